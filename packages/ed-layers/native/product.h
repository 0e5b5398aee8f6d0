// A matrix product y = x w on a CPU: the arguments, and the table of functions of one level of
// instructions. Nothing here depends on XLA.
#pragma once

#include <cstdint>

namespace ed {

// How the numbers of a matrix are stored. The values are part of the interface to Python
// (ed_layers/native/products.py).
enum class Format : int64_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2, kFourBits = 3 };

// y [rows, outputs] = x [rows, inputs] times w. Arrays are dense, the last axis innermost.
struct Product {
  const void* x;       // float32 or bfloat16
  bool x_is_bfloat16;  // and so is y
  void* y;
  int64_t rows, inputs, outputs;

  // [inputs, outputs]; four bits: [inputs / 2, outputs] bytes, the even input in the lower half.
  // Transposed: [outputs, inputs], float32 or bfloat16.
  const void* w;
  bool transposed;
  Format format;
  // Of codes alone: value = (table[code] - zero) * scale, both [inputs / group, outputs], zero may
  // be null. `table` has the 16 values of four bits.
  const float* scale;
  const float* zero;
  const float* table;
  int64_t group;
};

// Outputs that are computed together: a task is a whole number of them.
constexpr int64_t kTile = 64;

// The product of all rows with the outputs [first, last). `first` is a multiple of kTile.
//
// Every sum is taken in one order, whatever the other rows are, and whoever computes which outputs.
using ProductOfOutputs = void (*)(const Product&, int64_t first, int64_t last);

// The functions of one level, and its name.
struct Level {
  const char* name;
  ProductOfOutputs columns, rows;  // the latter where w lies transposed
};

extern const Level kBaseLevel;
#if defined(__x86_64__)
extern const Level kAvx2Level, kAvx512Level, kAvx512Bf16Level;
#endif

}  // namespace ed
