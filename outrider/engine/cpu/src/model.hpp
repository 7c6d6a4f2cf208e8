// A model of the Llama family, or some of its layers, and its passes over rows of many slots.
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
  Kind kv_kind;     // float32, bfloat16 or int8
  size_t kv_bytes;  // maximum of all slots together; 0: as much as their rows need
};

struct Layer {
  std::vector<float> attention_norm, query_norm, key_norm, ffn_norm;  // norms of queries and keys may be empty
  PackedLinear qkv, output, gate_up, down;
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

// The weights of a layer, of this rank: [outputs, inputs]; a bias or a norm of heads may have no data.
struct LayerArrays {
  Array attention_norm, query, key, value, query_bias, key_bias, value_bias, query_norm, key_norm, output, output_bias, ffn_norm,
      gate, up, gate_bias, up_bias, down, down_bias;
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

  void set_layer(int index, const LayerArrays& given);
  // Has the head give logits of these ids alone, ascending, one for each of its rows. Only where one rank has all of the model.
  void set_head_ids(std::vector<int> ids) { head_ids_ = std::move(ids); }
  // An embedding without data has the weights of the head, which has all tokens then.
  void set_ends(const Array& embedding, const Array& norm, const Array& head);

  // Number of floats of the features of a pass over so many rows.
  size_t feature_floats(size_t rows, size_t outputs) const {
    return (wanted_.every ? rows : outputs) * std::max<size_t>(1, wanted_.layers.size()) * shape_.width;
  }

  // Runs a pass. Throws RankGone.
  void run(const std::vector<Segment>& segments, const Results& results);

 private:
  struct Worker {
    Scratch tile, attention;
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
  bool add_up(int thread, float* x, size_t count);
  template <class Work>
  bool exchanged(int thread, Work work);
  bool judge(int thread, const Results& results, const int* chosen);
  int tiles_of(const PackedLinear& linear, int rows) const;
  Tile tile_at(const PackedLinear& linear, uint8_t* memory, int rows, int index, int* first) const;
  void attend(int thread, int layer, bool last);
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
  std::vector<float> cosines_, sines_;  // [positions, dim / 2]
  std::vector<Layer> layers_;
  Array embedding_;  // without data where the rows are those of the head
  Memory embedding_memory_;
  std::vector<float> norm_;
  PackedLinear head_;
  std::vector<int> head_ids_;  // of the rows of the head; empty: it has all tokens
  Pages pages_;
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
  float *hidden_ = nullptr, *qkv_ = nullptr, *attended_ = nullptr, *active_ = nullptr;
  float* part_ = nullptr;  // this rank's part of what all ranks add up or rank 0 collects; or the logits of the head's ids
  std::exception_ptr lost_;  // the error of a lost rank
  int rows_ = 0;
};

}  // namespace outrider
