// Packs the weights of checkpoints into panels, quantized where the linear's kind requires it.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <vector>

#include "blocks.hpp"
#include "kernels/kernels.hpp"
#include "memory.hpp"

namespace outrider {

inline size_t up_to(size_t count, size_t unit) { return (count + unit - 1) / unit * unit; }

// A matrix, or a vector as one row, in memory of the caller or in a file.
struct Array {
  enum class Type { float32, float16, bfloat16, blocks } type = Type::float32;
  const void* data = nullptr;
  int64_t rows = 0, columns = 0;
  Format format = Format::q8_0;  // of blocks
  const int32_t* order = nullptr;  // of blocks: the input of each column; null: the columns are in the order of the inputs
  int file = -1;      // that has the rows, where no memory has them
  int64_t start = 0;  // its byte where they begin
  int pairs = 0;      // of the rows of a head, if the two rows of a pair are neighbours in the file; else 0

  bool given() const { return data || file >= 0; }

  size_t row_bytes() const {
    const Layout& it = layout_of(format);
    return type == Type::blocks ? size_t(columns / it.unit) * it.block_bytes : size_t(columns) * (type == Type::float32 ? 4 : 2);
  }
  const uint8_t* row(int64_t number) const { return static_cast<const uint8_t*>(data) + size_t(number) * row_bytes(); }

  void read(int64_t number, float* out) const { values(row(number), out); }

  // The values of a row.
  void values(const uint8_t* from, float* out) const {
    if (type == Type::float32) {
      std::memcpy(out, from, columns * sizeof(float));
    } else if (type == Type::blocks) {
      const Layout& it = layout_of(format);
      for (int64_t i = 0; i < columns; i += it.unit, from += it.block_bytes) read_block(format, from).values(it, out + i);
    } else {
      const uint16_t* in = reinterpret_cast<const uint16_t*>(from);
      for (int64_t i = 0; i < columns; i++) out[i] = type == Type::bfloat16 ? widened(in[i]) : half_value(in[i]);
    }
  }
};

// Reads rows of an array, those of a file some at a time: a map of the file would end the process where the file shrinks.
class RowReader {
 public:
  explicit RowReader(const Array& array) : array_(array), each_(array.row_bytes()) {}

  // Return a row, until the next call. Throws system_error, and runtime_error where the file is shorter.
  const uint8_t* row(int64_t number) {
    if (array_.data) return array_.row(number);
    if (number < first_ || number >= end_) load(number);
    return buffer_.data() + size_t(number - first_) * each_;
  }

 private:
  void load(int64_t first) {
    first_ = first, end_ = std::min<int64_t>(first + LANES, array_.rows);
    buffer_.resize(size_t(end_ - first_) * each_);
    if (!array_.pairs) return read(first_, buffer_.data(), buffer_.size());
    const int64_t pairs = array_.pairs;
    for (int64_t r = first_; r < end_; r++) {
      const int64_t head = r / (2 * pairs), half = r / pairs % 2;
      read(2 * (head * pairs + r % pairs) + half, buffer_.data() + size_t(r - first_) * each_, each_);
    }
  }

  // Reads bytes from a row of the file on.
  void read(int64_t row, uint8_t* to, size_t bytes) const {
    off_t at = off_t(array_.start + row * int64_t(each_));
    while (bytes) {
      const ssize_t done = pread(array_.file, to, bytes, at);
      if (done < 0 && errno == EINTR) continue;
      if (done < 0) throw std::system_error(errno, std::generic_category());
      if (!done) throw std::runtime_error("a file of weights has become shorter");
      to += done, at += done, bytes -= size_t(done);
    }
  }

