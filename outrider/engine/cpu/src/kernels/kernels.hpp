// The table of kernels, which exists once for each instruction set.
//
// Each sum has one order that depends on its own terms alone: a linear sums over its inputs, attention over the keys of a
// path. So the bits of a row depend neither on the rows beside it, nor on tiles or threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "formats.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Between these two, functions are compiled for processors with some features.
#define OUTRIDER_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define OUTRIDER_TARGET(features) OUTRIDER_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define OUTRIDER_TARGET_END OUTRIDER_PRAGMA(clang attribute pop)
#else
#define OUTRIDER_TARGET(features) OUTRIDER_PRAGMA(GCC target(features))
#define OUTRIDER_TARGET_END
#endif

namespace outrider {

constexpr int LANES = 16;       // outputs of a panel, keys of a page
constexpr int BLOCK = 64;       // neighbouring bytes of a row of a tile; inputs are padded to a multiple of 64
constexpr int INPUTS = 64;      // inputs are padded to a multiple of this
constexpr int INT8_ZERO = 128;  // added to int8 inputs where the product needs unsigned ones

enum class Kind { float32, float16, bfloat16, float8, int8, blocks };
constexpr int KINDS = 6;

// A panel of a linear in blocks: outputs of one format.
struct Panel {
  Format format;
  uint8_t* data;  // units of 16 outputs, see formats.hpp
};

// A linear layer, y = x W' + b, packed in panels of 16 outputs. For each step of inputs a panel has 4 bytes of each of its 16
// outputs side by side: one float32, a pair of bfloat16 or four int8; of float16 2 bytes, of float8 (E4M3) one. The panels of a linear
// in blocks may have several formats.
struct Linear {
  Kind kind = Kind::float32;
  int outputs = 0, inputs = 0;  // of the model
  int padded = 0;               // inputs, padded to a multiple of 64
  int panels = 0;               // an even number, but for adapters'
  size_t panel_bytes = 0;
  size_t ahead = 0;  // bytes of a panel that are prefetched from memory before their use; 0: a cache holds the weights
  uint8_t* data = nullptr;
  const Panel* blocks = nullptr;  // of blocks: [panels]
  float* scales = nullptr;   // int8: [panels * 16]; float8: [panels, groups of inputs, 16]
  int group = 0;             // float8: inputs that share a scale
  int32_t* zeros = nullptr;  // int8: [panels * 16], 128 times the sum of an output's codes
  float* bias = nullptr;     // [panels * 16]; null: none
};

// Rows of inputs in the order in which kernels read them: for each 64 bytes of a row, those of all rows of the tile.
struct Tile {
  uint8_t* data;
  float* scales;  // int8: [rows]
  int rows;
};

// A tile for blocks. Inputs are int8 with a scale for each 32.
struct CodedTile {
  uint8_t* codes;   // as those of int8, but signed
  float* scales;    // [padded / 32, rows]
  float* sums;      // [padded / 32, rows] of the codes
  int32_t* minus;   // [padded / 32, rows] the same, below zero
  int32_t* minus16; // [padded / 16, rows] and for 16 inputs each
  int rows;

  CodedTile(const Tile& tile, int padded) : codes(tile.data), rows(tile.rows) {
    const size_t each = size_t(padded) / CHUNK * size_t(rows);
    scales = reinterpret_cast<float*>(codes + size_t(rows) * size_t(padded));
    sums = scales + each;
    minus = reinterpret_cast<int32_t*>(sums + each);
    minus16 = minus + each;
  }
  const uint8_t* at(int chunk, int row) const { return codes + (size_t(chunk / 2) * rows + row) * BLOCK + chunk % 2 * CHUNK; }
};

enum class Into { store, add, gate };
enum class Activation { silu, gelu_tanh };

// The destination of a linear's outputs. `gate`: panels 2 i and 2 i + 1 are a gate and an up projection: activation(gate) * up.
struct Output {
  Into into;
  float* data;
  size_t stride;  // floats from row to row
  int outputs;    // of a row; none beyond them is written
  const float* const* added = nullptr;  // what is added to each row's outputs; null: nothing. `gate`: those of all gates come first
  int ups = 0;                          // `gate`: place of the ups' addends behind those of the gates
  Activation activation = Activation::silu;
  float factor = 1.0f;  // `add`: of what is added
};

// How 16 keys and values of a head lie in a page: in float32, bfloat16 or int8.
//
// The keys come first, [dim, 16], then the values, [16, padded dim]. In bfloat16 two dimensions of a key are neighbours, and so are
// two rows of values: [dim / 2, 16, 2] and [8, padded dim, 2]. In int8 four dimensions of a key are neighbours, [dim / 4, 16, 4], and
// both keys and values end with a float32 for each row, the step of its codes.
struct HeadLayout {
  Kind kind = Kind::float32;
  int dim = 0;

