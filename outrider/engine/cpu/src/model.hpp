// A model of dense layers, or some of its layers, and its passes over rows of many slots.
//
// Where several ranks share a model, each has some of the heads and feed-forward units, columns of the embedding and tokens of
// the head (Megatron-LM, arXiv 1909.08053, section 3). The ranks add up their parts of the residual stream after the embedding
// and twice a layer; rank 0 collects the logits.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "adapter.hpp"
#include "delta_states.hpp"
#include "exchange.hpp"
#include "kernels/kernels.hpp"
#include "linear.hpp"
#include "memory.hpp"
#include "pages.hpp"
#include "pool.hpp"

namespace outrider {

struct Shape {
  int vocabulary, unpadded_vocabulary, width, layers, heads, kv_heads, dim, ffn, positions, slots, rows;  // heads and ffn: this rank's
  float eps;
  float scale;            // of queries
  float embedding_scale;  // of the rows of the embedding
  float residual_scale;   // of what layers add to the residual stream
  float score_cap, logit_cap;  // bounds of attention's scores and of the logits, see `Kernels::cap`; 0: none
  int turned;             // dimensions of a head that RoPE turns
  bool whole_norms;       // norms of queries and keys are over all heads together
  int experts, used, expert_ffn;  // of a mixture: experts of a layer, how many of them a row has, and their units; 0: none
  bool even;                      // the shares of a row's experts add up to 1
  int shared_ffn;                 // units of an expert that all rows have beside these, each times a gate of its own; 0: none
  Activation activation;
  std::vector<int> windows;  // of each layer: how many tokens its attention reaches back, itself among them; 0: all
  std::vector<int> ropes;    // of each layer: the number of its table of angles
  bool gated = false;        // each query head has a gate of its output beside it
  DeltaShape delta;          // of layers with the gated delta rule
  std::vector<int> deltas;   // whether each layer is one
  Kind kv_kind;     // float32, bfloat16 or int8
  size_t kv_bytes;  // maximum of all slots together; 0: as much as their rows need

  int query_stride() const { return gated ? 2 * dim : dim; }
  // The number of a layer among those that attend, or among those with a state.
  int rank_of(int layer) const { return int(std::count(deltas.begin(), deltas.begin() + layer, deltas[layer])); }
  int attending() const { return int(std::count(deltas.begin(), deltas.end(), 0)); }
  // Outputs of a router: a score for each expert, and the gate of the shared one.
  int routes() const { return experts + (shared_ffn ? 1 : 0); }
  // Numbers of all tables of angles.
  size_t angles() const { return size_t(1 + *std::max_element(ropes.begin(), ropes.end())) * positions * (turned / 2); }
};

struct Layer {
  std::vector<float> attention_norm, query_norm, key_norm, attention_post_norm, ffn_norm, ffn_post_norm;  // empty: there is none
  PackedLinear qkv, output, gate_up, down;
  PackedLinear router;              // of a mixture, [routes, width]; without data where the layer has none
  std::vector<PackedLinear> gate_ups, downs;  // of its experts
  // Of a layer with the gated delta rule, where `qkv` are the projections to queries, keys, values and gates of outputs.
  PackedLinear rates;                  // those to beta and to the decay
  std::vector<float> convolution;      // [key heads, taps, channels of a head]
  std::vector<float> decay_rates, decay_biases;  // [value heads], those of a key head side by side
  std::vector<float> state_norm;       // [value_dim]
};

// What a row of a mixture has from an expert.
struct Share {
  int expert, place;  // place among the rows that the experts compute
  float weight;
};

// The rows that one slot adds to a pass; see outrider.engine.interface.batch.Segment.
struct Segment {
  int slot, prefix, count, span, wanted;
  const int64_t* tokens;
  const int64_t* positions;
  const uint8_t* mask;  // [count, span]; null: a chain
  bool drawn;
  uint64_t base;  // of its noise keys
  double temperature;
  const Adapter* adapter;  // null: none

