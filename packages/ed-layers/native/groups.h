// What the kernels of a product share: rows of x and y, and the scales of groups of codes.
#pragma once

#include "acts.h"

namespace ed {
namespace {

// Store numbers of x or y: kLanes of them, or `count`.
inline void store_numbers(float* to, Vec v, int64_t count) {
  if (count >= kLanes) return store(to, v);
  std::memcpy(to, &v, count * sizeof(float));
}

inline void store_numbers(uint16_t* to, Vec v, int64_t count) {
  if (count >= kLanes) return store_halves(to, v);
  uint16_t some[kLanes];
  store_halves(some, v);
  std::memcpy(to, some, count * sizeof(uint16_t));
}

template <typename Number>
void write_as(const Product& p, int64_t row, int64_t column, const float* sums, int64_t count) {
  auto* to = static_cast<Number*>(p.y) + row * p.outputs + column;
  auto* bias = static_cast<const Number*>(p.bias) + column;
  for (int64_t c = 0; c < count; c += kLanes) {
    Vec sum = load(sums + c);
    if (p.bias) sum += load_some(bias + c, count - c);
    if (p.act != Act::kNone) sum = activated(p.act, sum);
    store_numbers(to + c, sum, count - c);
  }
}

// Store `count` sums of one row of y, which are readable as whole vectors.
inline void write(const Product& p, int64_t row, int64_t column, const float* sums, int64_t count) {
  p.y_is_bfloat16 ? write_as<uint16_t>(p, row, column, sums, count)
                  : write_as<float>(p, row, column, sums, count);
}

// The rows of a product as float32: the product's own, or a copy of bfloat16 rows.
struct WideRows {
  explicit WideRows(const Product& p) : copy(p.x_is_bfloat16 ? p.rows * p.inputs : 0) {
    x = p.x_is_bfloat16 ? copy.data : static_cast<const float*>(p.x);
    if (!p.x_is_bfloat16) return;
    auto* numbers = static_cast<const uint16_t*>(p.x);
    int64_t count = p.rows * p.inputs, i = 0;
    for (; i + kLanes <= count; i += kLanes) store(copy.data + i, load_numbers(numbers + i));
    for (; i < count; ++i) copy.data[i] = widen(numbers[i]);
  }
  Scratch copy;
  const float* x;
};

// A power of two, E8M0: the exponent of a float32 alone, of which the least is subnormal.
inline float power_of_two(uint8_t byte) {
  return byte == 255 ? __builtin_nanf("") : from_bits(byte ? uint32_t{byte} << 23 : 1u << 22);
}

// One number of [groups, outputs], or of [outputs, groups].
inline float of_group(const Product& p, const OfGroups& numbers, int64_t group, int64_t output) {
  int64_t at = p.transposed ? output * (p.inputs / p.group) + group : group * p.outputs + output;
  if (numbers.kind == Small::kFloat32) return static_cast<const float*>(numbers.data)[at];
  if (numbers.kind == Small::kFloat16) return from_float16(static_cast<const uint16_t*>(numbers.data)[at]);
  uint8_t byte = static_cast<const uint8_t*>(numbers.data)[at];
  return numbers.kind == Small::kUint8 ? byte : power_of_two(byte);
}

// The numbers of one group and the outputs of a tile.
struct TileNumbers {
  const float* get(const Product& p, const OfGroups& numbers, int64_t group, int64_t column,
                   int64_t count) {
    if (numbers.data == nullptr) return nullptr;
    int64_t step = p.transposed ? p.inputs / p.group : 1;
    int64_t at = p.transposed ? column * step + group : group * p.outputs + column;
    auto* floats = static_cast<const float*>(numbers.data) + at;
    auto* halves = static_cast<const uint16_t*>(numbers.data) + at;
    auto* bytes = static_cast<const uint8_t*>(numbers.data) + at;
    switch (numbers.kind) {
      case Small::kFloat32:
        if (step == 1 && count == kTile) return floats;
        fill(floats, step, count, [](float x) { return x; });
        break;
      case Small::kFloat16:
        if (step != 1 || count != kTile)
          fill(halves, step, count, [](uint16_t x) { return from_float16(x); });
        else
          for (int64_t c = 0; c < kTile; c += kLanes) store(copy + c, load_float16(halves + c));
        break;
      case Small::kUint8: fill(bytes, step, count, [](uint8_t x) { return float(x); }); break;
      case Small::kPowerOfTwo: fill(bytes, step, count, power_of_two); break;
    }
    for (int64_t c = count; c < kTile; ++c) copy[c] = 0;
    return copy;
  }

  template <typename Number, typename F>
  ED_INLINE void fill(const Number* from, int64_t step, int64_t count, const F& f) {
    if (step == 1)
      for (int64_t c = 0; c < count; ++c) copy[c] = f(from[c]);
    else
      for (int64_t c = 0; c < count; ++c) copy[c] = f(from[c * step]);
  }

  alignas(64) float copy[kTile];
};

// Codes of inputs [i, i + count) never cross the end of a group: their sum is scaled once.
inline int64_t codes_of_block(const Product& p, int64_t i, int64_t most_codes) {
  return least(most_codes, p.group - i % p.group);
}

}  // namespace
}  // namespace ed
