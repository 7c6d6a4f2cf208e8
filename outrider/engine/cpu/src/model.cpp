#include "model.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace outrider {
namespace {

const Array NO_BIAS;
constexpr int APART = 32;  // up to this many rows each thread packs its own copy of the inputs (no barrier)
constexpr size_t CACHED = size_t(24) << 20;  // bytes of weights up to which a cache may hold them
constexpr size_t FAR = 4096;                 // bytes of a panel to prefetch ahead, for weights in memory
constexpr int RUN = 4 * LANES;  // rows that a thread packs at a time: complete panels, because their outputs share cache lines
constexpr int PANELS = 8;  // panels that all tiles of rows use before the next ones, while a core's cache holds them

// Returns one over the root mean square of x.
float norm_factor(const float* x, int width, float eps) {
  float sums[LANES] = {};
  for (int i = 0; i < width; i++) sums[i % LANES] += x[i] * x[i];
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) sums[i] += sums[i + half];
  return 1.0f / std::sqrt(sums[0] / float(width) + eps);
}

// Adds x times a scale to y, behind an RMS norm where there are weights of one.
void add_row(float* y, const float* x, const std::vector<float>& weight, int width, float eps, float scale) {
  const float factor = weight.empty() ? scale : scale * norm_factor(x, width, eps);
  for (int i = 0; i < width; i++) y[i] += x[i] * factor * (weight.empty() ? 1.0f : weight[i]);
}

void normalize(float* x, const std::vector<float>& weight, float eps) {
  const float factor = norm_factor(x, int(weight.size()), eps);
  for (size_t i = 0; i < weight.size(); i++) x[i] *= factor * weight[i];
}

const float* data_of(const std::vector<float>& weight) { return weight.empty() ? nullptr : weight.data(); }

}  // namespace

Model::Model(const Shape& shape, WeightType type, WeightType head_type, int threads, const Kernels& kernels, const float* cosines,
             const float* sines, FeatureRequest wanted, std::unique_ptr<Exchange> exchange)
    : shape_(shape), type_(type), head_type_(head_type), kernels_(kernels), pool_(threads), wanted_(std::move(wanted)), exchange_(std::move(exchange)),
      cosines_(cosines, cosines + shape.angles()), sines_(sines, sines + shape.angles()), layers_(shape.layers),
      pages_({shape.kv_kind, shape.dim}, shape.attending(), shape.kv_heads, shape.slots, shape.rows, shape.kv_bytes),
      states_(shape.delta, shape.layers - shape.attending(), shape.slots),
      next_(shape.layers + 1), workers_(threads) {
  wide_ = up_to(shape.width, INPUTS);
  const DeltaShape& delta = shape.delta;
  qkv_wide_ = up_to(std::max(size_t(shape.heads) * shape.query_stride() + size_t(2 * shape.kv_heads) * shape.dim, size_t(delta.channels() + delta.values())), INPUTS);
  attended_wide_ = up_to(std::max(size_t(shape.heads) * shape.dim, size_t(delta.values())), INPUTS);
  rates_wide_ = up_to(size_t(2 * delta.value_heads), INPUTS);
  ffn_wide_ = up_to(std::max(shape.ffn, shape.shared_ffn), INPUTS);
}

