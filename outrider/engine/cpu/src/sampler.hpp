// Finds the leading tokens of a row of logits for one generation, as outrider.core.sampling.sampler does with numpy.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/kernels.hpp"

namespace outrider {

// The terms of a generation; see outrider.core.session.contract.Contract. Ids are ascending, and below the vocabulary.
struct SamplingTerms {
  int vocabulary;
  uint64_t base;       // of its noise keys
  double temperature;  // 0: greedy
  int64_t top_k;       // below the vocabulary; 0: all
  double top_p, min_p;
  double repetition, presence, frequency;
  std::vector<std::pair<int32_t, double>> bias;
  std::vector<int32_t> banned, stops, allowed;
  bool restricted;     // whether only allowed tokens may be chosen
  int64_t first_stop;  // position from which on a stop id may be chosen

  bool greedy() const { return temperature == 0.0; }
  bool penalizes() const { return repetition != 1.0 || presence != 0.0 || frequency != 0.0; }
  bool cuts() const { return !greedy() && (top_k > 0 || top_p < 1.0 || min_p > 0.0); }
};

class Sampler {
 public:
  static constexpr int UNDECIDED = -1;

  Sampler(SamplingTerms terms, const Kernels& kernels) : terms_(std::move(terms)), kernels_(kernels) {}

  int vocabulary() const { return terms_.vocabulary; }

  // Adds committed tokens, of the answer or of the text before it.
  void extend(const int64_t* tokens, size_t count, bool answer);

  // Writes the `count` best tokens after a row of logits at the end of `path`, best first, lower ids first among equals. Returns
  // how many of the tokens may be chosen, or UNDECIDED where the rounding of a logarithm could decide. `noised`: order by
  // log p + g, else by log p.
  int lead(const float* logits, const int64_t* path, size_t path_count, bool noised, int count, int64_t* tokens,
           double* scores);

 private:
  // The count of a token in the session's text and in the answer.
  struct TokenCount {
    int32_t token;
    int64_t session, answer;
  };
  struct Scored {
    double score;  // log p up to a constant
    int32_t token;
    bool operator<(const Scored& other) const {  // the better one is less
      return score > other.score || (score == other.score && token < other.token);
    }
  };
  // The state of a row.
  struct Row {
    const float* logits;        // null: only the tokens that are set apart
    std::vector<int32_t> ids;   // of tokens that are set apart, ascending
    std::vector<Scored> apart;  // those of them that may be chosen; their scores are not their logits alone
    std::vector<Scored> kept;   // after a cut
  };

  // Calls each(logits, first id, count) for pieces of the row, in which tokens that are set apart are -inf.
  template <class Each>
  void in_pieces(const Row& row, Each each) const {
    auto apart = row.ids.begin();
    float copy[PIECE];
    for (int first = 0; row.logits && first < terms_.vocabulary; first += PIECE) {
      const int count = std::min(PIECE, terms_.vocabulary - first);
      const float* piece = row.logits + first;
      if (apart != row.ids.end() && *apart < first + count) {
        std::copy(piece, piece + count, copy);
        for (; apart != row.ids.end() && *apart < first + count; ++apart)
          copy[*apart - first] = -std::numeric_limits<float>::infinity();
        piece = copy;
      }
      each(piece, first, count);
    }
  }

  std::vector<TokenCount> counted(const int64_t* tokens, size_t count, bool answer) const;
  static std::vector<TokenCount> joined(const std::vector<TokenCount>& one, const std::vector<TokenCount>& other);
  double adjusted(float logit, double bias, const TokenCount& counts) const;
  void set_apart(Row& row, const float* logits, int64_t position, const int64_t* path, size_t path_count) const;
  bool cut(Row& row) const;
  bool collect(Row& row, size_t least, double share, double deepest, double* rest) const;
  static bool keep_top_p(std::vector<Scored>& kept, double p, double rest);
  static bool keep_min_p(std::vector<Scored>& kept, double p);

  const SamplingTerms terms_;
  const Kernels& kernels_;
  std::vector<TokenCount> counts_;  // by ascending ids; empty without penalties
  int64_t length_ = 0;
};

}  // namespace outrider
