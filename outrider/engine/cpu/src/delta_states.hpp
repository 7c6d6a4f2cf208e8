// What slots keep for layers of the gated delta rule: states at the beginnings of blocks of 16 tokens, and of each row behind the
// last ones what the rows after it need. See kernels/delta.inc.
//
// A slot keeps the state before the block that its text is in, and the one before that, so that a text may lose its last tokens.
// Slots share states.
#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/kernels.hpp"
#include "memory.hpp"

namespace outrider {

struct DeltaShape {
  int key_heads = 0, value_heads = 0, dim = 0, value_dim = 0;  // 0 heads: no layer has a state
  int taps = 0;          // tokens that the convolution sees
  bool joined = false;   // one projection has query, key, values and gates of each key head side by side, the other beta and decay
  bool tiled = false;    // value heads of one key head are `key_heads` apart; else they are neighbours

  // The number of a key head's value head.
  int value_head(int head, int which) const { return tiled ? which * key_heads + head : head * group() + which; }
  int group() const { return key_heads ? value_heads / key_heads : 0; }
  int keys() const { return key_heads * dim; }
  int values() const { return value_heads * value_dim; }
  int channels() const { return 2 * keys() + values(); }
  size_t state_floats() const { return size_t(value_heads) * dim * value_dim; }
  size_t tail_floats() const { return size_t(std::max(0, taps - 1)) * channels(); }
  size_t row_floats() const { return size_t(channels()) + keys() + values() + value_heads; }
};

// The rows that a pass adds to a slot, and what it has before them.
struct DeltaPlan {
  int slot = 0, begin = 0, end = 0;  // rows before the state; rows after the pass
  int earlier = 0, blocks = 0, settled = -1;  // see `Delta`
  bool chain = false, keeps = true;  // whether all rows are kept
  int state = -1, made = -1;  // states: what it begins from, and what it makes; -1: none
  std::vector<DeltaRow> rows;
  std::vector<DeltaBase> bases;
  std::vector<int> paths;
  std::vector<float*> places;  // of each local row; null: it is not kept
};

class DeltaStates {
 public:
  static constexpr int BLOCK_ROWS = 16;
  static constexpr int STEP = 64;  // rows up to which a pass keeps all of them
  static constexpr size_t KEPT = 2;  // states of a slot

  DeltaStates(const DeltaShape& shape, int layers, int slots) : shape_(shape), layers_(layers), slots_(slots) {}

  size_t state_bytes() const { return (shape_.state_floats() + shape_.tail_floats()) * layers_ * sizeof(float); }
  size_t page_bytes() const { return shape_.row_floats() * layers_ * BLOCK_ROWS * sizeof(float); }
  // Those of the states that all slots keep.
  size_t bytes() const { return slots_.size() * KEPT * state_bytes(); }

  // `positions`, `sees`: of the new rows. `wanted`: rows of which logits are wanted; where it is one at most, the rows of a chain are text.
  template <class Sees>
  DeltaPlan prepare(int slot, int prefix, int count, int span, int wanted, bool chain, const int64_t* positions, Sees sees) {
    const auto demand = [](bool holds, const char* problem) {
      if (!holds) throw std::invalid_argument(std::string("segment: ") + problem);
    };
    Slot& it = slots_.at(slot);
    while (!it.states.empty() && states_[it.states.back()].rows > prefix) let_go(it.states.back()), it.states.pop_back();
    DeltaPlan plan;
    plan.slot = slot, plan.chain = chain;
    plan.state = it.states.empty() ? -1 : it.states.back();
    plan.begin = plan.state < 0 ? 0 : states_[plan.state].rows;
    plan.earlier = prefix + span - count - plan.begin;
    const int committed = prefix - plan.begin;
    demand(!committed || (plan.begin >= it.from && prefix <= it.end), "the text before it is not kept any more");
    plan.blocks = committed / BLOCK_ROWS;
    plan.end = prefix + span;
    if (plan.begin < it.from) it.from = it.end = plan.begin;
    const int text = !chain ? committed : plan.earlier + (wanted <= 1 ? count : 1);
    if (text / BLOCK_ROWS) plan.settled = text / BLOCK_ROWS * BLOCK_ROWS;
    map_paths(plan, committed, count, span, positions, sees, demand);
    const bool all_rows = !chain || wanted > 1 || count <= STEP;
    if (plan.settled > 0) {
      plan.made = take_state();
      states_[plan.made].rows = plan.begin + plan.settled;
      plan.keeps = all_rows;
    }
    plan.places.resize(size_t(plan.earlier + count), nullptr);
    for (int local = 0; local < plan.earlier; local++) plan.places[local] = place(slot, plan.begin + local, false);
    for (int local = all_rows ? plan.earlier : std::max(plan.earlier, plan.settled); local < plan.earlier + count; local++)
      plan.places[local] = place(slot, plan.begin + local, true);
    for (int local : plan.paths) demand(local >= plan.earlier || plan.places[local], "a row before it was not computed");
    return plan;
  }

