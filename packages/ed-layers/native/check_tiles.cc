// A program that computes products by AMX on a processor without AMX: such a processor stops at each
// instruction for tiles, and the handler of the signal computes what the instruction would do. The
// results are compared with those of the level below. The nightly test compiles this program with
// `emulated_tiles` of ed_layers/native/build.py.
//
// Source of the instructions and of their encoding: Intel's manual, volume 2 ("LDTILECFG",
// "TDPBF16PS", "TDPBSSD", "TILELOADD", "TILERELEASE", "TILESTORED", "TILEZERO").
#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include <ucontext.h>

#include "check_panels.h"
#include "product.h"

namespace {

// The state that LDTILECFG sets, and the numbers of the tiles.
struct Tiles {
  struct Shapes {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } shapes;
  alignas(64) uint8_t data[8][16][64];
  bool configured;
  int64_t products, releases;  // instructions so far
};
Tiles tiles;

[[noreturn]] void refuse(const char* reason) {
  std::fprintf(stderr, "%s\n", reason);
  std::_Exit(3);
}

void require(bool holds, const char* reason) {
  if (!holds) refuse(reason);
}

void load_shapes(const uint8_t* from) {
  std::memcpy(&tiles.shapes, from, sizeof tiles.shapes);
  require(tiles.shapes.palette == 1 && tiles.shapes.start == 0, "the palette is not 1");
  for (int i = 0; i < 16; ++i) {
    int rows = tiles.shapes.rows[i], bytes = tiles.shapes.bytes[i];
    require(i < 8 || (rows == 0 && bytes == 0), "there are only 8 tiles");
    require(rows <= 16 && bytes <= 64 && (rows == 0) == (bytes == 0), "a tile has a wrong shape");
  }
  std::memset(tiles.data, 0, sizeof tiles.data);
  tiles.configured = true;
}

float number(const uint8_t* bfloat16) {
  uint16_t upper;
  std::memcpy(&upper, bfloat16, 2);
  uint32_t bits = uint32_t{upper} << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// total += the products of the words of a row of one tile and of a column of another: pairs of
// bfloat16 numbers, of which even and odd ones are summed apart, or fours of bytes with a sign.
void add_words(const uint8_t* a, const uint8_t* b, int words, float& total) {
  float sums[2] = {0, 0};
  for (int k = 0; k < words; ++k)
    for (int odd = 0; odd < 2; ++odd)
      sums[odd] = std::fma(number(a + 4 * k + 2 * odd), number(b + 64 * k + 2 * odd), sums[odd]);
  total += sums[0] + sums[1];
}

void add_words(const uint8_t* a, const uint8_t* b, int words, int32_t& total) {
  for (int k = 0; k < words; ++k)
    for (int i = 0; i < 4; ++i)
      total += static_cast<int8_t>(a[4 * k + i]) * static_cast<int8_t>(b[64 * k + i]);
}

// to += a b
template <typename Sum>
void multiply(int to, int a, int b) {
  const auto& shapes = tiles.shapes;
  require(to != a && to != b && a != b, "the tiles of a product must differ");
  int rows = shapes.rows[to], columns = shapes.bytes[to] / 4, words = shapes.bytes[a] / 4;
  require(rows && columns && words, "a tile of a product has no shape");
  require(shapes.rows[a] == rows && shapes.rows[b] == words && shapes.bytes[b] == shapes.bytes[to],
          "the shapes of a product do not fit");
  for (int m = 0; m < rows; ++m)
    for (int n = 0; n < columns; ++n) {
      Sum total;
      std::memcpy(&total, &tiles.data[to][m][4 * n], 4);
      add_words(tiles.data[a][m], &tiles.data[b][0][4 * n], words, total);
      std::memcpy(&tiles.data[to][m][4 * n], &total, 4);
    }
  ++tiles.products;
}

// The registers of a signal's context by the number in an instruction.
int64_t read_register(const mcontext_t& context, int number) {
  constexpr int kPlaces[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                             REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return context.gregs[kPlaces[number]];
}

// One VEX instruction of three bytes of prefix: C4 RXBmmmmm WvvvvLpp opcode ModRM [SIB] [displacement].
struct Instruction {
  Instruction(const uint8_t* at, const mcontext_t& context) {
    require(at[0] == 0xc4 && (at[1] & 31) == 2, "an unknown instruction is not there");
    prefix = at[2] & 3, third = ~(at[2] >> 3) & 15, opcode = at[3];
    const int mode = at[4] >> 6, low = at[4] & 7;
    first = at[4] >> 3 & 7, second = low, of_registers = mode == 3, length = 5;
    if (of_registers) return;
    const int extend_base = (~at[1] >> 5 & 1) << 3, extend_index = (~at[1] >> 6 & 1) << 3;
    int base = low;
    if (low == 4) {  // SIB
      const uint8_t sib = at[length++];
      base = sib & 7;
      const int index = (sib >> 3 & 7) | extend_index;
      if (index != 4) stride = read_register(context, index) << (sib >> 6);
    }
    int64_t displacement = 0;
    if (mode == 1) displacement = static_cast<int8_t>(at[length]), length += 1;
    if (mode == 2 || (mode == 0 && base == 5)) {
      int32_t wide;
      std::memcpy(&wide, at + length, 4), displacement = wide, length += 4;
    }
    address = displacement;
    if (mode != 0 || base != 5) address += read_register(context, base | extend_base);
    else if (low == 5) address += reinterpret_cast<int64_t>(at) + length;  // relative to the next one
  }

  int prefix, opcode, first, second, third, length;
  bool of_registers;
  int64_t address = 0, stride = 0;
};

void run(int, siginfo_t*, void* of_signal) {
  mcontext_t& context = static_cast<ucontext_t*>(of_signal)->uc_mcontext;
  const Instruction one(reinterpret_cast<const uint8_t*>(context.gregs[REG_RIP]), context);
  auto* memory = reinterpret_cast<uint8_t*>(one.address);
  if (one.opcode == 0x49 && one.prefix == 0 && !one.of_registers) {
    load_shapes(memory);
  } else if (one.opcode == 0x49 && one.prefix == 0) {
    tiles.configured = false, ++tiles.releases;
  } else {
    require(tiles.configured, "an instruction for tiles ran without shapes");
    const int tile = one.first, rows = tiles.shapes.rows[tile], bytes = tiles.shapes.bytes[tile];
    if (one.opcode == 0x49 && one.prefix == 3 && one.of_registers) {
      std::memset(tiles.data[tile], 0, sizeof tiles.data[tile]);
    } else if (one.opcode == 0x4b && (one.prefix == 3 || one.prefix == 2)) {
      require(rows > 0, "a tile without a shape is read or written");
      if (one.prefix == 3) std::memset(tiles.data[tile], 0, sizeof tiles.data[tile]);
      for (int r = 0; r < rows; ++r)
        if (one.prefix == 3)
          std::memcpy(tiles.data[tile][r], memory + r * one.stride, bytes);
        else
          std::memcpy(memory + r * one.stride, tiles.data[tile][r], bytes);
    } else if (one.opcode == 0x5c && one.prefix == 2 && one.of_registers) {
      multiply<float>(one.first, one.second, one.third);
    } else if (one.opcode == 0x5e && one.prefix == 3 && one.of_registers) {
      multiply<int32_t>(one.first, one.second, one.third);
    } else {
      refuse("an instruction is neither known nor emulated");
    }
  }
  context.gregs[REG_RIP] += one.length;
}

std::mt19937 bits(0);

int64_t draw(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(bits() % static_cast<uint32_t>(high - low + 1));
}

uint16_t narrow(float x) {
  uint32_t all;
  std::memcpy(&all, &x, 4);
  return static_cast<uint16_t>(all >> 16);
}

std::vector<uint16_t> halves(int64_t count) {
  std::vector<uint16_t> numbers(count);
  for (uint16_t& x : numbers) x = narrow(static_cast<float>(draw(-1000, 1000)) / 500);
  return numbers;
}

// The largest difference of a product from a sum in float64, in units of the sizes of its terms.
double difference(const ed::Product& p, int64_t first, int64_t last) {
  auto* x = static_cast<const uint16_t*>(p.x);
  auto* w = static_cast<const uint16_t*>(p.w);
  auto of = [](uint16_t half) { return number(reinterpret_cast<const uint8_t*>(&half)); };
  auto found = [&](int64_t i) {
    if (p.y_is_bfloat16) return double{of(static_cast<const uint16_t*>(p.y)[i])};
    return double{static_cast<const float*>(p.y)[i]};
  };
  double largest = 0;
  for (int64_t r = 0; r < p.rows; ++r)
    for (int64_t o = first; o < last; ++o) {
      double sum = 0, size = 1e-30;
      for (int64_t i = 0; i < p.inputs; ++i) {
        const uint16_t right = p.transposed ? w[o * p.inputs + i] : w[i * p.outputs + o];
        double term = double{of(x[r * p.inputs + i])} * of(right);
        sum += term, size += std::fabs(term);
      }
      double rounding = p.y_is_bfloat16 ? std::fabs(sum) / 256 : 0;
      double apart = std::fabs(found(r * p.outputs + o) - sum) - rounding;
      largest = std::fmax(largest, apart / size);
    }
  return largest;
}

// A matrix of bfloat16 numbers in panels.
std::vector<uint16_t> panels_of(const std::vector<uint16_t>& w, int64_t inputs, int64_t outputs) {
  std::vector<uint16_t> panels(w.size());
  for (int64_t i = 0; i < inputs; ++i)
    for (int64_t o = 0; o < outputs; ++o) {
      const int64_t of_pair = o / ed::kTile * inputs / 2 * ed::kTile + i / 2 * ed::kTile + o % ed::kTile;
      panels[2 * of_pair + i % 2] = w[i * outputs + o];
    }
  return panels;
}

// A product of a random shape and bfloat16 numbers: by tiles near its exact value, and in one order
// of sums as on the level below.
void check_numbers() {
  ed::Product p{};
  p.rows = draw(16, 100), p.inputs = draw(0, 5) ? draw(1, 200) : draw(2040, 2300);
  p.transposed = draw(0, 1);
  if (p.transposed) p.rows = draw(64, 130);
  p.outputs = draw(1, 200), p.x_is_bfloat16 = true, p.y_is_bfloat16 = draw(0, 1);
  p.format = ed::Format::kBfloat16;
  p.in_panels = !p.transposed && draw(0, 1);
  if (p.in_panels) p.inputs += p.inputs % 2, p.outputs = ed::kTile * draw(1, 3);
  auto x = halves(p.rows * p.inputs), w = halves(p.inputs * p.outputs);
  const auto panels = p.in_panels ? panels_of(w, p.inputs, p.outputs) : w;
  std::vector<uint32_t> y(p.rows * p.outputs), other(y.size());
  p.x = x.data(), p.w = panels.data(), p.y = y.data();
  const int64_t products = tiles.products, releases = tiles.releases;
  const int64_t unit = p.in_panels ? ed::kTile / 2 : ed::kUnit;
  for (int64_t first = 0, last; first < p.outputs; first = last) {
    last = std::min(p.outputs, first + unit * draw(1, 12));
    (p.transposed ? ed::kAmxLevel.rows : ed::kAmxLevel.columns)(p, first, last);
  }
  require(tiles.products > products, "no product used tiles");
  require(tiles.releases > releases && !tiles.configured, "the tiles were not released");
  p.w = w.data();
  require(difference(p, 0, p.outputs) <= 2e-6, "a product differs from its exact value");
  p.fixed = true, p.w = panels.data();
  const int64_t before = tiles.products;
  (p.transposed ? ed::kAmxLevel.rows : ed::kAmxLevel.columns)(p, 0, p.outputs);
  require(tiles.products == before, "a product in one order used tiles");
  p.y = other.data(), p.w = w.data(), p.in_panels = false;
  (p.transposed ? ed::kAvx512Bf16Level.rows : ed::kAvx512Bf16Level.columns)(p, 0, p.outputs);
  require(y == other, "a product in one order differs from the level below");
}

// The gradient of a matrix of a random shape: x lies across, and its rows are made for tiles.
void check_gradients() {
  ed::Product p{};
  p.rows = p.x_rows = draw(16, 150), p.inputs = draw(1, 300), p.outputs = draw(1, 200);
  p.x_is_bfloat16 = p.y_is_bfloat16 = true, p.format = ed::Format::kBfloat16;
  auto x = halves(p.rows * p.inputs), w = halves(p.inputs * p.outputs);
  std::vector<uint16_t> y(p.rows * p.outputs), rows(2 * x.size());
  require(ed::kAmxLevel.across_in_rows, "tiles multiply rows");
  for (int64_t first = 0; first < p.inputs; first += ed::kTile)
    ed::kAmxLevel.across(p, x.data(), rows.data(), first, std::min(p.inputs, first + ed::kTile));
  for (int64_t row = 0; row < p.rows; ++row)
    for (int64_t i = 0; i < p.inputs; ++i)
      require(rows[row * p.inputs + i] == x[i * p.rows + row], "a number of x is misplaced");
  p.x = rows.data(), p.w = w.data(), p.y = y.data();
  const int64_t products = tiles.products;
  ed::kAmxLevel.columns(p, 0, p.outputs);
  require(tiles.products > products && !tiles.configured, "no gradient used tiles");
  require(difference(p, 0, p.outputs) <= 2e-6, "a gradient differs from its exact value");
}

// A product of packed codes and rows in 8 bits: the bits of the level below.
void check_codes() {
  ed::Product p{};
  const bool half = draw(0, 1);
  const int64_t groups = draw(1, 3), fours = half ? 8 : 4;
  p.rows = draw(16, 100), p.group = fours * draw(1, 100), p.inputs = groups * p.group;
  p.outputs = ed::kTile * draw(1, 3), p.in_panels = true;
  p.format = half ? ed::Format::kFourBits : ed::Format::kInt8;
  p.scale.kind = draw(0, 1) ? ed::Small::kFloat16 : ed::Small::kFloat32;
  std::vector<float> x(p.rows * p.inputs), y(p.rows * p.outputs), other(y.size());
  for (float& number : x) number = static_cast<float>(draw(-1000, 1000)) / 500;
  std::vector<float> row_scale(p.rows * groups);
  if (draw(0, 1)) p.zero = {x.data(), draw(0, 1) ? ed::Small::kUint8 : ed::Small::kFloat32};
  const int64_t all = p.outputs / ed::kTile * groups;
  std::vector<uint8_t> codes(all * ed::panel_group_bytes(p));
  ed::fill_code_panels(p, all, codes.data(), draw);
  p.x = x.data(), p.w = codes.data(), p.y = y.data();
  p.row_scale = row_scale.data();
  auto compute = [&](const ed::Level& level) {
    const ed::WholeSizes sizes = level.whole_sizes(p);
    std::vector<int8_t> numbers(p.rows * sizes.numbers);
    std::vector<int32_t> sums(p.rows * sizes.sums);
    p.numbers = numbers.data(), p.row_sums = sums.data();
    for (int64_t row = 0; row < p.rows; ++row) level.round_row(p, row);
    const int64_t share = ed::kTile / 2 * draw(1, 4);
    for (int64_t first = 0; first < p.outputs; first += share)
      level.whole(p, first, std::min(p.outputs, first + share));
  };
  const int64_t products = tiles.products;
  compute(ed::kAmxLevel);
  require(tiles.products > products && !tiles.configured, "no product of codes used tiles");
  p.y = other.data();
  compute(ed::kAvx512Bf16Level);
  require(y == other, "a product of codes differs from the level below");
}

}  // namespace

int main(int count, char** arguments) {
  struct sigaction action {};
  action.sa_sigaction = run, action.sa_flags = SA_SIGINFO;
  sigaction(SIGILL, &action, nullptr);
  const int64_t rounds = count > 1 ? std::atoll(arguments[1]) : 60;
  for (int64_t round = 0; round < rounds; ++round)
    check_numbers(), check_gradients(), check_codes();
  std::printf("%ld products of each kind, %ld instructions\n", static_cast<long>(rounds),
              static_cast<long>(tiles.products));
  return 0;
}
