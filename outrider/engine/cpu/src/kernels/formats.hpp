// The quantized types of GGUF files and of the hub's checkpoints, as the kernels read them.
//
// A weight comes in rows of blocks. A panel has the blocks of 16 outputs side by side in units: first the scales of all outputs, then for
// each 32 inputs the codes of all outputs, as many bits as in the file. The value of an input is
//
//     scale * (code - zero) + offset,   or   scale * table[code]
//
// and groups of 16 or 32 inputs share scale and offset. Those of fp8 are numbers themselves, and have panels of their own: see
// Kind::float8.
#pragma once

#include <cstddef>
#include <cstdint>

namespace outrider {

enum class Format : uint8_t {
  q8_0, q4_0, q4_1, q5_0, q5_1, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, mxfp4,
  int4_128, int4_64, int4_32, int8_128, int8_32, nvfp4_256, nvfp4_64, fp8_128, fp8_32,  // of the hub, by the inputs of a block
};
constexpr int FORMATS = 22;
constexpr int CHUNK = 32;      // inputs whose codes lie together, and which have a scale of their own in a tile
constexpr int MOST_UNIT = 256;  // inputs of a unit

// What a unit has beside its codes, each for 16 outputs. d and m are of 16 bits, words and floats of 32.
enum class Scales : uint8_t {
  d,      // d: the scale
  d_m,    // d and m: scale and offset
  power,  // a byte: the scale is 2^(byte - 128), for twice the values of the type
  k4,     // d, m, 4 words of bytes: nibbles a and b of each group. Scale d a, offset -m b
  k6,     // d, m, 3 words: the lower 4 bits of all a, of all b, and their upper bits. Scale d a, offset -m b
  s6,     // d, 3 words: the lower 4 bits of 8 a, of 8 others, and the upper bits of all. Scale d (a - 32)
  x6,     // d, a word: the lower 4 bits of all a, and 16 bits: their upper ones. Scale d (a - 32)
  s8,     // d, 4 words of bytes a. Scale d (a - 128)
  zero,   // a float, and a byte: the scale, and 128 more than the code of zero
  e4m3,   // a float, and a number in E4M3 for each group, whose product is the scale for twice the values of the type
  plain,  // a float: the scale
};

struct Layout {
  const char* name;
  int unit;         // inputs of a block and of a unit
  int block_bytes;  // of an output in the file
  int group;        // inputs that share a scale
  int low, high;    // bits of a code: lower ones, and those that are stored apart
  int zero;         // what is subtracted from a code; int8: codes are signed
  Scales scales;
  const int8_t* table;  // values of the codes; null: themselves
};

constexpr int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t FP4_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // twice those of e2m1

constexpr Layout LAYOUTS[FORMATS] = {
    {"q8_0", 32, 34, 32, 8, 0, 0, Scales::d, nullptr},
    {"q4_0", 32, 18, 32, 4, 0, 8, Scales::d, nullptr},
    {"q4_1", 32, 20, 32, 4, 0, 0, Scales::d_m, nullptr},
    {"q5_0", 32, 22, 32, 4, 1, 16, Scales::d, nullptr},
    {"q5_1", 32, 24, 32, 4, 1, 0, Scales::d_m, nullptr},
    {"q2_k", 256, 84, 16, 2, 0, 0, Scales::k4, nullptr},
    {"q3_k", 256, 110, 16, 2, 1, 4, Scales::s6, nullptr},
    {"q4_k", 256, 144, 32, 4, 0, 0, Scales::k6, nullptr},
    {"q5_k", 256, 176, 32, 4, 1, 0, Scales::k6, nullptr},
    {"q6_k", 256, 210, 16, 4, 2, 32, Scales::s8, nullptr},
    {"iq4_nl", 32, 18, 32, 4, 0, 0, Scales::d, IQ4_VALUES},
    {"iq4_xs", 256, 136, 32, 4, 0, 0, Scales::x6, IQ4_VALUES},
    {"mxfp4", 32, 17, 32, 4, 0, 0, Scales::power, FP4_VALUES},
    {"int4_128", 128, 69, 32, 4, 0, 0, Scales::zero, nullptr},
    {"int4_64", 64, 37, 32, 4, 0, 0, Scales::zero, nullptr},
    {"int4_32", 32, 21, 32, 4, 0, 0, Scales::zero, nullptr},
    {"int8_128", 128, 133, 32, 8, 0, 0, Scales::zero, nullptr},
    {"int8_32", 32, 37, 32, 8, 0, 0, Scales::zero, nullptr},
    {"nvfp4_256", 256, 148, 16, 4, 0, 0, Scales::e4m3, FP4_VALUES},
    {"nvfp4_64", 64, 40, 16, 4, 0, 0, Scales::e4m3, FP4_VALUES},
    {"fp8_128", 128, 132, 128, 8, 0, 0, Scales::plain, nullptr},
    {"fp8_32", 32, 36, 32, 8, 0, 0, Scales::plain, nullptr},
};

constexpr const Layout& layout_of(Format format) { return LAYOUTS[int(format)]; }

constexpr bool is_float8(Format format) { return layout_of(format).scales == Scales::plain; }

constexpr int scale_bytes(const Layout& it) {  // of a unit
  switch (it.scales) {
    case Scales::d: return 32;
    case Scales::d_m: return 64;
    case Scales::power: return 16;
    case Scales::k4: return 64 + 256;
    case Scales::k6: return 64 + 192;
    case Scales::s6: return 32 + 192;
    case Scales::x6: return 32 + 32 + 64;
    case Scales::s8: return 32 + 256;
    case Scales::zero: return 64 + 16;
    case Scales::e4m3: return 64 + it.unit / it.group * 16;
    case Scales::plain: return 64;
  }
  return 0;
}

constexpr int chunk_bytes(const Layout& it) { return (it.low + it.high) * 64; }
constexpr int unit_bytes(const Layout& it) { return scale_bytes(it) + it.unit / CHUNK * chunk_bytes(it); }
constexpr bool keeps_bytes() {  // a unit is as large as the blocks of its outputs
  for (const Layout& it : LAYOUTS)
    if (unit_bytes(it) != 16 * it.block_bytes) return false;
  return true;
}
static_assert(keeps_bytes(), "a panel has as many bytes as the blocks of its outputs");

}  // namespace outrider
