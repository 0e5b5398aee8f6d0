// A program that runs AMX kernels on a processor without AMX. The processor raises a signal at each
// tile instruction, and the signal handler emulates the instruction. The program compares the
// results with those of the next lower level. `native_programs.py` compiles it.
//
// Source of the instructions and their encoding: Intel's manual, volume 2 ("LDTILECFG",
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

#include "random_panels.h"
#include "gemm_args.h"

namespace {

// The state that LDTILECFG sets, and the data of the tiles.
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

[[noreturn]] void fail(const char* reason) {
  std::fprintf(stderr, "%s\n", reason);
  std::_Exit(3);
}

void require(bool holds, const char* reason) {
  if (!holds) fail(reason);
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

float to_float(const uint8_t* bfloat16) {
  uint16_t upper;
  std::memcpy(&upper, bfloat16, 2);
  uint32_t bits = uint32_t{upper} << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// total += the products of the words of a row of one tile and a column of another tile: pairs of
// bfloat16 numbers with separate sums of even and odd numbers, or quads of signed bytes.
void add_words(const uint8_t* a, const uint8_t* b, int words, float& reduce_sum) {
  float sums[2] = {0, 0};
  for (int k = 0; k < words; ++k)
    for (int odd = 0; odd < 2; ++odd)
      sums[odd] =
          std::fma(to_float(a + 4 * k + 2 * odd), to_float(b + 64 * k + 2 * odd), sums[odd]);
  reduce_sum += sums[0] + sums[1];
}

void add_words(const uint8_t* a, const uint8_t* b, int words, int32_t& reduce_sum) {
  for (int k = 0; k < words; ++k)
    for (int i = 0; i < 4; ++i)
      reduce_sum += static_cast<int8_t>(a[4 * k + i]) * static_cast<int8_t>(b[64 * k + i]);
}

// to += a b
template <typename Sum>
void multiply_tiles(int to, int a, int b) {
  const auto& shapes = tiles.shapes;
  require(to != a && to != b && a != b, "the tiles of a product must differ");
  int rows = shapes.rows[to], columns = shapes.bytes[to] / 4, words = shapes.bytes[a] / 4;
  require(rows && columns && words, "a tile of a product has no shape");
  require(shapes.rows[a] == rows && shapes.rows[b] == words && shapes.bytes[b] == shapes.bytes[to],
          "the shapes of a product do not fit");
  for (int m = 0; m < rows; ++m)
    for (int n = 0; n < columns; ++n) {
      Sum reduce_sum;
      std::memcpy(&reduce_sum, &tiles.data[to][m][4 * n], 4);
      add_words(tiles.data[a][m], &tiles.data[b][0][4 * n], words, reduce_sum);
      std::memcpy(&tiles.data[to][m][4 * n], &reduce_sum, 4);
    }
  ++tiles.products;
}

// Read a register of a signal's context by the number in an instruction.
int64_t read_register(const mcontext_t& context, int to_float) {
  constexpr int kPlaces[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                             REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                             REG_R12, REG_R13, REG_R14, REG_R15};
  return context.gregs[kPlaces[to_float]];
}

// One VEX instruction of three bytes of prefix: C4 RXBmmmmm WvvvvLpp opcode ModRM [SIB]
// [displacement].
struct Instruction {
  Instruction(const uint8_t* at, const mcontext_t& context) {
    require(at[0] == 0xc4 && (at[1] & 31) == 2, "an unknown instruction is not there");
    prefix = at[2] & 3, third = ~(at[2] >> 3) & 15, opcode = at[3];
    const int mode = at[4] >> 6, low = at[4] & 7;
    first = at[4] >> 3 & 7, second = low, register_mode = mode == 3, length = 5;
    if (register_mode) return;
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
    if (mode != 0 || base != 5)
      address += read_register(context, base | extend_base);
    else if (low == 5)
      address += reinterpret_cast<int64_t>(at) + length;  // relative to the next instruction
  }

  int prefix, opcode, first, second, third, length;
  bool register_mode;
  int64_t address = 0, stride = 0;
};

void emulate(int, siginfo_t*, void* signal_context) {
  mcontext_t& context = static_cast<ucontext_t*>(signal_context)->uc_mcontext;
  const Instruction instruction(reinterpret_cast<const uint8_t*>(context.gregs[REG_RIP]), context);
  auto* memory = reinterpret_cast<uint8_t*>(instruction.address);
  if (instruction.opcode == 0x49 && instruction.prefix == 0 && !instruction.register_mode) {
    load_shapes(memory);
  } else if (instruction.opcode == 0x49 && instruction.prefix == 0) {
    tiles.configured = false, ++tiles.releases;
  } else {
    require(tiles.configured, "an instruction for tiles ran without shapes");
    const int tile = instruction.first, rows = tiles.shapes.rows[tile],
              bytes = tiles.shapes.bytes[tile];
    if (instruction.opcode == 0x49 && instruction.prefix == 3 && instruction.register_mode) {
      std::memset(tiles.data[tile], 0, sizeof tiles.data[tile]);
    } else if (instruction.opcode == 0x4b && (instruction.prefix == 3 || instruction.prefix == 2)) {
      require(rows > 0, "a tile without a shape is read or written");
      if (instruction.prefix == 3) std::memset(tiles.data[tile], 0, sizeof tiles.data[tile]);
      for (int r = 0; r < rows; ++r)
        if (instruction.prefix == 3)
          std::memcpy(tiles.data[tile][r], memory + r * instruction.stride, bytes);
        else
          std::memcpy(memory + r * instruction.stride, tiles.data[tile][r], bytes);
    } else if (instruction.opcode == 0x5c && instruction.prefix == 2 && instruction.register_mode) {
      multiply_tiles<float>(instruction.first, instruction.second, instruction.third);
    } else if (instruction.opcode == 0x5e && instruction.prefix == 3 && instruction.register_mode) {
      multiply_tiles<int32_t>(instruction.first, instruction.second, instruction.third);
    } else {
      fail("an instruction is neither known nor emulated");
    }
  }
  context.gregs[REG_RIP] += instruction.length;
}

std::mt19937 bits(0);

int64_t draw(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(bits() % static_cast<uint32_t>(high - low + 1));
}

uint16_t narrow(float x) {
  uint32_t group_count;
  std::memcpy(&group_count, &x, 4);
  return static_cast<uint16_t>(group_count >> 16);
}

std::vector<uint16_t> draw_bfloat16(int64_t count) {
  std::vector<uint16_t> numbers(count);
  for (uint16_t& x : numbers) x = narrow(static_cast<float>(draw(-1000, 1000)) / 500);
  return numbers;
}

// Return the largest difference of a product from a float64 sum, relative to the sum of absolute
// terms.
double measure_error(const ed::Gemm& p, int64_t first, int64_t last) {
  auto* x = static_cast<const uint16_t*>(p.x);
  auto* w = static_cast<const uint16_t*>(p.w);
  auto decode = [](uint16_t four_bits) {
    return to_float(reinterpret_cast<const uint8_t*>(&four_bits));
  };
  auto get_result = [&](int64_t i) {
    if (p.y_is_bfloat16) return double{decode(static_cast<const uint16_t*>(p.y)[i])};
    return double{static_cast<const float*>(p.y)[i]};
  };
  double largest = 0;
  for (int64_t r = 0; r < p.rows; ++r)
    for (int64_t o = first; o < last; ++o) {
      double sum = 0, size = 1e-30;
      for (int64_t i = 0; i < p.inputs; ++i) {
        const uint16_t right = p.transposed ? w[o * p.inputs + i] : w[i * p.outputs + o];
        double term = double{decode(x[r * p.inputs + i])} * decode(right);
        sum += term, size += std::fabs(term);
      }
      double rounding = p.y_is_bfloat16 ? std::fabs(sum) / 256 : 0;
      double error = std::fabs(get_result(r * p.outputs + o) - sum) - rounding;
      largest = std::fmax(largest, error / size);
    }
  return largest;
}

// Pack a matrix of bfloat16 numbers.
std::vector<uint16_t> pack_panels(const std::vector<uint16_t>& w, int64_t inputs, int64_t outputs) {
  std::vector<uint16_t> panels(w.size());
  for (int64_t i = 0; i < inputs; ++i)
    for (int64_t o = 0; o < outputs; ++o) {
      const int64_t pair_index =
          o / ed::kTile * inputs / 2 * ed::kTile + i / 2 * ed::kTile + o % ed::kTile;
      panels[2 * pair_index + i % 2] = w[i * outputs + o];
    }
  return panels;
}

// A product of bfloat16 numbers with a random shape. AMX must be near the exact value, and a fixed
// order must equal the next lower level.
void check_gemm() {
  ed::Gemm p{};
  p.rows = draw(16, 100), p.inputs = draw(0, 5) ? draw(1, 200) : draw(2040, 2300);
  p.transposed = draw(0, 1);
  if (p.transposed) p.rows = draw(64, 130);
  p.outputs = draw(1, 200), p.x_is_bfloat16 = true, p.y_is_bfloat16 = draw(0, 1);
  p.format = ed::Format::kBfloat16;
  p.packed = !p.transposed && draw(0, 1);
  if (p.packed) p.inputs += p.inputs % 2, p.outputs = ed::kTile * draw(1, 3);
  auto x = draw_bfloat16(p.rows * p.inputs), w = draw_bfloat16(p.inputs * p.outputs);
  const auto panels = p.packed ? pack_panels(w, p.inputs, p.outputs) : w;
  std::vector<uint32_t> y(p.rows * p.outputs), other(y.size());
  p.x = x.data(), p.w = panels.data(), p.y = y.data();
  const int64_t products = tiles.products, releases = tiles.releases;
  const int64_t unit = p.packed ? ed::kTile / 2 : ed::kUnit;
  for (int64_t first = 0, last; first < p.outputs; first = last) {
    last = std::min(p.outputs, first + unit * draw(1, 12));
    (p.transposed ? ed::kAmxLevel.gemm_transposed : ed::kAmxLevel.gemm)(p, first, last);
  }
  require(tiles.products > products, "no product used tiles");
  require(tiles.releases > releases && !tiles.configured, "the tiles were not released");
  p.w = w.data();
  require(measure_error(p, 0, p.outputs) <= 2e-6, "a product differs from its exact value");
  p.fixed_order = true, p.w = panels.data();
  const int64_t products_before = tiles.products;
  (p.transposed ? ed::kAmxLevel.gemm_transposed : ed::kAmxLevel.gemm)(p, 0, p.outputs);
  require(tiles.products == products_before, "a product in one order used tiles");
  p.y = other.data(), p.w = w.data(), p.packed = false;
  (p.transposed ? ed::kAvx512Bf16Level.gemm_transposed : ed::kAvx512Bf16Level.gemm)(p, 0,
                                                                                    p.outputs);
  require(y == other, "a product in one order differs from the level below");
}

// The gradient of a matrix with a random shape: x is transposed, and packing writes its rows for
// tiles.
void check_gradients() {
  ed::Gemm p{};
  p.rows = p.x_rows = draw(16, 150), p.inputs = draw(1, 300), p.outputs = draw(1, 200);
  p.x_is_bfloat16 = p.y_is_bfloat16 = true, p.format = ed::Format::kBfloat16;
  auto x = draw_bfloat16(p.rows * p.inputs), w = draw_bfloat16(p.inputs * p.outputs);
  std::vector<uint16_t> y(p.rows * p.outputs), rows(2 * x.size());
  require(ed::kAmxLevel.lhs_in_rows, "tiles multiply rows");
  for (int64_t first = 0; first < p.inputs; first += ed::kTile)
    ed::kAmxLevel.pack_lhs(p, x.data(), rows.data(), first, std::min(p.inputs, first + ed::kTile));
  for (int64_t row = 0; row < p.rows; ++row)
    for (int64_t i = 0; i < p.inputs; ++i)
      require(rows[row * p.inputs + i] == x[i * p.rows + row], "a number of x is misplaced");
  p.x = rows.data(), p.w = w.data(), p.y = y.data();
  const int64_t products = tiles.products;
  ed::kAmxLevel.gemm(p, 0, p.outputs);
  require(tiles.products > products && !tiles.configured, "no gradient used tiles");
  require(measure_error(p, 0, p.outputs) <= 2e-6, "a gradient differs from its exact value");
}

// A product of packed codes with int8 rows must equal the next lower level.
void check_int8_gemm() {
  ed::Gemm p{};
  const bool four_bits = draw(0, 1);
  const int64_t groups = draw(1, 3), quad_inputs = four_bits ? 8 : 4;
  p.rows = draw(16, 100), p.group = quad_inputs * draw(1, 100), p.inputs = groups * p.group;
  p.outputs = ed::kTile * draw(1, 3), p.packed = true;
  p.format = four_bits ? ed::Format::kFourBits : ed::Format::kInt8;
  p.scale.kind = draw(0, 1) ? ed::ParamType::kFloat16 : ed::ParamType::kFloat32;
  std::vector<float> x(p.rows * p.inputs), y(p.rows * p.outputs), other(y.size());
  for (float& to_float : x) to_float = static_cast<float>(draw(-1000, 1000)) / 500;
  std::vector<float> row_scale(p.rows * groups);
  if (draw(0, 1)) p.zero = {x.data(), draw(0, 1) ? ed::ParamType::kUint8 : ed::ParamType::kFloat32};
  const int64_t group_count = p.outputs / ed::kTile * groups;
  std::vector<uint8_t> codes(group_count * ed::get_panel_group_bytes(p));
  ed::fill_code_panels(p, group_count, codes.data(), draw);
  p.x = x.data(), p.w = codes.data(), p.y = y.data();
  p.row_scale = row_scale.data();
  auto compute = [&](const ed::Level& level) {
    const ed::Int8RowSizes sizes = level.get_int8_row_sizes(p);
    std::vector<int8_t> numbers(p.rows * sizes.bytes);
    std::vector<int32_t> sums(p.rows * sizes.sums);
    p.x_int8 = numbers.data(), p.row_sums = sums.data();
    for (int64_t row = 0; row < p.rows; ++row) level.quantize_row(p, row);
    const int64_t share = ed::kTile / 2 * draw(1, 4);
    for (int64_t first = 0; first < p.outputs; first += share)
      level.int8_gemm(p, first, std::min(p.outputs, first + share));
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
  struct sigaction action{};
  action.sa_sigaction = emulate, action.sa_flags = SA_SIGINFO;
  sigaction(SIGILL, &action, nullptr);
  const int64_t rounds = count > 1 ? std::atoll(arguments[1]) : 60;
  for (int64_t round = 0; round < rounds; ++round)
    check_gemm(), check_gradients(), check_int8_gemm();
  std::printf("%ld products of each kind, %ld instructions\n", static_cast<long>(rounds),
              static_cast<long>(tiles.products));
  return 0;
}