size_t Model::weight_bytes() const {
  size_t bytes = head_.bytes();
  for (const auto& it : layers_) {
    bytes += it.qkv.bytes() + it.rates.bytes() + it.output.bytes() + it.gate_up.bytes() + it.down.bytes() + it.router.bytes();
    for (const auto* experts : {&it.gate_ups, &it.downs})
      for (const auto& one : *experts) bytes += one.bytes();
  }
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
  const int queries = shape_.heads * shape_.query_stride(), keys = shape_.kv_heads * shape_.dim;
  it.attention_norm = norm_of(given.attention_norm, int(wide_));
  it.ffn_norm = norm_of(given.ffn_norm, int(wide_));
  it.query_norm = norm_of(given.query_norm, shape_.whole_norms ? shape_.heads * shape_.dim : shape_.dim);
  it.key_norm = norm_of(given.key_norm, shape_.whole_norms ? keys : shape_.dim);
  it.attention_post_norm = norm_of(given.attention_post_norm, shape_.width);
  it.ffn_post_norm = norm_of(given.ffn_post_norm, shape_.width);
  adds_normed_ |= given.attention_post_norm.given() || given.ffn_post_norm.given();
  if (given.inputs.given()) set_delta(it, given);
  else it.qkv = packed(type_, {{given.query, given.query_bias}, {given.key, given.key_bias, queries}, {given.value, given.value_bias, queries + keys}},
                  queries + 2 * keys);
  it.output = packed(type_, {{given.output, given.output_bias}}, shape_.width);
  if (given.router.given()) {
    std::vector<Piece> routes{{given.router, NO_BIAS}};
    if (shape_.shared_ffn) routes.push_back({given.shared_gate, NO_BIAS, shape_.experts});
    it.router = packed({Kind::float32, false}, routes, shape_.routes());
    it.gate_ups.resize(shape_.experts), it.downs.resize(shape_.experts);
    if (!shape_.shared_ffn) return;
  }
  const int units = given.router.given() ? shape_.shared_ffn : shape_.ffn;
  it.gate_up = packed(type_, {{given.gate, given.gate_bias, 0, 2, 0}, {given.up, given.up_bias, 0, 2, 1}}, int(2 * up_to(units, LANES)));
  it.gate_up.outputs = 2 * units;
  it.down = packed(type_, {{given.down, given.down_bias}}, shape_.width);
}

void Model::set_delta(Layer& layer, const LayerArrays& given) {
  const DeltaShape& it = shape_.delta;
  std::vector<Piece> inputs{{given.inputs, NO_BIAS}}, rates{{given.beta, NO_BIAS}};
  if (given.gates.given()) inputs.push_back({given.gates, NO_BIAS, it.channels()});
  if (given.decay.given()) rates.push_back({given.decay, NO_BIAS, it.value_heads});
  layer.qkv = packed(type_, inputs, it.channels() + it.values());
  layer.rates = packed({Kind::float32, false}, rates, 2 * it.value_heads);
  layer.state_norm = norm_of(given.state_norm, it.value_dim);
  const std::vector<float> factors = norm_of(given.decay_rates, it.value_heads), biases = norm_of(given.decay_biases, it.value_heads);
  std::vector<float> taps(size_t(it.channels()) * it.taps);
  RowReader rows(given.convolution);
  for (int channel = 0; channel < it.channels(); channel++) given.convolution.values(rows.row(channel), &taps[size_t(channel) * it.taps]);
  const int of_head = 2 * it.dim + it.group() * it.value_dim;
  for (int head = 0; head < it.key_heads; head++) {
    std::vector<int> channels;
    const auto add = [&](int first, int count) { for (int i = 0; i < count; i++) channels.push_back(first + i); };
    add(head * it.dim, it.dim), add(it.keys() + head * it.dim, it.dim);
    for (int j = 0; j < it.group(); j++) {
      const int value = it.value_head(head, j);
      add(2 * it.keys() + value * it.value_dim, it.value_dim);
      layer.decay_rates.push_back(factors[value]), layer.decay_biases.push_back(biases[value]);
    }
    for (int tap = 0; tap < it.taps; tap++)
      for (int i = 0; i < of_head; i++) layer.convolution.push_back(taps[size_t(channels[i]) * it.taps + tap]);
  }
}

void Model::set_expert(int index, int expert, const Array& gate, const Array& up, const Array& down) {
  Layer& it = layers_.at(index);
  PackedLinear& gate_up = it.gate_ups.at(expert);
  gate_up = packed(type_, {{gate, Array(), 0, 2, 0}, {up, Array(), 0, 2, 1}}, int(2 * up_to(shape_.expert_ffn, LANES)));
  gate_up.outputs = 2 * shape_.expert_ffn;
  it.downs.at(expert) = packed(type_, {{down, Array()}}, shape_.width);
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
  for (auto& it : layers_) {
    it.qkv.ahead = it.rates.ahead = it.output.ahead = it.gate_up.ahead = it.down.ahead = FAR;
    for (auto* experts : {&it.gate_ups, &it.downs})
      for (auto& one : *experts) one.ahead = FAR;
  }
  head_.ahead = FAR;
}

