// Low-rank adapters of a model (LoRA, arXiv 2106.09685, section 4.1): B A x is added to what a linear gives for x.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "linear.hpp"

namespace outrider {

enum class Part { qkv, output, gate_up, down };  // the linears of a layer
constexpr int PARTS = 4;
constexpr int JOINED = 3;  // weights that a linear joins at most
constexpr int MOST_RANK = 512;  // of an adapter; a rank's part of a linear may have fewer inputs

// What an adapter adds to one linear.
struct LowRank {
  // B of one weight: [outputs, ranks].
  struct Expand {
    PackedLinear linear;
    int ranks;    // place of its ranks among those of all
    int outputs;  // place of its outputs among those of the linear
    int written;  // number of outputs, padding included
  };
  PackedLinear shrink;  // A of all weights, one behind the other: [ranks, inputs]; none: no outputs
  std::vector<Expand> expand;
  std::vector<std::array<int, 2>> gaps;  // outputs [first, last) of the linear, padding included, to which nothing is added
};

// Needs no model, so that one can be packed while the model runs.
class Adapter {
 public:
  Adapter(int width, int queries, int keys, int ffn, int layers, Kind kind)
      : width_(width), queries_(queries), keys_(keys), ffn_(ffn), kind_(kind), layers_(layers),
        tiles_(!std::strncmp(kernels_here()[0]->name, "amx", 3)) {}

  int inputs(Part part) const { return part == Part::output ? queries_ : part == Part::down ? ffn_ : width_; }
  // Outputs of the weight with that number in a linear; 0: it joins fewer.
  int outputs(Part part, int number) const {
    if (part == Part::qkv) return number ? keys_ : queries_;
    if (part == Part::gate_up) return number < 2 ? ffn_ : 0;
    return number ? 0 : width_;
  }
  bool fits(int width, int queries, int keys, int ffn, int layers, Kind kind) const {
    return width_ == width && queries_ == queries && keys_ == keys && ffn_ == ffn && int(layers_.size()) == layers && kind_ == kind;
  }
  int layers() const { return int(layers_.size()); }
  size_t ranks_wide() const { return ranks_wide_; }  // the most ranks of a linear, padding included
  size_t added_wide() const { return added_wide_; }  // the most outputs of a linear, padding included
  const LowRank& at(int layer, Part part) const { return layers_[layer][int(part)]; }

  // Sets A and B of the weights of a linear; those without data are not adapted.
  void set(int layer, Part part, const std::array<Array, JOINED>& a, const std::array<Array, JOINED>& b) {
    const int unit = tiles_ ? 32 : 16;
    LowRank it;
    int ranks = 0, place = 0, covered = 0, wide = 0;
    for (const Array& one : a) ranks += int(up_to(one.rows, unit));
    it.shrink = PackedLinear(kind_, ranks, inputs(part), false, INPUTS, tiles_);
    ranks = 0;
    for (int number = 0; number < JOINED && outputs(part, number); number++) {
      const int own = outputs(part, number), room = part == Part::gate_up ? int(up_to(own, LANES)) : own;
      const bool last = number + 1 == JOINED || !outputs(part, number + 1);
      const int end = last ? int(up_to(place + room, 2 * LANES)) : place + room;
      if (a[number].data) {
        it.shrink.fill(a[number], ranks, 1, 0, 0, int(a[number].rows));
        LowRank::Expand made{PackedLinear(kind_, own, int(a[number].rows), false, unit, tiles_), ranks, place, 0};
        made.linear.fill(b[number], 0, 1, 0, 0, own);
        made.written = std::min(made.linear.panels * LANES, end - place);
        if (covered < place) it.gaps.push_back({covered, place});
        covered = place + made.written;
        ranks += int(up_to(a[number].rows, unit));
        it.expand.push_back(std::move(made));
      }
      place += room;
      wide = end;
    }
    if (covered < wide) it.gaps.push_back({covered, wide});
    ranks_wide_ = std::max(ranks_wide_, up_to(size_t(it.shrink.panels) * LANES, 2 * LANES));
    added_wide_ = std::max(added_wide_, size_t(wide));
    layers_.at(layer)[int(part)] = std::move(it);
  }

 private:
  int width_, queries_, keys_, ffn_;
  Kind kind_;
  std::vector<std::array<LowRank, PARTS>> layers_;
  bool tiles_;  // whether the kernels may be those for tiles, which know whole tiles alone
  size_t ranks_wide_ = 0, added_wide_ = 0;
};

}  // namespace outrider
