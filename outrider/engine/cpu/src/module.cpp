// The Python module: `Model`, whose passes run without the interpreter's lock, and the available instruction sets.
#include <atomic>
#include <string>
#include <vector>

#include "model.hpp"
#include "python.hpp"
#include "quantize.hpp"

namespace outrider {
namespace {

struct Object {
  PyObject_HEAD
  Model* model;
  std::atomic<bool>* busy;
  ~Object() { delete model, delete busy; }
};

Model& model_of(const Object& self) {
  if (!self.model) throw std::logic_error("the model was not made");
  return *self.model;
}

// Guards a call: one at a time, without the interpreter's lock.
class ExclusiveCall {
 public:
  explicit ExclusiveCall(Object& self) : busy_(*self.busy) {
    if (busy_.exchange(true)) throw std::logic_error("another thread is using this model");
    state_ = PyEval_SaveThread();
  }
  ~ExclusiveCall() {
    PyEval_RestoreThread(state_);
    busy_ = false;
  }

 private:
  std::atomic<bool>& busy_;
  PyThreadState* state_;
};

struct AdapterObject {
  PyObject_HEAD
  Adapter* adapter;
  bool used;  // by a pass, which may be running: it cannot be changed any more
  ~AdapterObject() { delete adapter; }
};

PyObject* adapter_type = nullptr;

struct Names {
  PyObject *slot, *prefix, *tokens, *positions, *mask, *wanted, *adapter;
} names;

WeightType type_named(const std::string& name) {
  if (name == "float32") return {Kind::float32, false};
  if (name == "bfloat16") return {Kind::bfloat16, false};
  if (name == "int8") return {Kind::int8, false};
  if (name == "int4") return {Kind::blocks, false};
  if (name == "stored") return {Kind::blocks, true};
  throw std::invalid_argument("a type is float32, bfloat16, int8, int4 or stored, not " + name);
}

Kind kv_kind_named(const std::string& name) {
  if (name == "float32") return Kind::float32;
  if (name == "bfloat16") return Kind::bfloat16;
  if (name == "int8") return Kind::int8;
  throw std::invalid_argument("a type of KV is float32, bfloat16 or int8, not " + name);
}

Activation activation_named(const std::string& name) {
  if (name == "silu") return Activation::silu;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  throw std::invalid_argument("an activation is silu or gelu_tanh, not " + name);
}

std::vector<int> integers(PyObject* object) {
  const Reference all(PySequence_List(object));
  std::vector<int> numbers;
  for (Py_ssize_t i = 0; i < PyList_Size(all.get()); i++) {
    const long number = PyLong_AsLong(PyList_GetItem(all.get(), i));
    if (number == -1 && PyErr_Occurred()) throw PythonError();
    numbers.push_back(int(number));
  }
  return numbers;
}

// The exchange with other ranks; null without others. Takes this rank's number, the seconds that a rank may be silent, and the
// sockets.
std::unique_ptr<Exchange> exchange_of(int rank, double timeout_s, PyObject* sockets, const Shape& shape) {
  std::vector<int> connected = integers(sockets);
  if (connected.size() < 2) return nullptr;
  if (rank < 0 || size_t(rank) >= connected.size() || connected.size() > 1024 || shape.width % int(connected.size()) || !(timeout_s > 0))
    throw std::invalid_argument("these ranks cannot share the model");
  return std::make_unique<Exchange>(std::move(connected), rank, timeout_s);
}

void make(Object& self, PyObject* args) {
  const char *kind, *head_kind, *kv_kind, *instructions, *activation;
  Shape it;
  double eps, scale, embedding_scale, residual_scale, score_cap, logit_cap;
  int threads, every, rank, whole_norms, even, gated, joined, tiled;
  unsigned long long kv_bytes;
  PyObject *cosines, *sines, *windows, *ropes, *deltas, *layers, *sockets;
  double timeout_s;
  if (!PyArg_ParseTuple(args, "sss(iiiiiiiiiiidK)(dddddippsOO)(iiipi)(iiiiippO)OOisOp(idO)", &kind, &head_kind, &kv_kind, &it.vocabulary, &it.unpadded_vocabulary, &it.width,
                        &it.layers, &it.heads, &it.kv_heads, &it.dim, &it.ffn, &it.positions, &it.slots, &it.rows, &eps, &kv_bytes,
                        &scale, &embedding_scale, &residual_scale, &score_cap, &logit_cap, &it.turned, &whole_norms, &gated, &activation, &windows, &ropes,
                        &it.experts, &it.used, &it.expert_ffn, &even, &it.shared_ffn, &it.delta.key_heads, &it.delta.value_heads, &it.delta.dim, &it.delta.value_dim,
                        &it.delta.taps, &joined, &tiled, &deltas, &cosines, &sines, &threads, &instructions, &layers, &every, &rank, &timeout_s, &sockets))
    throw PythonError();
  it.eps = float(eps);
  it.scale = float(scale), it.embedding_scale = float(embedding_scale), it.residual_scale = float(residual_scale);
  it.score_cap = float(score_cap), it.logit_cap = float(logit_cap), it.whole_norms = whole_norms;
  it.even = even, it.gated = gated, it.delta.joined = joined, it.delta.tiled = tiled;
  it.activation = activation_named(activation);
  it.windows = integers(windows), it.ropes = integers(ropes), it.deltas = integers(deltas);
  it.kv_kind = kv_kind_named(kv_kind);
  it.kv_bytes = size_t(kv_bytes);
  if (self.model) throw std::logic_error("a model is made once");
  for (int size : {it.vocabulary, it.unpadded_vocabulary, it.width, it.layers, it.heads, it.kv_heads, it.dim, it.ffn,
                   it.positions, it.slots, it.rows, threads})
    if (size < 1 || size > 1 << 28) throw std::invalid_argument("a size of the model is out of range");
  if (int64_t(it.heads) * it.dim > 1 << 28 || it.heads % it.kv_heads || it.dim % 2 || it.turned % 2 || it.turned < 2 || it.turned > it.dim || it.unpadded_vocabulary > it.vocabulary || threads > 1024)
    throw std::invalid_argument("the sizes of the model do not fit one another");
  if (it.experts < 0 || it.experts > 1 << 16 || it.used < 0 || it.used > it.experts || it.expert_ffn < 0 || it.expert_ffn > 1 << 28 || it.shared_ffn < 0 || it.shared_ffn > 1 << 28 ||
      !it.experts != !it.used || !it.experts != !it.expert_ffn)
    throw std::invalid_argument("the sizes of the experts do not fit one another");
  const auto negative = [](int number) { return number < 0; };
  if (it.windows.size() != size_t(it.layers) || it.ropes.size() != size_t(it.layers) ||
      std::any_of(it.windows.begin(), it.windows.end(), negative) || std::any_of(it.ropes.begin(), it.ropes.end(), negative))
    throw std::invalid_argument("each layer has a window and a table of angles");
  const DeltaShape& d = it.delta;
  if (it.deltas.size() != size_t(it.layers) || std::any_of(it.deltas.begin(), it.deltas.end(), [](int one) { return one < 0 || one > 1; }))
    throw std::invalid_argument("each layer has a state or attends");
  if (!it.attending()) throw std::invalid_argument("no layer attends");
  if (it.attending() < it.layers && (d.key_heads < 1 || d.key_heads > 1 << 16 || d.value_heads < d.key_heads || d.value_heads > 1 << 16 ||
                                     d.value_heads % d.key_heads || d.dim < 16 || d.dim % 16 || d.dim > 1 << 12 || d.value_dim < 16 ||
                                     d.value_dim % 16 || d.value_dim > 1 << 12 || d.taps < 2 || d.taps > 4))
    throw std::invalid_argument("the sizes of the gated delta rule do not fit one another");
  const Kernels* kernels = kernels_named(instructions);
  if (!kernels) throw std::invalid_argument(std::string("this processor has no ") + instructions);
  const Py_ssize_t angles = Py_ssize_t(it.angles());
  const Buffer c(cosines, false), s(sines, false);
  FeatureRequest wanted;
  wanted.every = every;
  wanted.layers = integers(layers);
  self.busy = new std::atomic<bool>(false);
  self.model = new Model(it, type_named(kind), type_named(head_kind), threads, *kernels, c.as<float>('f', angles),
                         s.as<float>('f', angles), std::move(wanted), exchange_of(rank, timeout_s, sockets, it));
}

Format format_named(const char* name) {
  for (int format = 0; format < FORMATS; format++)
    if (!std::strcmp(name, LAYOUTS[format].name)) return Format(format);
  throw std::invalid_argument(std::string("no format of blocks is named ") + name);
}

// An array without its rows, of a type or a format of blocks that a file names.
Array array_named(const std::string& name) {
  Array it;
  if (name == "f32") it.type = Array::Type::float32;
  else if (name == "f16") it.type = Array::Type::float16;
  else if (name == "bf16") it.type = Array::Type::bfloat16;
  else it.type = Array::Type::blocks, it.format = format_named(name.c_str());
  return it;
}

// A weight as rows of bytes: the name of its type, and the rows in memory or in a file. Columns that are not in the order of the
// inputs have the number of each one's input beside them.
Array in_rows(Buffers& held, PyObject* object, int64_t columns) {
  const char* name;
  PyObject *bytes, *order = nullptr;
  if (!PyArg_ParseTuple(object, "sO|O", &name, &bytes, &order)) throw PythonError();
  Array it = array_named(name);
  it.columns = columns;
  if (it.type == Array::Type::blocks && columns % layout_of(it.format).unit) throw std::invalid_argument("a row is whole blocks");
  long long start, rows, row_bytes;
  if (PyTuple_Check(bytes)) {
    if (!PyArg_ParseTuple(bytes, "iLLLi", &it.file, &start, &rows, &row_bytes, &it.pairs)) throw PythonError();
    if (it.file < 0 || start < 0 || it.pairs < 0 || (it.pairs && rows % (2 * it.pairs))) throw std::invalid_argument("no rows of a file");
    it.start = start, it.rows = rows;
  } else {
    held.push_back(std::make_unique<Buffer>(bytes, false));
    const Buffer& buffer = *held.back();
    if (buffer.dimensions() != 2) throw std::invalid_argument("blocks are rows of bytes");
    it.data = buffer.as<uint8_t>('B', 0), it.rows = buffer.size(0), row_bytes = buffer.size(1);
  }
  if (uint64_t(row_bytes) != it.row_bytes()) throw std::invalid_argument("a weight has another shape than the model");
  if (order) {
    held.push_back(std::make_unique<Buffer>(order, false));
    it.order = held.back()->as<int32_t>('i', it.columns);
    std::vector<bool> seen(size_t(it.columns), false);
    for (int64_t column = 0; column < it.columns; column++) {
      const int32_t input = it.order[column];
      if (input < 0 || input >= it.columns || seen[size_t(input)]) throw std::invalid_argument("an order names each input once");
      seen[size_t(input)] = true;
    }
  }
  return it;
}

// A weight of that shape; without data for None.
Array taken(Buffers& held, PyObject* object, int64_t rows, int64_t columns) {
  if (object == Py_None) return {};
  Array it;
  if (PyTuple_Check(object)) {
    it = in_rows(held, object, columns);
  } else {
    held.push_back(std::make_unique<Buffer>(object, false));
    it = held.back()->array();
  }
  if (it.rows != rows || it.columns != columns) throw std::invalid_argument("a weight has another shape than the model");
  return it;
}

PyObject* set_layer(Object& self, PyObject* args) {
  int index;
  PyObject* weights;
  if (!PyArg_ParseTuple(args, "iO!", &index, &PyDict_Type, &weights)) throw PythonError();
  const Shape& it = model_of(self).shape();
  if (index < 0 || index >= it.layers) throw std::invalid_argument("no such layer");
  const bool mixture = PyDict_GetItemString(weights, "router");
  const bool delta = it.deltas[index];
  const DeltaShape& d = it.delta;
  const int64_t projected = d.channels() + (d.joined ? d.values() : 0), rated = int64_t(d.value_heads) * (d.joined ? 2 : 1);
  const int64_t width = it.width, ffn = mixture ? it.shared_ffn : it.ffn, queries = int64_t(it.heads) * it.query_stride(), keys = int64_t(it.kv_heads) * it.dim;
  LayerArrays a;
  const struct {
    const char* name;
    Array* array;
    int64_t rows, columns;
    bool needed;
  } fields[] = {{"attention_norm", &a.attention_norm, 1, width, false},
                {"query", &a.query, queries, width, !delta},
                {"key", &a.key, keys, width, !delta},
                {"value", &a.value, keys, width, !delta},
                {"inputs", &a.inputs, projected, width, delta},
                {"gates", &a.gates, d.values(), width, delta && !d.joined},
                {"beta", &a.beta, rated, width, delta},
                {"decay", &a.decay, rated, width, delta && !d.joined},
                {"convolution", &a.convolution, d.channels(), d.taps, delta},
                {"decay_rates", &a.decay_rates, 1, d.value_heads, delta},
                {"decay_biases", &a.decay_biases, 1, d.value_heads, delta},
                {"state_norm", &a.state_norm, 1, d.value_dim, delta},
                {"query_bias", &a.query_bias, 1, queries, false},
                {"key_bias", &a.key_bias, 1, keys, false},
                {"value_bias", &a.value_bias, 1, keys, false},
                {"query_norm", &a.query_norm, 1, it.whole_norms ? int64_t(it.heads) * it.dim : it.dim, it.whole_norms},
                {"key_norm", &a.key_norm, 1, it.whole_norms ? keys : it.dim, it.whole_norms},
                {"output", &a.output, width, delta ? d.values() : int64_t(it.heads) * it.dim, true},
                {"output_bias", &a.output_bias, 1, width, false},
                {"ffn_norm", &a.ffn_norm, 1, width, false},
                {"attention_post_norm", &a.attention_post_norm, 1, width, false},
                {"ffn_post_norm", &a.ffn_post_norm, 1, width, false},
                {"router", &a.router, it.experts, width, false},
                {"shared_gate", &a.shared_gate, 1, width, mixture && ffn},
                {"gate", &a.gate, ffn, width, ffn != 0},
                {"up", &a.up, ffn, width, ffn != 0},
                {"gate_bias", &a.gate_bias, 1, ffn, false},
                {"up_bias", &a.up_bias, 1, ffn, false},
                {"down", &a.down, width, ffn, ffn != 0},
                {"down_bias", &a.down_bias, 1, width, false}};
  Buffers held;
  Py_ssize_t known = 0;
  for (const auto& field : fields) {
    PyObject* weight = PyDict_GetItemString(weights, field.name);
    if (weight) known++, *field.array = taken(held, weight, field.rows, field.columns);
    if (field.needed && !field.array->given()) throw std::invalid_argument(std::string("a weight is missing: ") + field.name);
  }
  if (known != PyDict_Size(weights)) throw std::invalid_argument("a layer has no weight of that name");
  if (a.query_bias.given() != a.key_bias.given() || a.query_bias.given() != a.value_bias.given() ||
      a.gate_bias.given() != a.up_bias.given() || a.query_norm.given() != a.key_norm.given())
    throw std::invalid_argument("some biases or norms are missing");
  ExclusiveCall call(self);
  self.model->set_layer(index, a);
  return nullptr;
}

PyObject* set_expert(Object& self, PyObject* args) {
  int index, expert;
  PyObject *gate, *up, *down;
  if (!PyArg_ParseTuple(args, "iiOOO", &index, &expert, &gate, &up, &down)) throw PythonError();
  const Shape& it = model_of(self).shape();
  if (index < 0 || index >= it.layers || expert < 0 || expert >= it.experts) throw std::invalid_argument("no such expert");
  Buffers held;
  const Array g = taken(held, gate, it.expert_ffn, it.width), u = taken(held, up, it.expert_ffn, it.width);
  const Array d = taken(held, down, it.width, it.expert_ffn);
  if (!g.given() || !u.given() || !d.given()) throw std::invalid_argument("a weight is missing");
  ExclusiveCall call(self);
  self.model->set_expert(index, expert, g, u, d);
  return nullptr;
}

PyObject* set_ends(Object& self, PyObject* args) {
  PyObject *embedding, *norm, *head, *head_ids = nullptr;
  if (!PyArg_ParseTuple(args, "OOO|O", &embedding, &norm, &head, &head_ids)) throw PythonError();
  const Shape& it = model_of(self).shape();
  Buffers held;
  const Model& model = model_of(self);
  std::vector<int> ids = head_ids ? integers(head_ids) : std::vector<int>();
  for (size_t i = 0; i < ids.size(); i++)
    if (ids[i] < 0 || ids[i] >= it.vocabulary || (i && ids[i] <= ids[i - 1]))
      throw std::invalid_argument("the ids of a head ascend, and are below the vocabulary");
  if (!ids.empty() && (model.ranks() > 1 || embedding == Py_None))
    throw std::invalid_argument("the head of some ids has an embedding beside it, and one rank");
  // Blocks may not end where a rank's columns do.
  const Array e = taken(held, embedding, it.vocabulary, PyTuple_Check(embedding) ? it.width : it.width / model.ranks());
  const Array n = taken(held, norm, 1, it.width);
  const Array h = taken(held, head, ids.empty() ? model.head_tokens() : int(ids.size()), it.width);
  if (!(e.given() || model.ranks() == 1) || !n.given() || !h.given()) throw std::invalid_argument("a weight is missing");
  ExclusiveCall call(self);
  self.model->set_head_ids(std::move(ids));
  self.model->set_ends(e, n, h);
  return nullptr;
}

void make_adapter(AdapterObject& self, PyObject* args) {
  const char* kind;
  int width, queries, keys, ffn, layers;
  if (!PyArg_ParseTuple(args, "siiiii", &kind, &width, &queries, &keys, &ffn, &layers)) throw PythonError();
  if (self.adapter) throw std::logic_error("an adapter is made once");
  for (int size : {width, queries, keys, ffn, layers})
    if (size < 1 || size > 1 << 28) throw std::invalid_argument("a size of the adapter is out of range");
  const Kind it = type_named(kind).kind;
  if (it != Kind::float32 && it != Kind::bfloat16) throw std::invalid_argument("an adapter is float32 or bfloat16");
  self.adapter = new Adapter(width, queries, keys, ffn, layers, it);
}

PyObject* set_part(AdapterObject& self, PyObject* args) {
  if (!self.adapter) throw std::logic_error("the adapter was not made");
  if (self.used) throw std::logic_error("an adapter that is in use cannot be changed");
  int layer, number;
  PyObject *given[JOINED], *expanding[JOINED];
  if (!PyArg_ParseTuple(args, "iiOOOOOO", &layer, &number, &given[0], &expanding[0], &given[1], &expanding[1], &given[2],
                        &expanding[2]))
    throw PythonError();
  Adapter& it = *self.adapter;
  if (layer < 0 || layer >= it.layers() || number < 0 || number >= PARTS) throw std::invalid_argument("no such linear");
  const Part part = Part(number);
  Buffers held;
  std::array<Array, JOINED> a, b;
  for (int i = 0; i < JOINED; i++) {
    if (given[i] == Py_None && expanding[i] == Py_None) continue;
    if (given[i] == Py_None || expanding[i] == Py_None || !it.outputs(part, i)) throw std::invalid_argument("a weight is missing");
    held.push_back(std::make_unique<Buffer>(given[i], false));
    const int64_t ranks = held.back()->array().rows;
    if (ranks < 1 || ranks > MOST_RANK) throw std::invalid_argument("an adapter has no ranks, or more ranks than 512");
    a[i] = taken(held, given[i], ranks, it.inputs(part));
    b[i] = taken(held, expanding[i], it.outputs(part, i), ranks);
  }
  it.set(layer, part, a, b);
  return nullptr;
}

int64_t integer(PyObject* object, PyObject* name) {
  const Reference value(PyObject_GetAttr(object, name));
  const long long number = PyLong_AsLongLong(value.get());
  if (number == -1 && PyErr_Occurred()) throw PythonError();
  return number;
}

const Buffer& buffer(Buffers& held, PyObject* object, PyObject* name) {
  const Reference value(PyObject_GetAttr(object, name));
  held.push_back(std::make_unique<Buffer>(value.get(), false));
  return *held.back();
}

// Reads a segment, with the conditions of outrider.engine.interface.batch.Segment.check.
Segment read_segment(Buffers& held, PyObject* object, const Model& model) {
  const Shape& shape = model.shape();
  Segment it{};
  const auto demand = [&](bool holds, const char* problem) {
    if (!holds) throw std::invalid_argument("segment: " + std::string(problem));
  };
  const int64_t slot = integer(object, names.slot), prefix = integer(object, names.prefix);
  const Buffer& tokens = buffer(held, object, names.tokens);
  const Buffer& positions = buffer(held, object, names.positions);
  const Py_ssize_t count = tokens.count();
  demand(count >= 1 && count <= shape.rows, "its number of rows");
  demand(slot >= 0 && slot < shape.slots, "its slot");
  demand(tokens.dimensions() == 1 && positions.dimensions() == 1 && positions.count() == count, "its positions");
  int64_t span = count, wanted = count;
  {
    const Reference mask(PyObject_GetAttr(object, names.mask));
    if (mask.get() != Py_None) {
      held.push_back(std::make_unique<Buffer>(mask.get(), false));
      const Buffer& bits = *held.back();
      demand(bits.dimensions() == 2 && bits.size(0) == count && bits.size(1) >= count, "its mask");
      span = bits.size(1);
      it.mask = bits.as<uint8_t>('?', 0);
    }
    const Reference outputs(PyObject_GetAttr(object, names.wanted));
    if (outputs.get() != Py_None) {
      wanted = PyLong_AsLongLong(outputs.get());
      if (wanted == -1 && PyErr_Occurred()) throw PythonError();
    }
  }
  {
    const Reference adapter(PyObject_GetAttr(object, names.adapter));
    if (adapter.get() != Py_None) {
      demand(PyObject_IsInstance(adapter.get(), adapter_type) == 1, "its adapter");
      auto* given = reinterpret_cast<AdapterObject*>(adapter.get());  // the caller's segment holds it during the pass
      demand(given->adapter && given->adapter->fits(shape.width, shape.heads * shape.dim, shape.kv_heads * shape.dim, shape.ffn,
                                                    shape.layers, model.adapter_kind()),
             "an adapter of another model");
      given->used = true;
      it.adapter = given->adapter;
    }
  }
  demand(prefix >= 0 && span <= shape.rows && prefix <= shape.rows - span, "its prefix");
  demand(wanted >= 0 && wanted <= count, "its wanted rows");
  it.slot = int(slot), it.prefix = int(prefix), it.count = int(count), it.span = int(span), it.wanted = int(wanted);
  it.tokens = tokens.as<int64_t>('l', 0);
  it.positions = positions.as<int64_t>('l', 0);
  for (Py_ssize_t i = 0; i < count; i++) {
    demand(it.tokens[i] >= 0 && it.tokens[i] < shape.vocabulary, "a token outside the vocabulary");
    demand(it.positions[i] >= 0 && it.positions[i] < shape.positions, "a position out of range");
    demand(it.sees(int(i), int(span - count + i)), "a row that does not see itself");
  }
  return it;
}

PyObject* run(Object& self, PyObject* args) {
  PyObject *segments, *draws, *logits, *tokens, *scores, *features;
  int best, walks;
  if (!PyArg_ParseTuple(args, "OOipOOOO", &segments, &draws, &best, &walks, &logits, &tokens, &scores, &features))
    throw PythonError();
  const Shape& shape = model_of(self).shape();
  const Reference all(PySequence_List(segments));
  const Py_ssize_t count = PyList_Size(all.get());
  if (!count || count > shape.slots) throw std::invalid_argument("a pass needs at least one segment, and one for a slot");
  Buffers held;
  held.reserve(size_t(count) * 3 + 4);
  std::vector<Segment> pass;
  std::vector<bool> used(size_t(shape.slots));
  Py_ssize_t rows = 0, outputs = 0;
  for (Py_ssize_t i = 0; i < count; i++) {
    pass.push_back(read_segment(held, PyList_GetItem(all.get(), i), model_of(self)));
    if (used[pass.back().slot]) throw std::invalid_argument("two segments of a pass share a slot");
    used[pass.back().slot] = true;
    rows += pass.back().count;
    outputs += pass.back().wanted;
  }
  if (rows > 1 << 20) throw std::invalid_argument("a pass of more than a million rows");
  if (best < 0 || best > shape.vocabulary) throw std::invalid_argument("best must be at most the vocabulary size");
  if (best) {
    const Reference terms(PySequence_List(draws));
    if (PyList_Size(terms.get()) != count) throw std::invalid_argument("a draw for each segment");
    for (Py_ssize_t i = 0; i < count; i++) {
      PyObject* draw = PyList_GetItem(terms.get(), i);
      if (draw == Py_None) continue;
      const Reference base(PySequence_GetItem(draw, 0)), temperature(PySequence_GetItem(draw, 1));
      pass[i].drawn = true;
      pass[i].base = PyLong_AsUnsignedLongLongMask(base.get());
      pass[i].temperature = PyFloat_AsDouble(temperature.get());
      if (PyErr_Occurred()) throw PythonError();
      if (!(pass[i].temperature >= 0)) throw std::invalid_argument("a temperature is not negative");
    }
  }
  Results results{};
  const auto writable = [&](PyObject* it) -> const Buffer& {
    held.push_back(std::make_unique<Buffer>(it, true));
    return *held.back();
  };
  if (!self.model->rank()) results.logits = writable(logits).as<float>('f', outputs * shape.vocabulary);
  results.best = best;
  results.walks = walks != 0;
  if (best) {
    results.tokens = writable(tokens).as<int64_t>('l', outputs * best);
    results.scores = writable(scores).as<double>('d', outputs * best);
  }
  if (features != Py_None)
    results.features = writable(features).as<float>('f', self.model->feature_floats(int(rows), int(outputs)));
  ExclusiveCall call(self);
  self.model->run(pass, results);
  return nullptr;
}

PyObject* move(Object& self, PyObject* args) {
  int slot;
  PyObject *source, *target;
  if (!PyArg_ParseTuple(args, "iOO", &slot, &source, &target)) throw PythonError();
  const Shape& shape = model_of(self).shape();
  const Buffer from(source, false), to(target, false);
  const Py_ssize_t count = from.count();
  const int64_t *s = from.as<int64_t>('l', 0), *t = to.as<int64_t>('l', 0);
  if (slot < 0 || slot >= shape.slots || to.count() != count) throw std::invalid_argument("rows that cannot be moved");
  for (Py_ssize_t i = 0; i < count; i++)
    if (s[i] < 0 || s[i] >= shape.rows || t[i] < 0 || t[i] >= shape.rows) throw std::invalid_argument("a row out of range");
  ExclusiveCall call(self);
  self.model->move(slot, s, t, size_t(count));
  return nullptr;
}

PyObject* copy(Object& self, PyObject* args) {
  int source, target, rows;
  if (!PyArg_ParseTuple(args, "iii", &source, &target, &rows)) throw PythonError();
  const Shape& shape = model_of(self).shape();
  if (source < 0 || source >= shape.slots || target < 0 || target >= shape.slots || rows < 0 || rows > shape.rows)
    throw std::invalid_argument("a slot or a number of rows out of range");
  ExclusiveCall call(self);
  self.model->copy(source, target, rows);
  return nullptr;
}

PyObject* release(Object& self, PyObject* args) {
  int slot, rows;
  if (!PyArg_ParseTuple(args, "ii", &slot, &rows)) throw PythonError();
  const Shape& shape = model_of(self).shape();
  if (slot < 0 || slot >= shape.slots || rows < 0 || rows > shape.rows)
    throw std::invalid_argument("a slot or a number of rows out of range");
  ExclusiveCall call(self);
  self.model->release(slot, rows);
  return nullptr;
}

PyObject* pages(Object& self, PyObject* args) {
  int slot, first, end;
  if (!PyArg_ParseTuple(args, "iii", &slot, &first, &end)) throw PythonError();
  const Shape& shape = model_of(self).shape();
  if (slot < 0 || slot >= shape.slots || first < 0 || first > end || end > shape.rows)
    throw std::invalid_argument("a slot or rows out of range");
  int needed, free;
  {
    ExclusiveCall call(self);
    needed = self.model->pages().needed(slot, first, end);
    free = int(self.model->pages().free());
  }
  return Py_BuildValue("(ii)", needed, free);
}

PyObject* sizes(Object& self, PyObject*) {
  Model& model = model_of(self);
  return Py_BuildValue("{s:s,s:n,s:n,s:n,s:n,s:n,s:d}", "instructions", model.kernels().name, "weight_bytes",
                       Py_ssize_t(model.weight_bytes()), "page_bytes", Py_ssize_t(model.pages().page_bytes()), "kv_bytes",
                       Py_ssize_t(model.kv_bytes()), "state_bytes", Py_ssize_t(model.state_bytes()), "kv_bytes_taken",
                       Py_ssize_t(model.pages().taken() * model.pages().page_bytes()), "exchange_s", model.exchange_seconds());
}

PyObject* quantize(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    const char* name;
    PyObject *values, *blocks;
    if (!PyArg_ParseTuple(args, "sOO", &name, &values, &blocks)) throw PythonError();
    const Format format = format_named(name);
    const Layout& it = layout_of(format);
    if (!can_quantize(format)) throw std::invalid_argument(std::string("weights are not quantized to ") + name);
    const Buffer from(values, false), to(blocks, true);
    if (from.dimensions() != 2 || to.dimensions() != 2 || from.size(0) != to.size(0) || from.size(1) % it.unit ||
        to.size(1) != from.size(1) / it.unit * it.block_bytes)
      throw std::invalid_argument("blocks of that format do not fill the rows");
    const float* in = from.as<float>('f', 0);
    uint8_t* out = to.as<uint8_t>('B', 0);
    const Py_ssize_t count = from.count() / it.unit;
    PyThreadState* state = PyEval_SaveThread();
    for (Py_ssize_t i = 0; i < count; i++) write_block(format, quantized(format, in + i * it.unit), out + i * it.block_bytes);
    PyEval_RestoreThread(state);
    return nothing();
  });
}