  bool sees(int row, int column) const { return mask ? mask[size_t(row) * span + column] != 0 : column <= row; }
  // The child of a row that has this token; `count` where there is none.
  int below(int row, int64_t token) const {
    const int at = span - count + row;
    for (int other = row + 1; other < count; other++)
      if (tokens[other] == token && positions[other] == positions[row] + 1 && sees(other, at)) return other;
    return count;
  }
};

// The buffers for the results of a pass.
struct Results {
  float* logits;    // [outputs, vocabulary]; on rank 0 alone. Those of ids that the head lacks are left as they are
  int best;         // number of tokens to choose for each row that is drawn; 0: none
  bool walks;       // whether to choose only for rows that the chosen tokens lead to, from a segment's first row on
  int64_t* tokens;  // [outputs, best]; -1 where there are fewer tokens, or none are chosen
  double* scores;   // [outputs, best]
  float* features;  // [rows or outputs, parts * width]; null: none
};

// The features that a pass returns; see outrider.engine.interface.features.
struct FeatureRequest {
  std::vector<int> layers;  // layers whose outputs are returned, the first is 1; empty: the inputs of the head
  bool every = false;       // of all rows; else of those that want logits
};

// The weights of a layer, of this rank: [outputs, inputs]; a bias, a norm of heads or one behind a part may have no data.
struct LayerArrays {
  Array attention_norm, query, key, value, query_bias, key_bias, value_bias, query_norm, key_norm, output, output_bias, ffn_norm,
      gate, up, gate_bias, up_bias, down, down_bias, attention_post_norm, ffn_post_norm, router, shared_gate;
  Array inputs, gates, beta, decay, convolution, decay_rates, decay_biases, state_norm;  // with the gated delta rule
};

// The type that weights are kept in.
struct WeightType {
  Kind kind;
  bool stored;  // each as its array; `kind` is that of inputs. Otherwise blocks are made as q4_1
};

class Model {
 public:
  // `exchange`: with the other ranks that share the model; null: this rank has all of it.
  Model(const Shape& shape, WeightType type, WeightType head_type, int threads, const Kernels& kernels, const float* cosines,
        const float* sines, FeatureRequest wanted, std::unique_ptr<Exchange> exchange);

  const Shape& shape() const { return shape_; }
  int ranks() const { return exchange_ ? exchange_->ranks() : 1; }
  int rank() const { return exchange_ ? exchange_->rank() : 0; }
  double exchange_seconds() const { return exchange_ ? exchange_->seconds() : 0.0; }
  // Tokens of this rank's part of the head.
  int head_tokens() const { return head_ids_.empty() ? (shape_.vocabulary + ranks() - 1) / ranks() : int(head_ids_.size()); }
  const Kernels& kernels() const { return kernels_; }
  Kind adapter_kind() const { return type_.kind == Kind::float32 ? Kind::float32 : Kind::bfloat16; }
  Pages& pages() { return pages_; }
  size_t weight_bytes() const;
  size_t kv_bytes() const { return pages_.bytes(); }
  size_t state_bytes() const { return states_.bytes(); }
  bool has_states() const { return shape_.attending() < shape_.layers; }

  void set_layer(int index, const LayerArrays& given);
  // An expert of a layer that has a router.
  void set_expert(int index, int expert, const Array& gate, const Array& up, const Array& down);
  // Has the head give logits of these ids alone, ascending, one for each of its rows. Only where one rank has all of the model.
  void set_head_ids(std::vector<int> ids) { head_ids_ = std::move(ids); }
  // An embedding without data has the weights of the head, which has all tokens then.
  void set_ends(const Array& embedding, const Array& norm, const Array& head);

  // Number of floats of the features of a pass over so many rows.
  size_t feature_floats(size_t rows, size_t outputs) const {
    return (wanted_.every ? rows : outputs) * std::max<size_t>(1, wanted_.layers.size()) * shape_.width;
  }

  // Rows of slots: see `Pages` and `DeltaStates`.
  void move(int slot, const int64_t* source, const int64_t* target, size_t count);
  void copy(int source, int target, int rows);
  void release(int slot, int rows);

  // Runs a pass. Throws RankGone.
  void run(const std::vector<Segment>& segments, const Results& results);

 private:
  struct Worker {
    Scratch tile, attention, delta;
    std::vector<int32_t> more;
    std::vector<const float*> added;  // what adapters add to the rows of a linear
    std::vector<float> ordered;       // inputs in the order of a linear's weights
  };
  // Rows of a pass that have the same adapter.
  struct Adapted {
    const Adapter* adapter;
    int first;              // place of their first row in `ranks_` and `added_`
    std::vector<int> rows;  // ascending
  };
  struct Unit {
    int segment, head;
  };
  struct Row {
    const Segment* segment;
    int row, output;
  };

