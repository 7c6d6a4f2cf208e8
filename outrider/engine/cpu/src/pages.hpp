// Keys and values in pages of 16 rows, which slots may share: a page is copied when one of several writes to it.
//
// In a page each layer's heads follow one another, each with its keys, [dim, 16], and its values, [16, padded dim].
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "kernels.hpp"
#include "memory.hpp"

namespace outrider {

class Pages {
 public:
  Pages() = default;
  Pages(int layers, int heads, int dim, int slots, int rows)
      : heads_(heads), dim_(dim), padded_((dim + 15) / 16 * 16), parts_(layers * heads), slots_(slots),
        each_((rows + LANES - 1) / LANES) {
    const size_t count = size_t(slots) * each_;
    memory_ = Memory(count * page_floats() * sizeof(float), false);
    table_.assign(count, -1);
    users_.assign(count, 0);
    for (size_t page = count; page--;) free_.push_back(int32_t(page));
  }

  int padded_dim() const { return padded_; }
  size_t head_floats() const { return size_t(dim_ + padded_) * LANES; }
  size_t page_floats() const { return parts_ * head_floats(); }
  size_t bytes() const { return memory_.bytes(); }
  size_t taken() const { return users_.size() - free_.size(); }
  const float* data() const { return memory_.as<float>(); }
  const int32_t* table(int slot) const { return table_.data() + size_t(slot) * each_; }
  size_t head(int layer, int head) const { return (size_t(layer) * heads_ + head) * head_floats(); }

  // A slot's rows [0, end) are about to be read, of which those from `first` on are written before.
  void prepare(int slot, int first, int end) {
    for (int index = 0; index * LANES < end; index++) ready(slot, index, (index + 1) * LANES > first);
  }

  // One row's key and value of a head, of a slot that was prepared.
  void write(int slot, int row, size_t head, const float* key, const float* value) {
    float* keys = at(slot, row) + head;
    for (int d = 0; d < dim_; d++) keys[d * LANES + row % LANES] = key[d];
    std::memcpy(keys + dim_ * LANES + (row % LANES) * padded_, value, size_t(dim_) * sizeof(float));
  }

  // Every row is read before one is written.
  void move(int slot, const int64_t* source, const int64_t* target, size_t count) {
    std::vector<float> rows(count * parts_ * 2 * dim_);
    float* out = rows.data();
    for (size_t i = 0; i < count; i++) {
      ready(slot, int(source[i]) / LANES, false);
      const float* page = at(slot, int(source[i]));
      for (int part = 0; part < parts_; part++, page += head_floats()) {
        for (int d = 0; d < dim_; d++) *out++ = page[d * LANES + source[i] % LANES];
        std::memcpy(out, page + dim_ * LANES + (source[i] % LANES) * padded_, dim_ * sizeof(float));
        out += dim_;
      }
    }
    const float* in = rows.data();
    for (size_t i = 0; i < count; i++) {
      ready(slot, int(target[i]) / LANES, true);
      for (int part = 0; part < parts_; part++, in += 2 * dim_)
        write(slot, int(target[i]), part * head_floats(), in, in + dim_);
    }
  }

  // Rows [0, rows) of one slot become another's, too. Whole pages are shared.
  void copy(int source, int target, int rows) {
    if (source == target) return;
    for (int index = 0; index < rows / LANES; index++) {
      int32_t& page = entry(target, index);
      const int32_t shared = entry(source, index);
      if (page == shared) continue;
      if (page >= 0) let_go(page);
      page = shared;
      if (shared >= 0) users_[shared]++;
    }
    const int left = rows % LANES, first = rows - left;
    if (!left || entry(source, first / LANES) < 0) return;
    ready(target, first / LANES, true);
    const float* from = at(source, first);
    float* to = at(target, first);
    for (int part = 0; part < parts_; part++, from += head_floats(), to += head_floats()) {
      for (int d = 0; d < dim_; d++) std::memcpy(to + d * LANES, from + d * LANES, left * sizeof(float));
      std::memcpy(to + dim_ * LANES, from + dim_ * LANES, size_t(left) * padded_ * sizeof(float));
    }
  }

 private:
  int32_t& entry(int slot, int index) { return table_[size_t(slot) * each_ + index]; }
  float* at(int slot, int row) { return memory_.as<float>() + size_t(entry(slot, row / LANES)) * page_floats(); }

  // Page `index` of a slot is there, and its own where it is to be written.
  void ready(int slot, int index, bool written) {
    int32_t& page = entry(slot, index);
    if (page < 0)
      page = take();
    else if (written && users_[page] > 1)
      page = separate(page);
  }

  int32_t take() {
    // There are as many pages as entries of the table, so that one is free whenever an entry has none of its own.
    if (free_.empty()) throw std::logic_error("no free page");
    const int32_t page = free_.back();
    free_.pop_back();
    users_[page] = 1;
    return page;
  }

  void let_go(int32_t page) {
    if (--users_[page] == 0) free_.push_back(page);
  }

  int32_t separate(int32_t page) {
    const int32_t own = take();
    std::memcpy(memory_.as<float>() + own * page_floats(), memory_.as<float>() + page * page_floats(),
                page_floats() * sizeof(float));
    let_go(page);
    return own;
  }

  int heads_ = 0, dim_ = 0, padded_ = 0, parts_ = 0, slots_ = 0, each_ = 0;
  Memory memory_;
  std::vector<int32_t> table_;  // [slots, each]: -1: none yet
  std::vector<int32_t> users_;  // of each page
  std::vector<int32_t> free_;
};

}  // namespace outrider
