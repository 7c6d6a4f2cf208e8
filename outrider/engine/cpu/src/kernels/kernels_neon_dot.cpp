#include "kernels.hpp"

#if defined(__aarch64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("arch=armv8.2-a+dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif

#define OUTRIDER_NAME "neon-dot"
#define OUTRIDER_VECTOR 128
#define OUTRIDER_BF16 0
#define OUTRIDER_VNNI 0
#define OUTRIDER_DOT 1
#define OUTRIDER_TABLE neon_dot_kernels
#include "kernels.inc"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