  const Array& array_;
  const size_t each_;  // bytes of a row
  std::vector<uint8_t> buffer_;
  int64_t first_ = 0, end_ = 0;  // rows that it holds
};

// A linear and the memory of its weights.
class PackedLinear : public Linear {
 public:
  PackedLinear() = default;
  // `unit`: inputs are padded to a multiple of it, which may be 16 for float32 and bfloat16; `even`: the number of panels is.
  // `group_`: inputs of float8 that share a scale.
  PackedLinear(Kind kind_, int outputs_, int inputs_, bool biased, int unit = INPUTS, bool even = true, int group_ = 0) {
    kind = kind_, outputs = outputs_, inputs = inputs_;
    padded = (inputs + unit - 1) / unit * unit;
    panels = (outputs + LANES - 1) / LANES;
    if (even) panels += panels % 2;
    switch (kind) {
      case Kind::float32: panel_bytes = size_t(padded) * LANES * 4; break;
      case Kind::float16:
      case Kind::bfloat16: panel_bytes = size_t(padded) * LANES * 2; break;
      case Kind::float8:
      case Kind::int8: panel_bytes = size_t(padded) * LANES; break;
      case Kind::blocks: break;
    }
    const size_t most = size_t(panels) * LANES;
    weights_ = Memory(panels * panel_bytes, true);
    data = weights_.as<uint8_t>();
    group = group_;
    rest_ = Memory(most * (kind == Kind::int8 ? 12 : 4 + 4 * groups()), false);
    if (biased) bias = rest_.as<float>();
    if (kind == Kind::float8) scales = rest_.as<float>() + most;
    if (kind == Kind::int8) {
      scales = rest_.as<float>() + most;
      zeros = rest_.as<int32_t>() + 2 * most;
    }
  }

  // A linear in blocks. `formats`: of its panels.
  PackedLinear(const std::vector<Format>& formats, int outputs_, int inputs_, bool biased)
      : PackedLinear(Kind::blocks, outputs_, inputs_, biased) {
    panels_.resize(panels);
    size_t bytes = 0;
    for (int p = 0; p < panels; p++) panels_[p].format = formats[std::min(size_t(p), formats.size() - 1)], bytes += bytes_of(p);
    weights_ = Memory(bytes, true);
    uint8_t* next = weights_.as<uint8_t>();
    for (int p = 0; p < panels; next += bytes_of(p++)) panels_[p].data = next;
    blocks = panels_.data();
  }

  // Bytes that a pass reads.
  size_t bytes() const {
    const size_t count = size_t(outputs) * inputs;
    switch (kind) {
      case Kind::float32: return count * 4;
      case Kind::float16:
      case Kind::bfloat16: return count * 2;
      case Kind::float8: return count + outputs * groups() * 4;
      case Kind::int8: return count + size_t(outputs) * 4;
      default: return weights_.bytes();
    }
  }

  // Sets rows [begin, end) of a weight as outputs first + begin, ... See Model::Piece.
  void fill(const Array& weight, int first, int step_panels, int phase, int begin, int end) {
    std::vector<float> row(padded, 0.0f);
    RowReader rows(weight);
    for (int r = begin; r < end; r++) {
      const uint8_t* from = rows.row(r);
      if (weight.type == Array::Type::blocks && (kind == Kind::blocks || kind == Kind::float8)) {
        const int o = place(r, first, step_panels, phase);
        kind == Kind::blocks ? set_blocks(o, from) : set_eighths(o, from, weight.format);
        continue;
      }
      weight.values(from, row.data());
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
      case Kind::float16:
        for (int k = 0; k < padded; k++) reinterpret_cast<uint16_t*>(panel)[size_t(k) * LANES + lane] = half_bits(row[k]);
        break;
      case Kind::bfloat16: {
        uint16_t* out = reinterpret_cast<uint16_t*>(panel) + lane * 2;
        for (int k = 0; k < padded; k += 2, out += 2 * LANES) out[0] = rounded(row[k]), out[1] = rounded(row[k + 1]);
        break;
      }
      case Kind::int8: set_bytes(o, panel + lane * 4, row); break;
      case Kind::blocks: quantize(o, row); break;
      case Kind::float8: throw std::logic_error("a float8 linear is set from blocks");
    }
  }

