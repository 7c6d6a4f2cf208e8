#include "kernels.hpp"

#if defined(__aarch64__)
#define OUTRIDER_NAME "neon"
#define OUTRIDER_VECTOR 128
#define OUTRIDER_BF16 0
#define OUTRIDER_VNNI 0
#define OUTRIDER_DOT 0
#define OUTRIDER_TABLE neon_kernels
#include "kernels.inc"
#endif
