#include <cmath>
#include <cstring>

#include "kernels.hpp"

#define OUTRIDER_NAME "portable"
#define OUTRIDER_VECTOR 0
#define OUTRIDER_BF16 0
#define OUTRIDER_VNNI 0

namespace outrider {
namespace {
#include "kernels.inc"
}  // namespace
const Kernels portable_kernels = table;
}  // namespace outrider
