#include "kernels.hpp"

#if defined(__aarch64__)
OUTRIDER_TARGET("arch=armv8.2-a+dotprod")
#define OUTRIDER_NAME "neon-dot"
#define OUTRIDER_VECTOR 128
#define OUTRIDER_BF16 0
#define OUTRIDER_VNNI 0
#define OUTRIDER_DOT 1
#define OUTRIDER_TABLE neon_dot_kernels
#include "kernels.inc"
OUTRIDER_TARGET_END
#endif