  // A weight whose rows are the outputs of a linear from `first` on. With `step_panels` 2 they fill every second panel.
  struct Piece {
    const Array& weight;
    const Array& bias;
    int first = 0, step_panels = 1, phase = 0;
  };
  PackedLinear packed(WeightType type, const std::vector<Piece>& pieces, int outputs);
  void fill(PackedLinear& linear, const Piece& piece);
  void prefetch_further();
  std::vector<float> norm_of(const Array& weight, int padded) const;
  void compute(int thread, const Results& results);
  void group(const std::vector<Segment>& segments);
  void apply(int thread, const PackedLinear& linear, const float* x, size_t stride, const float* norm, int rows,
             const Output& output, const int* chosen = nullptr, int turn = 0);
  const float* const* adapt(int thread, int layer, Part part, const float* x, size_t stride, const float* norm, int rows, bool last);
  bool project(int thread, int layer, Part part, const float* x, size_t stride, int rows, bool last);
  bool add_part(int thread, const std::vector<float>& norm, int rows);
  bool mix(int thread, int layer, int rows);
  void share(const float* scores, Share* shares) const;
  void group_shares(int rows);
  bool add_up(int thread, float* x, size_t count);
  template <class Work>
  bool exchanged(int thread, Work work);
  bool judge(int thread, const Results& results, const int* chosen);
  int tiles_of(const PackedLinear& linear, int rows) const;
  Tile tile_at(const PackedLinear& linear, uint8_t* memory, int rows, int index, int* first) const;
  void attend(int thread, int layer, bool last);
  void set_delta(Layer& layer, const LayerArrays& given);
  void recur(int thread, int layer);
  void clear_padding(int thread, float* x, size_t stride, int inputs, size_t rows) const;
  void attend_head(Worker& worker, int layer, const Segment& segment, int first_row, int head, int least);
  void embed(int thread);
  void choose(int thread, const Results& results);
  int64_t choose(const Results& results, const Row& at) const;

  Shape shape_;
  WeightType type_, head_type_;
  const Kernels& kernels_;
  Pool pool_;
  FeatureRequest wanted_;
  std::unique_ptr<Exchange> exchange_;
  std::vector<float> cosines_, sines_;  // [tables, positions, turned / 2]
  bool adds_normed_ = false;            // whether a layer has norms behind its parts
  std::vector<Layer> layers_;
  Array embedding_;  // without data where the rows are those of the head
  Memory embedding_memory_;
  std::vector<float> norm_;
  PackedLinear head_;
  std::vector<int> head_ids_;  // of the rows of the head; empty: it has all tokens
  Pages pages_;
  DeltaStates states_;
  std::vector<DeltaPlan> plans_;  // of the running pass, one for each segment
  size_t rates_wide_ = 0;
  Scratch rates_memory_;
  float* rates_ = nullptr;  // [rows, rates_wide_]
  size_t wide_, qkv_wide_, attended_wide_, ffn_wide_;  // floats of a row of each buffer

  // State of the running pass.
  const std::vector<Segment>* segments_ = nullptr;
  std::vector<int> first_rows_;  // of each segment
  std::vector<int> outputs_;     // rows that want logits
  std::vector<Row> choices_;     // rows to choose tokens for; or the first row of each segment, from which a walk begins
  std::vector<Unit> units_;
  std::vector<std::atomic<int>> next_;  // next unit of each layer; last the next row to choose for
  std::vector<Worker> workers_;
  std::vector<Adapted> adapted_, last_adapted_;  // of all rows; of those that want logits
  size_t ranks_wide_ = 0, added_wide_ = 0;       // floats of a row of each buffer
  Scratch ranks_memory_, added_memory_;
  float *ranks_ = nullptr, *added_ = nullptr;
  Scratch hidden_memory_, qkv_memory_, attended_memory_, active_memory_, part_memory_, shared_tile_;
  // Of a mixture: scores of all experts and gates of the shared one, [rows, routes]; shares, [rows, used], by ascending experts; the rows of each expert, one
  // behind the other; and what these make of them, [rows * used, width].
  Scratch scores_memory_, mixed_memory_;
  float *scores_ = nullptr, *mixed_ = nullptr;
  std::vector<Share> shares_;
  std::vector<int> expert_firsts_, expert_rows_;
  float *hidden_ = nullptr, *qkv_ = nullptr, *attended_ = nullptr, *active_ = nullptr;
  float* part_ = nullptr;  // this rank's part of what all ranks add up or rank 0 collects; what a norm follows; or the logits of the head's ids
  std::exception_ptr lost_;  // the error of a lost rank
  int rows_ = 0;
};

}  // namespace outrider
