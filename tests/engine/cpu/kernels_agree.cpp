// Every kernel on every instruction set that this processor has, against the portable one, on random input.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "blocks.hpp"

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

Floats attended(const Kernels& kernels, bool halves, const void* pool, const Floats& query) {
  constexpr int ROWS = 40, COMMON = 33, QUERIES = 3;
  const int32_t table[] = {2, 0, 1}, more[QUERIES][3] = {{33, 35}, {34}, {33, 36, 39}};
  const int counts[QUERIES] = {2, 1, 3};
  const int32_t* rows[QUERIES];
  const float* queries[QUERIES];
  float* outs[QUERIES];
  Floats out(QUERIES * DIM), packed(DIM * 8), scores(8 * (ROWS + 64));
  for (int q = 0; q < QUERIES; q++) rows[q] = more[q], queries[q] = &query[q * DIM], outs[q] = &out[q * DIM];
  const size_t page = 2 * LANES * DIM * (halves ? sizeof(uint16_t) : sizeof(float));
  kernels.attend({QUERIES, DIM, DIM, queries, outs, halves, static_cast<const uint8_t*>(pool), table, page, 0, COMMON, ROWS,
                  rows, counts, packed.data(), scores.data(), ROWS + 64});
  return out;
}

// What pages of one head hold, keys [DIM, 16] and values [16, DIM], in pairs: [DIM / 2, 16, 2] and [8, DIM, 2].
std::vector<uint16_t> paired(const Floats& pool) {
  std::vector<uint16_t> pairs(pool.size());
  for (size_t page = 0; page < pool.size(); page += 2 * LANES * DIM)
    for (int d = 0; d < DIM; d++)
      for (int row = 0; row < LANES; row++) {
        const size_t values = page + LANES * DIM;
        pairs[page + (d / 2 * LANES + row) * 2 + d % 2] = rounded(pool[page + d * LANES + row]);
        pairs[values + (row / 2 * DIM + d) * 2 + row % 2] = rounded(pool[values + row * DIM + d]);
      }
  return pairs;
}

Floats in_bfloat16(Floats values) {
  for (float& value : values) value = widened(rounded(value));
  return values;
}

Floats turned(const Kernels& kernels, Floats x, const Floats& angles, const Floats& weight) {
  kernels.turn(x.data(), DIM, weight.data(), 1e-5f, &angles[0], &angles[DIM / 2], 0.125f);
  return x;
}

}  // namespace

int main() {
  const Floats pool = in_bfloat16(floats(3 * 2 * LANES * DIM)), query = in_bfloat16(floats(3 * DIM));
  const Floats angles = floats(DIM), weight = floats(DIM);
  const std::vector<uint16_t> pairs = paired(pool);
  const Floats expected = attended(portable_kernels, false, pool.data(), query);
  for (const Kernels* kernels : kernels_here()) {
    linears(*kernels);
    blocks(*kernels);
    choices(*kernels);
    compare(kernels->name, "attend", attended(*kernels, false, pool.data(), query), expected, 1e-5);
    compare(kernels->name, "attend to bfloat16", attended(*kernels, true, pairs.data(), query), expected, 1e-5);
    compare(kernels->name, "turn", turned(*kernels, query, angles, weight), turned(portable_kernels, query, angles, weight), 1e-6);
  }
  std::printf("kernels_agree: sets=%zu wrong=%d\n", kernels_here().size(), wrong);
  return wrong != 0;
}
