// The Python type `Sampler`, and `logprobs`.
#include <algorithm>
#include <cmath>
#include <limits>

#include "python.hpp"
#include "sampler.hpp"

namespace outrider {
namespace {

struct Object {
  PyObject_HEAD
  Sampler* sampler;
  ~Object() { delete sampler; }
};

std::vector<int32_t> ids_of(PyObject* object, int vocabulary) {
  const Buffer buffer(object, false);
  const int64_t* ids = buffer.as<int64_t>('l', 0);
  std::vector<int32_t> found;
  for (Py_ssize_t i = 0; i < buffer.count(); i++) {
    if (ids[i] < 0 || ids[i] >= vocabulary || (i && ids[i] <= ids[i - 1]))
      throw std::invalid_argument("ids ascend, and are below the vocabulary");
    found.push_back(int32_t(ids[i]));
  }
  return found;
}

Sampler& sampler_of(const Object& self) {
  if (!self.sampler) throw std::logic_error("the sampler was not made");
  return *self.sampler;
}

void make(Object& self, PyObject* args) {
  SamplingTerms it;
  unsigned long long base;
  long long top_k, first_stop;
  int restricted;
  PyObject *biased, *bias, *banned, *allowed, *stops;
  if (!PyArg_ParseTuple(args, "iKdLdd(ddd)OOOOpOL", &it.vocabulary, &base, &it.temperature, &top_k, &it.top_p, &it.min_p,
                        &it.repetition, &it.presence, &it.frequency, &biased, &bias, &banned, &allowed, &restricted,
                        &stops, &first_stop))
    throw PythonError();
  if (self.sampler) throw std::logic_error("a sampler is made once");
  if (it.vocabulary < 1 || !(it.temperature >= 0.0) || top_k < 0 || !(it.top_p > 0.0) || !(it.min_p >= 0.0))
    throw std::invalid_argument("terms out of range");
  it.base = base, it.top_k = top_k < it.vocabulary ? top_k : 0, it.first_stop = first_stop, it.restricted = restricted != 0;
  const Buffer by(bias, false);
  const std::vector<int32_t> ids = ids_of(biased, it.vocabulary);
  const double* values = by.as<double>('d', Py_ssize_t(ids.size()));
  for (size_t i = 0; i < ids.size(); i++) it.bias.emplace_back(ids[i], values[i]);
  it.banned = ids_of(banned, it.vocabulary);
  it.allowed = ids_of(allowed, it.vocabulary);
  it.stops = ids_of(stops, it.vocabulary);
  self.sampler = new Sampler(std::move(it), *kernels_here().front());
}

const int64_t* tokens_of(const Buffer& buffer) {
  const int64_t* tokens = buffer.as<int64_t>('l', 0);
  for (Py_ssize_t i = 0; i < buffer.count(); i++)
    if (tokens[i] < 0) throw std::invalid_argument("a token is not negative");
  return tokens;
}

PyObject* extend(Object& self, PyObject* args) {
  PyObject* tokens;
  int answer;
  if (!PyArg_ParseTuple(args, "Op", &tokens, &answer)) throw PythonError();
  const Buffer buffer(tokens, false);
  sampler_of(self).extend(tokens_of(buffer), size_t(buffer.count()), answer != 0);
  return nullptr;
}

PyObject* lead(Object& self, PyObject* args) {
  PyObject *logits, *path, *tokens, *scores;
  int noised;
  if (!PyArg_ParseTuple(args, "OOpOO", &logits, &path, &noised, &tokens, &scores)) throw PythonError();
  Sampler& sampler = sampler_of(self);
  const Buffer row(logits, false), above(path, false), best(tokens, true), values(scores, true);
  const Py_ssize_t count = best.count();
  if (count < 1 || count > sampler.vocabulary()) throw std::invalid_argument("best must be between 1 and the vocabulary size");
  const int found = sampler.lead(row.as<float>('f', sampler.vocabulary()), tokens_of(above), size_t(above.count()),
                                 noised != 0, int(count), best.as<int64_t>('l', count), values.as<double>('d', count));
  return PyLong_FromLong(found);
}

PyObject* logprobs(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    PyObject *logits, *tokens, *scores;
    if (!PyArg_ParseTuple(args, "OOO", &logits, &tokens, &scores)) throw PythonError();
    const Buffer row(logits, false), best(tokens, true), values(scores, true);
    const int size = int(row.count()), count = int(best.count());
    const float* x = row.as<float>('f', size);
    if (size < 1 || count > size) throw std::invalid_argument("best must be at most the vocabulary size");
    const Kernels& kernels = *kernels_here().front();
    Leaders leaders{count, best.as<int64_t>('l', count), values.as<double>('d', count)};
    if (count) lead(kernels, x, size, {0, 0.0}, leaders);
    const float top = leaders.found ? float(leaders.scores[0]) : kernels.most(x, size);
    return PyFloat_FromDouble(double(top) + std::log(kernels.mass(x, size, top, 1.0f, std::numeric_limits<float>::infinity())));
  });
}

PyMethodDef methods[] = {{"extend", method<Object, extend>, METH_VARARGS, "Tokens were committed."},
                         {"lead", method<Object, lead>, METH_VARARGS, "The best tokens after a row; how many there are, or -1."},
                         {nullptr, nullptr, 0, nullptr}};

PyType_Slot slots[] = {{Py_tp_init, reinterpret_cast<void*>(made<Object, make>)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(discard<Object>)},
                       {Py_tp_methods, methods},
                       {Py_tp_doc, const_cast<char*>("From logits to tokens, for one generation.")},
                       {0, nullptr}};

PyType_Spec spec = {"outrider._native.Sampler", sizeof(Object), 0, Py_TPFLAGS_DEFAULT, slots};

PyMethodDef functions[] = {{"logprobs", logprobs, METH_VARARGS, "The logarithm of all weights' sum; the best tokens."},
                           {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool add_sampling(PyObject* module) {
  PyObject* type = PyType_FromSpec(&spec);
  if (!type || PyModule_AddObject(module, "Sampler", type)) {
    Py_XDECREF(type);
    return false;
  }
  return PyModule_AddFunctions(module, functions) == 0;
}

}  // namespace outrider
