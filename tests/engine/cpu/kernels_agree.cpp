// Every kernel on every instruction set that this processor has, against the portable one, on random input.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "blocks.hpp"
#include "pages.hpp"

using namespace outrider;
using Floats = std::vector<float>;

namespace {

std::mt19937 dice(1);
int wrong = 0;
constexpr int DIM = 64;  // of a head

float uniform() { return std::uniform_real_distribution<float>(-1.0f, 1.0f)(dice); }

Floats floats(size_t count) {
  Floats x(count);
  for (float& value : x) value = uniform();
  return x;
}

void report(const char* set, const char* what, bool right, double worst = 0.0) {
  std::printf("%-16s %-10s %-5s %.1e\n", set, what, right ? "right" : "WRONG", worst);
  wrong += !right;
}

void compare(const char* set, const char* what, const Floats& found, const Floats& expected, double tolerance) {
  double worst = 0.0;
  for (size_t i = 0; i < found.size(); i++) {
    const double off = std::fabs(found[i] - expected[i]) / (1.0 + std::fabs(expected[i]));
    if (!(off <= worst)) worst = off;  // NaN, too
  }
  report(set, what, worst <= tolerance, worst);
}

// A linear whose packed bytes are random codes, behind finite scales.
struct Packed {
  Linear linear;
  std::vector<uint8_t> data;
  Floats scales;
  std::vector<int32_t> zeros;

  Packed(Kind kind, int outputs, int inputs) : scales(size_t(outputs), 0.01f), zeros(size_t(outputs), 0) {
    const bool narrow = kind == Kind::int8 || kind == Kind::float8;
    const size_t bytes = kind == Kind::float32 ? 64 * inputs : narrow ? 16 * inputs : 32 * inputs;
    linear.kind = kind;
    linear.outputs = outputs;
    linear.inputs = linear.padded = inputs;
    linear.panels = outputs / LANES;
    linear.panel_bytes = bytes;
    data.resize(bytes * linear.panels + 4096);
    for (size_t i = 0; i < data.size(); i += 4) {
      const float value = uniform();
      const uint16_t half = kind == Kind::float16 ? half_bits(value) : rounded(value);
      if (kind == Kind::float32) std::memcpy(&data[i], &value, 4);
      else if (kind == Kind::bfloat16 || kind == Kind::float16)
        std::memcpy(&data[i], &half, 2), std::memcpy(&data[i + 2], &half, 2);
      else
        for (int j = 0; j < 4; j++) data[i + j] = uint8_t(int8_t(int(dice() % 255) - 127));
    }
    if (kind == Kind::int8)
      for (int o = 0; o < outputs; o++)
        for (int i = 0; i < inputs; i++)
          zeros[o] += INT8_ZERO * int8_t(data[(o / LANES) * bytes + size_t(i / 4) * 64 + (o % LANES) * 4 + i % 4]);
    if (kind == Kind::float8) {
      linear.group = 128;
      scales.resize(size_t(outputs) * (inputs / linear.group));
      for (float& scale : scales) scale = 0.01f * uniform();
    }
    linear.data = data.data();
    linear.scales = scales.data();
    linear.zeros = zeros.data();
  }
};

// A linear in blocks of random bytes, behind finite scales.
struct Coded {
  Linear linear;
  std::vector<Panel> panels;
  std::vector<uint8_t> data;
  Floats values;  // [outputs, inputs]

  Coded(Format format, int outputs, int inputs) : panels(size_t(outputs) / LANES), values(size_t(outputs) * inputs) {
    const Layout& it = layout_of(format);
    linear.kind = Kind::blocks;
    linear.outputs = outputs;
    linear.inputs = inputs;
    linear.padded = (inputs + 63) / 64 * 64;
    linear.panels = outputs / LANES;
    const size_t units = size_t(inputs) / it.unit, bytes = units * unit_bytes(it);
    data.resize(bytes * panels.size() + 8192);
    std::vector<uint8_t> raw(size_t(it.block_bytes));
    for (int o = 0; o < outputs; o++) {
      panels[o / LANES] = {format, &data[o / LANES * bytes]};
      for (size_t u = 0; u < units; u++) {
        for (uint8_t& byte : raw) byte = uint8_t(dice());
        Block block = read_block(format, raw.data());
        block.scale = uniform() * 0.01f;
        block.d = half_bits(uniform() * 0.01f), block.m = half_bits(uniform() * 0.01f);
        if (it.scales == Scales::power) block.a[0] = uint8_t(120 + dice() % 8);
        if (dice() % 8 == 0) block.d = 0;
        write_unit(format, block, panels[o / LANES].data + u * unit_bytes(it), o % LANES);
        block.values(it, &values[size_t(o) * inputs + u * it.unit]);
      }
    }
    linear.blocks = panels.data();
  }