void Model::run(const std::vector<Segment>& segments, const Results& results) {
  segments_ = &segments;
  first_rows_.clear();
  for (const DeltaPlan& plan : plans_) states_.discard(plan);  // of a pass that has failed
  plans_.clear();
  outputs_.clear();
  choices_.clear();
  units_.clear();
  rows_ = 0;
  int longest = 0, widest = 0;
  for (size_t s = 0; s < segments.size(); s++) {
    const Segment& it = segments[s];
    const int end = it.prefix + it.span;
    if (has_states()) {
      const auto sees = [&](int row, int column) { return it.sees(row, column); };
      plans_.push_back(states_.prepare(it.slot, it.prefix, it.count, it.span, it.wanted, !it.mask, it.positions, sees));
    }
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
  rates_ = rates_memory_.of<float>(rows * rates_wide_);
  const size_t mixed = rows * shape_.used, expert_wide = up_to(shape_.expert_ffn, INPUTS);
  active_ = active_memory_.of<float>(std::max(rows * ffn_wide_, mixed * expert_wide));
  if (shape_.experts) {
    scores_ = scores_memory_.of<float>(rows * shape_.routes());
    mixed_ = mixed_memory_.of<float>(mixed * shape_.width);
    shares_.resize(mixed), expert_rows_.resize(mixed), expert_firsts_.resize(size_t(shape_.experts) + 1);
  }
  const size_t logits = outputs_.size() * head_tokens();
  const bool adds_parts = exchange_ || adds_normed_ || shape_.experts;
  if (adds_parts || !head_ids_.empty()) part_ = part_memory_.of<float>(adds_parts ? std::max(rows * shape_.width, logits) : logits);
  group(segments);
  const size_t inputs = std::max({wide_, attended_wide_, ffn_wide_, ranks_wide_, expert_wide});
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
  for (const DeltaPlan& plan : plans_) states_.finish(plan);
  plans_.clear();
}

void Model::move(int slot, const int64_t* source, const int64_t* target, size_t count) {
  if (has_states()) states_.move(slot, source, target, count);
  pages_.move(slot, source, target, count);
}

void Model::copy(int source, int target, int rows) {
  if (has_states()) states_.copy(source, target, rows);
  pages_.copy(source, target, rows);
}

void Model::release(int slot, int rows) {
  if (has_states()) states_.release(slot, rows);
  pages_.release(slot, rows);
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
    const float* norm = data_of(layer.attention_norm);
    const float* const* added = adapt(thread, index, Part::qkv, hidden_, wide_, norm, rows, false);
    apply(thread, layer.qkv, hidden_, wide_, norm, rows, {Into::store, qkv_, qkv_wide_, int(qkv_wide_), added});
    if (shape_.deltas[index]) apply(thread, layer.rates, hidden_, wide_, norm, rows, {Into::store, rates_, rates_wide_, int(rates_wide_)}, nullptr, 1);
    if (has_states()) clear_padding(thread, attended_, attended_wide_, layer.output.inputs, rows);
    pool_.meet(thread);
    if (shape_.whole_norms) {
      for (int row = thread; row < rows; row += pool_.size()) {
        normalize(qkv_ + row * qkv_wide_, layer.query_norm, shape_.eps);
        normalize(qkv_ + row * qkv_wide_ + size_t(shape_.heads) * shape_.dim, layer.key_norm, shape_.eps);
      }
      pool_.meet(thread);
    }
    if (shape_.deltas[index]) recur(thread, index);
    else attend(thread, index, last && !whole);
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
    if (!layer.gate_ups.empty()) {
      if (!mix(thread, index, rows)) return;
    } else {
      norm = data_of(layer.ffn_norm);
      const int gates = int(up_to(shape_.ffn, LANES));
      if (shape_.experts) clear_padding(thread, active_, ffn_wide_, shape_.ffn, rows);
      added = adapt(thread, index, Part::gate_up, hidden_, wide_, norm, rows, fewer);
      apply(thread, layer.gate_up, hidden_, wide_, norm, rows, {Into::gate, active_, ffn_wide_, int(ffn_wide_), added, gates, shape_.activation});
      pool_.meet(thread);
      if (!project(thread, index, Part::down, active_, ffn_wide_, rows, fewer)) return;
    }
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
  const bool attention = part == Part::output;
  const PackedLinear& linear = attention ? layers_[layer].output : layers_[layer].down;
  const std::vector<float>& norm = attention ? layers_[layer].attention_post_norm : layers_[layer].ffn_post_norm;
  const float* const* added = adapt(thread, layer, part, x, stride, nullptr, rows, last);
  if (!exchange_ && norm.empty()) {
    apply(thread, linear, x, stride, nullptr, rows, {Into::add, hidden_, wide_, int(wide_), added, 0, Activation::silu, shape_.residual_scale});
  } else {
    const size_t width = size_t(shape_.width);
    apply(thread, linear, x, stride, nullptr, rows, {Into::store, part_, width, int(width), added});
    pool_.meet(thread);
    return add_part(thread, norm, rows);
  }
  pool_.meet(thread);
  return true;
}

// Adds the parts of all ranks, behind a norm if there is one, to the residual stream. Returns false when another rank is lost.
bool Model::add_part(int thread, const std::vector<float>& norm, int rows) {
  const size_t width = size_t(shape_.width);
  if (!add_up(thread, part_, size_t(rows) * width)) return false;
  for (int row = thread; row < rows; row += pool_.size())
    add_row(hidden_ + row * wide_, part_ + row * width, norm, shape_.width, shape_.eps, shape_.residual_scale);
  pool_.meet(thread);
  return true;
}

// The feed-forward of a mixture of experts (arXiv 1701.06538): each row goes through those that its router scores highest. Rows of
// one expert are computed together, so that its weights are read once. Returns false when another rank is lost.
bool Model::mix(int thread, int layer, int rows) {
  const Layer& it = layers_[layer];
  const float* norm = data_of(it.ffn_norm);
  const size_t routes = size_t(shape_.routes()), used = size_t(shape_.used), width = size_t(shape_.width);
  apply(thread, it.router, hidden_, wide_, norm, rows, {Into::store, scores_, routes, int(routes)});
  pool_.meet(thread);
  for (int row = thread; row < rows; row += pool_.size()) share(scores_ + row * routes, &shares_[row * used]);
  clear_padding(thread, active_, up_to(shape_.expert_ffn, INPUTS), shape_.expert_ffn, rows * used);
  pool_.meet(thread);
  if (!thread) group_shares(rows);
  pool_.meet(thread);
  const size_t wide = up_to(shape_.expert_ffn, INPUTS);
  const auto each = [&](auto work) {
    for (int expert = 0; expert < shape_.experts; expert++) {
      const int first = expert_firsts_[expert], count = expert_firsts_[expert + 1] - first;
      if (!count) continue;
      work(expert, first, count);
      if (rows_ > APART) pool_.meet(thread);
    }
    pool_.meet(thread);
  };
  each([&](int expert, int first, int count) {
    apply(thread, it.gate_ups[expert], hidden_, wide_, norm, count,
          {Into::gate, active_ + first * wide, wide, int(wide), nullptr, 0, shape_.activation}, &expert_rows_[first], expert);
  });
  each([&](int expert, int first, int count) {
    apply(thread, it.downs[expert], active_ + first * wide, wide, nullptr, count, {Into::store, mixed_ + first * width, width, int(width)},
          nullptr, expert);
  });
  for (int row = thread; row < rows; row += pool_.size()) {
    float* sum = part_ + row * width;
    std::fill(sum, sum + width, 0.0f);
    for (size_t i = 0; i < used; i++) {
      const Share& one = shares_[row * used + i];
      for (size_t column = 0; column < width; column++) sum[column] += one.weight * mixed_[one.place * width + column];
    }
  }
  pool_.meet(thread);
  if (shape_.shared_ffn) {
    clear_padding(thread, active_, ffn_wide_, shape_.shared_ffn, rows);
    const int gates = int(up_to(shape_.shared_ffn, LANES));
    apply(thread, it.gate_up, hidden_, wide_, norm, rows, {Into::gate, active_, ffn_wide_, int(ffn_wide_), nullptr, gates, shape_.activation});
    pool_.meet(thread);
    apply(thread, it.down, active_, ffn_wide_, nullptr, rows, {Into::store, mixed_, width, int(width)});
    pool_.meet(thread);
    for (int row = thread; row < rows; row += pool_.size()) {
      const float gate = 1.0f / (1.0f + std::exp(-scores_[row * routes + shape_.experts]));
      for (size_t column = 0; column < width; column++) part_[row * width + column] += gate * mixed_[row * width + column];
    }
    pool_.meet(thread);
  }
  return add_part(thread, it.ffn_post_norm, rows);
}

// Chooses the experts of a row: those with the highest scores, lower numbers first among equals. Their weights are the shares of
// the softmax over all experts; they add up to 1 if that is wanted.
void Model::share(const float* scores, Share* shares) const {
  const int used = shape_.used;
  int found = 0;
  for (int expert = 0; expert < shape_.experts; expert++) {
    if (found == used && !(scores[expert] > scores[shares[used - 1].expert])) continue;
    int place = found < used ? found++ : used - 1;
    for (; place && scores[expert] > scores[shares[place - 1].expert]; place--) shares[place] = shares[place - 1];
    shares[place].expert = expert;
  }
  const float top = scores[shares[0].expert];
  float total = 0.0f;
  if (shape_.even) {
    for (int i = 0; i < used; i++) total += std::exp(scores[shares[i].expert] - top);
  } else {
    for (int expert = 0; expert < shape_.experts; expert++) total += std::exp(scores[expert] - top);
  }
  for (int i = 0; i < used; i++) shares[i].weight = std::exp(scores[shares[i].expert] - top) / total;
  std::sort(shares, shares + used, [](const Share& one, const Share& other) { return one.expert < other.expert; });
}

// Lists the rows of each expert, and finds the place of each share among them.
void Model::group_shares(int rows) {
  const int count = rows * shape_.used;
  std::fill(expert_firsts_.begin(), expert_firsts_.end(), 0);
  for (int i = 0; i < count; i++) expert_firsts_[shares_[i].expert + 1]++;
  for (int expert = 0; expert < shape_.experts; expert++) expert_firsts_[expert + 1] += expert_firsts_[expert];
  std::vector<int> next(expert_firsts_.begin(), expert_firsts_.end() - 1);
  for (int i = 0; i < count; i++) {
    shares_[i].place = next[shares_[i].expert]++;
    expert_rows_[shares_[i].place] = i / shape_.used;
  }
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
  const auto cap = [&](float* logits, size_t count) {
    if (shape_.logit_cap > 0.0f) kernels_.cap(logits, int(count), shape_.logit_cap);
  };
  if (!exchange_) {
    for (int output = thread; output < outputs; output += pool_.size()) {
      float* logits = head_ids_.empty() ? results.logits + output * vocabulary : part_ + output * tokens;
      cap(logits, tokens);
      for (size_t i = 0; i < head_ids_.size(); i++) results.logits[output * vocabulary + head_ids_[i]] = logits[i];
    }
    return true;
  }
  if (!exchanged(thread, [&] { exchange_->collect(part_, size_t(outputs) * tokens); }) || rank()) return false;
  for (int output = thread; output < outputs; output += pool_.size()) {
    for (int from = 0; from < ranks(); from++) {
      const size_t first = std::min(from * tokens, vocabulary), count = std::min(tokens, vocabulary - first);
      const float* logits = (from ? exchange_->part(from) : part_) + size_t(output) * tokens;
      std::copy(logits, logits + count, results.logits + output * vocabulary + first);
    }
    cap(results.logits + output * vocabulary, vocabulary);
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
      if (shape_.embedding_scale != 1.0f)
        for (int i = 0; i < shape_.width; i++) out[i] *= shape_.embedding_scale;
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

// Sets what lies behind the inputs of a linear in each row to zero: other layers may have more of them.
void Model::clear_padding(int thread, float* x, size_t stride, int inputs, size_t rows) const {
  for (size_t row = size_t(thread); row < rows; row += size_t(pool_.size()))
    std::fill(x + row * stride + inputs, x + row * stride + up_to(size_t(inputs), INPUTS), 0.0f);
}

// Computes a layer with the gated delta rule: each segment's key heads.
void Model::recur(int thread, int layer) {
  const Layer& it = layers_[layer];
  const DeltaShape& shape = shape_.delta;
  const size_t number = size_t(shape_.rank_of(layer)), heads = size_t(shape.key_heads);
  const int keys = shape.keys(), group = shape.group(), wide = shape.value_dim;
  const int total = int(segments_->size()) * shape.key_heads;
  for (int unit; (unit = next_[layer].fetch_add(1, std::memory_order_relaxed)) < total;) {
    const int index = unit / shape.key_heads, head = unit % shape.key_heads;
    const DeltaPlan& plan = plans_[index];
    const size_t first = size_t(first_rows_[index]);
    Delta a;
    a.dim = shape.dim, a.value_dim = wide, a.group = group, a.taps = shape.taps, a.eps = shape_.eps;
    a.convolution = &it.convolution[size_t(head) * shape.taps * a.channels()];
    a.rates = &it.decay_rates[size_t(head) * group], a.rate_bias = &it.decay_biases[size_t(head) * group];
    a.norm = it.state_norm.data();
    a.earlier = plan.earlier, a.rows = int(plan.rows.size()), a.blocks = plan.blocks, a.chain = plan.chain;
    a.row = plan.rows.data(), a.bases = plan.bases.data(), a.states = int(plan.bases.size()), a.paths = plan.paths.data();
    a.inputs = qkv_ + first * qkv_wide_, a.stride = qkv_wide_;
    a.gates = rates_ + first * rates_wide_, a.gates_stride = rates_wide_;
    const int value = shape.value_head(head, 0), each = group > 1 ? shape.value_head(head, 1) - value : 0;
    if (shape.joined) {
      a.query = head * (2 * shape.dim + 2 * group * wide), a.key = a.query + shape.dim;
      a.value = a.key + shape.dim, a.gate = a.value + group * wide;
      a.value_each = a.gate_each = wide;
      a.beta = head * 2 * group, a.decay = a.beta + group, a.beta_each = a.decay_each = 1;
    } else {
      a.query = head * shape.dim, a.key = keys + a.query;
      a.value = 2 * keys + value * wide, a.gate = shape.channels() + value * wide;
      a.value_each = a.gate_each = each * wide;
      a.beta = value, a.decay = shape.value_heads + value, a.beta_each = a.decay_each = each;
    }
    a.out = attended_ + first * attended_wide_ + size_t(value) * wide, a.out_stride = attended_wide_, a.out_each = each * wide;
    a.places = plan.places.data();
    a.offset = (number * heads + head) * (a.channels() + a.key_floats());
    const size_t state = (number * heads + head) * a.state_floats(), tail = (number * heads + head) * (shape.taps - 1) * a.channels();
    a.state = plan.state < 0 ? nullptr : states_.state(plan.state) + state;
    a.tail = plan.state < 0 ? nullptr : states_.tail(plan.state) + tail;
    a.settled = plan.settled;
    a.kept_state = plan.made < 0 ? nullptr : states_.state(plan.made) + state;
    a.kept_tail = plan.made < 0 ? nullptr : states_.tail(plan.made) + tail;
    a.scratch = workers_[thread].delta.of<float>(a.scratch_floats());
    kernels_.delta(a);
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
  const int dim = shape_.dim, half = shape_.turned / 2, group = shape_.heads / shape_.kv_heads;
  const int stride = shape_.query_stride();
  const size_t keys = size_t(shape_.heads) * stride, values = keys + size_t(shape_.kv_heads) * dim;
  const size_t place = pages_.head(shape_.rank_of(layer), head);
  const int written = segment.prefix + segment.span - segment.count;
  const auto norm = [&](const std::vector<float>& weight) { return shape_.whole_norms ? nullptr : data_of(weight); };
  const float* cosines = &cosines_[size_t(shape_.ropes[layer]) * shape_.positions * half];
  const float* sines = &sines_[size_t(shape_.ropes[layer]) * shape_.positions * half];
  const bool coded = pages_.layout().kind == Kind::int8;
  for (int row = 0; row < segment.count; row++) {
    float* own = qkv_ + size_t(first_row + row) * qkv_wide_;
    const size_t angle = size_t(segment.positions[row]) * half;
    float* key = own + keys + size_t(head) * dim;
    kernels_.turn(key, dim, shape_.turned, norm(it.key_norm), shape_.eps, cosines + angle, sines + angle, 1.0f);
    if (coded) kernels_.spread(key, dim);
    pages_.write(kernels_, segment.slot, written + row, place, key, own + values + size_t(head) * dim);
    if (row < least) continue;
    for (int q = head * group; q < (head + 1) * group; q++) {
      kernels_.turn(own + size_t(q) * stride, dim, shape_.turned, norm(it.query_norm), shape_.eps, cosines + angle, sines + angle, shape_.scale);
      if (coded) kernels_.spread(own + size_t(q) * stride, dim);
    }
  }

  const int most = kernels_.most_queries, count = (segment.count - least) * group;
  Attention a;
  a.head = pages_.layout(), a.pool = pages_.data();
  a.page_bytes = pages_.page_bytes(), a.offset = place;
  a.packed = worker.attention.of<float>(0);
  a.scores = a.packed + size_t(most) * dim;
  a.score_stride = size_t(segment.prefix + segment.span) + 32;
  const float* query[16];
  float* out[16];
  const int32_t* more[16];
  int counts[16], hidden[16];
  a.query = query, a.out = out, a.more = more, a.counts = counts, a.hidden = hidden, a.cap = shape_.score_cap;
  // The place on a row's path of the first key that it sees, which is its position, for the keys before the segment as well.
  const auto seen_from = [&](int row) {
    const int window = shape_.windows[layer];
    return window ? std::max<int64_t>(0, segment.positions[row] + 1 - window) : 0;
  };
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
    int64_t skipped = a.common;  // rows that no query sees, in whole pages
    for (int row = first; row <= last; row++) skipped = std::min(skipped, seen_from(row));
    skipped = skipped / LANES * LANES;
    a.table = pages_.table(segment.slot) + skipped / LANES;
    a.common -= int(skipped);
    a.rows = a.common;
    int32_t* list = worker.more.data();
    for (int row = first; row <= last; row++) {
      int found = 0;
      for (int column = shared; column < (segment.mask ? segment.span : row + 1); column++)
        if (segment.sees(row, column)) list[found++] = segment.prefix + column - int(skipped);
      if (found) a.rows = std::max(a.rows, list[found - 1] + 1);
      for (int q = 0; q < group; q++) {
        const int index = (row - least) * group + q - begin;
        if (index < 0 || index >= a.queries) continue;
        query[index] = qkv_ + size_t(first_row + row) * qkv_wide_ + size_t(head * group + q) * stride;
        out[index] = attended_ + size_t(first_row + row) * attended_wide_ + size_t(head * group + q) * dim;
        more[index] = list;
        counts[index] = found;
        hidden[index] = int(seen_from(row) - skipped);
      }
      list += found;
    }
    kernels_.attend(a);
    if (!shape_.gated) continue;
    for (int q = 0; q < a.queries; q++)
      for (int d = 0; d < dim; d++) out[q][d] /= 1.0f + std::exp(-query[q][dim + d]);
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
