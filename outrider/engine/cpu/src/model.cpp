#include "model.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace outrider {
namespace {

constexpr int APART = 32;  // up to this many rows each thread packs its own copy of the inputs (no barrier)
constexpr size_t CACHED = size_t(24) << 20;  // bytes of weights up to which a cache may hold them
constexpr size_t FAR = 4096;                 // bytes of a panel to prefetch ahead, for weights in memory
constexpr int RUN = 4 * LANES;  // rows that a thread packs at a time: complete panels, because their outputs share cache lines
constexpr int PANELS = 8;  // panels that all tiles of rows use before the next ones, while a core's cache holds them

}  // namespace

Model::Model(const Shape& shape, WeightType type, WeightType head_type, int threads, const Kernels& kernels, const float* cosines,
             const float* sines, FeatureRequest wanted, std::unique_ptr<Exchange> exchange)
    : shape_(shape), type_(type), head_type_(head_type), kernels_(kernels), pool_(threads), wanted_(std::move(wanted)), exchange_(std::move(exchange)),
      cosines_(cosines, cosines + size_t(shape.positions) * (shape.dim / 2)),
      sines_(sines, sines + size_t(shape.positions) * (shape.dim / 2)), layers_(shape.layers),
      pages_({shape.kv_kind, shape.dim}, shape.layers, shape.kv_heads, shape.slots, shape.rows, shape.kv_bytes),
      next_(shape.layers + 1), workers_(threads) {
  wide_ = up_to(shape.width, INPUTS);
  qkv_wide_ = up_to(size_t(shape.heads + 2 * shape.kv_heads) * shape.dim, INPUTS);
  attended_wide_ = up_to(size_t(shape.heads) * shape.dim, INPUTS);
  ffn_wide_ = up_to(shape.ffn, INPUTS);
}

size_t Model::weight_bytes() const {
  size_t bytes = head_.bytes();
  for (const auto& it : layers_) bytes += it.qkv.bytes() + it.output.bytes() + it.gate_up.bytes() + it.down.bytes();
  return bytes;
}

// Packs weights that have the same inputs as one linear.
PackedLinear Model::packed(WeightType type, const std::vector<Piece>& pieces, int outputs) {
  const int inputs = int(pieces[0].weight.columns);
  const auto all = [&](Array::Type it) {
    return std::all_of(pieces.begin(), pieces.end(), [&](const Piece& piece) { return piece.weight.type == it; });
  };
  const auto eighths = [&](const Piece& piece) { return is_float8(piece.weight.format); };
  const Array& first = pieces[0].weight;
  Kind kind = type.kind;
  if (type.stored) {
    kind = Kind::float32;
    if (all(Array::Type::blocks)) {
      const auto same = [&](const Piece& piece) { return piece.weight.format == first.format; };
      if (std::none_of(pieces.begin(), pieces.end(), eighths)) kind = Kind::blocks;
      else if (std::all_of(pieces.begin(), pieces.end(), same)) kind = Kind::float8;
    }
    if (all(Array::Type::bfloat16)) kind = Kind::bfloat16;
    if (all(Array::Type::float16)) kind = Kind::float16;
  }
  const bool biased = pieces[0].bias.given();
  PackedLinear linear;
  if (kind == Kind::blocks) {
    std::vector<Format> formats(size_t(outputs + LANES - 1) / LANES, Format::q4_1);
    for (const Piece& piece : pieces) {
      const Format format = type.stored ? piece.weight.format : Format::q4_1;
      if (inputs % layout_of(format).unit) throw std::invalid_argument("blocks that do not fill the inputs of a linear");
      if (piece.first % LANES && format != formats[piece.first / LANES])
        throw std::invalid_argument("weights of different types that share a panel of 16 outputs");
      for (int row = 0; row < int(piece.weight.rows); row++)
        formats[PackedLinear::place(row, piece.first, piece.step_panels, piece.phase) / LANES] = format;
    }
    linear = PackedLinear(formats, outputs, inputs, biased);
  } else {
    linear = PackedLinear(kind, outputs, inputs, biased, INPUTS, true, kind == Kind::float8 ? layout_of(first.format).unit : 0);
  }
  for (const Piece& piece : pieces)
    if (!first.order != !piece.weight.order || (first.order && !std::equal(first.order, first.order + inputs, piece.weight.order)))
      throw std::invalid_argument("weights of a linear that have their inputs in different orders");
  if (first.order) linear.order.assign(first.order, first.order + inputs);
  for (const Piece& piece : pieces) fill(linear, piece);
  return linear;
}

