// From a row of logits to the tokens that lead it, for one generation: what outrider.core.sampler does with numpy.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "kernels.hpp"

namespace outrider {

// The terms of a generation; see outrider.core.contract.Contract. Ids are ascending, and below the vocabulary.
struct Terms {
  int vocabulary;
  uint64_t base;       // of its noise keys
  double temperature;  // 0: greedy
  int64_t top_k;       // below the vocabulary; 0: all
  double top_p, min_p;
  double repetition, presence, frequency;
  std::vector<std::pair<int32_t, double>> bias;
  std::vector<int32_t> banned, stops, allowed;
  bool restricted;     // to what is allowed
  int64_t first_stop;  // position from which a stop id may be said

  bool greedy() const { return temperature == 0.0; }
  bool penalizes() const { return repetition != 1.0 || presence != 0.0 || frequency != 0.0; }
  bool cuts() const { return !greedy() && (top_k > 0 || top_p < 1.0 || min_p > 0.0); }
};

class Sampler {
 public:
  static constexpr int UNDECIDED = -1;

  Sampler(Terms terms, const Kernels& kernels) : terms_(std::move(terms)), kernels_(kernels) {}

  int vocabulary() const { return terms_.vocabulary; }

  // Tokens were committed, of the answer or of what comes before it.
  void extend(const int64_t* tokens, size_t count, bool answer);

  // The `count` best tokens after a row of logits at the end of `path`, best first, lower ids first among equals; gives how
  // many there are that may be said. UNDECIDED: so close that it could hang on how a logarithm is rounded.
  // `noised`: by log p + g, else by log p.
  int lead(const float* logits, const int64_t* path, size_t path_count, bool noised, int count, int64_t* tokens,
           double* scores);

 private:
  // How often a token is there, in the session's text and in the answer.
  struct Said {
    int32_t token;
    int64_t session, answer;
  };
  struct Scored {
    double score;  // log p up to a constant
    int32_t token;
    bool operator<(const Scored& other) const {  // the better one comes first
      return score > other.score || (score == other.score && token < other.token);
    }
  };
  // A row while it is looked at.
  struct Row {
    const float* logits;        // null: none but those set apart
    std::vector<int32_t> ids;   // ascending, of what is set apart
    std::vector<Scored> apart;  // of that, what may be said: its score is not its logit alone
    std::vector<Scored> kept;   // by a cut
  };

  // Calls each(logits, first id, count) for pieces of the row, in which what is set apart is -inf.
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

  std::vector<Said> counted(const int64_t* tokens, size_t count, bool answer) const;
  static std::vector<Said> joined(const std::vector<Said>& one, const std::vector<Said>& other);
  double adjusted(float logit, double bias, const Said& said) const;
  void set_apart(Row& row, const float* logits, int64_t position, const int64_t* path, size_t path_count) const;
  bool cut(Row& row) const;
  bool collect(Row& row, size_t least, double share, double deepest, double* rest) const;
  static bool keep_top_p(std::vector<Scored>& kept, double p, double rest);
  static bool keep_min_p(std::vector<Scored>& kept, double p);

  const Terms terms_;
  const Kernels& kernels_;
  std::vector<Said> said_;  // by ascending ids, where there are penalties
  int64_t length_ = 0;
};

}  // namespace outrider
