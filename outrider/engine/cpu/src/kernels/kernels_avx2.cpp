#include "kernels.hpp"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi,bmi2,lzcnt"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,bmi,bmi2,lzcnt")
#endif

#define OUTRIDER_NAME "avx2"
#define OUTRIDER_VECTOR 256
#define OUTRIDER_BF16 0
#define OUTRIDER_VNNI 0
#define OUTRIDER_TABLE avx2_kernels
#include "kernels.inc"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