void Model::fill(PackedLinear& linear, const Piece& piece) {
  const int count = int(piece.weight.rows);
  std::atomic<int> next{0};
  std::vector<std::exception_ptr> failed(size_t(pool_.size()));
  pool_.run([&](int thread) {
    try {
      for (int begin; (begin = next.fetch_add(RUN)) < count;)
        linear.fill(piece.weight, piece.first, piece.step_panels, piece.phase, begin, std::min(begin + RUN, count));
    } catch (...) {
      failed[size_t(thread)] = std::current_exception();
    }
  });
  for (const auto& error : failed)
    if (error) std::rethrow_exception(error);
  if (!piece.bias.given()) return;
  std::vector<float> values(count);
  piece.bias.values(RowReader(piece.bias).row(0), values.data());
  for (int r = 0; r < count; r++)
    linear.bias[PackedLinear::place(r, piece.first, piece.step_panels, piece.phase)] = values[r];
}

std::vector<float> Model::norm_of(const Array& weight, int padded) const {
  std::vector<float> values(weight.given() ? padded : 0, 0.0f);
  if (weight.given()) weight.values(RowReader(weight).row(0), values.data());
  return values;
}

void Model::set_layer(int index, const LayerArrays& given) {
  Layer& it = layers_.at(index);
  const int queries = shape_.heads * shape_.dim, keys = shape_.kv_heads * shape_.dim;
  it.attention_norm = norm_of(given.attention_norm, int(wide_));
  it.ffn_norm = norm_of(given.ffn_norm, int(wide_));
  it.query_norm = norm_of(given.query_norm, shape_.dim);
  it.key_norm = norm_of(given.key_norm, shape_.dim);
  it.qkv = packed(type_, {{given.query, given.query_bias}, {given.key, given.key_bias, queries}, {given.value, given.value_bias, queries + keys}},
                  queries + 2 * keys);
  it.output = packed(type_, {{given.output, given.output_bias}}, shape_.width);
  it.gate_up = packed(type_, {{given.gate, given.gate_bias, 0, 2, 0}, {given.up, given.up_bias, 0, 2, 1}}, int(2 * up_to(shape_.ffn, LANES)));
  it.gate_up.outputs = 2 * shape_.ffn;
  it.down = packed(type_, {{given.down, given.down_bias}}, shape_.width);
}

void Model::set_ends(const Array& embedding, const Array& norm, const Array& head) {
  norm_ = norm_of(norm, int(wide_));
  head_ = packed(head_type_, {{head, Array()}}, head_tokens());
  if (embedding.given() || !head_.keeps(head.type)) {  // otherwise the rows of the embedding are read from the packed head
    embedding_ = embedding.given() ? embedding : head;
    const size_t each = embedding_.row_bytes();
    embedding_memory_ = Memory(size_t(embedding_.rows) * each, false);
    RowReader rows(embedding_);
    for (int64_t r = 0; r < embedding_.rows; r++) std::memcpy(embedding_memory_.as<uint8_t>() + size_t(r) * each, rows.row(r), each);
    embedding_.data = embedding_memory_.as<void>();
  }
  if (weight_bytes() > CACHED) prefetch_further();
}

// Prefetches further ahead where the weights come from memory, and not from a cache that all cores share.
void Model::prefetch_further() {
  for (auto& it : layers_) it.qkv.ahead = it.output.ahead = it.gate_up.ahead = it.down.ahead = FAR;
  head_.ahead = FAR;
}

