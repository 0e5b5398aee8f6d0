// A matrix product y = x w on a CPU: the arguments, and the table of functions of one level of
// instructions. Nothing here depends on XLA.
#pragma once

#include <cstdint>

#include "attend.h"
#include "recur.h"

namespace ed {

// How the numbers of a matrix are stored: as numbers, or as codes.
enum class Format { kFloat32, kBfloat16, kInt8, kFp8, kFourBits };

// How a scale, or what stands for zero, is stored.
enum class Small { kFloat32, kFloat16, kUint8, kPowerOfTwo };

constexpr int64_t bytes_of(Small kind) {
  return kind == Small::kFloat32 ? 4 : kind == Small::kFloat16 ? 2 : 1;
}

// The numbers of the groups of codes, [inputs / group, outputs], or turned; null = none. In panels,
// those of the first group.
struct OfGroups {
  const void* data;
  Small kind;
};

// By the numbers of `ACTS` in ed_layers/native/products.py.
enum class Act { kNone, kSilu, kGeluTanh, kGelu, kQuickGelu, kRelu };

// y [rows, outputs] = x [rows, inputs] times w. Arrays are dense, the last axis innermost.
struct Product {
  const void* x;       // float32 or bfloat16
  bool x_is_bfloat16, y_is_bfloat16;
  void* y;
  int64_t rows, inputs, outputs;

  // Whether x lies across, [inputs, x_rows]: float32, or words that `across` of the level made of
  // bfloat16 numbers. A task has some of these rows.
  bool x_across;
  int64_t x_rows;

  // [inputs, outputs]; four bits: [inputs / 2, outputs] bytes, the even input in the lower half.
  // Transposed: [outputs, inputs], or half as many bytes.
  const void* w;
  bool transposed;
  bool in_panels;  // see number_panels.h, and panels.h for x in 8 bits
  Format format;
  // Of codes alone: value = (level - zero) * scale, where the level of four bits is table[code].
  OfGroups scale, zero;
  const float* table;  // [16]
  int64_t group;       // inputs

  // Whether a sum has one order, however many rows there are: then AMX does not compute it, and a
  // transposed matrix is not turned.
  bool fixed;

  // What is done to the sums: a bias [outputs], as y; null = none. Then the activation.
  const void* bias;
  Act act;

  // Where x is multiplied in 8 bits ("whole numbers"): see whole.h, which makes these.
  int8_t* numbers;
  float* row_scale;
  int32_t* row_sums;
};

// Outputs that are computed together, and the least number of them that tasks are cut by: a
// narrower tile costs little where it is a multiple of kUnit, but with 8-bit activations.
constexpr int64_t kTile = 64, kUnit = 16;

// The bytes of a group of codes in a panel: see panels.h.
constexpr int64_t panel_group_bytes(const Product& p) {
  const int64_t codes = p.format == Format::kFourBits ? p.group / 2 : p.group;
  return kTile * (bytes_of(p.scale.kind) + (p.zero.data ? bytes_of(p.zero.kind) : 0) + codes);
}

// Whether bfloat16 rows are multiplied by a bfloat16 matrix where it lies, which some levels do by
// pairs of inputs.
constexpr bool of_pairs(const Product& p) {
  return p.x_is_bfloat16 && p.format == Format::kBfloat16 && !p.transposed;
}

// The number of rows from which on large panels of a matrix of numbers are fastest (many.h).
constexpr int64_t many_rows(const Product& p) { return of_pairs(p) ? 128 : 64; }

// The product of all rows with the outputs [first, last). `first` is a multiple of kUnit, and of kTile
// for x in 8 bits; in panels, both are multiples of half a panel.
//
// Every sum is taken in one order, whatever the other rows are, and whoever computes which outputs.
using ProductOfOutputs = void (*)(const Product&, int64_t first, int64_t last);

// y of `gate` becomes act(y) times y of `up`, at the outputs [first, last).
using GateOfOutputs = void (*)(Act, const Product& gate, const Product& up, int64_t first,
                               int64_t last);

// Bytes that the whole numbers of one row take, and how many sums of them there are.
struct WholeSizes {
  int64_t numbers, sums;
};

// The functions of one level, and its name.
struct Level {
  const char* name;
  ProductOfOutputs columns, rows;  // the latter where w lies transposed
  ProductOfOutputs whole;          // where x is multiplied in 8 bits
  GateOfOutputs gate;
  // Write inputs [first, last) of a bfloat16 x that lies across to a buffer of four bytes for each
  // number, as the level multiplies them: across or in rows. `first` is even.
  void (*across)(const Product&, const void* x, void* buffer, int64_t first, int64_t last);
  bool across_in_rows;
  WholeSizes (*whole_sizes)(const Product&);
  void (*round_row)(const Product&, int64_t row);  // x in 8 bits
  void (*take)(const Product&, const int32_t* at, int64_t first, int64_t last);  // see panels.h
  int64_t (*first_largest)(const float* row, int64_t count);
  Attention attention;
  void (*rotate)(const Rotary&, int64_t first, int64_t last);  // tokens
  void (*recur)(const Recurrence&, int64_t first, int64_t last);  // heads
};

extern const Level kBaseLevel;
#if defined(__x86_64__)
extern const Level kAvx2Level, kAvxVnniLevel, kAvx512Level, kAvx512VnniLevel, kAvx512Bf16Level,
    kAmxLevel;
#elif defined(__aarch64__)
extern const Level kDotprodLevel;
#endif

}  // namespace ed