  // The products in double precision, with inputs as a tile has them.
  Floats exact(const Kernels& kernels, const Floats& x, int rows) const {
    const size_t inputs = size_t(linear.inputs);
    Floats y(size_t(rows) * linear.outputs);
    std::vector<uint8_t> memory(size_t(linear.padded) * 4 + 4096);
    for (int r = 0; r < rows; r++) {
      const Tile tile{memory.data(), nullptr, 1};
      kernels.pack(Kind::blocks, &x[r * inputs], nullptr, linear.inputs, linear.inputs, 0.0f, tile, 0);
      const CodedTile t(tile, linear.inputs);
      for (int o = 0; o < linear.outputs; o++) {
        double sum = 0.0;
        for (size_t k = 0; k < inputs; k++)
          sum += double(values[o * inputs + k]) * t.scales[k / CHUNK] * int8_t(t.at(int(k) / CHUNK, 0)[k % CHUNK]);
        y[size_t(r) * linear.outputs + o] = float(sum);
      }
    }
    return y;
  }
};

// `each`: rows of a tile.
Floats product(const Kernels& kernels, const Linear& l, const Floats& x, const float* weight, int rows, int each) {
  std::vector<uint8_t> tile(size_t(each) * l.padded * 4 + 4096);
  Floats scales(each), y(size_t(rows) * l.outputs), padded(size_t(l.padded));
  const Tile t{tile.data(), scales.data(), each};
  for (int first = 0; first < rows; first += each) {
    for (int r = 0; r < each; r++) {
      std::copy_n(&x[size_t(first + r) * l.inputs], l.inputs, padded.begin());
      kernels.pack(l.kind, padded.data(), weight, l.inputs, l.padded, 1e-5f, t, r);
    }
    kernels.linear(l, t, 0, l.panels, {Into::store, y.data(), size_t(l.outputs), l.outputs}, first);
  }
  return y;
}

void linears(const Kernels& kernels) {
  const bool rounds = std::strstr(kernels.name, "bf16") || std::strstr(kernels.name, "amx");  // inputs, to 8 bits
  const struct { Kind kind; const char* name; double tolerance; } kinds[] = {
      {Kind::float32, "float32", 1e-5}, {Kind::float16, "float16", 1e-5}, {Kind::bfloat16, "bfloat16", rounds ? 0.03 : 1e-5},
      {Kind::float8, "float8", 1e-5},
      {Kind::int8, "int8", 0.03}};  // an input may be rounded to the next code
  for (const auto& it : kinds)
    for (int rows = 1; rows <= kernels.most_rows[int(it.kind)]; rows++) {
      dice.seed(rows);
      const Packed packed(it.kind, 96, 256);
      const Floats x = floats(size_t(rows) * 256), weight = floats(256);
      const Floats together = product(kernels, packed.linear, x, weight.data(), rows, rows);
      compare(kernels.name, it.name, together, product(portable_kernels, packed.linear, x, weight.data(), rows, 1), it.tolerance);
      report(kernels.name, "bits", together == product(kernels, packed.linear, x, weight.data(), rows, 1));
    }
}

void blocks(const Kernels& kernels) {
  for (int format = 0; format < FORMATS; format++) {
    const Layout& it = LAYOUTS[format];
    if (is_float8(Format(format))) continue;  // its panels are others
    for (int rows = 1; rows <= kernels.most_rows[int(Kind::blocks)]; rows++) {
      dice.seed(rows);
      const Coded coded(Format(format), rows % 2 ? 48 : 32, rows % 3 ? 512 : it.unit);
      const Floats x = floats(size_t(rows) * coded.linear.inputs);
      const Floats together = product(kernels, coded.linear, x, nullptr, rows, rows);
      compare(kernels.name, it.name, together, coded.exact(kernels, x, rows), 1e-4);
      report(kernels.name, "bits", together == product(kernels, coded.linear, x, nullptr, rows, 1));
    }
  }
}

void choices(const Kernels& kernels) {
  const int size = 1003;
  Floats x = floats(size);
  for (float& value : x) value *= 5.0f;
  for (double temperature : {0.0, 0.7}) {
    int64_t tokens[2][8];
    double scores[2][8];
    Leaders ours{8, tokens[0], scores[0]}, expected{8, tokens[1], scores[1]};
    lead(kernels, x.data(), size, {123, temperature}, ours);
    lead(portable_kernels, x.data(), size, {123, temperature}, expected);
    report(kernels.name, "lead", ours.found == expected.found && !std::memcmp(tokens[0], tokens[1], sizeof *tokens) &&
                                     !std::memcmp(scores[0], scores[1], sizeof *scores));
  }
  report(kernels.name, "most", kernels.most(x.data(), size) == portable_kernels.most(x.data(), size));
  std::vector<int32_t> places(size), others(size);
  const int above = kernels.above(x.data(), size, 1.0f, places.data());
  report(kernels.name, "above", above == portable_kernels.above(x.data(), size, 1.0f, others.data()) && places == others);
  const double mass = kernels.mass(x.data(), size, 5.0f, 1.0f, 1.0f), other = portable_kernels.mass(x.data(), size, 5.0f, 1.0f, 1.0f);
  report(kernels.name, "mass", std::fabs(mass - other) < 1e-6 * other, std::fabs(mass / other - 1.0));
}

// Queries of one head and what each sees: rows 0 to common - 1, and some further ones.
struct Attended {
  int dim, rows, common;
  Floats keys, values, query;  // [rows, dim] and [queries, dim]
  std::vector<std::vector<int32_t>> more;

