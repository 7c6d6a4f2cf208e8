#include "sampler.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace outrider {
namespace {

constexpr double NEVER = -std::numeric_limits<double>::infinity();
constexpr float NEVER_F = -std::numeric_limits<float>::infinity();
// Libraries round logarithms and sums differently. Decisions with a smaller margin are left to the slower sampler in Python:
constexpr double OF_SCORES = 1e-9;
constexpr double OF_PROBABILITY = 1e-10;  // of a share of probability
constexpr double OF_FLOATS = 1e-6;        // of sums in floats

// outrider.core.sampling.noise.gumbel_row for one token.
double gumbel(uint64_t key, int32_t token) {
  const uint32_t bits = uint32_t(mix64(key + uint64_t(token + 1) * PHI) >> 32);
  const double u = std::min((double(bits) + 0.5) * 0x1p-32, 1.0 - 0x1p-24);
  return -std::log(-std::log1p(-u));
}

}  // namespace

void Sampler::extend(const int64_t* tokens, size_t count, bool answer) {
  length_ += int64_t(count);
  if (terms_.penalizes()) counts_ = joined(counts_, counted(tokens, count, answer));
}

// The count of each of these tokens, by ascending ids.
std::vector<Sampler::TokenCount> Sampler::counted(const int64_t* tokens, size_t count, bool answer) const {
  std::vector<int32_t> ids;
  for (size_t i = 0; i < count; i++)
    if (tokens[i] < terms_.vocabulary) ids.push_back(int32_t(tokens[i]));
  std::sort(ids.begin(), ids.end());
  std::vector<TokenCount> counts;
  for (int32_t token : ids) {
    if (counts.empty() || counts.back().token != token) counts.push_back({token, 0, 0});
    counts.back().session++;
    counts.back().answer += answer;
  }
  return counts;
}

std::vector<Sampler::TokenCount> Sampler::joined(const std::vector<TokenCount>& one, const std::vector<TokenCount>& other) {
  std::vector<TokenCount> both;
  both.reserve(one.size() + other.size());
  for (auto a = one.begin(), b = other.begin(); a != one.end() || b != other.end();) {
    const bool first = b == other.end() || (a != one.end() && a->token <= b->token);
    both.push_back(first ? *a++ : *b++);
    if (first && b != other.end() && b->token == both.back().token) {
      both.back().session += b->session;
      both.back().answer += (b++)->answer;
    }
  }
  return both;
}

int Sampler::lead(const float* logits, const int64_t* path, size_t path_count, bool noised, int count, int64_t* tokens,
                  double* scores) {
  static thread_local Row row;
  const int64_t position = length_ + int64_t(path_count);
  set_apart(row, logits, position, path, path_count);
  noised = noised && !terms_.greedy();
  const uint64_t key = mix64(terms_.base + uint64_t(position) * PHI);
  const bool cuts = terms_.cuts();
  if (cuts && !cut(row)) return UNDECIDED;
  Leaders leaders{count, tokens, scores};
  if (!cuts) {
    const Draw draw{key, noised ? terms_.temperature : 0.0};
    in_pieces(row, [&](const float* x, int first, int size) { kernels_.lead(x, first, size, draw, leaders); });
    for (int i = 0; i < leaders.found && !noised && !terms_.greedy(); i++) scores[i] /= terms_.temperature;
  }
  for (const auto& it : cuts ? row.kept : row.apart)
    leaders.add(noised ? it.score + gumbel(key, it.token) : it.score, it.token);
  if (noised && leaders.found > 1 && scores[0] - scores[1] < OF_SCORES) return UNDECIDED;
  return leaders.found;
}

// log p up to a constant: a token's logit after bias and penalties, over the temperature.
double Sampler::adjusted(float logit, double bias, const TokenCount& counts) const {
  double score = double(logit) + bias;
  if (counts.session && terms_.repetition != 1.0) score = score < 0 ? score * terms_.repetition : score / terms_.repetition;
  if (counts.answer) score -= terms_.presence + terms_.frequency * double(counts.answer);
  return terms_.greedy() ? score : score / terms_.temperature;
}

