// Quantization of rows of x to int8, for one level: each group of a row has a scale.
#pragma once

#include "gemm_blocked.h"

namespace ed {
namespace {

constexpr int64_t kBlockInputs = 256;  // inputs of a block

// The layout of a quantized row. A group has `per_group` blocks of at most kBlockInputs inputs. A
// block has one part, or two parts with the even and the odd inputs. A part is padded with zeros,
// because kernels read full vectors or tiles.
struct QuantBlocks {
  explicit QuantBlocks(const Gemm& p)
      : codes_per_byte(p.format == Format::kFourBits ? 2 : 1),
        per_group((p.group + kBlockInputs - 1) / kBlockInputs),
        groups(p.inputs / p.group),
        block_count(groups * per_group) {
    const int64_t inputs = per_group > 1 ? kBlockInputs : p.group;
    const int64_t values = codes_per_byte == 2 ? (inputs + 1) / 2 : inputs;
    part_bytes =
        values < kVectorBytes ? round_up<kMinPartBytes>(values) : round_up<kVectorBytes>(values);
    block_bytes = part_bytes * codes_per_byte;
  }

  int64_t codes_per_byte, per_group;
  int64_t groups, block_count;      // groups of x, and blocks of all groups
  int64_t part_bytes, block_bytes;  // bytes

 private:
  template <int64_t multiple>
  static int64_t round_up(int64_t bytes) {
    return (bytes + multiple - 1) / multiple * multiple;
  }

  static constexpr int64_t kVectorBytes = kLanes * 4;
#if defined(__AMX_INT8__)
  static constexpr int64_t kMinPartBytes = 64;  // a row of a tile
#else
  static constexpr int64_t kMinPartBytes = 16;
#endif
};

Int8RowSizes get_int8_row_sizes(const Gemm& p) {
  const QuantBlocks blocks(p);
  return {blocks.block_count * blocks.block_bytes, blocks.block_count};
}

// Return the largest absolute value; NaN if a number is NaN. Without the sign, the bits of numbers
// have the order of the numbers, and NaN follows infinity.
template <typename Element>
ED_INLINE float find_max_abs(const Element* x, int64_t count) {
  Ints high = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    Ints size = (Ints)load_partial(x + i, count - i) & 0x7fffffff;
    high = size > high ? size : high;
  }
  return cast_bits(reduce_max(high));
}

// Round to the nearest integers, ties to even: after the addition, the sum has no fraction bits.
// NaN becomes zero; then the scale is NaN.
ED_INLINE Ints round_to_int(Vec x) {
  x = (x + 0x1.8p23f) - 0x1.8p23f;
  return convert_to_int(x == x ? x : Vec{});
}

// Quantize a block of `count` inputs and return the sum of the codes. The odd inputs are stored
// `odd_offset` bytes after the even ones; 0: inputs are consecutive.
template <typename Element>
ED_INLINE int32_t quantize_block(const Element* x, int64_t count, float scale, int8_t* to,
                                 int64_t odd_offset) {
  const Vec divisor = broadcast(scale == 0 ? 1 : scale);
  Ints sums = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Ints codes = round_to_int(load_partial(x + i, count - i) / divisor);
    sums += codes;
    const int64_t valid = min_int(kLanes, count - i);
    int8_t bytes[kLanes];
    if (odd_offset) {
      int8_t* even = valid < kLanes ? bytes : to + i / 2;
      int8_t* odd = valid < kLanes ? bytes + kLanes / 2 : even + odd_offset;
      store_even_odd_bytes(codes, even, odd);
      if (valid == kLanes) continue;
      std::memcpy(to + i / 2, even, valid / 2),
          std::memcpy(to + i / 2 + odd_offset, odd, valid / 2);
    } else {
      store_bytes(codes, valid < kLanes ? bytes : to + i);
      if (valid < kLanes) std::memcpy(to + i, bytes, valid);
    }
  }
  return reduce_sum(sums);
}

template <typename Element>
void quantize_row_as(const Gemm& p, const Element* x, int64_t row) {
  const QuantBlocks blocks(p);
  const int64_t bytes = blocks.block_count * blocks.block_bytes;
  int8_t* values = p.x_int8 + row * bytes;
  int32_t* sums = p.row_sums + row * blocks.block_count;
  if (bytes > p.inputs) std::memset(values, 0, bytes);
  x += row * p.inputs;
  for (int64_t g = 0; g < blocks.groups; ++g, x += p.group) {
    const float scale = find_max_abs(x, p.group) * (1.0f / 127);
    p.row_scale[row * blocks.groups + g] = scale;
    for (int64_t i = 0; i < p.group; i += kBlockInputs, values += blocks.block_bytes)
      *sums++ = quantize_block(x + i, min_int(kBlockInputs, p.group - i), scale, values,
                               blocks.codes_per_byte == 2 ? blocks.part_bytes : 0);
  }
}

// Write the codes, scales and sums of one row, as `quantize_activations` of
// ed_layers.quantization.qarray computes them.
void quantize_row(const Gemm& p, int64_t row) {
  p.x_is_bfloat16 ? quantize_row_as(p, static_cast<const uint16_t*>(p.x), row)
                  : quantize_row_as(p, static_cast<const float*>(p.x), row);
}

}  // namespace
}  // namespace ed
