// Arguments of a matrix product y = x w, and the kernel table of a level. No dependency on XLA.
#pragma once

#include <cstdint>

#include "attention_args.h"
#include "recurrence_args.h"

namespace ed {

// The format of the weights: float numbers, or codes.
enum class Format { kFloat32, kBfloat16, kInt8, kFp8, kFourBits };

// The type of a scale or zero.
enum class ParamType { kFloat32, kFloat16, kUint8, kE8m0 };

constexpr int64_t get_byte_width(ParamType kind) {
  return kind == ParamType::kFloat32 ? 4 : kind == ParamType::kFloat16 ? 2 : 1;
}

// The scales or zeros of quantization groups, [inputs / group, outputs], or the transpose; null =
// none. For packed codes, the parameters of the first group.
struct GroupParams {
  const void* data;
  ParamType kind;
};

// The numbers of `ACTS` in ed_layers/native/products.py.
enum class Activation { kNone, kSilu, kGeluTanh, kGelu, kQuickGelu, kRelu };

// y [rows, outputs] = x [rows, inputs] * w. Arrays are dense and row-major.
struct Gemm {
  const void* x;  // float32 or bfloat16
  bool x_is_bfloat16, y_is_bfloat16;
  void* y;
  int64_t rows, inputs, outputs;

  // Whether x is transposed, [inputs, x_rows]: float32, or words that `pack_lhs` of the level packs
  // from bfloat16 numbers. A task has some of these rows.
  bool x_transposed;
  int64_t x_rows;

  // [inputs, outputs]; four bits: [inputs / 2, outputs] bytes with the even input in the lower
  // half. Transposed: [outputs, inputs], or [outputs, inputs / 2].
  const void* w;
  bool transposed;
  bool packed;  // see gemm_packed.h, and int8_gemm_packed.h for int8 rows
  Format format;
  // Codes only: value = (level - zero) * scale. The level of a four-bit code is table[code].
  GroupParams scale, zero;
  const float* table;  // [16]
  int64_t group;       // inputs of a group

  // Whether the order of a sum is the same for all numbers of rows. AMX then computes no product,
  // and no transposed matrix is packed.
  bool fixed_order;

  // Epilogue: a bias [outputs] with the dtype of y, or null; then the activation.
  const void* bias;
  Activation act;

  // Int8 rows of x, which `quantize_row` writes: see quantize_rows.h.
  int8_t* x_int8;
  float* row_scale;
  int32_t* row_sums;
};

// Outputs of a tile, and the granularity of tasks. A narrower tile has little overhead if it is a
// multiple of kUnit, except for int8 rows.
constexpr int64_t kTile = 64, kUnit = 16;

// Return the bytes of a group of packed codes: see int8_gemm_packed.h.
constexpr int64_t get_panel_group_bytes(const Gemm& p) {
  const int64_t codes = p.format == Format::kFourBits ? p.group / 2 : p.group;
  return kTile *
         (get_byte_width(p.scale.kind) + (p.zero.data ? get_byte_width(p.zero.kind) : 0) + codes);
}

// Return whether bfloat16 rows are multiplied by an unpacked bfloat16 matrix, which some levels do
// in pairs of inputs.
constexpr bool uses_bf16_pairs(const Gemm& p) {
  return p.x_is_bfloat16 && p.format == Format::kBfloat16 && !p.transposed;
}

// Return the smallest number of rows for which large panels are the fastest (gemm.h).
constexpr int64_t get_large_gemm_rows(const Gemm& p) { return uses_bf16_pairs(p) ? 128 : 64; }

// Compute the outputs [first, last) of all rows. `first` is a multiple of kUnit, and of kTile for
// int8 rows. For packed weights, both are multiples of half a panel.
//
// Every sum has one order, which depends neither on the other rows nor on the partition into tasks.
using GemmKernel = void (*)(const Gemm&, int64_t first, int64_t last);

// y of `gate` becomes act(y) times y of `up`, for the outputs [first, last).
using GluKernel = void (*)(Activation, const Gemm& gate, const Gemm& up, int64_t first,
                           int64_t last);

// Bytes of one int8 row, and its number of block sums.
struct Int8RowSizes {
  int64_t bytes, sums;
};

// The kernel table of a level, and its name.
struct Level {
  const char* name;
  GemmKernel gemm, gemm_transposed;  // the latter for transposed w
  GemmKernel int8_gemm;              // for int8 rows
  GluKernel apply_glu;
  // Pack the inputs [first, last) of a transposed bfloat16 x into a buffer of four bytes per
  // number, in the layout that the level multiplies: transposed words or rows. `first` is even.
  void (*pack_lhs)(const Gemm&, const void* x, void* buffer, int64_t first, int64_t last);
  bool lhs_in_rows;
  Int8RowSizes (*get_int8_row_sizes)(const Gemm&);
  void (*quantize_row)(const Gemm&, int64_t row);  // to int8
  void (*gather_rows)(const Gemm&, const int32_t* at, int64_t first,
                      int64_t last);  // see int8_gemm_packed.h
  int64_t (*find_argmax)(const float* row, int64_t count);
  AttentionKernels attention;
  void (*apply_rotary)(const RotaryArgs&, int64_t first, int64_t last);        // tokens
  void (*run_recurrence)(const RecurrenceArgs&, int64_t first, int64_t last);  // heads
};

extern const Level kBaseLevel;
#if defined(__x86_64__)
extern const Level kAvx2Level, kAvxVnniLevel, kAvx512Level, kAvx512VnniLevel, kAvx512Bf16Level,
    kAmxLevel;
#elif defined(__aarch64__)
extern const Level kDotprodLevel;
#endif

}  // namespace ed
