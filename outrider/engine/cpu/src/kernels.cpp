#include "kernels.hpp"

#include <cstring>
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace outrider {

#if defined(__aarch64__)
static bool has_dot_products() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) & (1ul << 20);  // HWCAP_ASIMDDP
#else
  return true;  // all of Apple's
#endif
}
#endif

std::vector<const Kernels*> kernels_here() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512cd");
  const bool vnni = wide && __builtin_cpu_supports("avx512vnni");
  if (vnni && __builtin_cpu_supports("avx512bf16")) found.push_back(&avx512_bf16_kernels);
  // Intel's cores take products of bfloat16 at half the rate of float32's, AMD's at twice that rate.
  if (vnni) found.insert(__builtin_cpu_is("intel") ? found.begin() : found.end(), &avx512_vnni_kernels);
  if (wide) found.push_back(&avx512_kernels);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(&avx2_kernels);
#elif defined(__aarch64__)
  if (has_dot_products()) found.push_back(&neon_dot_kernels);
  found.push_back(&neon_kernels);
#endif
  found.push_back(&portable_kernels);
  return found;
}

const Kernels* kernels_named(const char* name) {
  for (const Kernels* it : kernels_here())
    if (!*name || !std::strcmp(name, it->name)) return it;
  return nullptr;
}

}  // namespace outrider
