// A model of the Llama family, or some of its layers, and one pass over rows of many slots.
//
// Of a model that several ranks share each has some heads and feed-forward units, columns of the embedding and tokens of the
// head (Megatron-LM, arXiv 1909.08053, section 3). Their parts of the residual stream are added up after the embedding and
// twice a layer; rank 0 collects the logits.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include "exchange.hpp"
#include "kernels.hpp"
#include "linear.hpp"
#include "memory.hpp"
#include "pages.hpp"
#include "pool.hpp"

namespace outrider {

struct Shape {
  int vocabulary, sayable, width, layers, heads, kv_heads, dim, ffn, positions, slots, rows;  // heads and ffn: this rank's
  float eps;
  size_t kv_bytes;  // of all slots together at most; 0: as much as they have places for
};

struct Layer {
  std::vector<float> attention_norm, query_norm, key_norm, ffn_norm;  // of queries and keys: maybe none
  PackedLinear qkv, output, gate_up, down;
};

// The rows that one slot adds to a pass; see outrider.engine.batch.Segment.
struct Segment {
  int slot, prefix, count, span, wanted;
  const int64_t* tokens;
  const int64_t* positions;
  const uint8_t* mask;  // [count, span]; null: a chain
  bool drawn;
  uint64_t base;  // of its noise keys
  double temperature;

  bool sees(int row, int column) const { return mask ? mask[size_t(row) * span + column] != 0 : column <= row; }
  // The row below another one that has this token; none: `count`.
  int below(int row, int64_t token) const {
    const int at = span - count + row;
    for (int other = row + 1; other < count; other++)
      if (tokens[other] == token && positions[other] == positions[row] + 1 && sees(other, at)) return other;
    return count;
  }
};

// Where a pass leaves its results.
struct Results {
  float* logits;    // [outputs, vocabulary]; on rank 0 alone
  int best;         // tokens to be chosen for each row that is drawn; 0: none
  bool walks;       // but only for the rows that the chosen tokens lead to, from a segment's first
  int64_t* tokens;  // [outputs, best]; -1 where there are fewer, or none are chosen
  double* scores;   // [outputs, best]
  float* features;  // [rows or outputs, parts * width]; null: none
};

// Which features a pass gives; see outrider.engine.features.
struct Wanted {
  std::vector<int> layers;  // whose outputs, the first is 1; none: what goes into the head
  bool every = false;       // of every row, else of those that want logits
};

class Model {
 public:
  // `exchange`: with the other ranks that share the model; null: it is all here.
  Model(const Shape& shape, Kind kind, Kind head_kind, int threads, const Kernels& kernels, const float* cosines,
        const float* sines, Wanted wanted, std::unique_ptr<Exchange> exchange);

  const Shape& shape() const { return shape_; }
  int ranks() const { return exchange_ ? exchange_->ranks() : 1; }
  int rank() const { return exchange_ ? exchange_->rank() : 0; }
  double exchange_seconds() const { return exchange_ ? exchange_->seconds() : 0.0; }
  int head_tokens() const { return (shape_.vocabulary + ranks() - 1) / ranks(); }  // of this rank's part of the head
  const Kernels& kernels() const { return kernels_; }
  Pages& pages() { return pages_; }
  size_t weight_bytes() const;
  size_t kv_bytes() const { return pages_.bytes(); }

  // This rank's part of each weight: [outputs, inputs]; a bias or a norm may have no data.
  void set_layer(int index, const Array& attention_norm, const Array& query, const Array& key, const Array& value,
                 const Array& query_bias, const Array& key_bias, const Array& value_bias, const Array& query_norm,
                 const Array& key_norm, const Array& output, const Array& output_bias, const Array& ffn_norm,
                 const Array& gate, const Array& up, const Array& gate_bias, const Array& up_bias, const Array& down,
                 const Array& down_bias);
  void set_ends(const Array& embedding, const Array& norm, const Array& head);

  // Of the features of a pass over so many rows.
  size_t feature_floats(size_t rows, size_t outputs) const {
    return (wanted_.every ? rows : outputs) * std::max<size_t>(1, wanted_.layers.size()) * shape_.width;
  }

  // Throws RankGone.
  void run(const std::vector<Segment>& segments, const Results& results);

 private:
  struct Worker {
    Scratch tile, attention;
    std::vector<int32_t> more;
  };
  struct Unit {
    int segment, head;
  };
  struct Row {
    const Segment* segment;
    int row, output;
  };

  void fill(PackedLinear& linear, const Array& weight, const Array& bias, int first, int step_panels, int phase);
  void ask_further_ahead();
  std::vector<float> norm_of(const Array& weight, int padded) const;
  void compute(int thread, const Results& results);
  void apply(int thread, const PackedLinear& linear, const float* x, size_t stride, const float* norm, int rows,
             const Output& output, const int* chosen = nullptr);
  bool project(int thread, const PackedLinear& linear, const float* x, size_t stride, int rows);
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
  Kind kind_;
  const Kernels& kernels_;
  Pool pool_;
  Wanted wanted_;
  std::unique_ptr<Exchange> exchange_;
  std::vector<float> cosines_, sines_;  // [positions, dim / 2]
  std::vector<Layer> layers_;
  Array::Type embedding_type_ = Array::Type::float32;
  Memory embedding_;
  std::vector<float> norm_;
  PackedLinear head_;
  Pages pages_;
  size_t wide_, qkv_wide_, attended_wide_, ffn_wide_;  // floats of a row of each

  // Of the pass that runs.
  const std::vector<Segment>* segments_ = nullptr;
  std::vector<int> first_rows_;  // of each segment
  std::vector<int> outputs_;     // rows that want logits
  std::vector<Row> choices_;     // rows to choose from; or the first of each segment, to walk on from
  std::vector<Unit> units_;
  std::vector<std::atomic<int>> next_;  // unit of each layer; then row to choose from
  std::vector<Worker> workers_;
  Scratch hidden_memory_, qkv_memory_, attended_memory_, active_memory_, part_memory_, shared_tile_;
  float *hidden_ = nullptr, *qkv_ = nullptr, *attended_ = nullptr, *active_ = nullptr;
  float* part_ = nullptr;  // this rank's, of what all ranks add up or rank 0 collects
  std::exception_ptr lost_;  // another rank
  int rows_ = 0;
};

}  // namespace outrider