  // Drops what a pass would have made.
  void discard(const DeltaPlan& plan) {
    if (plan.made >= 0) let_go(plan.made);
  }

  // Keeps what a pass has made.
  void finish(const DeltaPlan& plan) {
    Slot& it = slots_.at(plan.slot);
    it.end = plan.end;
    if (plan.made < 0) return;
    it.states.push_back(plan.made);
    it.from = plan.keeps ? std::max(it.from, plan.begin) : states_[plan.made].rows;
    while (it.states.size() > KEPT) let_go(it.states.front()), it.states.erase(it.states.begin());
    for (int page = 0; page < it.from / BLOCK_ROWS && page < int(it.pages.size()); page++) free_page(it.pages[page]);
  }

  float* state(int index) const { return states_[index].memory.as<float>(); }  // [layers, key heads]: each the states of its value heads
  float* tail(int index) const { return state(index) + shape_.state_floats() * layers_; }

  void move(int slot, const int64_t* source, const int64_t* target, size_t count) {
    const size_t bytes = page_bytes() / BLOCK_ROWS;
    std::vector<char> rows(count * bytes);
    for (size_t i = 0; i < count; i++)
      if (float* from = place(slot, int(source[i]), false)) std::memcpy(rows.data() + i * bytes, from, bytes);
    for (size_t i = 0; i < count; i++)
      if (place(slot, int(source[i]), false)) std::memcpy(place(slot, int(target[i]), true), rows.data() + i * bytes, bytes);
    Slot& it = slots_.at(slot);
    for (size_t i = 0; i < count; i++) it.end = std::max(it.end, int(target[i]) + 1);
  }

  // Throws where the source cannot be gone on with from these rows.
  void copy(int source, int target, int rows) {
    if (source == target) return;
    const Slot& from = slots_.at(source);
    std::vector<int> kept;
    for (int state : from.states)
      if (states_[state].rows <= rows) kept.push_back(state);
    const int begin = kept.empty() ? 0 : states_[kept.back()].rows;
    if (rows > begin && (begin < from.from || rows > from.end)) throw std::invalid_argument("a copy of rows that are not kept any more");
    release(target, 0);
    Slot& to = slots_.at(target);
    to.states = kept;
    for (int state : kept) states_[state].users++;
    to.from = begin, to.end = rows;
    for (int row = begin; row < rows; row++) std::memcpy(place(target, row, true), place(source, row, false), page_bytes() / BLOCK_ROWS);
  }

  void release(int slot, int rows) {
    Slot& it = slots_.at(slot);
    while (!it.states.empty() && states_[it.states.back()].rows > rows) let_go(it.states.back()), it.states.pop_back();
    it.end = std::min(it.end, rows);
    for (int page = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS; page < int(it.pages.size()); page++) free_page(it.pages[page]);
    if (!rows) it.from = 0;
  }

 private:
  struct State {
    Memory memory;
    int rows = 0, users = 0;
  };
  struct Slot {
    std::vector<int> states;  // ascending by their rows
    int from = 0, end = 0;    // rows that are kept
    std::vector<int> pages;   // of 16 rows; -1: none
  };