void Model::run(const std::vector<Segment>& segments, const Results& results) {
  segments_ = &segments;
  first_rows_.clear();
  outputs_.clear();
  choices_.clear();
  units_.clear();
  rows_ = 0;
  int longest = 0, widest = 0;
  for (size_t s = 0; s < segments.size(); s++) {
    const Segment& it = segments[s];
    const int end = it.prefix + it.span;
    pages_.prepare(it.slot, end - it.count, end);
    first_rows_.push_back(rows_);
    for (int row = it.count - it.wanted; row < it.count; row++) {
      if (it.drawn && (!results.walks || row == it.count - it.wanted)) choices_.push_back({&it, row, int(outputs_.size())});
      outputs_.push_back(rows_ + row);
    }
    for (int head = 0; head < shape_.kv_heads; head++) units_.push_back({int(s), head});
    rows_ += it.count;
    longest = std::max(longest, end);
    widest = std::max(widest, it.span);
  }
  for (auto& next : next_) next.store(0, std::memory_order_relaxed);
  const size_t rows = size_t(rows_);
  hidden_ = hidden_memory_.of<float>(rows * wide_);
  qkv_ = qkv_memory_.of<float>(rows * qkv_wide_);
  attended_ = attended_memory_.of<float>(rows * attended_wide_);
  active_ = active_memory_.of<float>(rows * ffn_wide_);
  const size_t logits = outputs_.size() * head_tokens();
  if (exchange_ || !head_ids_.empty()) part_ = part_memory_.of<float>(exchange_ ? std::max(rows * shape_.width, logits) : logits);
  group(segments);
  const size_t inputs = std::max({wide_, attended_wide_, ffn_wide_, ranks_wide_});
  const size_t tile_bytes = rows * inputs * 4 + rows * 4;
  if (rows_ > APART) shared_tile_.of<uint8_t>(tile_bytes);
  for (auto& worker : workers_) {
    if (rows_ <= APART) worker.tile.of<uint8_t>(tile_bytes);
    const size_t queries = kernels_.most_queries;
    worker.attention.of<float>(queries * (size_t(longest) + 64 + shape_.dim));
    worker.more.resize(queries * size_t(widest));
  }
  pool_.run([&](int thread) { compute(thread, results); });
  if (lost_) std::rethrow_exception(lost_);
}

// Groups the rows by their adapters, and makes room for what these add.
void Model::group(const std::vector<Segment>& segments) {
  adapted_.clear();
  last_adapted_.clear();
  ranks_wide_ = added_wide_ = 0;
  int output = 0;
  for (size_t s = 0; s < segments.size(); s++) {
    const Segment& it = segments[s];
    const int outputs = output;
    output += it.wanted;
    if (!it.adapter) continue;
    const auto same = [&](const Adapted& other) { return other.adapter == it.adapter; };
    auto found = std::find_if(adapted_.begin(), adapted_.end(), same);
    if (found == adapted_.end()) {
      adapted_.push_back({it.adapter, 0, {}});
      last_adapted_.push_back({it.adapter, 0, {}});
      found = adapted_.end() - 1;
    }
    auto& last = last_adapted_[found - adapted_.begin()];
    for (int row = 0; row < it.count; row++) found->rows.push_back(first_rows_[s] + row);
    for (int row = 0; row < it.wanted; row++) last.rows.push_back(outputs + row);
  }
  size_t rows = 0;
  for (size_t i = 0; i < adapted_.size(); i++) {
    adapted_[i].first = last_adapted_[i].first = int(rows);
    rows += adapted_[i].rows.size();
    ranks_wide_ = std::max(ranks_wide_, adapted_[i].adapter->ranks_wide());
    added_wide_ = std::max(added_wide_, adapted_[i].adapter->added_wide());
  }
  if (!rows) return;
  ranks_ = ranks_memory_.of<float>(rows * ranks_wide_);
  added_ = added_memory_.of<float>(rows * added_wide_);
}