  int padded() const { return (dim + LANES - 1) / LANES * LANES; }
  int quads() const { return (dim + 3) / 4; }  // words of a key in int8
  size_t key_bytes() const {
    if (kind == Kind::int8) return size_t(quads() + 1) * LANES * 4;
    return size_t(dim) * LANES * (kind == Kind::bfloat16 ? 2 : 4);
  }
  size_t value_bytes() const {
    if (kind == Kind::int8) return size_t(padded() + 4) * LANES;
    return size_t(padded()) * LANES * (kind == Kind::bfloat16 ? 2 : 4);
  }
  size_t bytes() const { return key_bytes() + value_bytes(); }
};

// Some queries of one segment over one head's keys and values.
struct Attention {
  int queries;                 // at most `most_queries`
  HeadLayout head;
  const float* const* query;   // [queries] of dim floats each, rotated and scaled
  float* const* out;           // [queries] of dim floats each
  const uint8_t* pool;         // of pages
  const int32_t* table;        // page of each 16 cache rows of the slot
  size_t page_bytes, offset;   // size of a page; offset of this head's keys in it, which its values follow
  int common;                  // cache rows that every query sees, from the first on
  int rows;                    // cache rows up to the last that any query sees
  const int32_t* const* more;  // [queries] the rows from `common` on that each sees, ascending
  const int* counts;           // [queries] the number of these rows
  float cap;                   // bound of the scores, see `Kernels::cap`; 0: none
  const int* hidden;           // [queries] how many of its keys, from the first on, each does not see: they are before its window
  float* packed;               // scratch: [dim * most_queries]
  float* scores;               // scratch: [most_queries * score_stride]
  size_t score_stride;         // at least rows + 32
};

// A row of a segment in a layer with the gated delta rule. Local rows are those behind a slot's state, the segment's own last.
struct DeltaRow {
  int base;          // of the block that the row is in; -1: the text's state
  int first, count;  // the rows of its path in its block, before it: paths[first], ...
  int taps[3];       // the three rows before it; Delta::NO_ROW: there is none; Delta::TAIL - i: input i of the tail
};

// The state behind a block that rows of the segment complete: that of another base, and the rows of the block.
struct DeltaBase {
  int base, first;
};

// The rows of a segment in one key head of a layer with the gated delta rule, and in the value heads that share it.
struct Delta {
  static constexpr int NO_ROW = -1, TAIL = -2;
  int dim, value_dim, group, taps;  // dimensions of a key and of a value; value heads; tokens that the convolution sees, at most 4
  float eps;
  const float* convolution;  // [taps, channels]; the channels of query, key and values
  const float *rates, *rate_bias;  // [group]
  const float* norm;         // [value_dim]
  int earlier, rows;         // local rows before the segment's own, and these
  int blocks;                // complete blocks of text among those before
  bool chain;
  const DeltaRow* row;       // [rows]
  const DeltaBase* bases;
  int states;                // number of bases
  const int* paths;
  const float* inputs;       // [rows, stride]: projections, each of them from its place on
  size_t stride;
  int query, key, value, value_each, gate, gate_each;  // `each`: from one value head to the next
  const float* gates;        // [rows, gates_stride]
  size_t gates_stride;
  int beta, beta_each, decay, decay_each;
  float* out;                // [rows, out_stride]: from the first value head's on
  size_t out_stride;
  int out_each;
  float* const* places;      // [earlier + rows] where rows are kept; null: nowhere
  size_t offset;             // of this head there
  const float *state, *tail; // [group, dim, value_dim] and [taps - 1, channels]: what the slot has; null: a text begins
  int settled;               // local rows after which the state and the tail are kept; -1: they are not
  float *kept_state, *kept_tail;
  float* scratch;            // of `scratch_floats()`

  int channels() const { return 2 * dim + group * value_dim; }
  size_t key_floats() const { return size_t(dim) + size_t(group) * value_dim + group; }  // of a row: its key, and what follows it
  size_t state_floats() const { return size_t(group) * dim * value_dim; }
  size_t held_states() const { return 1 + (chain ? size_t(states > 0) : size_t(states)); }
  size_t scratch_floats() const {
    return rows * key_floats() + held_states() * state_floats() + std::max<size_t>(16 * size_t(dim), dim + size_t(group + 2) * value_dim) + 16;
  }
};

// How a row's tokens are drawn: those with the largest logit / temperature + Gumbel noise.
struct Draw {
  uint64_t key;        // of the noise at the position
  double temperature;  // 0: greedy, without noise
};

constexpr int PIECE = 512;  // logits that are compared together

// The best tokens so far, best first, lower ids first among equals.
struct Leaders {
  int most;  // maximum to keep
  int64_t* tokens;
  double* scores;
  int found = 0;
  float bound = -__builtin_inff();  // score that a token must exceed to be one of them, roughly