PyObject* instruction_sets(PyObject*, PyObject*) {
  return guarded([]() -> PyObject* {
    const Reference list(PyList_New(0));
    for (const Kernels* it : kernels_here()) {
      const Reference text(PyUnicode_FromString(it->name));
      if (PyList_Append(list.get(), text.get())) throw PythonError();
    }
    Py_INCREF(list.get());
    return list.get();
  });
}

PyMethodDef methods[] = {
    {"set_layer", method<Object, set_layer>, METH_VARARGS, "Packs the weights of a layer."},
    {"set_expert", method<Object, set_expert>, METH_VARARGS, "Packs the weights of an expert of a layer that has a router."},
    {"set_ends", method<Object, set_ends>, METH_VARARGS, "Packs the head; keeps embedding and last norm."},
    {"run", method<Object, run>, METH_VARARGS, "One pass."},
    {"move", method<Object, move>, METH_VARARGS, "Moves rows of a slot."},
    {"copy", method<Object, copy>, METH_VARARGS, "Rows of a slot become another's, too."},
    {"release", method<Object, release>, METH_VARARGS, "Rows of a slot from one on are not needed any more."},
    {"pages", method<Object, pages>, METH_VARARGS, "How many pages writing some rows takes at most, and how many are free."},
    {"sizes", method<Object, sizes>, METH_NOARGS, "Instruction set, bytes of weights, of a page and of KV, seconds of exchange with other ranks."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot slots[] = {{Py_tp_init, reinterpret_cast<void*>(made<Object, make>)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(discard<Object>)},
                       {Py_tp_methods, methods},
                       {Py_tp_doc, const_cast<char*>("A model's weights and the KV of its slots.")},
                       {0, nullptr}};

PyType_Spec spec = {"outrider._native.Model", sizeof(Object), 0, Py_TPFLAGS_DEFAULT, slots};

PyMethodDef adapter_methods[] = {{"set", method<AdapterObject, set_part>, METH_VARARGS, "Packs A and B of a linear of a layer."},
                                 {nullptr, nullptr, 0, nullptr}};

PyType_Slot adapter_slots[] = {{Py_tp_init, reinterpret_cast<void*>(made<AdapterObject, make_adapter>)},
                               {Py_tp_dealloc, reinterpret_cast<void*>(discard<AdapterObject>)},
                               {Py_tp_methods, adapter_methods},
                               {Py_tp_doc, const_cast<char*>("A low-rank adapter of a model.")},
                               {0, nullptr}};

PyType_Spec adapter_spec = {"outrider._native.Adapter", sizeof(AdapterObject), 0, Py_TPFLAGS_DEFAULT, adapter_slots};

bool add_type(PyObject* module, const char* name, PyType_Spec* from, PyObject** made = nullptr) {
  PyObject* type = PyType_FromSpec(from);
  if (!type) return false;
  if (made) {
    Py_INCREF(type);
    *made = type;
  }
  if (!PyModule_AddObject(module, name, type)) return true;
  Py_DECREF(type);
  return false;
}

PyMethodDef functions[] = {{"quantize", quantize, METH_VARARGS, "Quantizes rows of float32 to blocks, as a GGUF file has them."},
                           {"instruction_sets", instruction_sets, METH_NOARGS, "Those that this processor has, best first."},
                           {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "outrider._native", "The engine for CPUs.", -1, functions, nullptr, nullptr,
                          nullptr, nullptr};

}  // namespace
}  // namespace outrider

PyMODINIT_FUNC PyInit__native() {
  using namespace outrider;
  PyObject** all[] = {&names.slot, &names.prefix, &names.tokens, &names.positions, &names.mask, &names.wanted, &names.adapter};
  const char* texts[] = {"slot", "prefix", "tokens", "positions", "mask", "wanted", "adapter"};
  for (int i = 0; i < 7; i++)
    if (!(*all[i] = PyUnicode_InternFromString(texts[i]))) return nullptr;
  PyObject* module = PyModule_Create(&definition);
  if (!module) return nullptr;
  if (!add_type(module, "Model", &spec) || !add_type(module, "Adapter", &adapter_spec, &adapter_type) || !add_sampling(module)) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