// Sets apart tokens that may not be chosen, and tokens whose score is not their logit alone.
void Sampler::set_apart(Row& row, const float* logits, int64_t position, const int64_t* path, size_t path_count) const {
  constexpr int32_t NONE = std::numeric_limits<int32_t>::max();
  row.logits = terms_.restricted ? nullptr : logits;
  row.apart.clear();
  row.ids.clear();
  const std::vector<TokenCount> last = terms_.penalizes() ? counted(path, path_count, true) : std::vector<TokenCount>();
  const size_t stops = position < terms_.first_stop ? terms_.stops.size() : 0;
  size_t biased = 0, counted = 0, on_path = 0, banned = 0, stop = 0, allowed = 0;  // index in each list
  const auto id = [&](const auto& ids, size_t at, size_t size) { return at < size ? ids[at] : NONE; };
  while (true) {
    const int32_t by = biased < terms_.bias.size() ? terms_.bias[biased].first : NONE;
    const int32_t before = counted < counts_.size() ? counts_[counted].token : NONE;
    const int32_t late = on_path < last.size() ? last[on_path].token : NONE;
    const int32_t never = id(terms_.banned, banned, terms_.banned.size()), end = id(terms_.stops, stop, stops);
    const int32_t may = id(terms_.allowed, allowed, terms_.restricted ? terms_.allowed.size() : 0);
    const int32_t token = std::min({by, before, late, never, end, may});
    if (token == NONE) return;
    TokenCount counts{token, 0, 0};
    const double bias = by == token ? terms_.bias[biased++].second : 0.0;
    if (before == token) counts = counts_[counted++];
    if (late == token) counts.session += last[on_path].session, counts.answer += last[on_path].answer, on_path++;
    banned += never == token;
    stop += end == token;
    allowed += may == token;
    row.ids.push_back(token);
    if (never == token || end == token || (terms_.restricted && may != token)) continue;
    row.apart.push_back({adjusted(logits[token], bias, counts), token});
  }
}

// Applies top-k, top-p and min-p to `kept`, in that order. Returns false where the rounding of sums decides.
bool Sampler::cut(Row& row) const {
  const size_t k = size_t(terms_.top_k);
  const bool by_share = terms_.top_p < 1.0, by_ratio = terms_.min_p > 0.0;
  const double deepest = !k && !by_share && by_ratio ? 1e-6 - std::log(terms_.min_p) : 0.0;
  double rest = 0.0;
  if (!collect(row, k, !k && by_share ? terms_.top_p : 0.0, deepest, &rest)) return false;
  auto& kept = row.kept;
  if (k && kept.size() > k) {
    std::nth_element(kept.begin(), kept.begin() + (k - 1), kept.end());
    const double least = kept[k - 1].score;
    kept.erase(std::remove_if(kept.begin() + k, kept.end(), [&](const Scored& it) { return it.score < least; }), kept.end());
  }
  if (by_share && !keep_top_p(kept, terms_.top_p, rest)) {
    // With all tokens in `kept` no sum is in floats.
    if (rest == 0.0 || !collect(row, 0, 0.0, -NEVER, &rest) || !keep_top_p(kept, terms_.top_p, rest)) return false;
  }
  return !by_ratio || keep_min_p(kept, terms_.min_p);
}