  // Whether `get` returns the weights that were set, bit for bit, where they came from memory of this type.
  bool keeps(Array::Type type) const {
    switch (kind) {
      case Kind::float16: return type == Array::Type::float16;
      case Kind::bfloat16: return type == Array::Type::bfloat16;
      case Kind::blocks: return type == Array::Type::blocks;
      default: return kind == Kind::float32;
    }
  }

  // Reads the weights of output `o`, which a linear `keeps`: `row` gets `inputs` floats.
  void get(int o, float* row) const {
    if (kind == Kind::blocks) {
      const Panel& panel = panels_[o / LANES];
      const Layout& it = layout_of(panel.format);
      for (int i = 0; i < inputs; i += it.unit)
        read_unit(panel.format, panel.data + size_t(i / it.unit) * unit_bytes(it), o % LANES).values(it, row + i);
      return;
    }
    const uint8_t* panel = data + (o / LANES) * panel_bytes;
    const int lane = o % LANES;
    if (kind == Kind::float32) {
      for (int k = 0; k < inputs; k++) row[k] = reinterpret_cast<const float*>(panel)[size_t(k) * LANES + lane];
    } else if (kind == Kind::float16) {
      for (int k = 0; k < inputs; k++) row[k] = half_value(reinterpret_cast<const uint16_t*>(panel)[size_t(k) * LANES + lane]);
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

  size_t bytes_of(int panel) const {
    const Layout& it = layout_of(panels_[panel].format);
    return size_t(inputs / it.unit) * unit_bytes(it);
  }

  void set_block(int o, int unit, const Block& block) {
    const Panel& panel = panels_[o / LANES];
    write_unit(panel.format, block, panel.data + size_t(unit) * unit_bytes(layout_of(panel.format)), o % LANES);
  }

  // Sets the weights of output `o` from the blocks of a file.
  void set_blocks(int o, const uint8_t* row) {
    const Panel& panel = panels_[o / LANES];
    as_constant(panel.format, [&](auto format) {
      constexpr Layout it = layout_of(format);
      for (int unit = 0; unit < inputs / it.unit; unit++)
        write_unit(format, read_block(format, row + unit * it.block_bytes), panel.data + size_t(unit) * unit_bytes(it), o % LANES);
    });
  }

  size_t groups() const { return group ? size_t(inputs + group - 1) / group : 0; }  // of inputs that share a scale

  // Sets the weights of output `o` of float8 from blocks.
  void set_eighths(int o, const uint8_t* row, Format format) {
    uint8_t* out = data + (o / LANES) * panel_bytes + o % LANES;
    for (size_t g = 0; g < groups(); g++, row += layout_of(format).block_bytes) {
      std::memcpy(scales + ((o / LANES) * groups() + g) * LANES + o % LANES, row, 4);
      for (int k = 0; k < group; k++, out += LANES) *out = row[4 + k];
    }
  }

  // A scale and an offset for each 32 inputs (ZeroQuant, arXiv 2206.01861, section 4.1), as q4_1.
  void quantize(int o, const float* row) {
    for (int unit = 0; unit < inputs / CHUNK; unit++, row += CHUNK) {
      const auto [low, high] = std::minmax_element(row, row + CHUNK);
      Block block;
      block.m = half_bits(*low);
      block.d = half_bits((*high - *low) / 15.0f);
      const float offset = half_value(block.m), scale = half_value(block.d);
      for (int k = 0; k < CHUNK; k++) {
        const float code = scale > 0.0f ? std::nearbyint((row[k] - offset) / scale) : 0.0f;
        block.codes[k] = code > 0.0f ? uint8_t(std::min(code, 15.0f)) : 0;
      }
      set_block(o, unit, block);
    }
  }

  Memory weights_, rest_;
  std::vector<Panel> panels_;  // of blocks

 public:
  std::vector<int32_t> order;  // of the inputs, for each column of the weights; empty: their own
};

}  // namespace outrider
