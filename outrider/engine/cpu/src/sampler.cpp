#include "sampler.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace outrider {
namespace {

constexpr double NEVER = -std::numeric_limits<double>::infinity();
constexpr float NEVER_F = -std::numeric_limits<float>::infinity();
// Libraries round logarithms and sums differently. What is decided by less than this is left to the slower way:
constexpr double OF_SCORES = 1e-9;
constexpr double OF_PROBABILITY = 1e-10;  // a share
constexpr double OF_FLOATS = 1e-6;        // of what is summed as floats

bool has(const std::vector<int32_t>& ids, int32_t token) { return std::binary_search(ids.begin(), ids.end(), token); }

// outrider.core.noise.gumbel_row, of one token.
double gumbel(uint64_t key, int32_t token) {
  const uint32_t bits = uint32_t(mix64(key + uint64_t(token + 1) * PHI) >> 32);
  const double u = std::min((double(bits) + 0.5) * 0x1p-32, 1.0 - 0x1p-24);
  return -std::log(-std::log1p(-u));
}

// The best of what is added, best first.
class Leaders {
 public:
  Leaders(int most, int found, int64_t* tokens, double* scores)
      : most_(most), found_(found), tokens_(tokens), scores_(scores) {}

  void add(double score, int64_t token) {
    const auto better = [&](int place) {
      return score > scores_[place] || (score == scores_[place] && token < tokens_[place]);
    };
    if (!(score > NEVER) || (found_ == most_ && !better(most_ - 1))) return;
    int place = found_ < most_ ? found_++ : most_ - 1;
    for (; place && better(place - 1); place--) {
      scores_[place] = scores_[place - 1];
      tokens_[place] = tokens_[place - 1];
    }
    scores_[place] = score;
    tokens_[place] = token;
  }
  int found() const { return found_; }

 private:
  const int most_;
  int found_;
  int64_t* tokens_;
  double* scores_;
};

}  // namespace

void Sampler::extend(const int64_t* tokens, size_t count, bool answer) {
  length_ += int64_t(count);
  if (!terms_.penalizes()) return;
  for (size_t i = 0; i < count; i++) {
    if (tokens[i] >= terms_.vocabulary) continue;
    Said& said = said_[int32_t(tokens[i])];
    said.session++;
    said.answer += answer;
  }
}

// As if the answer went on with these tokens, or not after all.
void Sampler::count_path(const int64_t* path, size_t count, int by) {
  if (!terms_.penalizes()) return;
  for (size_t i = 0; i < count; i++) {
    if (path[i] >= terms_.vocabulary) continue;
    const auto it = said_.try_emplace(int32_t(path[i])).first;
    it->second.session += by;
    it->second.answer += by;
    if (!it->second.session) said_.erase(it);
  }
}

int Sampler::lead(const float* logits, const int64_t* path, size_t path_count, bool noised, int count, int64_t* tokens,
                  double* scores) {
  static thread_local Row row;
  const int64_t position = length_ + int64_t(path_count);
  count_path(path, path_count, 1);
  set_apart(row, logits, position);
  count_path(path, path_count, -1);
  noised = noised && !terms_.greedy();
  const uint64_t key = mix64(terms_.base + uint64_t(position) * PHI);
  const bool cuts = terms_.cuts();
  if (cuts && !cut(row)) return UNDECIDED;
  int found = 0;
  if (!cuts && row.logits) {
    found = kernels_.lead(row.logits, terms_.vocabulary, {key, noised ? terms_.temperature : 0.0}, count, tokens, scores);
    for (int i = 0; i < found && !noised && !terms_.greedy(); i++) scores[i] /= terms_.temperature;
  }
  Leaders leaders(count, found, tokens, scores);
  for (const auto& it : cuts ? row.kept : row.apart)
    leaders.add(noised ? it.score + gumbel(key, it.token) : it.score, it.token);
  if (noised && leaders.found() > 1 && count > 1 && scores[0] - scores[1] < OF_SCORES) return UNDECIDED;
  return leaders.found();
}

// log p up to a constant: a token's logit after bias and penalties, over the temperature.
double Sampler::adjusted(float logit, int32_t token, double bias) const {
  double score = double(logit) + bias;
  const auto it = said_.find(token);
  if (it != said_.end()) {
    if (terms_.repetition != 1.0) score = score < 0 ? score * terms_.repetition : score / terms_.repetition;
    if (it->second.answer) score -= terms_.presence + terms_.frequency * double(it->second.answer);
  }
  return terms_.greedy() ? score : score / terms_.temperature;
}

