// Blocks of quantized weights: reads those of files, packs them into panels, and reads them back.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels/kernels.hpp"

namespace outrider {

// A block of one output, or a part of its row that is as long.
struct Block {
  uint8_t codes[MOST_UNIT];  // int8: signed ones
  uint16_t d = 0, m = 0;     // halves
  float scale = 0.0f;
  uint8_t a[16] = {}, b[16] = {};  // of each group, see Scales

  void values(const Layout& it, float* out) const {
    for (int g = 0; g < it.unit / it.group; g++) group_values(it, g, out + g * it.group);
  }

 private:
  void group_values(const Layout& it, int g, float* out) const {
    float scale = half_value(d), offset = 0.0f;
    int zero = it.zero;
    switch (it.scales) {
      case Scales::d: break;
      case Scales::d_m: offset = half_value(m); break;
      case Scales::power: scale = std::ldexp(1.0f, a[0] - 128); break;
      case Scales::k4:
      case Scales::k6: scale *= float(a[g]), offset = -half_value(m) * float(b[g]); break;
      case Scales::s6:
      case Scales::x6: scale *= float(a[g] - 32); break;
      case Scales::s8: scale *= float(a[g] - 128); break;
      case Scales::zero: scale = this->scale, zero = a[0] - 128; break;
      case Scales::e4m3: scale = this->scale * float8_value(a[g]); break;
      case Scales::plain: scale = this->scale; break;
    }
    for (int i = 0; i < it.group; i++) {
      const uint8_t bits = codes[g * it.group + i];
      const int code = it.table ? it.table[bits] : (it.low == 8 ? int8_t(bits) : bits) - zero;
      out[i] = it.scales == Scales::plain ? scale * float8_value(bits) : scale * float(code) + offset;
    }
  }
};

// Nibbles of a file: those of the first `count` inputs are the lower ones.
inline void read_nibbles(const uint8_t* in, int count, uint8_t* codes) {
  for (int k = 0; k < count; k++) codes[k] = in[k] & 15;
  for (int k = 0; k < count; k++) codes[k + count] = in[k] >> 4;
}

// Reads pairs of bits of a file: a byte has those of inputs that are 32 apart, in each half of the 256.
inline void read_pairs(const uint8_t* in, uint8_t* codes) {
  for (int run = 0; run < 8; run++)
    for (int k = 0; k < 32; k++) codes[run * 32 + k] = in[run / 4 * 32 + k] >> run % 4 * 2 & 3;
}

// Adds bits of a file to the codes of 256 inputs, at `place`: a byte has those of inputs that are 32 apart.
inline void add_bits(const uint8_t* in, int place, uint8_t* codes) {
  for (int run = 0; run < 8; run++)
    for (int k = 0; k < 32; k++) codes[run * 32 + k] = uint8_t(codes[run * 32 + k] | (in[k] >> run & 1) << place);
}

// Adds pairs of bits, in the order of `read_pairs`.
inline void add_pairs(const uint8_t* in, int place, uint8_t* codes) {
  for (int run = 0; run < 8; run++)
    for (int k = 0; k < 32; k++)
      codes[run * 32 + k] = uint8_t(codes[run * 32 + k] | (in[run / 4 * 32 + k] >> run % 4 * 2 & 3) << place);
}

// Reads a block of a file.
[[gnu::always_inline]] inline Block read_block(Format format, const uint8_t* from) {
  const Layout& it = layout_of(format);
  Block block;
  const auto half_at = [&](int at) {
    uint16_t bits;
    std::memcpy(&bits, from + at, 2);
    return bits;
  };
  const auto fifth_bits = [&](const uint8_t* in) {  // of 32 inputs
    for (int k = 0; k < 32; k++) block.codes[k] |= uint8_t((in[k / 8] >> k % 8 & 1) << 4);
  };
  const auto scale_at = [&](int at) { std::memcpy(&block.scale, from + at, 4); };
  switch (format) {
    case Format::q8_0:
      block.d = half_at(0);
      std::memcpy(block.codes, from + 2, 32);
      break;
    case Format::q4_0:
    case Format::iq4_nl:
      block.d = half_at(0);
      read_nibbles(from + 2, 16, block.codes);
      break;
    case Format::q4_1:
      block.d = half_at(0), block.m = half_at(2);
      read_nibbles(from + 4, 16, block.codes);
      break;
    case Format::q5_0:
      block.d = half_at(0);
      read_nibbles(from + 6, 16, block.codes);
      fifth_bits(from + 2);
      break;
    case Format::q5_1:
      block.d = half_at(0), block.m = half_at(2);
      read_nibbles(from + 8, 16, block.codes);
      fifth_bits(from + 4);
      break;
    case Format::mxfp4:
      block.a[0] = std::max<uint8_t>(from[0], 1);
      read_nibbles(from + 1, 16, block.codes);
      break;
    case Format::q2_k:
      block.d = half_at(80), block.m = half_at(82);
      for (int g = 0; g < 16; g++) block.a[g] = from[g] & 15, block.b[g] = from[g] >> 4;
      read_pairs(from + 16, block.codes);
      break;
    case Format::q3_k: {
      block.d = half_at(108);
      const uint8_t* scales = from + 96;
      for (int g = 0; g < 16; g++)
        block.a[g] = uint8_t((scales[g % 8] >> g / 8 * 4 & 15) | (scales[8 + g % 4] >> g / 4 * 2 & 3) << 4);
      read_pairs(from + 32, block.codes);
      add_bits(from, 2, block.codes);
      break;
    }
    case Format::q4_k:
    case Format::q5_k: {
      block.d = half_at(0), block.m = half_at(2);
      const uint8_t *scales = from + 4, *nibbles = from + (format == Format::q4_k ? 16 : 48);
      for (int g = 0; g < 4; g++) {
        block.a[g] = scales[g] & 63;
        block.b[g] = scales[g + 4] & 63;
        block.a[g + 4] = uint8_t((scales[g + 8] & 15) | (scales[g] >> 6) << 4);
        block.b[g + 4] = uint8_t((scales[g + 8] >> 4) | (scales[g + 4] >> 6) << 4);
      }
      for (int k = 0; k < 256; k += 64) read_nibbles(nibbles + k / 2, 32, block.codes + k);
      if (format == Format::q5_k) add_bits(from + 16, 4, block.codes);
      break;
    }
    case Format::q6_k:
      block.d = half_at(208);
      for (int g = 0; g < 16; g++) block.a[g] = uint8_t(from[192 + g] ^ 128);
      for (int half = 0; half < 2; half++) read_nibbles(from + half * 64, 64, block.codes + half * 128);
      add_pairs(from + 128, 4, block.codes);
      break;
    case Format::iq4_xs:
      block.d = half_at(0);
      for (int g = 0; g < 8; g++) {
        block.a[g] = uint8_t((from[4 + g / 2] >> g % 2 * 4 & 15) | (half_at(2) >> 2 * g & 3) << 4);
        read_nibbles(from + 8 + g * 16, 16, block.codes + g * 32);
      }
      break;
    case Format::int4_128:
    case Format::int4_64:
    case Format::int4_32:
      scale_at(0), block.a[0] = from[4];
      for (int k = 0; k < it.unit; k += 32) read_nibbles(from + 5 + k / 2, 16, block.codes + k);
      break;
    case Format::int8_128:
    case Format::int8_32:
      scale_at(0), block.a[0] = from[4];
      std::memcpy(block.codes, from + 5, it.unit);
      break;
    case Format::nvfp4_256:
    case Format::nvfp4_64:
      scale_at(0);
      std::memcpy(block.a, from + 4, it.unit / 16);
      for (int k = 0; k < it.unit; k += 32) read_nibbles(from + 4 + it.unit / 16 + k / 2, 16, block.codes + k);
      break;
    case Format::fp8_128:
    case Format::fp8_32:
      scale_at(0);
      std::memcpy(block.codes, from + 4, it.unit);
      break;
  }
  return block;
}

// The scales of a block in the bits of a unit: see Scales.
struct ScaleBits {
  uint32_t words[4] = {};
  uint16_t upper = 0;

