// Shared by the types of the module: buffers of the caller, references, and the conversion of errors to Python's.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "exchange.hpp"
#include "linear.hpp"

namespace outrider {

// Thrown where Python has already raised an exception.
struct PythonError {};

// A buffer of the caller, held for the lifetime of this object.
class Buffer {
 public:
  Buffer(PyObject* object, bool writable) {
    const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, &view_, flags)) throw PythonError();
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { PyBuffer_Release(&view_); }

  char format() const {
    const char* format = view_.format ? view_.format : "B";
    while (*format == '<' || *format == '=' || *format == '@') format++;
    return *format == 'q' && sizeof(long) == 8 ? 'l' : *format;
  }
  Py_ssize_t count() const { return view_.len / view_.itemsize; }
  int dimensions() const { return view_.ndim; }
  Py_ssize_t size(int dimension) const { return view_.shape[dimension]; }

  template <class T>
  T* as(char format, Py_ssize_t count) const {
    if (this->format() != format || this->count() < count)
      throw std::invalid_argument(std::string("a buffer of ") + std::to_string(count) + " items of type '" + format + "' is needed");
    return static_cast<T*>(view_.buf);
  }
  Array array() const {
    Array it;
    switch (format()) {
      case 'f': it.type = Array::Type::float32; break;
      case 'e': it.type = Array::Type::float16; break;
      case 'H': it.type = Array::Type::bfloat16; break;
      default: throw std::invalid_argument("weights are float32, float16 or the bits of bfloat16 as uint16");
    }
    if (dimensions() < 1 || dimensions() > 2) throw std::invalid_argument("a weight is a matrix or a vector");
    it.data = view_.buf;
    it.rows = dimensions() == 2 ? size(0) : 1;
    it.columns = size(dimensions() - 1);
    return it;
  }

 private:
  Py_buffer view_;
};

using Buffers = std::vector<std::unique_ptr<Buffer>>;

class Reference {
 public:
  explicit Reference(PyObject* object) : object_(object) {
    if (!object) throw PythonError();
  }
  Reference(const Reference&) = delete;
  ~Reference() { Py_DECREF(object_); }
  PyObject* get() const { return object_; }

 private:
  PyObject* object_;
};

template <class Work>
PyObject* guarded(Work work) {
  try {
    return work();
  } catch (const PythonError&) {
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
  } catch (const RankGone& error) {
    PyErr_SetString(PyExc_ConnectionError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

inline PyObject* nothing() {
  Py_INCREF(Py_None);
  return Py_None;
}

// A method of a type. `work` may throw, and returns null for None.
template <class T, PyObject* (*work)(T&, PyObject*)>
PyObject* method(PyObject* self, PyObject* args) {
  PyObject* result = guarded([&] { return work(*reinterpret_cast<T*>(self), args); });
  return result || PyErr_Occurred() ? result : nothing();
}

// A type's __init__. `work` may throw.
template <class T, void (*work)(T&, PyObject*)>
int made(PyObject* self, PyObject* args, PyObject*) {
  guarded([&]() -> PyObject* {
    work(*reinterpret_cast<T*>(self), args);
    return nullptr;
  });
  return PyErr_Occurred() ? -1 : 0;
}

template <class T>
void discard(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  reinterpret_cast<T*>(object)->~T();
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

// Adds the type `Sampler` and the function `logprobs`.
bool add_sampling(PyObject* module);

}  // namespace outrider