// Takes out of the row what may not be said, and what is not scored by its logit alone.
void Sampler::set_apart(Row& row, const float* logits, int64_t position) const {
  row.apart.clear();
  row.logits = logits;
  const bool unstopped = position < terms_.first_stop && !terms_.stops.empty();
  const auto add = [&](int32_t token) {
    if (has(terms_.banned, token) || (unstopped && has(terms_.stops, token))) return;
    const auto by = std::lower_bound(terms_.bias.begin(), terms_.bias.end(), std::make_pair(token, NEVER));
    const bool biased = by != terms_.bias.end() && by->first == token;
    row.apart.push_back({adjusted(logits[token], token, biased ? by->second : 0.0), token});
  };
  if (terms_.restricted) {
    for (int32_t token : terms_.allowed) add(token);
    row.logits = nullptr;
    return;
  }
  if (terms_.bias.empty() && said_.empty() && terms_.banned.empty() && !unstopped) return;
  row.copy.assign(logits, logits + terms_.vocabulary);
  row.logits = row.copy.data();
  for (const auto& it : terms_.bias) {
    add(it.first);
    row.copy[it.first] = NEVER_F;
  }
  for (const auto& it : said_) {
    if (row.copy[it.first] == NEVER_F) continue;  // it is biased, too, or its logit says never
    add(it.first);
    row.copy[it.first] = NEVER_F;
  }
  for (int32_t token : terms_.banned) row.copy[token] = NEVER_F;
  if (unstopped)
    for (int32_t token : terms_.stops) row.copy[token] = NEVER_F;
}

// Leaves in `kept` what top-k, top-p and min-p leave, in that order. False: that hangs on how sums are rounded.
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
    // Of all tokens nothing is summed as floats.
    if (rest == 0.0 || !collect(row, 0, 0.0, -NEVER, &rest) || !keep_top_p(kept, terms_.top_p, rest)) return false;
  }
  return !by_ratio || keep_min_p(kept, terms_.min_p);
}

// Into `kept` all that scores at least as much as some bound: at least `least` tokens, with at least that `share` of all
// probability, or all that is up to `deepest` below the best. `rest`: the probability of what is not kept, the best one's
// being 1, if a share is asked for. False where the scores are no numbers.
bool Sampler::collect(Row& row, size_t least, double share, double deepest, double* rest) const {
  const int size = terms_.vocabulary;
  const double temperature = terms_.temperature;
  double top = row.logits ? double(kernels_.most(row.logits, size)) / temperature : NEVER;
  for (const auto& it : row.apart) top = std::max(top, it.score);
  if (!std::isfinite(top)) return false;
  row.found.resize(size_t(size));
  const auto weight = [&](const Scored& it) { return std::exp(it.score - top); };
  for (double depth : {4.0, 9.0, 18.0, 40.0, -NEVER}) {
    const bool all = std::isinf(depth);
    const double bound = top - (deepest > 0.0 ? deepest : depth);
    // A little lower, so that rounding leaves out none.
    const float least_logit = all ? NEVER_F : float(bound * temperature - 1e-5 * (1.0 + std::fabs(bound * temperature)));
    row.kept.clear();
    *rest = 0.0;
    const auto take = [&](const Scored& it) {
      if (it.score >= bound && it.score > NEVER) row.kept.push_back(it);
      else if (share > 0.0) *rest += weight(it);
    };
    for (const auto& it : row.apart) take(it);
    const int count = row.logits ? kernels_.above(row.logits, size, least_logit, row.found.data()) : 0;
    for (int i = 0; i < count; i++) take({double(row.logits[row.found[i]]) / temperature, row.found[i]});
    if (all || deepest > 0.0) return true;
    if (row.kept.size() < least) continue;
    if (share == 0.0) return true;
    double mass = 0.0;
    for (const auto& it : row.kept) mass += weight(it);
    if (row.logits)
      *rest += kernels_.mass(row.logits, size, float(top * temperature), float(1.0 / temperature), least_logit);
    if (mass > (share + OF_FLOATS) * (mass + *rest)) return true;
  }
  return true;
}

// The smallest set of best tokens whose probability reaches p of all. Only those are sorted that score about as much as the
// last one of it.
bool Sampler::keep_top_p(std::vector<Scored>& kept, double p, double rest) {
  if (kept.empty()) return true;
  constexpr int PARTS = 1024;  // of the range of scores, the best first
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

// Tokens with at least a share p of the likeliest one's probability.
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