  Attended(int dim, int queries, bool bfloat16) : dim(dim), rows(1 + int(dice() % 70)), common(int(dice() % (rows + 1))), more(queries) {
    keys = floats(size_t(rows) * dim), values = floats(size_t(rows) * dim), query = floats(size_t(queries) * dim);
    for (float& value : query) value /= std::sqrt(float(dim));
    if (bfloat16)
      for (Floats* all : {&keys, &values, &query})
        for (float& value : *all) value = widened(rounded(value));
    for (auto& seen : more)
      for (int row = common; row < rows; row++)
        if (dice() % 2 || (!common && row + 1 == rows)) seen.push_back(row);
  }

  // What queries from `first` on see and find, of which the first `together` rows are common.
  Floats found(const Kernels& kernels, Kind kind, int first, int count, int together) const {
    Pages pages({kind, dim}, 1, 1, 2, 96, 0);
    pages.prepare(1, 0, 96);
    pages.prepare(0, 0, 1);
    pages.release(1, 0);  // the other pages of slot 0 are in descending order
    pages.prepare(0, 0, rows);
    for (int row = 0; row < rows; row++) pages.write(kernels, 0, row, 0, &keys[size_t(row) * dim], &values[size_t(row) * dim]);
    std::vector<std::vector<int32_t>> seen(count);
    std::vector<const int32_t*> lists(count);
    std::vector<int> counts(count), hidden(count);
    std::vector<const float*> queries(count);
    std::vector<float*> outs(count);
    Floats out(size_t(count) * dim), packed(size_t(count) * (dim + 2)), scores(size_t(count) * 128);
    for (int q = 0; q < count; q++) {
      for (int row = together; row < common; row++) seen[q].push_back(row);
      seen[q].insert(seen[q].end(), more[first + q].begin(), more[first + q].end());
      lists[q] = seen[q].data(), counts[q] = int(seen[q].size());
      queries[q] = &query[size_t(first + q) * dim], outs[q] = &out[size_t(q) * dim];
    }
    kernels.attend({count, pages.layout(), queries.data(), outs.data(), pages.data(), pages.table(0), pages.page_bytes(), 0, together,
                    rows, lists.data(), counts.data(), 0.0f, hidden.data(), packed.data(), scores.data(), 128});
    return out;
  }

