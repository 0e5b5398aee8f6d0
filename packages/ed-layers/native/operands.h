// Operands of a product: rows of x and y, and the scales and zeros of quantization groups.
#pragma once

#include "activations.h"

namespace ed {
namespace {

// Store min(kLanes, count) numbers of x or y.
inline void store_partial(float* to, Vec v, int64_t count) {
  if (count >= kLanes) return store(to, v);
  std::memcpy(to, &v, count * sizeof(float));
}

inline void store_partial(uint16_t* to, Vec v, int64_t count) {
  if (count >= kLanes) return store_bfloat16(to, v);
  uint16_t padded[kLanes];
  store_bfloat16(padded, v);
  std::memcpy(to, padded, count * sizeof(uint16_t));
}

template <typename Element>
void write_outputs_as(const Gemm& p, int64_t row, int64_t column, const float* sums,
                      int64_t count) {
  auto* to = static_cast<Element*>(p.y) + row * p.outputs + column;
  auto* bias = static_cast<const Element*>(p.bias) + column;
  for (int64_t c = 0; c < count; c += kLanes) {
    Vec sum = load(sums + c);
    if (p.bias) sum += load_partial(bias + c, count - c);
    if (p.act != Activation::kNone) sum = apply_activation(p.act, sum);
    store_partial(to + c, sum, count - c);
  }
}

// Store `count` sums of one row of y, after bias and activation. The sums must be readable as full
// vectors.
inline void write_outputs(const Gemm& p, int64_t row, int64_t column, const float* sums,
                          int64_t count) {
  p.y_is_bfloat16 ? write_outputs_as<uint16_t>(p, row, column, sums, count)
                  : write_outputs_as<float>(p, row, column, sums, count);
}

// The rows of x as float32: in place, or a copy of bfloat16 rows.
struct Float32Rows {
  explicit Float32Rows(const Gemm& p) : copy(p.x_is_bfloat16 ? p.rows * p.inputs : 0) {
    x = p.x_is_bfloat16 ? copy.data : static_cast<const float*>(p.x);
    if (!p.x_is_bfloat16) return;
    auto* params = static_cast<const uint16_t*>(p.x);
    int64_t count = p.rows * p.inputs, i = 0;
    for (; i + kLanes <= count; i += kLanes) store(copy.data + i, load_elements(params + i));
    for (; i < count; ++i) copy.data[i] = widen(params[i]);
  }
  Scratch copy;
  const float* x;
};

// A power of two in E8M0, which is the exponent of a float32. The smallest one is subnormal.
inline float decode_e8m0(uint8_t byte) {
  return byte == 255 ? __builtin_nanf("") : cast_bits(byte ? uint32_t{byte} << 23 : 1u << 22);
}

// Read one number of [groups, outputs], or of [outputs, groups].
inline float read_group_param(const Gemm& p, const GroupParams& params, int64_t group,
                              int64_t output) {
  int64_t index = p.transposed ? output * (p.inputs / p.group) + group : group * p.outputs + output;
  if (params.kind == ParamType::kFloat32) return static_cast<const float*>(params.data)[index];
  if (params.kind == ParamType::kFloat16)
    return convert_float16(static_cast<const uint16_t*>(params.data)[index]);
  uint8_t byte = static_cast<const uint8_t*>(params.data)[index];
  return params.kind == ParamType::kUint8 ? byte : decode_e8m0(byte);
}

// The scales or zeros of one group for the outputs of a tile.
struct TileParams {
  const float* get(const Gemm& p, const GroupParams& params, int64_t group, int64_t column,
                   int64_t count) {
    if (params.data == nullptr) return nullptr;
    int64_t stride = p.transposed ? p.inputs / p.group : 1;
    int64_t index = p.transposed ? column * stride + group : group * p.outputs + column;
    auto* floats = static_cast<const float*>(params.data) + index;
    auto* float16s = static_cast<const uint16_t*>(params.data) + index;
    auto* bytes = static_cast<const uint8_t*>(params.data) + index;
    switch (params.kind) {
      case ParamType::kFloat32:
        if (stride == 1 && count == kTile) return floats;
        fill(floats, stride, count, [](float x) { return x; });
        break;
      case ParamType::kFloat16:
        if (stride != 1 || count != kTile)
          fill(float16s, stride, count, [](uint16_t x) { return convert_float16(x); });
        else
          for (int64_t c = 0; c < kTile; c += kLanes) store(copy + c, load_float16(float16s + c));
        break;
      case ParamType::kUint8:
        fill(bytes, stride, count, [](uint8_t x) { return float(x); });
        break;
      case ParamType::kE8m0:
        fill(bytes, stride, count, decode_e8m0);
        break;
    }
    for (int64_t c = count; c < kTile; ++c) copy[c] = 0;
    return copy;
  }

  template <typename Element, typename F>
  ED_INLINE void fill(const Element* from, int64_t stride, int64_t count, const F& f) {
    if (stride == 1)
      for (int64_t c = 0; c < count; ++c) copy[c] = f(from[c]);
    else
      for (int64_t c = 0; c < count; ++c) copy[c] = f(from[c * stride]);
  }

  alignas(64) float copy[kTile];
};

// Return the number of codes of the next block. A block never crosses the end of a group, so its
// sum is scaled once.
inline int64_t get_block_codes(const Gemm& p, int64_t i, int64_t max_codes) {
  return min_int(max_codes, p.group - i % p.group);
}

}  // namespace
}  // namespace ed
