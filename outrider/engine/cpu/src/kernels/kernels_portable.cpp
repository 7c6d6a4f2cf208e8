#include "kernels.hpp"

#define OUTRIDER_NAME "portable"
#define OUTRIDER_VECTOR 0
#define OUTRIDER_BF16 0
#define OUTRIDER_VNNI 0
#define OUTRIDER_TABLE portable_kernels
#include "kernels.inc"
