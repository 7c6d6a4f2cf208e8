#include "kernels.hpp"

#if defined(__x86_64__)
OUTRIDER_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx512vnni,fma,avx2,f16c,bmi,bmi2,lzcnt")
#define OUTRIDER_NAME "avx512_vnni"
#define OUTRIDER_VECTOR 512
#define OUTRIDER_BF16 0
#define OUTRIDER_VNNI 1
#define OUTRIDER_TABLE avx512_vnni_kernels
#include "kernels.inc"
OUTRIDER_TARGET_END
#endif