void Model::compute(int thread, const Results& results) {
  const bool whole = results.features && wanted_.every && wanted_.layers.empty();
  const size_t parts = std::max<size_t>(1, wanted_.layers.size());
  embed(thread);
  pool_.meet(thread);
  if (!add_up(thread, hidden_, size_t(rows_) * wide_)) return;
  int rows = rows_;
  for (int index = 0; index < shape_.layers; index++) {
    const Layer& layer = layers_[index];
    const bool last = index + 1 == shape_.layers;
    const float* norm = layer.attention_norm.data();
    const float* const* added = adapt(thread, index, Part::qkv, hidden_, wide_, norm, rows, false);
    apply(thread, layer.qkv, hidden_, wide_, norm, rows, {Into::store, qkv_, qkv_wide_, int(qkv_wide_), added});
    pool_.meet(thread);
    attend(thread, index, last && !whole);
    pool_.meet(thread);
    if (last && !whole && outputs_.size() < size_t(rows)) {  // only rows that want logits continue
      if (thread == 0)
        for (size_t i = 0; i < outputs_.size(); i++) {
          std::memmove(hidden_ + i * wide_, hidden_ + outputs_[i] * wide_, wide_ * sizeof(float));
          std::memmove(attended_ + i * attended_wide_, attended_ + outputs_[i] * attended_wide_, attended_wide_ * sizeof(float));
        }
      pool_.meet(thread);
      rows = int(outputs_.size());
      if (!rows) break;
    }
    const bool fewer = last && !whole;
    if (!project(thread, index, Part::output, attended_, attended_wide_, rows, fewer)) return;
    norm = layer.ffn_norm.data();
    const int gates = int(up_to(shape_.ffn, LANES));
    added = adapt(thread, index, Part::gate_up, hidden_, wide_, norm, rows, fewer);
    apply(thread, layer.gate_up, hidden_, wide_, norm, rows, {Into::gate, active_, ffn_wide_, int(ffn_wide_), added, gates});
    pool_.meet(thread);
    if (!project(thread, index, Part::down, active_, ffn_wide_, rows, fewer)) return;
    if (!results.features) continue;
    for (size_t part = 0; part < wanted_.layers.size(); part++) {
      if (wanted_.layers[part] != index + 1) continue;
      const int count = wanted_.every ? rows_ : int(outputs_.size());
      for (int row = thread; row < count; row += pool_.size())
        std::memcpy(results.features + (row * parts + part) * shape_.width,
                    hidden_ + size_t(wanted_.every ? row : outputs_[row]) * wide_, shape_.width * sizeof(float));
    }
  }
  if (results.features && wanted_.layers.empty()) {
    const Tile one{nullptr, nullptr, 1};
    std::vector<float> normed(wide_);
    for (int row = thread; row < rows; row += pool_.size()) {
      Tile tile = one;
      tile.data = reinterpret_cast<uint8_t*>(normed.data());
      kernels_.pack(Kind::float32, hidden_ + row * wide_, norm_.data(), shape_.width, int(wide_), shape_.eps, tile, 0);
      std::memcpy(results.features + size_t(row) * shape_.width, normed.data(), shape_.width * sizeof(float));
    }
  }
  if (!outputs_.empty() && judge(thread, results, whole ? outputs_.data() : nullptr)) choose(thread, results);
}

// Computes what adapters add to a linear's outputs for rows of x, and returns a pointer for each row; null: for no row.
// `last`: the rows are those that want logits.
const float* const* Model::adapt(int thread, int layer, Part part, const float* x, size_t stride, const float* norm, int rows,
                                 bool last) {
  const auto& groups = last ? last_adapted_ : adapted_;
  const bool apart = rows_ <= APART;
  const auto present = [&](const Adapted& it) { return it.adapter->at(layer, part).shrink.outputs && !it.rows.empty(); };
  if (std::none_of(groups.begin(), groups.end(), present)) return nullptr;
  auto& added = workers_[thread].added;
  added.assign(rows, nullptr);
  int turn = 0;
  for (const Adapted& it : groups) {
    if (!present(it)) continue;
    const Output ranks{Into::store, ranks_ + it.first * ranks_wide_, ranks_wide_, int(ranks_wide_)};
    apply(thread, it.adapter->at(layer, part).shrink, x, stride, norm, int(it.rows.size()), ranks, it.rows.data(), turn++);
    if (!apart) pool_.meet(thread);
  }
  if (apart) pool_.meet(thread);
  for (const Adapted& it : groups) {
    if (!present(it)) continue;
    const LowRank& low = it.adapter->at(layer, part);
    float* out = added_ + it.first * added_wide_;
    for (const auto& one : low.expand) {
      const Output outputs{Into::store, out + one.outputs, added_wide_, one.written};
      apply(thread, one.linear, ranks_ + it.first * ranks_wide_ + one.ranks, ranks_wide_, nullptr, int(it.rows.size()), outputs);
      if (!apart) pool_.meet(thread);
    }
    for (int row : it.rows) {
      if (row % pool_.size() == thread)
        for (const auto& gap : low.gaps) std::fill(out + gap[0], out + gap[1], 0.0f);
      added[row] = out, out += added_wide_;
    }
  }
  pool_.meet(thread);
  return added.data();
}

