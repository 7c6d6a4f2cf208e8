// Low-rank adapters of a model (LoRA, arXiv 2106.09685, section 4.1): B A x is added to what a linear gives for x.
#pragma once

#include <array>
#include <stdexcept>
#include <vector>

#include "linear.hpp"

namespace outrider {

enum class Part { qkv, output, gate_up, down };  // the linears of a layer
constexpr int PARTS = 4;

// What an adapter adds to one linear. Adapted weights that the linear joins, like those of queries, keys and values, have ranks
// side by side: A has the rows of all, and B zeros where an output does not use a rank.
struct LowRank {
  PackedLinear shrink;  // A: [ranks, inputs]; none: no outputs
  PackedLinear expand;  // B: [outputs, ranks], in the panels of the linear
};

// Needs no model, so that one can be packed while the model runs.
class Adapter {
 public:
  static constexpr int RANKS = 32;  // ranks are padded to a multiple of this

  Adapter(int width, int queries, int keys, int ffn, int layers, Kind kind)
      : width_(width), queries_(queries), keys_(keys), ffn_(ffn), kind_(kind), layers_(layers) {}

  int inputs(Part part) const { return part == Part::output ? queries_ : part == Part::down ? ffn_ : width_; }
  int outputs(Part part) const { return part == Part::qkv ? queries_ + 2 * keys_ : part == Part::gate_up ? ffn_ : width_; }
  bool fits(int width, int queries, int keys, int ffn, int layers, Kind kind) const {
    return width_ == width && queries_ == queries && keys_ == keys && ffn_ == ffn && int(layers_.size()) == layers && kind_ == kind;
  }
  int layers() const { return int(layers_.size()); }
  size_t bytes() const { return bytes_; }
  const LowRank& at(int layer, Part part) const { return layers_[layer][int(part)]; }

  // Sets A and B of one linear. `up`: for gates and ups B of the ups; those of the gates are `b`.
  void set(int layer, Part part, const Array& a, const Array& b, const Array& up) {
    LowRank& it = layers_.at(layer)[int(part)];
    const int ranks = int(a.rows), rows = outputs(part);
    const bool paired = part == Part::gate_up;
    it.shrink = PackedLinear(kind_, ranks, inputs(part), false);
    it.shrink.fill(a, 0, 1, 0, 0, ranks);
    it.expand = PackedLinear(kind_, paired ? 2 * ((rows + LANES - 1) / LANES * LANES) : rows, ranks, false, RANKS);
    it.expand.fill(b, 0, paired ? 2 : 1, 0, 0, rows);
    if (paired) it.expand.fill(up, 0, 2, 1, 0, rows);
    bytes_ += it.shrink.bytes() + it.expand.bytes();
  }

 private:
  int width_, queries_, keys_, ffn_;
  Kind kind_;
  std::vector<std::array<LowRank, PARTS>> layers_;
  size_t bytes_ = 0;
};

}  // namespace outrider
