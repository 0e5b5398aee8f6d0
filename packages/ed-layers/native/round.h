// Rows of x in 8 bits, for one level of instructions: each group of a row has a scale.
#pragma once

#include "columns.h"

namespace ed {
namespace {

constexpr int64_t kWhole = 256;  // inputs of a block

// How a group is laid out: in `count` blocks of at most kWhole inputs. The numbers of x of a block are
// one part, or two halves, of even and of odd inputs. A part has zeros behind its numbers, because
// kernels read whole vectors or tiles.
struct Blocks {
  explicit Blocks(const Product& p)
      : halves(p.format == Format::kFourBits ? 2 : 1),
        count((p.group + kWhole - 1) / kWhole),
        groups(p.inputs / p.group),
        all(groups * count) {
    const int64_t inputs = count > 1 ? kWhole : p.group;
    const int64_t numbers = halves == 2 ? (inputs + 1) / 2 : inputs;
    of_part = numbers < kVectorBytes ? whole<kLeastBytes>(numbers) : whole<kVectorBytes>(numbers);
    of_block = of_part * halves;
  }

  int64_t halves, count;
  int64_t groups, all;        // groups of x, and blocks of all groups
  int64_t of_part, of_block;  // bytes

 private:
  template <int64_t multiple>
  static int64_t whole(int64_t bytes) {
    return (bytes + multiple - 1) / multiple * multiple;
  }

  static constexpr int64_t kVectorBytes = kLanes * 4;
#if defined(__AMX_INT8__)
  static constexpr int64_t kLeastBytes = 64;  // a row of a tile
#else
  static constexpr int64_t kLeastBytes = 16;
#endif
};

WholeSizes whole_sizes(const Product& p) {
  const Blocks blocks(p);
  return {blocks.all * blocks.of_block, blocks.all};
}

// The largest size of some numbers; NaN if one of them is. Without a sign, the bits of numbers have
// their order, and those of NaN follow infinity.
template <typename Number>
ED_INLINE float largest_size(const Number* x, int64_t count) {
  Ints high = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    Ints size = (Ints)load_some(x + i, count - i) & 0x7fffffff;
    high = size > high ? size : high;
  }
  return from_bits(highest(high));
}

// The nearest whole numbers, ties to even: what is added has no bits for fractions. NaN has no
// number; the scale is NaN, too.
ED_INLINE Ints nearest_of(Vec x) {
  x = (x + 0x1.8p23f) - 0x1.8p23f;
  return whole_of(x == x ? x : Vec{});
}

// The numbers of a block of `count` inputs, and their sum. The odd inputs come `to_odd` bytes behind
// the even ones; 0: they follow each other.
template <typename Number>
ED_INLINE int32_t round_block(const Number* x, int64_t count, float scale, int8_t* to, int64_t to_odd) {
  const Vec by = broadcast(scale == 0 ? 1 : scale);
  Ints sums = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Ints some = nearest_of(load_some(x + i, count - i) / by);
    sums += some;
    const int64_t used = least(kLanes, count - i);
    int8_t bytes[kLanes];
    if (to_odd) {
      int8_t* even = used < kLanes ? bytes : to + i / 2;
      int8_t* odd = used < kLanes ? bytes + kLanes / 2 : even + to_odd;
      store_bytes_apart(some, even, odd);
      if (used == kLanes) continue;
      std::memcpy(to + i / 2, even, used / 2), std::memcpy(to + i / 2 + to_odd, odd, used / 2);
    } else {
      store_bytes(some, used < kLanes ? bytes : to + i);
      if (used < kLanes) std::memcpy(to + i, bytes, used);
    }
  }
  return total(sums);
}

template <typename Number>
void round_numbers(const Product& p, const Number* x, int64_t row) {
  const Blocks blocks(p);
  const int64_t bytes = blocks.all * blocks.of_block;
  int8_t* numbers = p.numbers + row * bytes;
  int32_t* sums = p.row_sums + row * blocks.all;
  if (bytes > p.inputs) std::memset(numbers, 0, bytes);
  x += row * p.inputs;
  for (int64_t g = 0; g < blocks.groups; ++g, x += p.group) {
    const float scale = largest_size(x, p.group) * (1.0f / 127);
    p.row_scale[row * blocks.groups + g] = scale;
    for (int64_t i = 0; i < p.group; i += kWhole, numbers += blocks.of_block)
      *sums++ = round_block(x + i, least(kWhole, p.group - i), scale, numbers,
                            blocks.halves == 2 ? blocks.of_part : 0);
  }
}

// Numbers, scales and sums of one row: as `rounded` of ed_layers.quantization.qarray has them.
void round_row(const Product& p, int64_t row) {
  p.x_is_bfloat16 ? round_numbers(p, static_cast<const uint16_t*>(p.x), row)
                  : round_numbers(p, static_cast<const float*>(p.x), row);
}

}  // namespace
}  // namespace ed
