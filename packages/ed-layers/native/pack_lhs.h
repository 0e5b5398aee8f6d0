// Packing of the left operand of a weight gradient, x [inputs, rows]. Bfloat16 numbers are
// converted to the layout that the level multiplies. Float32 numbers are read without a copy.
#pragma once

#include "gemm_blocked.h"
#include "transpose.h"

namespace ed {
namespace {

#if defined(__AMX_BF16__)
constexpr bool kLhsInRows = true;  // AMX tiles need rows

// The transpose of x: [x_rows, inputs].
void pack_lhs(const Gemm& p, const void* x, void* buffer, int64_t first, int64_t last) {
  auto* from = static_cast<const uint16_t*>(x);
  auto* to = static_cast<uint16_t*>(buffer);
  auto load_pair = [&](int64_t pair, int64_t column) {
    auto* even = from + 2 * pair * p.x_rows + column;
    const int64_t count = p.x_rows - column;
    Vec upper = 2 * pair + 1 < last ? load_partial(even + p.x_rows, count) : Vec{};
    Ints lower = ((Ints)load_partial(even, count) >> 16) & 0xffff;
    return (Vec)((Ints)upper | lower);
  };
  auto store_words = [&](int64_t column, int64_t pair, Vec numbers) {
    const int64_t bytes = min_int(sizeof numbers, 2 * (last - 2 * pair));
    std::memcpy(to + column * p.inputs + 2 * pair, &numbers, bytes);
  };
  for (int64_t pair = first / 2; 2 * pair < last; pair += kLanes)
    for (int64_t column = 0; column < p.x_rows; column += kLanes)
      transpose_block(pair, (last + 1) / 2, column, p.x_rows, load_pair, store_words);
}
#else
constexpr bool kLhsInRows = false;

#if defined(__AVX512BF16__)
// Pairs of inputs: [(inputs + 1) / 2, x_rows, 2].
void pack_lhs(const Gemm& p, const void* x, void* buffer, int64_t first, int64_t last) {
  auto* even = static_cast<const uint16_t*>(x) + first * p.x_rows;
  auto* to = static_cast<uint16_t*>(buffer) + first * p.x_rows;
  const int64_t full_rows = p.x_rows / 32 * 32;
  for (int64_t i = first; i < last; i += 2, even += 2 * p.x_rows, to += 2 * p.x_rows) {
    const uint16_t* odd = i + 1 < last ? even + p.x_rows : nullptr;
    interleave_rows(even, odd, full_rows, to);
    for (int64_t c = full_rows; c < p.x_rows; ++c)
      to[2 * c] = even[c], to[2 * c + 1] = odd ? odd[c] : 0;
  }
}
#else
// Float32 numbers: [inputs, x_rows].
void pack_lhs(const Gemm& p, const void* x, void* buffer, int64_t first, int64_t last) {
  auto* from = static_cast<const uint16_t*>(x);
  auto* to = static_cast<float*>(buffer);
  const int64_t end = last * p.x_rows;
  for (int64_t c = first * p.x_rows; c < end; c += kLanes)
    store_partial(to + c, load_partial(from + c, end - c), end - c);
}
#endif
#endif

}  // namespace
}  // namespace ed
