// The left operand of the gradient of a matrix, x [inputs, rows], which lies across: bfloat16 numbers
// are brought into the form that a level multiplies. Float32 numbers need no copy.
#pragma once

#include "columns.h"
#include "turn.h"

namespace ed {
namespace {

#if defined(__AMX_BF16__)
constexpr bool kAcrossInRows = true;  // tiles need rows

// Rows of x: [x_rows, inputs].
void across(const Product& p, const void* x, void* buffer, int64_t first, int64_t last) {
  auto* from = static_cast<const uint16_t*>(x);
  auto* to = static_cast<uint16_t*>(buffer);
  auto pair_of = [&](int64_t pair, int64_t column) {
    auto* even = from + 2 * pair * p.x_rows + column;
    const int64_t count = p.x_rows - column;
    Vec upper = 2 * pair + 1 < last ? load_some(even + p.x_rows, count) : Vec{};
    Ints lower = ((Ints)load_some(even, count) >> 16) & 0xffff;
    return (Vec)((Ints)upper | lower);
  };
  auto put = [&](int64_t column, int64_t pair, Vec numbers) {
    const int64_t bytes = least(sizeof numbers, 2 * (last - 2 * pair));
    std::memcpy(to + column * p.inputs + 2 * pair, &numbers, bytes);
  };
  for (int64_t pair = first / 2; 2 * pair < last; pair += kLanes)
    for (int64_t column = 0; column < p.x_rows; column += kLanes)
      turn_block(pair, (last + 1) / 2, column, p.x_rows, pair_of, put);
}
#else
constexpr bool kAcrossInRows = false;

#if defined(__AVX512BF16__)
// Words of two inputs: [(inputs + 1) / 2, x_rows, 2].
void across(const Product& p, const void* x, void* buffer, int64_t first, int64_t last) {
  auto* even = static_cast<const uint16_t*>(x) + first * p.x_rows;
  auto* to = static_cast<uint16_t*>(buffer) + first * p.x_rows;
  const int64_t whole = p.x_rows / 32 * 32;
  for (int64_t i = first; i < last; i += 2, even += 2 * p.x_rows, to += 2 * p.x_rows) {
    const uint16_t* odd = i + 1 < last ? even + p.x_rows : nullptr;
    pair_rows(even, odd, whole, to);
    for (int64_t c = whole; c < p.x_rows; ++c) to[2 * c] = even[c], to[2 * c + 1] = odd ? odd[c] : 0;
  }
}
#else
// Float32 numbers: [inputs, x_rows].
void across(const Product& p, const void* x, void* buffer, int64_t first, int64_t last) {
  auto* from = static_cast<const uint16_t*>(x);
  auto* to = static_cast<float*>(buffer);
  const int64_t end = last * p.x_rows;
  for (int64_t c = first * p.x_rows; c < end; c += kLanes)
    store_numbers(to + c, load_some(from + c, end - c), end - c);
}
#endif
#endif

}  // namespace
}  // namespace ed