  Floats exact() const {
    Floats out;
    for (size_t q = 0; q < more.size(); q++) {
      std::vector<int32_t> seen(common);
      std::iota(seen.begin(), seen.end(), 0);
      seen.insert(seen.end(), more[q].begin(), more[q].end());
      std::vector<double> sums(dim);
      double total = 0.0;
      for (int32_t row : seen) {
        double score = 0.0;
        for (int d = 0; d < dim; d++) score += double(query[q * dim + d]) * keys[size_t(row) * dim + d];
        total += std::exp(score);
        for (int d = 0; d < dim; d++) sums[d] += std::exp(score) * values[size_t(row) * dim + d];
      }
      for (double sum : sums) out.push_back(float(sum / total));
    }
    return out;
  }
};

void attention(const Kernels& kernels) {
  const struct { Kind kind; const char* name; double tolerance; } kinds[] = {
      {Kind::float32, "attend", 1e-5}, {Kind::bfloat16, "attend to bfloat16", 1e-5}, {Kind::int8, "attend to int8", 0.006}};
  for (const auto& it : kinds)
    for (int dim : {2, 8, 20, 64, 80, 128, 256})
      for (int queries = 1; queries <= kernels.most_queries; queries++) {
        dice.seed(unsigned(dim * 100 + queries));
        const Attended all(dim, queries, it.kind == Kind::bfloat16);
        const Floats found = all.found(kernels, it.kind, 0, queries, all.common);
        compare(kernels.name, it.name, found, all.exact(), it.tolerance);
        bool same = true;
        for (int q = 0; q < queries; q++) {
          const Floats one(found.begin() + q * dim, found.begin() + (q + 1) * dim);
          compare(kernels.name, it.name, one, all.found(portable_kernels, it.kind, q, 1, all.common), 1e-5);
          for (int together : {all.common, all.common / 2}) same = same && one == all.found(kernels, it.kind, q, 1, together);
        }
        report(kernels.name, "bits", same);
      }
}

void codes(const Kernels& kernels) {
  for (int count : {2, 8, 20, 64, 80, 256}) {
    dice.seed(unsigned(count));
    Floats x = floats(size_t(count)), y = floats(size_t(count));
    double product = 0.0, spread = 0.0;
    for (int i = 0; i < count; i++) product += double(x[i]) * y[i];
    Floats other = x;
    kernels.spread(x.data(), count), kernels.spread(y.data(), count), portable_kernels.spread(other.data(), count);
    for (int i = 0; i < count; i++) spread += double(x[i]) * y[i];
    report(kernels.name, "spread", x == other && std::fabs(spread - product) < 1e-5, std::fabs(spread - product));
    std::vector<uint8_t> own(512, 7), portable(512, 7);
    const float step = kernels.code(x.data(), count, own.data(), 8);
    bool right = step == portable_kernels.code(x.data(), count, portable.data(), 8) && own == portable;
    for (int i = 0; i < count; i++) right = right && std::fabs(step * int8_t(own[i / 4 * 8 + i % 4]) - x[i]) < 0.501f * step;
    for (int i = 0; i < 512; i++) right = right && (own[i] == 7 || (i % 8 < 4 && i / 8 * 4 < count));
    report(kernels.name, "code", right);
    x[count / 2] = count % 3 ? INFINITY : NAN;
    report(kernels.name, "code", std::isnan(kernels.code(x.data(), count, own.data(), 8)));
  }
}

Floats turned(const Kernels& kernels, Floats x, const Floats& angles, const Floats& weight) {
  kernels.turn(x.data(), DIM, DIM, weight.data(), 1e-5f, &angles[0], &angles[DIM / 2], 0.125f);
  return x;
}

}  // namespace

int main() {
  const Floats query = floats(DIM), angles = floats(DIM), weight = floats(DIM);
  for (const Kernels* kernels : kernels_here()) {
    linears(*kernels);
    blocks(*kernels);
    choices(*kernels);
    codes(*kernels);
    attention(*kernels);
    compare(kernels->name, "turn", turned(*kernels, query, angles, weight), turned(portable_kernels, query, angles, weight), 1e-6);
  }
  std::printf("kernels_agree: sets=%zu wrong=%d\n", kernels_here().size(), wrong);
  return wrong != 0;
}