  template <class Sees, class Demand>
  void map_paths(DeltaPlan& plan, int committed, int count, int span, const int64_t* positions, Sees sees, Demand demand) const {
    std::map<int, int> known;  // the number of each base, by its last row
    std::vector<int> before;   // rows before the row at hand, one for each position
    const auto same = [](int at) { return at; };  // the row at each position of a chain
    if (plan.chain)
      for (int local = 0; local < plan.earlier + count; local++) plan.paths.push_back(local);
    const auto base_of = [&](int block, const auto& row_at, const auto& first_at) {
      int base = -1;
      for (int number = plan.blocks + 1; number <= block; number++) {
        const auto [at, is_new] = known.emplace(row_at(number * BLOCK_ROWS - 1), int(plan.bases.size()));
        if (is_new) plan.bases.push_back({base, first_at((number - 1) * BLOCK_ROWS)});
        base = at->second;
      }
      return base;
    };
    for (int row = 0; row < count; row++) {
      DeltaRow it;
      int place;
      if (plan.chain) {
        place = plan.earlier + row;
        it.base = base_of(place / BLOCK_ROWS, same, same);
        it.first = place / BLOCK_ROWS * BLOCK_ROWS;
      } else {
        before.clear();
        for (int local = 0; local < committed; local++) before.push_back(local);
        for (int column = 0; column < span - count + row; column++)
          if (sees(row, column)) before.push_back(committed + column);
        place = int(before.size());
        const auto put = [&](int first) {  // the path of a block
          const int at = int(plan.paths.size());
          plan.paths.insert(plan.paths.end(), before.begin() + first, before.begin() + std::min(place, first + BLOCK_ROWS));
          return at;
        };
        it.base = base_of(place / BLOCK_ROWS, [&](int at) { return before[at]; }, put);
        it.first = put(place / BLOCK_ROWS * BLOCK_ROWS);
      }
      demand(positions[row] == plan.begin + place, "a row whose position is not that of its path");
      it.count = place % BLOCK_ROWS;
      for (int tap = 0; tap < 3; tap++) {
        const int at = place - 3 + tap;
        it.taps[tap] = at >= 0 ? (plan.chain ? at : before[at]) : plan.begin ? Delta::TAIL - (at + shape_.taps - 1) : Delta::NO_ROW;
      }
      plan.rows.push_back(it);
    }
    if (plan.chain && plan.settled > 0) base_of(plan.settled / BLOCK_ROWS, same, same);
  }

  // The floats of a row; null where it has no page and none is wanted.
  float* place(int slot, int row, bool wanted) {
    Slot& it = slots_.at(slot);
    const int index = row / BLOCK_ROWS;
    if (index >= int(it.pages.size())) {
      if (!wanted) return nullptr;
      it.pages.resize(size_t(index) + 1, -1);
    }
    int& page = it.pages[index];
    if (page < 0) {
      if (!wanted) return nullptr;
      page = take(free_pages_, pages_);
      if (!pages_[page].bytes()) pages_[page] = Memory(page_bytes(), false);
    }
    return pages_[page].as<float>() + size_t(row % BLOCK_ROWS) * shape_.row_floats() * layers_;
  }

  template <class T>
  static int take(std::vector<int>& free, std::vector<T>& all) {
    if (free.empty()) {
      all.emplace_back();
      return int(all.size()) - 1;
    }
    const int found = free.back();
    free.pop_back();
    return found;
  }

  int take_state() {
    const int found = take(free_states_, states_);
    State& it = states_[found];
    if (!it.memory.bytes()) it.memory = Memory(state_bytes(), true);
    it.users = 1;
    return found;
  }

  void let_go(int state) {
    if (!--states_[state].users) free_states_.push_back(state);
  }

  void free_page(int& page) {
    if (page >= 0) free_pages_.push_back(page);
    page = -1;
  }

  DeltaShape shape_;
  size_t layers_ = 0;
  std::vector<Slot> slots_;
  std::vector<State> states_;
  std::vector<int> free_states_;
  std::vector<Memory> pages_;
  std::vector<int> free_pages_;
};

}  // namespace outrider
