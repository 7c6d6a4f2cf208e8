#include "kernels.hpp"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#include "../linear.hpp"

namespace outrider {

#if defined(__x86_64__) && defined(__linux__) && !defined(OUTRIDER_EMULATED_AMX)
// Returns whether kernels compute the same products as the portable ones. For kernels that were tested in an emulation alone.
static bool multiply_right(const Kernels& kernels) {
  constexpr int ROWS = 5, INPUTS_HERE = 128, OUTPUTS = 96;
  for (Kind kind : {Kind::bfloat16, Kind::int8}) {
    PackedLinear linear(kind, OUTPUTS, INPUTS_HERE, false);
    std::vector<float> row(INPUTS_HERE), found[2];
    for (int o = 0; o < OUTPUTS; o++) {
      for (int k = 0; k < INPUTS_HERE; k++) row[k] = float((o * 7 + k * 3) % 11 - 5);
      linear.set(o, row.data());
    }
    const Kernels* const both[] = {&kernels, &portable_kernels};
    for (int i = 0; i < 2; i++) {
      std::vector<uint8_t> inputs(ROWS * INPUTS_HERE * 4);
      float scales[ROWS];
      const Tile tile{inputs.data(), scales, ROWS};
      for (int r = 0; r < ROWS; r++) {
        for (int k = 0; k < INPUTS_HERE; k++) row[k] = float((r * 5 + k) % 7 - 3);
        both[i]->pack(kind, row.data(), nullptr, INPUTS_HERE, INPUTS_HERE, 0.0f, tile, r);
      }
      found[i].resize(ROWS * OUTPUTS);
      both[i]->linear(linear, tile, 0, linear.panels, {Into::store, found[i].data(), OUTPUTS, OUTPUTS}, 0);
    }
    for (int i = 0; i < ROWS * OUTPUTS; i++)
      if (!(std::fabs(found[0][i] - found[1][i]) <= 1e-3f * (1.0f + std::fabs(found[1][i])))) return false;
  }
  return true;
}
#endif

#if defined(__x86_64__)
// Returns whether this processor has tiles, and the system permits this process to use them.
static bool has_tiles() {
#if defined(OUTRIDER_EMULATED_AMX)
  return true;
#elif defined(__linux__)
  constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24, INT8 = 1u << 25;  // bits of edx, leaf 7
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;             // arguments of arch_prctl
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (BF16 | TILE | INT8)) != (BF16 | TILE | INT8)) return false;
  static const bool right = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 && multiply_right(amx_kernels);
  return right;
#else
  return false;
#endif
}
#endif

#if defined(__aarch64__)
static bool has_dot_products() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) & (1ul << 20);  // HWCAP_ASIMDDP
#else
  return true;  // all processors of Apple have them
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
  const bool halves = vnni && __builtin_cpu_supports("avx512bf16"), intel = __builtin_cpu_is("intel");
  if (halves && has_tiles()) found.push_back(&amx_kernels);
  // Intel's cores multiply bfloat16 at half the rate of float32, AMD's at twice that rate.
  if (halves && !intel) found.push_back(&avx512_bf16_kernels);
  if (vnni) found.push_back(&avx512_vnni_kernels);
  if (halves && intel) found.push_back(&avx512_bf16_kernels);
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
