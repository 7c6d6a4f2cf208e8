// The quantized types of GGUF files, as the kernels read them.
//
// A file has rows of blocks. A panel has the blocks of 16 outputs side by side in units: first the scales of all outputs, then for
// each 32 inputs the codes of all outputs, as many bits as in the file. The value of an input is
//
//     scale * (code - zero) + offset,   or   scale * table[code]
//
// and groups of 16 or 32 inputs share scale and offset.
#pragma once

#include <cstddef>
#include <cstdint>

namespace outrider {

enum class Format : uint8_t { q8_0, q4_0, q4_1, q5_0, q5_1, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, mxfp4 };
constexpr int FORMATS = 13;
constexpr int CHUNK = 32;      // inputs whose codes lie together, and which have a scale of their own in a tile
constexpr int MOST_UNIT = 256;  // inputs of a unit

// What a unit has beside its codes, each for 16 outputs. d and m are of 16 bits, words of 32.
enum class Scales : uint8_t {
  d,      // d: the scale
  d_m,    // d and m: scale and offset
  power,  // a byte: the scale is 2^(byte - 128), for twice the values of the type
  k4,     // d, m, 4 words of bytes: nibbles a and b of each group. Scale d a, offset -m b
  k6,     // d, m, 3 words: the lower 4 bits of all a, of all b, and their upper bits. Scale d a, offset -m b
  s6,     // d, 3 words: the lower 4 bits of 8 a, of 8 others, and the upper bits of all. Scale d (a - 32)
  x6,     // d, a word: the lower 4 bits of all a, and 16 bits: their upper ones. Scale d (a - 32)
  s8,     // d, 4 words of bytes a. Scale d (a - 128)
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
};

constexpr const Layout& layout_of(Format format) { return LAYOUTS[int(format)]; }

constexpr int scale_bytes(Scales scales) {  // of a unit
  switch (scales) {
    case Scales::d: return 32;
    case Scales::d_m: return 64;
    case Scales::power: return 16;
    case Scales::k4: return 64 + 256;
    case Scales::k6: return 64 + 192;
    case Scales::s6: return 32 + 192;
    case Scales::x6: return 32 + 32 + 64;
    case Scales::s8: return 32 + 256;
  }
  return 0;
}

constexpr int chunk_bytes(const Layout& it) { return (it.low + it.high) * 64; }
constexpr int unit_bytes(const Layout& it) { return scale_bytes(it.scales) + it.unit / CHUNK * chunk_bytes(it); }
constexpr bool keeps_bytes() {  // a unit is as large as the blocks of its outputs
  for (const Layout& it : LAYOUTS)
    if (unit_bytes(it) != 16 * it.block_bytes) return false;
  return true;
}
static_assert(keeps_bytes(), "a panel has as many bytes as the blocks of its outputs");

}  // namespace outrider