  ScaleBits() = default;
  ScaleBits(Scales scales, const Block& block) {
    for (int g = 0; g < 16; g++) {
      const uint32_t a = block.a[g], b = block.b[g];
      if (scales == Scales::k4) words[g / 4] |= (a | b << 4) << g % 4 * 8;
      if (scales == Scales::s8) words[g / 4] |= a << g % 4 * 8;
      if (scales == Scales::s6) words[g / 8] |= (a & 15) << g % 8 * 4, words[2] |= (a >> 4) << g * 2;
      if (g >= 8) continue;
      if (scales == Scales::x6) words[0] |= (a & 15) << g * 4, upper = uint16_t(upper | (a >> 4) << g * 2);
      if (scales == Scales::k6)
        words[0] |= (a & 15) << g * 4, words[1] |= (b & 15) << g * 4, words[2] |= (a >> 4 | b >> 4 << 2) << g * 4;
    }
  }

  void read(Scales scales, Block& block) const {
    for (int g = 0; g < 16; g++) {
      const uint32_t byte = words[g / 4] >> g % 4 * 8, low = words[g / 8] >> g % 8 * 4 & 15;
      if (scales == Scales::k4) block.a[g] = byte & 15, block.b[g] = byte >> 4 & 15;
      if (scales == Scales::s8) block.a[g] = byte & 255;
      if (scales == Scales::s6) block.a[g] = uint8_t(low | (words[2] >> g * 2 & 3) << 4);
      if (g >= 8) continue;
      const uint32_t more = words[2] >> g * 4;
      if (scales == Scales::x6) block.a[g] = uint8_t(low | (upper >> g * 2 & 3) << 4);
      if (scales == Scales::k6)
        block.a[g] = uint8_t(low | (more & 3) << 4), block.b[g] = uint8_t((words[1] >> g * 4 & 15) | (more >> 2 & 3) << 4);
    }
  }
};

// Where a unit has the scales of an output.
struct ScalePlaces {
  uint8_t *d, *m, *words, *upper, *power, *scale, *bytes;  // null: none. `bytes` are 16 apart
  int count = 0, byte_count = 0;                           // of words, and of bytes

