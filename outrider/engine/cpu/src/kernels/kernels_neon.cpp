#include <cmath>
#include <cstring>
#if defined(__aarch64__)
#include <arm_neon.h>

#include "kernels.hpp"

#define OUTRIDER_NAME "neon"
#define OUTRIDER_VECTOR 128
#define OUTRIDER_BF16 0
#define OUTRIDER_VNNI 0
#define OUTRIDER_DOT 0

namespace outrider {
namespace {
#include "kernels.inc"
}  // namespace
const Kernels neon_kernels = table;
}  // namespace outrider
#endif
