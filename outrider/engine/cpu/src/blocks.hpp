// Blocks of quantized weights: reads those of files, packs them into panels, and reads them back.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/kernels.hpp"

namespace outrider {

// A block of one output, or a part of its row that is as long.
struct Block {
  uint8_t codes[MOST_UNIT];  // int8: signed ones
  uint16_t d, m;             // halves
  uint8_t a[16], b[16];      // of each group, see Scales

  void values(const Layout& it, float* out) const {
    for (int g = 0; g < it.unit / it.group; g++) group_values(it, g, out + g * it.group);
  }

 private:
  void group_values(const Layout& it, int g, float* out) const {
    float scale = half_value(d), offset = 0.0f;
    switch (it.scales) {
      case Scales::d: break;
      case Scales::d_m: offset = half_value(m); break;
      case Scales::power: scale = std::ldexp(1.0f, a[0] - 128); break;
      case Scales::k4:
      case Scales::k6: scale *= float(a[g]), offset = -half_value(m) * float(b[g]); break;
      case Scales::s6:
      case Scales::x6: scale *= float(a[g] - 32); break;
      case Scales::s8: scale *= float(a[g] - 128); break;
    }
    for (int i = 0; i < it.group; i++) {
      const uint8_t bits = codes[g * it.group + i];
      const int code = it.low == 8 ? int8_t(bits) : it.table ? it.table[bits] : bits - it.zero;
      out[i] = scale * float(code) + offset;
    }
  }
};

// Reads a block of a file.
inline Block read_block(Format format, const uint8_t* from) {
  Block block{};
  const auto half_at = [&](int at) {
    uint16_t bits;
    std::memcpy(&bits, from + at, 2);
    return bits;
  };
  // Nibbles of 32 inputs: the lower ones are the first 16 inputs.
  const auto nibbles = [&](const uint8_t* in, int count, uint8_t* out) {
    for (int k = 0; k < count; k++) out[k] = in[k] & 15, out[k + count] = in[k] >> 4;
  };
  // The upper bits of 32 inputs, a bit for each.
  const auto fifth_bits = [&](const uint8_t* in) {
    for (int k = 0; k < 32; k++) block.codes[k] |= uint8_t((in[k / 8] >> k % 8 & 1) << 4);
  };
  switch (format) {
    case Format::q8_0:
      block.d = half_at(0);
      std::memcpy(block.codes, from + 2, 32);
      break;
    case Format::q4_0:
    case Format::iq4_nl:
      block.d = half_at(0);
      nibbles(from + 2, 16, block.codes);
      break;
    case Format::q4_1:
      block.d = half_at(0), block.m = half_at(2);
      nibbles(from + 4, 16, block.codes);
      break;
    case Format::q5_0:
      block.d = half_at(0);
      nibbles(from + 6, 16, block.codes);
      fifth_bits(from + 2);
      break;
    case Format::q5_1:
      block.d = half_at(0), block.m = half_at(2);
      nibbles(from + 8, 16, block.codes);
      fifth_bits(from + 4);
      break;
    case Format::mxfp4:
      block.a[0] = std::max<uint8_t>(from[0], 1);
      nibbles(from + 1, 16, block.codes);
      break;
    case Format::q2_k:
      block.d = half_at(80), block.m = half_at(82);
      for (int g = 0; g < 16; g++) block.a[g] = from[g] & 15, block.b[g] = from[g] >> 4;
      for (int k = 0; k < 256; k++) block.codes[k] = from[16 + k / 128 * 32 + k % 32] >> k % 128 / 32 * 2 & 3;
      break;
    case Format::q3_k: {
      block.d = half_at(108);
      const uint8_t *scales = from + 96, *twos = from + 32;
      for (int g = 0; g < 16; g++)
        block.a[g] = uint8_t((scales[g % 8] >> g / 8 * 4 & 15) | (scales[8 + g % 4] >> g / 4 * 2 & 3) << 4);
      for (int k = 0; k < 256; k++)
        block.codes[k] = uint8_t((twos[k / 128 * 32 + k % 32] >> k % 128 / 32 * 2 & 3) | (from[k % 32] >> k / 32 & 1) << 2);
      break;
    }
    case Format::q4_k:
    case Format::q5_k: {
      block.d = half_at(0), block.m = half_at(2);
      const uint8_t* scales = from + 4;
      for (int g = 0; g < 8; g++) {
        const uint8_t upper = g < 4 ? 0 : 1;
        block.a[g] = upper ? uint8_t((scales[g + 4] & 15) | (scales[g - 4] >> 6) << 4) : scales[g] & 63;
        block.b[g] = upper ? uint8_t((scales[g + 4] >> 4) | (scales[g] >> 6) << 4) : scales[g + 4] & 63;
      }
      const uint8_t* in = from + (format == Format::q4_k ? 16 : 48);
      for (int k = 0; k < 256; k += 64) nibbles(in + k / 2, 32, block.codes + k);
      if (format == Format::q5_k)
        for (int k = 0; k < 256; k++) block.codes[k] |= uint8_t((from[16 + k % 32] >> k / 32 & 1) << 4);
      break;
    }
    case Format::q6_k:
      block.d = half_at(208);
      for (int g = 0; g < 16; g++) block.a[g] = uint8_t(from[192 + g] ^ 128);
      for (int k = 0; k < 256; k++) {
        const int half = k / 128, quarter = k % 128 / 32, l = k % 32;
        const uint8_t low = from[half * 64 + quarter % 2 * 32 + l] >> quarter / 2 * 4 & 15;
        block.codes[k] = uint8_t(low | (from[128 + half * 32 + l] >> quarter * 2 & 3) << 4);
      }
      break;
    case Format::iq4_xs:
      block.d = half_at(0);
      for (int g = 0; g < 8; g++) {
        block.a[g] = uint8_t((from[4 + g / 2] >> g % 2 * 4 & 15) | (half_at(2) >> 2 * g & 3) << 4);
        nibbles(from + 8 + g * 16, 16, block.codes + g * 32);
      }
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
  uint8_t *d, *m, *words, *upper, *power;  // null: none
  int count = 0;                           // of words

  ScalePlaces(Scales scales, uint8_t* unit, int lane) {
    const bool offsets = scales == Scales::d_m || scales == Scales::k4 || scales == Scales::k6, alone = scales == Scales::power;
    power = alone ? unit + lane : nullptr;
    d = alone ? nullptr : unit + lane * 2;
    m = offsets ? unit + 32 + lane * 2 : nullptr;
    upper = scales == Scales::x6 ? unit + 32 + lane * 2 : nullptr;
    words = unit + (offsets || upper ? 64 : 32) + lane * 4;
    count = scales == Scales::k6 || scales == Scales::s6 ? 3 : scales == Scales::k4 || scales == Scales::s8 ? 4 : upper ? 1 : 0;
  }
};

// The place of four codes of an output in a chunk: `shift` is that of their lower bits, and `above` of the upper ones.
struct CodePlace {
  uint8_t *lower, *upper;
  int shift, above;

  CodePlace(const Layout& it, uint8_t* unit, int lane, int k) {
    const int step = k % CHUNK / 4, each = 8 / it.low, more = it.high ? 8 / it.high : 1;
    uint8_t* chunk = unit + scale_bytes(it.scales) + k / CHUNK * chunk_bytes(it) + lane * 4;
    lower = chunk + step / each * 64, shift = step % each * it.low;
    upper = chunk + it.low * 64 + step / more * 64, above = step % more * it.high;
  }
};

// Writes a block as output `lane` of a unit, which had zeros there.
inline void write_unit(Format format, const Block& block, uint8_t* unit, int lane) {
  const Layout& it = layout_of(format);
  const ScalePlaces at(it.scales, unit, lane);
  const ScaleBits bits(it.scales, block);
  if (at.power) *at.power = block.a[0];
  if (at.d) std::memcpy(at.d, &block.d, 2);
  if (at.m) std::memcpy(at.m, &block.m, 2);
  if (at.upper) std::memcpy(at.upper, &bits.upper, 2);
  for (int i = 0; i < at.count; i++) std::memcpy(at.words + i * 64, &bits.words[i], 4);
  for (int k = 0; k < it.unit; k += 4) {
    const CodePlace place(it, unit, lane, k);
    for (int i = 0; i < 4; i++) {
      const unsigned code = block.codes[k + i];
      place.lower[i] = uint8_t(place.lower[i] | (code & ((1u << it.low) - 1)) << place.shift);
      if (it.high) place.upper[i] = uint8_t(place.upper[i] | code >> it.low << place.above);
    }
  }
}

// Reads what `write_unit` wrote.
inline Block read_unit(Format format, const uint8_t* from, int lane) {
  const Layout& it = layout_of(format);
  uint8_t* unit = const_cast<uint8_t*>(from);  // it is read alone
  Block block{};
  ScaleBits bits;
  const ScalePlaces at(it.scales, unit, lane);
  if (at.power) block.a[0] = *at.power;
  if (at.d) std::memcpy(&block.d, at.d, 2);
  if (at.m) std::memcpy(&block.m, at.m, 2);
  if (at.upper) std::memcpy(&bits.upper, at.upper, 2);
  for (int i = 0; i < at.count; i++) std::memcpy(&bits.words[i], at.words + i * 64, 4);
  bits.read(it.scales, block);
  for (int k = 0; k < it.unit; k += 4) {
    const CodePlace place(it, unit, lane, k);
    for (int i = 0; i < 4; i++) {
      unsigned code = place.lower[i] >> place.shift & ((1u << it.low) - 1);
      if (it.high) code |= (place.upper[i] >> place.above & ((1u << it.high) - 1)) << it.low;
      block.codes[k + i] = uint8_t(code);
    }
  }
  return block;
}

}  // namespace outrider