  ScalePlaces(const Layout& it, uint8_t* unit, int lane) {
    const Scales scales = it.scales;
    const bool offsets = scales == Scales::d_m || scales == Scales::k4 || scales == Scales::k6, alone = scales == Scales::power;
    const bool wide = scales == Scales::zero || scales == Scales::e4m3;
    power = alone ? unit + lane : nullptr;
    scale = wide ? unit + lane * 4 : nullptr;
    bytes = wide ? unit + 64 + lane : nullptr;
    byte_count = scales == Scales::zero ? 1 : wide ? it.unit / it.group : 0;
    d = alone || wide ? nullptr : unit + lane * 2;
    m = offsets ? unit + 32 + lane * 2 : nullptr;
    upper = scales == Scales::x6 ? unit + 32 + lane * 2 : nullptr;
    words = unit + (offsets || upper ? 64 : 32) + lane * 4;
    count = scales == Scales::k6 || scales == Scales::s6 ? 3 : scales == Scales::k4 || scales == Scales::s8 ? 4 : upper ? 1 : 0;
  }
};

constexpr uint32_t BYTES = 0x01010101;  // a bit of each byte

// Writes words of codes, `bits` of each byte from the bit `from` on, several to a word of a vector.
template <int BITS>
inline void write_words(const uint32_t* codes, int from, uint8_t* out) {
  constexpr int each = 8 / BITS;
  for (int word = 0; word < BITS; word++, out += 64) {
    uint32_t packed = 0;
    for (int i = 0; i < each; i++) packed |= (codes[word * each + i] >> from & BYTES * ((1u << BITS) - 1)) << i * BITS;
    std::memcpy(out, &packed, 4);
  }
}

template <int BITS>
inline void read_words(const uint8_t* in, int from, uint32_t* codes) {
  constexpr int each = 8 / BITS;
  for (int word = 0; word < BITS; word++, in += 64) {
    uint32_t packed;
    std::memcpy(&packed, in, 4);
    for (int i = 0; i < each; i++) codes[word * each + i] |= (packed >> i * BITS & BYTES * ((1u << BITS) - 1)) << from;
  }
}

// Writes a block as output `lane` of a unit, which had zeros there.
[[gnu::always_inline]] inline void write_unit(Format format, const Block& block, uint8_t* unit, int lane) {
  const Layout& it = layout_of(format);
  const ScalePlaces at(it, unit, lane);
  const ScaleBits bits = at.count ? ScaleBits(it.scales, block) : ScaleBits();
  if (at.power) *at.power = block.a[0];
  if (at.scale) std::memcpy(at.scale, &block.scale, 4);
  for (int i = 0; i < at.byte_count; i++) at.bytes[i * 16] = block.a[i];
  if (at.d) std::memcpy(at.d, &block.d, 2);
  if (at.m) std::memcpy(at.m, &block.m, 2);
  if (at.upper) std::memcpy(at.upper, &bits.upper, 2);
  for (int i = 0; i < at.count; i++) std::memcpy(at.words + i * 64, &bits.words[i], 4);
  uint8_t* chunk = unit + scale_bytes(it) + lane * 4;
  for (int k = 0; k < it.unit; k += CHUNK, chunk += chunk_bytes(it)) {
    uint32_t codes[8];
    std::memcpy(codes, block.codes + k, sizeof codes);
    if (it.low == 8) write_words<8>(codes, 0, chunk);
    else if (it.low == 4) write_words<4>(codes, 0, chunk);
    else write_words<2>(codes, 0, chunk);
    if (it.high == 1) write_words<1>(codes, it.low, chunk + it.low * 64);
    else if (it.high == 2) write_words<2>(codes, it.low, chunk + it.low * 64);
  }
}

// Calls `work` with a format as a constant: it is compiled for each, which packs twice as fast.
template <class Work, size_t... I>
inline void as_constant(Format format, Work work, std::index_sequence<I...>) {
  (void)((format == Format(I) && (work(std::integral_constant<Format, Format(I)>()), true)) || ...);
}

template <class Work>
inline void as_constant(Format format, Work work) {
  as_constant(format, work, std::make_index_sequence<FORMATS>());
}

// Reads what `write_unit` wrote.
inline Block read_unit(Format format, const uint8_t* from, int lane) {
  const Layout& it = layout_of(format);
  uint8_t* unit = const_cast<uint8_t*>(from);  // it is read alone
  Block block;
  ScaleBits bits;
  const ScalePlaces at(it, unit, lane);
  if (at.power) block.a[0] = *at.power;
  if (at.d) std::memcpy(&block.d, at.d, 2);
  if (at.m) std::memcpy(&block.m, at.m, 2);
  if (at.upper) std::memcpy(&bits.upper, at.upper, 2);
  for (int i = 0; i < at.count; i++) std::memcpy(&bits.words[i], at.words + i * 64, 4);
  bits.read(it.scales, block);
  if (at.scale) std::memcpy(&block.scale, at.scale, 4);
  for (int i = 0; i < at.byte_count; i++) block.a[i] = at.bytes[i * 16];
  uint8_t* chunk = unit + scale_bytes(it) + lane * 4;
  for (int k = 0; k < it.unit; k += CHUNK, chunk += chunk_bytes(it)) {
    uint32_t codes[8] = {};
    if (it.low == 8) read_words<8>(chunk, 0, codes);
    else if (it.low == 4) read_words<4>(chunk, 0, codes);
    else read_words<2>(chunk, 0, codes);
    if (it.high == 1) read_words<1>(chunk + it.low * 64, it.low, codes);
    else if (it.high == 2) read_words<2>(chunk + it.low * 64, it.low, codes);
    std::memcpy(block.codes + k, codes, sizeof codes);
  }
  return block;
}

}  // namespace outrider
