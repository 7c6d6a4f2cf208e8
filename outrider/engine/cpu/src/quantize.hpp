// Quantizes weights to blocks of GGUF's types, as its files have them.
//
// The scale of a group is the one that fits its weights best, each weighted by its size: several are tried, and each is refined
// by least squares for the codes that it gives.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "blocks.hpp"

namespace outrider {

constexpr int TRIALS = 12;  // scales that are tried for a group

// Writes a block as a file has it, of a format that `can_quantize`: what `read_block` reads.
inline void write_block(Format format, const Block& block, uint8_t* out) {
  const Layout& it = layout_of(format);
  std::memset(out, 0, size_t(it.block_bytes));
  const auto nibbles = [&](const uint8_t* codes, int count, uint8_t* to) {
    for (int k = 0; k < count; k++) to[k] = uint8_t((codes[k] & 15) | (codes[k + count] & 15) << 4);
  };
  const auto bits = [&](uint8_t* to, int from) {  // of inputs that are 32 apart
    for (int k = 0; k < 256; k++) to[k % 32] = uint8_t(to[k % 32] | (block.codes[k] >> from & 1) << k / 32);
  };
  const auto pairs = [&](uint8_t* to, int from) {
    for (int k = 0; k < 256; k++) {
      uint8_t& byte = to[k / 128 * 32 + k % 32];
      byte = uint8_t(byte | (block.codes[k] >> from & 3) << k % 128 / 32 * 2);
    }
  };
  int at = 0;
  const auto put_half = [&](uint16_t half) { std::memcpy(out + at, &half, 2), at += 2; };
  switch (format) {
    case Format::q8_0:
      put_half(block.d);
      std::memcpy(out + at, block.codes, 32);
      break;
    case Format::q4_0:
    case Format::q4_1:
    case Format::q5_0:
    case Format::q5_1:
      put_half(block.d);
      if (it.scales == Scales::d_m) put_half(block.m);
      if (it.high) {
        for (int k = 0; k < 32; k++) out[at + k / 8] = uint8_t(out[at + k / 8] | (block.codes[k] >> 4) << k % 8);
        at += 4;
      }
      nibbles(block.codes, 16, out + at);
      break;
    case Format::q4_k:
    case Format::q5_k:
      put_half(block.d), put_half(block.m);
      for (int g = 0; g < 4; g++) {
        out[4 + g] = uint8_t(block.a[g] | block.a[g + 4] >> 4 << 6);
        out[8 + g] = uint8_t(block.b[g] | block.b[g + 4] >> 4 << 6);
        out[12 + g] = uint8_t((block.a[g + 4] & 15) | (block.b[g + 4] & 15) << 4);
      }
      if (it.high) bits(out + 16, 4);
      for (int k = 0; k < 256; k += 64) nibbles(block.codes + k, 32, out + (it.high ? 48 : 16) + k / 2);
      break;
    case Format::q6_k:
      for (int half = 0; half < 2; half++) nibbles(block.codes + half * 128, 64, out + half * 64);
      pairs(out + 128, 4);
      for (int g = 0; g < 16; g++) out[192 + g] = block.a[g] ^ 128;
      std::memcpy(out + 208, &block.d, 2);
      break;
    default: break;
  }
}

constexpr bool can_quantize(Format format) {
  const Layout& it = layout_of(format);
  return !it.table && (it.scales == Scales::d || it.scales == Scales::d_m || it.scales == Scales::k6 || it.scales == Scales::s8);
}

// A scale and an offset of a group: weights are about scale * code + offset.
struct Fit {
  float scale = 0.0f, offset = 0.0f;
};

// The nearest code, as a number.
inline float code_of(float x, const Fit& fit, float inverse, float least, float most) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer
  const float code = ((x - fit.offset) * inverse + magic) - magic;
  return code > least ? (code < most ? code : most) : least;
}

inline float inverse_of(const Fit& fit) { return fit.scale != 0.0f ? 1.0f / fit.scale : 0.0f; }

// Sums over a group, with weights: of codes q and values v.
struct Sums {
  double w = 0, q = 0, qq = 0, v = 0, qv = 0, vv = 0;

  Sums(const float* x, const float* weights, int count, const Fit& fit, float least, float most) {
    constexpr int LANES_HERE = 8;
    float sums[6][LANES_HERE] = {};
    const float inverse = inverse_of(fit);
    for (int k = 0; k < count; k += LANES_HERE)
      for (int l = 0; l < LANES_HERE; l++) {
        const float value = x[k + l], weight = weights[k + l], code = code_of(value, fit, inverse, least, most);
        sums[0][l] += weight;
        sums[1][l] += weight * code;
        sums[2][l] += weight * code * code;
        sums[3][l] += weight * value;
        sums[4][l] += weight * value * code;
        sums[5][l] += weight * value * value;
      }
    double* const all[] = {&w, &q, &qq, &v, &qv, &vv};
    for (int i = 0; i < 6; i++)
      for (float part : sums[i]) *all[i] += part;
  }