// Adds the output of a linear over x to the residual stream. Returns false when another rank is lost, which ends the pass.
bool Model::project(int thread, int layer, Part part, const float* x, size_t stride, int rows, bool last) {
  const PackedLinear& linear = part == Part::output ? layers_[layer].output : layers_[layer].down;
  const float* const* added = adapt(thread, layer, part, x, stride, nullptr, rows, last);
  if (!exchange_) {
    apply(thread, linear, x, stride, nullptr, rows, {Into::add, hidden_, wide_, int(wide_), added});
  } else {
    const size_t width = size_t(shape_.width);
    apply(thread, linear, x, stride, nullptr, rows, {Into::store, part_, width, int(width), added});
    pool_.meet(thread);
    if (!add_up(thread, part_, size_t(rows) * width)) return false;
    for (int row = thread; row < rows; row += pool_.size())
      for (size_t i = 0; i < width; i++) hidden_[row * wide_ + i] += part_[row * width + i];
  }
  pool_.meet(thread);
  return true;
}

// Where several ranks share the model, replaces x by the sum of their x. Returns false when another rank is lost.
bool Model::add_up(int thread, float* x, size_t count) {
  return !exchange_ || exchanged(thread, [&] { exchange_->sum(x, count); });
}

// Runs work that needs the other ranks on the first thread. Returns false when a rank is lost.
template <class Work>
bool Model::exchanged(int thread, Work work) {
  if (!thread) {
    try {
      work();
    } catch (const std::exception&) {
      lost_ = std::current_exception();
    }
  }
  pool_.meet(thread);
  return !lost_;
}

// Computes the logits of the outputs. `chosen`: their rows; null: the first ones. Returns false on ranks without logits, and when
// another rank is lost.
bool Model::judge(int thread, const Results& results, const int* chosen) {
  const size_t vocabulary = size_t(shape_.vocabulary), tokens = size_t(head_tokens());
  const int outputs = int(outputs_.size());
  const Output all{Into::store, results.logits, vocabulary, int(vocabulary)}, part{Into::store, part_, tokens, int(tokens)};
  apply(thread, head_, hidden_, wide_, norm_.data(), outputs, exchange_ || !head_ids_.empty() ? part : all, chosen);
  pool_.meet(thread);
  if (!exchange_) {
    for (int output = thread; output < outputs && !head_ids_.empty(); output += pool_.size())
      for (size_t i = 0; i < tokens; i++) results.logits[output * vocabulary + head_ids_[i]] = part_[output * tokens + i];
    return true;
  }
  if (!exchanged(thread, [&] { exchange_->collect(part_, size_t(outputs) * tokens); }) || rank()) return false;
  for (int output = thread; output < outputs; output += pool_.size())
    for (int from = 0; from < ranks(); from++) {
      const size_t first = std::min(from * tokens, vocabulary), count = std::min(tokens, vocabulary - first);
      const float* logits = (from ? exchange_->part(from) : part_) + size_t(output) * tokens;
      std::copy(logits, logits + count, results.logits + output * vocabulary + first);
    }
  return true;  // each thread chooses from the rows that it has just copied, or passes a barrier before
}

void Model::embed(int thread) {
  int row = 0;
  const int columns = shape_.width / ranks();
  for (const auto& segment : *segments_)
    for (int i = 0; i < segment.count; i++, row++) {
      if (row % pool_.size() != thread) continue;
      float *out = hidden_ + row * wide_, *own = out + rank() * columns;
      std::fill(out, out + wide_, 0.0f);
      if (!embedding_.data) {
        head_.get(int(segment.tokens[i]), out);
      } else if (embedding_.columns == columns) {
        embedding_.read(segment.tokens[i], own);
      } else {  // all columns, of which the others are other ranks'
        embedding_.read(segment.tokens[i], out);
        std::fill(out, own, 0.0f);
        std::fill(own + columns, out + shape_.width, 0.0f);
      }
    }
}

int Model::tiles_of(const PackedLinear& linear, int rows) const {
  const int most = kernels_.most_rows[int(linear.kind)];
  return (rows + most - 1) / most;
}

