// Packs the weights of checkpoints into panels, quantized where the linear's kind requires it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/kernels.hpp"
#include "memory.hpp"

namespace outrider {

inline size_t up_to(size_t count, size_t unit) { return (count + unit - 1) / unit * unit; }

// A matrix, or a vector as one row, in memory of the caller.
struct Array {
  enum class Type { float32, float16, bfloat16 } type = Type::float32;
  const void* data = nullptr;
  int64_t rows = 0, columns = 0;

  void read(int64_t row, float* out) const {
    const size_t first = size_t(row) * columns;
    if (type == Type::float32) {
      std::memcpy(out, static_cast<const float*>(data) + first, columns * sizeof(float));
      return;
    }
    const uint16_t* in = static_cast<const uint16_t*>(data) + first;
    for (int64_t i = 0; i < columns; i++) out[i] = type == Type::bfloat16 ? widened(in[i]) : half(in[i]);
  }

 private:
  static float half(uint16_t bits) {
    const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
    float value = exponent == 31 ? (fraction ? NAN : INFINITY)
                  : exponent     ? std::ldexp(float(fraction + 1024), exponent - 25)
                                 : std::ldexp(float(fraction), -24);
    return bits & 0x8000 ? -value : value;
  }
};

// A linear and the memory of its weights.
class PackedLinear : public Linear {
 public:
  PackedLinear() = default;
  // `unit`: inputs are padded to a multiple of it, which may be 16 for float32 and bfloat16; `even`: the number of panels is.
  PackedLinear(Kind kind_, int outputs_, int inputs_, bool biased, int unit = INPUTS, bool even = true) {
    kind = kind_, outputs = outputs_, inputs = inputs_;
    padded = (inputs + unit - 1) / unit * unit;
    panels = (outputs + LANES - 1) / LANES;
    if (even) panels += panels % 2;
    switch (kind) {
      case Kind::float32: panel_bytes = size_t(padded) * LANES * 4; break;
      case Kind::bfloat16: panel_bytes = size_t(padded) * LANES * 2; break;
      case Kind::int8: panel_bytes = size_t(padded) * LANES; break;
      case Kind::int4: panel_bytes = size_t(padded / GROUP) * 320; break;
    }
    const size_t most = size_t(panels) * LANES;
    weights_ = Memory(panels * panel_bytes, true);
    data = weights_.as<uint8_t>();
    rest_ = Memory(most * (kind == Kind::int8 ? 12 : 4), false);
    if (biased) bias = rest_.as<float>();
    if (kind == Kind::int8) {
      scales = rest_.as<float>() + most;
      zeros = rest_.as<int32_t>() + 2 * most;
    }
  }

  // Bytes that a pass reads.
  size_t bytes() const {
    const size_t count = size_t(outputs) * inputs;
    switch (kind) {
      case Kind::float32: return count * 4;
      case Kind::bfloat16: return count * 2;
      case Kind::int8: return count + size_t(outputs) * 4;
      default: return count / 2 + count / GROUP * 4;
    }
  }

  // Sets rows [begin, end) of a weight as outputs first + begin, ... With `step_panels` 2 and `phase` 0 or 1 they fill every
  // second panel.
  void fill(const Array& weight, int first, int step_panels, int phase, int begin, int end) {
    std::vector<float> row(padded, 0.0f);
    for (int r = begin; r < end; r++) {
      weight.read(r, row.data());
      set(place(r, first, step_panels, phase), row.data());
    }
  }

  static int place(int row, int first, int step_panels, int phase) {
    return step_panels == 1 ? first + row : (row / LANES * step_panels + phase) * LANES + row % LANES;
  }

  // Sets the weights of output `o`: `row` has `padded` floats, with zeros behind the inputs.
  void set(int o, const float* row) {
    uint8_t* panel = data + (o / LANES) * panel_bytes;
    const int lane = o % LANES;
    switch (kind) {
      case Kind::float32:
        for (int k = 0; k < padded; k++) reinterpret_cast<float*>(panel)[size_t(k) * LANES + lane] = row[k];
        break;
      case Kind::bfloat16: {
        uint16_t* out = reinterpret_cast<uint16_t*>(panel) + lane * 2;
        for (int k = 0; k < padded; k += 2, out += 2 * LANES) out[0] = rounded(row[k]), out[1] = rounded(row[k + 1]);
        break;
      }
      case Kind::int8: set_bytes(o, panel + lane * 4, row); break;
      case Kind::int4: set_nibbles(panel, lane, row); break;
    }
  }

  // Whether `get` returns the weights that were set, bit for bit, where they came from memory of this type.
  bool keeps(Array::Type type) const {
    return kind == Kind::float32 || (kind == Kind::bfloat16 && type == Array::Type::bfloat16);
  }

  // Reads the weights of output `o`, of a kind without quantization: `row` gets `inputs` floats.
  void get(int o, float* row) const {
    const uint8_t* panel = data + (o / LANES) * panel_bytes;
    const int lane = o % LANES;
    if (kind == Kind::float32) {
      for (int k = 0; k < inputs; k++) row[k] = reinterpret_cast<const float*>(panel)[size_t(k) * LANES + lane];
    } else {
      const uint16_t* in = reinterpret_cast<const uint16_t*>(panel) + lane * 2;
      for (int k = 0; k < inputs; k++) row[k] = widened(in[size_t(k / 2) * 2 * LANES + k % 2]);
    }
  }

 private:
  // One scale for each output (vector-wise quantization: LLM.int8(), arXiv 2208.07339, section 3.1).
  void set_bytes(int o, uint8_t* out, const float* row) {
    float most = 0.0f;
    for (int k = 0; k < inputs; k++) most = std::max(most, std::fabs(row[k]));
    const float scale = std::max(most / 127.0f, 1e-30f);
    int32_t sum = 0;
    for (int k = 0; k < padded; k++) {
      const float exact = std::nearbyint(row[k] / scale);  // NaN where an input was not finite
      const int code = exact >= -127.0f && exact <= 127.0f ? int(exact) : 0;
      sum += code;
      out[size_t(k / 4) * 64 + k % 4] = uint8_t(int8_t(code));
    }
    scales[o] = scale;
    zeros[o] = sum * INT8_ZERO;
  }

  // A scale and an offset for each 32 inputs (ZeroQuant, arXiv 2206.01861, section 4.1).
  void set_nibbles(uint8_t* panel, int lane, const float* row) {
    for (int g = 0; g < padded / GROUP; g++, panel += 320, row += GROUP) {
      const auto [low, high] = std::minmax_element(row, row + GROUP);
      const float span = (*high - *low) / 15.0f;
      const uint16_t offset_bits = rounded(*low + 8.0f * span);
      uint16_t scale_bits = rounded(span);
      if (!(widened(scale_bits) > 0.0f)) scale_bits = rounded(1.0f);
      const float offset = widened(offset_bits), scale = widened(scale_bits);
      uint16_t* words = reinterpret_cast<uint16_t*>(panel);
      for (int k = 0; k < GROUP; k++) {
        const float code = std::nearbyint((row[k] - offset) / scale) + 8.0f;
        const uint16_t nibble = code > 0.0f ? uint16_t(std::min(code, 15.0f)) : 0;
        uint16_t& word = words[(k / 8) * 32 + lane * 2 + k % 2];
        const int shift = k % 8 / 2 * 4;
        word = uint16_t((word & ~(15 << shift)) | nibble << shift);
      }
      words[128 + lane] = scale_bits;
      words[144 + lane] = offset_bits;
    }
  }

  Memory weights_, rest_;
};

}  // namespace outrider
