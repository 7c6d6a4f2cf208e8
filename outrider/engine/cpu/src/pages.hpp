// Keys and values in pages of 16 rows, which slots may share: a shared page is copied when a slot writes to it. There may be
// fewer pages than the rows of all slots need; the caller of a pass ensures that there are enough for it.
//
// A page holds the heads of all layers one after another, each with its keys, [dim, 16], and its values, [16, padded dim]. In
// bfloat16 two dimensions of a key are neighbours, and so are two rows of values: [dim / 2, 16, 2] and [8, padded dim, 2].
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "kernels/kernels.hpp"
#include "memory.hpp"

namespace outrider {

class Pages {
 public:
  Pages() = default;
  // `halves`: bfloat16, else float32. `bytes`: maximum of all pages together; 0: as many as the rows of all slots need.
  Pages(bool halves, int layers, int heads, int dim, int slots, int rows, size_t bytes)
      : halves_(halves), heads_(heads), dim_(dim), padded_((dim + 15) / 16 * 16), parts_(layers * heads),
        each_((rows + LANES - 1) / LANES) {
    const size_t places = size_t(slots) * each_;
    const size_t count = bytes ? std::min(places, bytes / page_bytes()) : places;
    memory_ = Memory(count * page_bytes(), false);
    table_.assign(places, -1);
    users_.assign(count, 0);
    for (size_t page = count; page--;) free_.push_back(int32_t(page));
  }

  bool halves() const { return halves_; }
  int padded_dim() const { return padded_; }
  size_t head_bytes() const { return size_t(dim_ + padded_) * LANES * (halves_ ? sizeof(uint16_t) : sizeof(float)); }
  size_t page_bytes() const { return parts_ * head_bytes(); }
  size_t bytes() const { return memory_.bytes(); }
  size_t free() const { return free_.size(); }
  size_t taken() const { return users_.size() - free_.size(); }
  const uint8_t* data() const { return memory_.as<uint8_t>(); }
  const int32_t* table(int slot) const { return table_.data() + size_t(slot) * each_; }
  size_t head(int layer, int head) const { return (size_t(layer) * heads_ + head) * head_bytes(); }

  // Prepares a slot for a pass that reads its rows [0, end), and writes those from `first` on before.
  void prepare(int slot, int first, int end) {
    for (int index = 0; index * LANES < end; index++) ready(slot, index, (index + 1) * LANES > first);
  }

  // The maximum of pages that `prepare` allocates, if the rows before `first` have pages.
  int needed(int slot, int first, int end) const {
    int count = 0;
    for (int index = first / LANES; index * LANES < end; index++) {
      const int32_t page = table(slot)[index];
      count += page < 0 || users_[page] > 1;
    }
    return count;
  }

  // Releases a slot's rows from `rows` on.
  void release(int slot, int rows) {
    for (int index = (rows + LANES - 1) / LANES; index < each_; index++) let_go(entry(slot, index));
  }

  // Writes the key and the value of one head and row, in a prepared slot.
  void write(int slot, int row, size_t head, const float* key, const float* value) {
    uint8_t* place = at(slot, row) + head;
    if (halves_) {
      uint16_t* keys = reinterpret_cast<uint16_t*>(place);
      for (int d = 0; d < dim_; d++) keys[key_at(keys, d, row)] = rounded(key[d]);
      for (int d = 0; d < dim_; d++) keys[value_at(keys, d, row)] = rounded(value[d]);
    } else {
      float* keys = reinterpret_cast<float*>(place);
      for (int d = 0; d < dim_; d++) keys[key_at(keys, d, row)] = key[d];
      std::memcpy(keys + value_at(keys, 0, row), value, size_t(dim_) * sizeof(float));
    }
  }

  // Moves rows of a slot. All rows are read before one is written.
  void move(int slot, const int64_t* source, const int64_t* target, size_t count) {
    if (halves_) move_of<uint16_t>(slot, source, target, count);
    else move_of<float>(slot, source, target, count);
  }

  // Makes another slot share rows [0, rows) of one. Allocates no page: the last shared page may hold further rows of the
  // source, which no pass over the other slot sees.
  void copy(int source, int target, int rows) {
    if (source == target) return;
    for (int index = 0; index * LANES < rows; index++) {
      int32_t& page = entry(target, index);
      const int32_t shared = entry(source, index);
      if (page == shared) continue;
      let_go(page);
      page = shared;
      if (shared >= 0) users_[shared]++;
    }
  }

 private:
  int32_t& entry(int slot, int index) { return table_[size_t(slot) * each_ + index]; }
  uint8_t* at(int slot, int row) { return memory_.as<uint8_t>() + size_t(entry(slot, row / LANES)) * page_bytes(); }

  // The index of a row's dimension d in a head's part of a page.
  size_t key_at(const float*, int d, int row) const { return size_t(d) * LANES + row % LANES; }
  size_t value_at(const float*, int d, int row) const { return size_t(dim_) * LANES + row % LANES * padded_ + d; }
  size_t key_at(const uint16_t*, int d, int row) const { return (size_t(d / 2) * LANES + row % LANES) * 2 + d % 2; }
  size_t value_at(const uint16_t*, int d, int row) const {
    return size_t(dim_) * LANES + (row % LANES / 2 * padded_ + d) * 2 + row % 2;
  }

  template <class T>
  void move_of(int slot, const int64_t* source, const int64_t* target, size_t count) {
    std::vector<T> rows(count * parts_ * 2 * dim_);
    T* held = rows.data();
    const auto each = [&](int row, auto work) {  // calls `work` with the place and the copy of each value of a row
      T* head = reinterpret_cast<T*>(at(slot, row));
      for (int part = 0; part < parts_; part++, head += head_bytes() / sizeof(T)) {
        for (int d = 0; d < dim_; d++) work(head[key_at(head, d, row)], *held++);
        for (int d = 0; d < dim_; d++) work(head[value_at(head, d, row)], *held++);
      }
    };
    for (size_t i = 0; i < count; i++) {
      ready(slot, int(source[i]) / LANES, false);
      each(int(source[i]), [](const T& place, T& copy) { copy = place; });
    }
    held = rows.data();
    for (size_t i = 0; i < count; i++) {
      ready(slot, int(target[i]) / LANES, true);
      each(int(target[i]), [](T& place, const T& copy) { place = copy; });
    }
  }

  // Ensures that a slot has page `index`, and shares it with no other slot where it will be written.
  void ready(int slot, int index, bool written) {
    int32_t& page = entry(slot, index);
    if (page < 0)
      page = take();
    else if (written && users_[page] > 1)
      page = separate(page);
  }

  int32_t take() {
    if (free_.empty()) throw std::runtime_error("no page of KV is free");
    const int32_t page = free_.back();
    free_.pop_back();
    users_[page] = 1;
    return page;
  }

  void let_go(int32_t& page) {
    if (page >= 0 && --users_[page] == 0) free_.push_back(page);
    page = -1;
  }

  int32_t separate(int32_t page) {
    const int32_t own = take();
    std::memcpy(memory_.as<uint8_t>() + own * page_bytes(), memory_.as<uint8_t>() + page * page_bytes(), page_bytes());
    let_go(page);
    return own;
  }

  bool halves_ = false;
  int heads_ = 0, dim_ = 0, padded_ = 0, parts_ = 0, each_ = 0;
  Memory memory_;
  std::vector<int32_t> table_;  // [slots, each]; -1: no page
  std::vector<int32_t> users_;  // number of slots that use each page
  std::vector<int32_t> free_;
};

}  // namespace outrider