  // What the codes err by with a fit, squared and weighted.
  double error(const Fit& fit) const {
    const double s = fit.scale, o = fit.offset;
    return vv - 2 * s * qv - 2 * o * v + s * s * qq + 2 * s * o * q + o * o * w;
  }

  // The best fit for the codes; its offset is at most `highest`. The scale is 0 where there is none.
  Fit refined(bool offset, float highest) const {
    const double spread = w * qq - q * q;
    Fit fit;
    if (offset && spread > 0.0) {
      fit.scale = float((w * qv - q * v) / spread);
      fit.offset = float((v - fit.scale * q) / w);
      if (fit.offset <= highest) return fit;
    }
    fit.offset = offset ? std::min(highest, float(v / w)) : 0.0f;
    fit.scale = qq > 0.0 ? float((qv - fit.offset * q) / qq) : 0.0f;
    return fit;
  }
};

// The fit of codes from `least` to `most`. `offset`: whether it has one, of at most `highest`.
inline Fit best_fit(const float* x, int count, float least, float most, bool offset, float highest) {
  float low = x[0], high = x[0], squares = 0.0f, extreme = 0.0f, weights[CHUNK];
  for (int k = 0; k < count; k++) {
    low = std::min(low, x[k]), high = std::max(high, x[k]);
    squares += x[k] * x[k];
    if (std::fabs(x[k]) > std::fabs(extreme)) extreme = x[k];
  }
  low = std::min(low, highest);
  const float usual = std::sqrt(squares / float(count));
  for (int k = 0; k < count; k++) weights[k] = usual + std::fabs(x[k]);
  if (!(offset ? high > low : extreme != 0.0f)) return {0.0f, offset ? low : 0.0f};
  Fit best;
  double error = INFINITY;
  for (int trial = 0; trial < TRIALS; trial++) {
    const float part = 0.8f + 0.4f / float(TRIALS) * float(trial);  // of the range; codes beyond it are clamped
    const Fit first = offset ? Fit{(high - low) * part / (most - least), low} : Fit{extreme * part / least, 0.0f};
    const Sums sums(x, weights, count, first, least, most);
    const Fit fit = sums.refined(offset, highest);
    if (offset && !(fit.scale > 0.0f)) continue;
    if (const double off = sums.error(fit); off < error) error = off, best = fit;
  }
  return best;
}

// Quantizes as many weights as a block has.
inline Block quantized(Format format, const float* x) {
  const Layout& it = layout_of(format);
  const int groups = it.unit / it.group, codes = 1 << (it.low + it.high);
  const bool offset = it.scales == Scales::d_m || it.scales == Scales::k6;
  const int least = it.low == 8 ? -127 : -it.zero, most = it.low == 8 ? 127 : codes - 1 - it.zero;
  Block block;
  Fit fits[16];
  float scale = 0.0f, lowest = 0.0f;
  for (int g = 0; g < groups; g++) {
    fits[g] = best_fit(x + g * it.group, it.group, float(least), float(most), offset, it.scales == Scales::k6 ? 0.0f : INFINITY);
    if (std::fabs(fits[g].scale) > std::fabs(scale)) scale = fits[g].scale;
    lowest = std::min(lowest, fits[g].offset);
  }
  const auto ratio = [](float value, float unit) { return unit != 0.0f ? std::nearbyint(value / unit) : 0.0f; };
  if (it.scales == Scales::k6) {
    block.d = half_bits(scale / 63.0f), block.m = half_bits(-lowest / 63.0f);
    const float d = half_value(block.d), m = half_value(block.m);
    for (int g = 0; g < groups; g++) {
      block.a[g] = uint8_t(std::clamp(ratio(fits[g].scale, d), 0.0f, 63.0f));
      block.b[g] = uint8_t(std::clamp(ratio(-fits[g].offset, m), 0.0f, 63.0f));
      fits[g] = {d * block.a[g], -m * block.b[g]};
    }
  } else if (it.scales == Scales::s8) {
    block.d = half_bits(scale / -128.0f);
    const float d = half_value(block.d);
    for (int g = 0; g < groups; g++) {
      const int a = int(std::clamp(ratio(fits[g].scale, d), -128.0f, 127.0f));
      block.a[g] = uint8_t(a + 128);
      fits[g] = {d * float(a), 0.0f};
    }
  } else {
    block.d = half_bits(fits[0].scale), block.m = half_bits(fits[0].offset);
    fits[0] = {half_value(block.d), offset ? half_value(block.m) : 0.0f};
  }
  for (int k = 0; k < it.unit; k++) {
    const Fit& fit = fits[k / it.group];
    const int code = int(code_of(x[k], fit, inverse_of(fit), float(least), float(most)));
    block.codes[k] = uint8_t(it.low == 8 ? code : code + it.zero);
  }
  return block;
}

}  // namespace outrider