  void add(double score, int64_t token) {
    const auto better = [&](int place) {
      return score > scores[place] || (score == scores[place] && token < tokens[place]);
    };
    if (!(score > -__builtin_inf()) || (found == most && !better(most - 1))) return;
    int place = found < most ? found++ : most - 1;
    for (; place && better(place - 1); place--) {
      scores[place] = scores[place - 1];
      tokens[place] = tokens[place - 1];
    }
    scores[place] = score;
    tokens[place] = token;
    // Rounding moves the bound of a score by far less than this.
    if (found == most) bound = float(scores[most - 1] - 1e-3 - 1e-5 * __builtin_fabs(scores[most - 1]));
  }
};

struct Kernels {
  const char* name;
  int most_rows[KINDS];  // maximum of a tile's rows, by the kind of linear
  int most_queries;  // maximum of queries of attention
  // Packs a row of inputs into a tile. `weight`: of an RMS norm before; null: no norm. `padded`: floats of x and weight.
  void (*pack)(Kind, const float* x, const float* weight, int width, int padded, float eps, const Tile&, int row);
  // Computes panels [first, last) of a linear for a tile's rows; the first is `row` of the output. `first` is even, and so is
  // `last` unless it is the end.
  void (*linear)(const Linear&, const Tile&, int first, int last, const Output&, int row);
  void (*attend)(const Attention&);
  // Rounds numbers to int8 codes: each four, the last ones with zeros, `stride` bytes behind the four before. Returns the step of
  // the codes; NaN where a number is not finite.
  float (*code)(const float* x, int count, uint8_t* codes, size_t stride);
  // Changes one head's vector: RMS norm where there is a weight, rotation of the first `turned` dimensions by `cosines` and `sines`,
  // [turned / 2], then `scale`.
  void (*turn)(float* x, int dim, int turned, const float* weight, float eps, const float* cosines, const float* sines, float scale);
  // Spreads each number over all of a head's, or over the largest power of two that divides them (a Walsh-Hadamard transform), so
  // that none is much larger than the others. Products of two vectors stay the same.
  void (*spread)(float* x, int dim);
  // Adds the best of tokens first, first + 1, ... to the leaders: at most PIECE tokens.
  void (*lead)(const float* logits, int first, int count, const Draw&, Leaders&);
  float (*most)(const float* x, int count);
  // Writes the indices of numbers above `bound` to `places`, which has room for all. Returns their number.
  int (*above)(const float* x, int count, float bound, int32_t* places);
  // The sum of exp((x - top) * factor) over the x that are not more than `bound`.
  double (*mass)(const float* x, int count, float top, float factor, float bound);
  // Bounds numbers smoothly: most * tanh(x / most).
  void (*cap)(float* x, int count, float most);
  void (*delta)(const Delta&);
};

// Finds the best tokens of a row.
inline void lead(const Kernels& kernels, const float* logits, int vocabulary, const Draw& draw, Leaders& leaders) {
  for (int first = 0; first < vocabulary; first += PIECE)
    kernels.lead(logits + first, first, vocabulary - first < PIECE ? vocabulary - first : PIECE, draw, leaders);
}

extern const Kernels portable_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels, avx512_kernels, avx512_vnni_kernels, avx512_bf16_kernels, amx_kernels;
#elif defined(__aarch64__)
extern const Kernels neon_kernels, neon_dot_kernels;
#endif

std::vector<const Kernels*> kernels_here();            // the kernels that this processor supports, the fastest first
const Kernels* kernels_named(const char* name);        // "": the fastest; null where this processor does not support them

inline uint64_t mix64(uint64_t value) {  // outrider.core.session.digest
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
  return value ^ (value >> 31);
}

constexpr uint64_t PHI = 0x9E3779B97F4A7C15u;

inline float half_value(uint16_t bits) {  // float16 to float32
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, magnitude = bits & 0x7fffu;
  uint32_t wide = sign | (magnitude >= 0x7c00 ? 0x7f800000u | (magnitude & 0x3ff) << 13 : (magnitude << 13) + (112u << 23));
  float value;
  __builtin_memcpy(&value, &wide, 4);
  if (magnitude < 0x400) value = (sign ? -1.0f : 1.0f) * float(magnitude) * 0x1p-24f;
  return value;
}

// E4M3 to float32; the pattern of what is no number is the largest one.
inline float float8_value(uint8_t bits) { return half_value(uint16_t((bits & 0x80) << 8 | (bits & 0x7f) << 7)) * 256.0f; }

inline uint16_t half_bits(float value) {  // float32 to float16, to the nearest, ties to even; beyond its range infinite
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00);
  if (magnitude >= 0x47800000u) return uint16_t(sign | 0x7c00);
  if (magnitude < 0x38800000u) {  // a multiple of 2^-24
    float scaled;
    __builtin_memcpy(&scaled, &magnitude, 4);
    return uint16_t(sign | uint16_t(std::nearbyint(scaled * 0x1p24f)));
  }
  return uint16_t(sign | ((magnitude + 0xfffu + (magnitude >> 13 & 1) - (112u << 23)) >> 13));
}

inline float widened(uint16_t bits) {  // bfloat16 to float32
  uint32_t wide = uint32_t(bits) << 16;
  float value;
  __builtin_memcpy(&value, &wide, 4);
  return value;
}

inline uint16_t rounded(float value) {  // float32 to bfloat16, to the nearest, ties to even
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40);
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

}  // namespace outrider