// Puts all tokens whose score reaches some bound into `kept`: at least `least` tokens with at least that `share` of all
// probability, or all that are up to `deepest` below the best one. `rest`: the probability of the others, in units of the best
// token's, where a share is wanted. Returns false where scores are not finite.
bool Sampler::collect(Row& row, size_t least, double share, double deepest, double* rest) const {
  const double temperature = terms_.temperature;
  float most = NEVER_F;
  in_pieces(row, [&](const float* x, int, int count) { most = std::max(most, kernels_.most(x, count)); });
  double top = double(most) / temperature;
  for (const auto& it : row.apart) top = std::max(top, it.score);
  if (!std::isfinite(top)) return false;
  const auto weight = [&](const Scored& it) { return std::exp(it.score - top); };
  for (double depth : {4.0, 9.0, 18.0, 40.0, -NEVER}) {
    const bool all = std::isinf(depth);
    const double bound = top - (deepest > 0.0 ? deepest : depth);
    // A little lower, so that rounding excludes no token.
    const float least_logit = all ? NEVER_F : float(bound * temperature - 1e-5 * (1.0 + std::fabs(bound * temperature)));
    row.kept.clear();
    *rest = 0.0;
    const auto take = [&](const Scored& it) {
      if (it.score >= bound && it.score > NEVER) row.kept.push_back(it);
      else if (share > 0.0) *rest += weight(it);
    };
    for (const auto& it : row.apart) take(it);
    in_pieces(row, [&](const float* x, int first, int size) {
      int32_t places[PIECE];
      const int count = kernels_.above(x, size, least_logit, places);
      for (int i = 0; i < count; i++) take({double(x[places[i]]) / temperature, first + places[i]});
    });
    if (all || deepest > 0.0) return true;
    if (row.kept.size() < least) continue;
    if (share == 0.0) return true;
    double mass = 0.0;
    for (const auto& it : row.kept) mass += weight(it);
    in_pieces(row, [&](const float* x, int, int size) {
      *rest += kernels_.mass(x, size, float(top * temperature), float(1.0 / temperature), least_logit);
    });
    if (mass > (share + OF_FLOATS) * (mass + *rest)) return true;
  }
  return true;
}

// Keeps the smallest set of best tokens whose probability reaches p of all. Sorts only the tokens with about the score of the
// last one in the set.
bool Sampler::keep_top_p(std::vector<Scored>& kept, double p, double rest) {
  if (kept.empty()) return true;
  constexpr int PARTS = 1024;  // parts of the range of scores, the best first
  double top = kept[0].score, least = top, total = rest, reached = 0.0, margin = OF_PROBABILITY;
  for (const auto& it : kept) top = std::max(top, it.score), least = std::min(least, it.score);
  const double scale = least < top ? (PARTS - 1) / (top - least) : 0.0;
  const auto part_of = [&](const Scored& it) { return int((top - it.score) * scale); };
  std::vector<double> mass(PARTS, 0.0);
  for (const auto& it : kept) mass[part_of(it)] += std::exp(it.score - top);
  for (double of_part : mass) total += of_part;
  margin += OF_FLOATS * rest / total;
  int part = 0;
  while (part < PARTS - 1 && (reached + mass[part]) / total < p + margin) {
    if ((reached + mass[part]) / total > p - margin) return false;
    reached += mass[part++];
  }
  const auto better = std::partition(kept.begin(), kept.end(), [&](const Scored& it) { return part_of(it) < part; });
  const auto worse = std::partition(better, kept.end(), [&](const Scored& it) { return part_of(it) == part; });
  std::sort(better, worse);
  for (auto it = better; it != worse; ++it) {
    reached += std::exp(it->score - top);
    const double over = reached / total - p;
    if (std::fabs(over) < margin) return false;
    if (over > 0.0) {
      kept.erase(it + 1, kept.end());
      return true;
    }
  }
  return false;
}

// Keeps tokens with at least a share p of the likeliest token's probability.
bool Sampler::keep_min_p(std::vector<Scored>& kept, double p) {
  double top = NEVER;
  for (const auto& it : kept) top = std::max(top, it.score);
  const double least = top + std::log(p);
  for (const auto& it : kept)
    if (p < 1.0 && std::fabs(it.score - least) < OF_SCORES) return false;
  kept.erase(std::remove_if(kept.begin(), kept.end(), [&](const Scored& it) { return it.score < least; }), kept.end());
  return true;
}

}  // namespace outrider
