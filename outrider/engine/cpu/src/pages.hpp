// Keys and values in pages of 16 rows, which slots may share: a shared page is copied when a slot writes to it. There may be
// fewer pages than the rows of all slots need; the caller of a pass ensures that there are enough for it.
//
// A page holds the heads of all layers one after another, each as `HeadLayout` describes.
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
  // `bytes`: maximum of all pages together; 0: as many as the rows of all slots need.
  Pages(const HeadLayout& layout, int layers, int heads, int slots, int rows, size_t bytes)
      : layout_(layout), heads_(heads), parts_(layers * heads), each_((rows + LANES - 1) / LANES) {
    const size_t places = size_t(slots) * each_;
    const size_t count = bytes ? std::min(places, bytes / page_bytes()) : places;
    memory_ = Memory(count * page_bytes(), false);
    table_.assign(places, -1);
    users_.assign(count, 0);
    for (size_t page = count; page--;) free_.push_back(int32_t(page));
  }

  const HeadLayout& layout() const { return layout_; }
  size_t page_bytes() const { return parts_ * layout_.bytes(); }
  size_t bytes() const { return memory_.bytes(); }
  size_t free() const { return free_.size(); }
  size_t taken() const { return users_.size() - free_.size(); }
  const uint8_t* data() const { return memory_.as<uint8_t>(); }
  const int32_t* table(int slot) const { return table_.data() + size_t(slot) * each_; }
  size_t head(int layer, int head) const { return (size_t(layer) * heads_ + head) * layout_.bytes(); }

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
  void write(const Kernels& kernels, int slot, int row, size_t head, const float* key, const float* value) {
    uint8_t* place = at(slot, row) + head;
    const int dim = layout_.dim;
    if (layout_.kind == Kind::int8) {
      Quad *quads = reinterpret_cast<Quad*>(place), *values = quads + at_value(quads, 0, row);
      const float steps[] = {kernels.code(key, dim, quads[row % LANES].codes, LANES * sizeof(Quad)),
                             kernels.code(value, dim, values->codes, sizeof(Quad))};
      std::memcpy(quads + at_key(quads, layout_.quads(), row), &steps[0], sizeof(Quad));
      std::memcpy(quads + at_value(quads, layout_.padded() / 4, row), &steps[1], sizeof(Quad));
    } else if (layout_.kind == Kind::bfloat16) {
      uint16_t* halves = reinterpret_cast<uint16_t*>(place);
      for (int d = 0; d < dim; d++) halves[at_key(halves, d, row)] = rounded(key[d]);
      for (int d = 0; d < dim; d++) halves[at_value(halves, d, row)] = rounded(value[d]);
    } else {
      float* floats = reinterpret_cast<float*>(place);
      for (int d = 0; d < dim; d++) floats[at_key(floats, d, row)] = key[d];
      std::memcpy(floats + at_value(floats, 0, row), value, size_t(dim) * sizeof(float));
    }
  }

  // Moves rows of a slot. All rows are read before one is written.
  void move(int slot, const int64_t* source, const int64_t* target, size_t count) {
    if (layout_.kind == Kind::int8) move_of<Quad>(slot, source, target, count, layout_.quads() + 1, layout_.padded() / 4 + 1);
    else if (layout_.kind == Kind::bfloat16) move_of<uint16_t>(slot, source, target, count, layout_.dim, layout_.dim);
    else move_of<float>(slot, source, target, count, layout_.dim, layout_.dim);
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

  struct Quad {  // four codes, or behind the last ones of a row their step
    uint8_t codes[4];
  };

  // The index of a row's number d in a head's part of a page.
  size_t at_key(const void*, int d, int row) const { return size_t(d) * LANES + row % LANES; }
  size_t at_key(const uint16_t*, int d, int row) const { return (size_t(d / 2) * LANES + row % LANES) * 2 + d % 2; }
  size_t at_value(const float*, int d, int row) const {
    return layout_.key_bytes() / sizeof(float) + row % LANES * layout_.padded() + d;
  }
  size_t at_value(const uint16_t*, int d, int row) const {
    return layout_.key_bytes() / sizeof(uint16_t) + (row % LANES / 2 * layout_.padded() + d) * 2 + row % 2;
  }
  size_t at_value(const Quad*, int d, int row) const {
    const int wide = layout_.padded() / 4;
    return layout_.key_bytes() / sizeof(Quad) + (d < wide ? row % LANES * wide + d : LANES * wide + row % LANES);
  }

  // `keys`, `values`: how many numbers a row has.
  template <class T>
  void move_of(int slot, const int64_t* source, const int64_t* target, size_t count, int keys, int values) {
    std::vector<T> rows(count * parts_ * (keys + values));
    T* held = rows.data();
    const auto each = [&](int row, auto work) {  // calls `work` with the place and the copy of each number of a row
      T* head = reinterpret_cast<T*>(at(slot, row));
      for (int part = 0; part < parts_; part++, head += layout_.bytes() / sizeof(T)) {
        for (int d = 0; d < keys; d++) work(head[at_key(head, d, row)], *held++);
        for (int d = 0; d < values; d++) work(head[at_value(head, d, row)], *held++);
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

  HeadLayout layout_;
  int heads_ = 0, parts_ = 0, each_ = 0;
  Memory memory_;
  std::vector<int32_t> table_;  // [slots, each]; -1: no page
  std::vector<int32_t> users_;  // number of slots that use each page
  std::vector<int32_t> free_;
};

}  // namespace outrider
