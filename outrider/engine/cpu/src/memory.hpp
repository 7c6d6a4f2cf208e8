// Large memory: zeroed, aligned, and in pages that the system allocates when they are first written.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>

namespace outrider {

class Memory {
 public:
  Memory() = default;
  // `huge`: use pages of two megabytes where the system has them, for memory that is read from end to end.
  Memory(size_t bytes, bool huge) : bytes_(bytes) {
    if (!bytes) return;
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data_ == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    if (huge && bytes >= (size_t(2) << 20)) madvise(data_, bytes, MADV_HUGEPAGE);
    if (!huge) madvise(data_, bytes, MADV_NOHUGEPAGE);
#endif
  }
  Memory(Memory&& other) noexcept { *this = std::move(other); }
  Memory& operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Memory() {
    if (data_) munmap(data_, bytes_);
  }

  template <class T>
  T* as() const { return static_cast<T*>(data_); }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// Scratch memory that grows and never shrinks; growing loses its content.
class Scratch {
 public:
  template <class T>
  T* of(size_t count) {
    const size_t bytes = count * sizeof(T) + 64;
    if (bytes > memory_.bytes()) memory_ = Memory(bytes + bytes / 4, true);
    return memory_.as<T>();
  }

 private:
  Memory memory_;
};

}  // namespace outrider