// The tile number `index` of the inputs in `memory`; `first` becomes its first row.
Tile Model::tile_at(const PackedLinear& linear, uint8_t* memory, int rows, int index, int* first) const {
  const int count = tiles_of(linear, rows);
  const int each = rows / count, longer = rows % count;
  *first = index * each + std::min(index, longer);
  const size_t width = size_t(linear.padded);
  float* scales = reinterpret_cast<float*>(memory + size_t(rows) * width * 4);
  return {memory + *first * width * 4, scales + *first, each + (index < longer ? 1 : 0)};
}

// Applies a linear to rows of x. `chosen`: these rows; null: the first ones. `turn`: which thread has the first panels.
void Model::apply(int thread, const PackedLinear& linear, const float* x, size_t stride, const float* norm, int rows,
                  const Output& output, const int* chosen, int turn) {
  const bool apart = rows_ <= APART;
  uint8_t* memory = (apart ? workers_[thread].tile : shared_tile_).of<uint8_t>(0);
  const int tiles = tiles_of(linear, rows);
  const std::vector<int32_t>& order = linear.order;
  std::vector<float>& ordered = workers_[thread].ordered;  // a row, and the norm's weights
  const auto put = [&](const float* from, float* to) {
    for (int32_t input : order) *to++ = from[input];
  };
  if (!order.empty()) {
    ordered.assign(2 * size_t(linear.padded), 0.0f);
    if (norm) put(norm, ordered.data() + linear.padded), norm = ordered.data() + linear.padded;
  }
  int first;
  for (int index = 0; index < tiles; index++) {
    const Tile tile = tile_at(linear, memory, rows, index, &first);
    for (int row = 0; row < tile.rows; row++) {
      if (!apart && (first + row) % pool_.size() != thread) continue;
      const float* source = x + (chosen ? chosen[first + row] : first + row) * stride;
      if (!order.empty()) put(source, ordered.data()), source = ordered.data();
      kernels_.pack(linear.kind, source, norm, linear.inputs, linear.padded, shape_.eps, tile, row);
    }
  }
  if (!apart) pool_.meet(thread);
  const int pairs = (linear.panels + 1) / 2;
  const int share = (thread + turn) % pool_.size();
  const int begin = int(int64_t(pairs) * share / pool_.size()) * 2;
  const int end = std::min(int(int64_t(pairs) * (share + 1) / pool_.size()) * 2, linear.panels);
  const int together = tiles == 1 ? end - begin : PANELS;
  for (int panel = begin; panel < end; panel += together)
    for (int index = 0; index < tiles; index++) {
      const Tile tile = tile_at(linear, memory, rows, index, &first);
      kernels_.linear(linear, tile, panel, std::min(panel + together, end), output, first);
    }
}

void Model::attend(int thread, int layer, bool last) {
  const int total = int(units_.size());
  for (int unit; (unit = next_[layer].fetch_add(1, std::memory_order_relaxed)) < total;) {
    const auto [index, head] = units_[unit];
    const Segment& segment = (*segments_)[index];
    attend_head(workers_[thread], layer, segment, first_rows_[index], head, last ? segment.count - segment.wanted : 0);
  }
}

