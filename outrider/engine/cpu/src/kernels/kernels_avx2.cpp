#include "kernels.hpp"

#if defined(__x86_64__)
OUTRIDER_TARGET("avx2,fma,f16c,bmi,bmi2,lzcnt")
#define OUTRIDER_NAME "avx2"
#define OUTRIDER_VECTOR 256
#define OUTRIDER_BF16 0
#define OUTRIDER_VNNI 0
#define OUTRIDER_TABLE avx2_kernels
#include "kernels.inc"
OUTRIDER_TARGET_END
#endif