// Computes one KV head of one segment: writes its keys and values, then the queries from row `least` on attend.
void Model::attend_head(Worker& worker, int layer, const Segment& segment, int first_row, int head, int least) {
  const Layer& it = layers_[layer];
  const int dim = shape_.dim, half = dim / 2, group = shape_.heads / shape_.kv_heads;
  const size_t keys = size_t(shape_.heads) * dim, values = keys + size_t(shape_.kv_heads) * dim;
  const size_t place = pages_.head(layer, head);
  const int written = segment.prefix + segment.span - segment.count;
  const auto norm = [](const std::vector<float>& weight) { return weight.empty() ? nullptr : weight.data(); };
  const float scale = 1.0f / std::sqrt(float(dim));
  const bool coded = pages_.layout().kind == Kind::int8;
  for (int row = 0; row < segment.count; row++) {
    float* own = qkv_ + size_t(first_row + row) * qkv_wide_;
    const size_t angle = size_t(segment.positions[row]) * half;
    float* key = own + keys + size_t(head) * dim;
    kernels_.turn(key, dim, norm(it.key_norm), shape_.eps, &cosines_[angle], &sines_[angle], 1.0f);
    if (coded) kernels_.spread(key, dim);
    pages_.write(kernels_, segment.slot, written + row, place, key, own + values + size_t(head) * dim);
    if (row < least) continue;
    for (int q = head * group; q < (head + 1) * group; q++) {
      kernels_.turn(own + size_t(q) * dim, dim, norm(it.query_norm), shape_.eps, &cosines_[angle], &sines_[angle], scale);
      if (coded) kernels_.spread(own + size_t(q) * dim, dim);
    }
  }

  const int most = kernels_.most_queries, count = (segment.count - least) * group;
  Attention a;
  a.head = pages_.layout(), a.pool = pages_.data(), a.table = pages_.table(segment.slot);
  a.page_bytes = pages_.page_bytes(), a.offset = place;
  a.packed = worker.attention.of<float>(0);
  a.scores = a.packed + size_t(most) * dim;
  a.score_stride = size_t(segment.prefix + segment.span) + 32;
  const float* query[16];
  float* out[16];
  const int32_t* more[16];
  int counts[16];
  a.query = query, a.out = out, a.more = more, a.counts = counts;
  for (int begin = 0; begin < count; begin += most) {
    a.queries = std::min(most, count - begin);
    const int first = least + begin / group, last = least + (begin + a.queries - 1) / group;
    int shared = 0;  // number of columns from the first one on that all of these rows see
    const auto seen = [&] {
      for (int row = first; row <= last; row++)
        if (!segment.sees(row, shared)) return false;
      return true;
    };
    if (segment.mask)
      while (shared < segment.span && seen()) shared++;
    else
      shared = first + 1;
    a.common = segment.prefix + shared;
    a.rows = a.common;
    int32_t* list = worker.more.data();
    for (int row = first; row <= last; row++) {
      int found = 0;
      for (int column = shared; column < (segment.mask ? segment.span : row + 1); column++)
        if (segment.sees(row, column)) list[found++] = segment.prefix + column;
      if (found) a.rows = std::max(a.rows, list[found - 1] + 1);
      for (int q = 0; q < group; q++) {
        const int index = (row - least) * group + q - begin;
        if (index < 0 || index >= a.queries) continue;
        const size_t at = size_t(head * group + q) * dim;
        query[index] = qkv_ + size_t(first_row + row) * qkv_wide_ + at;
        out[index] = attended_ + size_t(first_row + row) * attended_wide_ + at;
        more[index] = list;
        counts[index] = found;
      }
      list += found;
    }
    kernels_.attend(a);
  }
}

void Model::choose(int thread, const Results& results) {
  for (size_t output = size_t(thread); output < outputs_.size(); output += size_t(pool_.size())) {
    float* logits = results.logits + output * shape_.vocabulary;
    std::fill(logits + shape_.unpadded_vocabulary, logits + shape_.vocabulary, -std::numeric_limits<float>::infinity());
    std::fill_n(results.tokens + output * results.best, results.best, -1);
  }
  if (choices_.empty()) return;
  pool_.meet(thread);
  for (size_t index; (index = size_t(next_[shape_.layers].fetch_add(1, std::memory_order_relaxed))) < choices_.size();) {
    Row at = choices_[index];
    while (at.row < at.segment->count) {
      const int64_t token = choose(results, at);
      if (!results.walks || token < 0) break;
      const int next = at.segment->below(at.row, token);
      at.output += next - at.row;
      at.row = next;
    }
  }
}

// Chooses the best tokens after a row. Returns the first, or -1 where there is none.
int64_t Model::choose(const Results& results, const Row& at) const {
  const uint64_t position = uint64_t(at.segment->positions[at.row]) + 1;
  int64_t* tokens = results.tokens + size_t(at.output) * results.best;
  double* scores = results.scores + size_t(at.output) * results.best;
  const Draw draw{mix64(at.segment->base + position * PHI), at.segment->temperature};
  const float* logits = results.logits + size_t(at.output) * shape_.vocabulary;
  Leaders leaders{results.best, tokens, scores};
  lead(kernels_, logits, shape_.unpadded_vocabulary, draw, leaders);
  const int found = leaders.found;
  std::fill(tokens + found, tokens + results.best, -1);
  std::fill(scores + found, scores + results.best, -std::numeric_limits<double>::infinity());
  return tokens[0];
}

}  // namespace outrider
