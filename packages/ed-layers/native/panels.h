// Products with codes in panels, for one level of instructions.
//
// A panel has kTile outputs of all inputs, in the order in which a product reads them. For each group
// of inputs, there are kTile scales, kTile zeros if there are any, and the codes as fours of bytes. A
// byte has one code of 8 bits, or two of four bits, the even input in the lower half. So a matrix is
// read in one long run, and the lines of the next block are fetched evenly while a block is
// multiplied. Every sum has the order of `whole_in_tiles` of whole.h.
#pragma once

#include "whole.h"
#include "whole_tiles.h"

namespace ed {
namespace {

// Fetches the next block of a panel, in as many parts as the block is gone over.
struct NextBlock {
  // Call `f(Count<lines to fetch for each four>, the line of the first four)` for the part `pass`.
  template <typename F>
  ED_INLINE void part(int64_t pass, const F& f) const {
    const int64_t share = passes == 1 ? lines : passes < lines ? 2 : 1, line = pass * share;
    if (line >= lines) return f(Count<0>(), from);
    if (share == 4) return f(Count<4>(), from);
    if (share == 2) return f(Count<2>(), from + line * 64);
    f(Count<1>(), from + line * 64);
  }

  const char* from;
  int64_t lines, passes;  // lines of a four, two or four
};

#if !ED_PAIRS
// The product of a block of codes of four bits: see `multiply_whole`, whose sums these are.
template <int R, int V, int lines>
void multiply_half(const BlockOfRows<R>& of_rows, int64_t bytes, const uint8_t* w,
                   const float* scale, const float* zero, float* sums, int64_t sums_stride,
                   const char* next) {
  Ints acc[R][V] = {};
  for (int64_t n = 0; n < bytes / 4; ++n) {
    Ints even[V], odd[V];
    ED_UNROLL
    for (int c = 0; c < V; ++c) {
      Ints both = load_ints(w + (n * kTile + c * kLanes) * 4);
      even[c] = both & 0x0f0f0f0f, odd[c] = (both >> 4) & 0x0f0f0f0f;
    }
    ED_UNROLL
    for (int l = 0; l < lines; ++l) prefetch(next + n * 4 * kTile + l * 64);
    ED_UNROLL
    for (int r = 0; r < R; ++r) {
      const int8_t* x = of_rows.numbers + r * of_rows.stride + 4 * n;
      int32_t of_even, of_odd;
      std::memcpy(&of_even, x, 4), std::memcpy(&of_odd, x + of_rows.to_odd, 4);
      ED_UNROLL
      for (int c = 0; c < V; ++c) {
        acc[r][c] = dot_of_bytes(acc[r][c], even[c], of_even);
        acc[r][c] = dot_of_bytes(acc[r][c], odd[c], of_odd);
      }
    }
  }
  add_block<R, V>(of_rows, acc, scale, zero, sums, sums_stride);
}
#endif

// Fours of bytes with two codes as fours of even codes, and from kFours / 2 on those of odd ones.
inline void part_halves(const uint8_t* w, int64_t bytes, uint8_t* fours) {
  for (int64_t i = 0; i < bytes * kTile; i += kLanes * 4) {
    Ints both = load_ints(w + i);
    Ints even = both & 0x0f0f0f0f, odd = (both >> 4) & 0x0f0f0f0f;
    std::memcpy(fours + i, &even, sizeof even);
    std::memcpy(fours + kFours / 2 * 4 * kTile + i, &odd, sizeof odd);
  }
}

// The scales and zeros of a group of a panel as float32.
class PanelGroup {
 public:
  PanelGroup(const Product& p, const uint8_t* group)
      : scale(widened(p.scale.kind, group, scales_)),
        zero(p.zero.data ? widened(p.zero.kind, group + kTile * bytes_of(p.scale.kind), zeros_)
                         : nullptr) {}

  const float *const scale, *const zero;  // no zero: null

 private:
  static const float* widened(Small kind, const uint8_t* from, float* copies) {
    if (kind == Small::kFloat32) return reinterpret_cast<const float*>(from);
    for (int64_t c = 0; c < kTile; c += kLanes)
      store(copies + c, kind == Small::kFloat16
                            ? load_float16(reinterpret_cast<const uint16_t*>(from) + c)
                            : to_numbers(load_bytes(from + c)));
    return copies;
  }

  alignas(64) float scales_[kTile], zeros_[kTile];
};

// Some rows of x in 8 bits by a panel, or by half of one.
class OfPanels {
 public:
  explicit OfPanels(const Product& p)
      : p_(p), blocks_(p), group_bytes_(panel_group_bytes(p)),
        header_(group_bytes_ - kTile * (p.group / blocks_.halves)),
        parted_(blocks_.halves == 2 && (ED_PAIRS || in_tiles())),
        scratch_(parted_ ? kWhole * kTile / 4 : 0) {}

  // sums [rows, kTile] = the products of the rows from `row` on, at the outputs [first, last) of the
  // panel that begins with output `column`.
  void multiply(int64_t row, int64_t rows, int64_t column, int64_t first, int64_t last, float* sums) {
    std::memset(sums, 0, rows * kTile * sizeof(float));
    auto* group = static_cast<const uint8_t*>(p_.w) + column / kTile * blocks_.groups * group_bytes_;
    for (int64_t g = 0; g < blocks_.groups; ++g, group += group_bytes_) {
      const PanelGroup numbers(p_, group);
      for (int64_t i = 0; i < header_; i += 64) prefetch(group + group_bytes_ + i);
      const uint8_t* w = group + header_;
      for (int64_t b = 0; b < blocks_.count; ++b) {
        const int64_t bytes = least(kWhole, p_.group - b * kWhole) / blocks_.halves;
        const uint8_t* next = w + bytes * kTile + (b + 1 < blocks_.count ? 0 : header_);
        const Block block{g * blocks_.count + b, bytes, w, next};
        multiply_block(block, numbers, row, rows, first, last, sums);
        w += bytes * kTile;
      }
    }
  }

 private:
  // The codes of a block of inputs, `bytes` of each output, and those of the next block.
  struct Block {
    int64_t number, bytes;
    const uint8_t *w, *next;
  };

  bool in_tiles() const {
#if defined(__AMX_INT8__)
    return p_.rows >= kTileRows;
#else
    return false;
#endif
  }

  void multiply_block(const Block& block, const PanelGroup& numbers, int64_t row, int64_t rows,
                      int64_t first, int64_t last, float* sums) {
    auto* fours = reinterpret_cast<uint8_t*>(scratch_.data);
    if (parted_) part_halves(block.w, block.bytes, fours);
#if defined(__AMX_INT8__)
    if (in_tiles())
      return tiles_.add(p_, row, rows, block.number, parted_ ? fours : block.w, block.bytes, first,
                        last, numbers.scale, numbers.zero, sums);
#endif
    constexpr int64_t kLess = kBlock < kTile / 2 ? kBlock : kTile / 2;  // outputs of half a panel
    const int64_t width = last - first, at_once = width < kBlock ? kLess : kBlock;
    const NextBlock next{reinterpret_cast<const char*>(block.next + 4 * first), width * 4 / 64,
                         (rows + kRows - 1) / kRows * (width / at_once)};
    int64_t pass = 0;
    row_blocks<kRows>(rows, [&](auto r, int64_t at) {
      constexpr int R = decltype(r)::value;
      BlockOfRows<R> of_rows(p_, blocks_, row + at, block.number);
      for (int64_t c = first; c < last; c += at_once)
        next.part(pass++, [&](auto lines, const char* from) __attribute__((always_inline)) {
          constexpr int L = decltype(lines)::value;
          auto by = [&](auto vectors) __attribute__((always_inline)) {
            constexpr int V = decltype(vectors)::value;
            const float *scale = numbers.scale + c, *zero = numbers.zero ? numbers.zero + c : nullptr;
            float* to = sums + at * kTile + c;
#if ED_PAIRS
            if (parted_)
              return multiply_whole<R, V, false, L>(of_rows, 2, block.bytes, fours + 4 * c, scale, zero,
                                                    to, kTile, from);
#else
            if (blocks_.halves == 2)
              return multiply_half<R, V, L>(of_rows, block.bytes, block.w + 4 * c, scale, zero, to,
                                            kTile, from);
#endif
            multiply_whole<R, V, true, L>(of_rows, 1, block.bytes, block.w + 4 * c, scale, zero, to,
                                          kTile, from);
          };
          at_once == kBlock ? by(Count<kVectors>()) : by(Count<kLess / kLanes>());
        });
    });
  }

  const Product& p_;
  const Blocks blocks_;
  const int64_t group_bytes_, header_;
  const bool parted_;  // whether codes of four bits are parted before they are multiplied
  Scratch scratch_;
#if defined(__AMX_INT8__)
  WholeTiles tiles_;
#endif
};

// The outputs [first, last) of codes in panels, which are whole halves of panels, by rows in 8 bits.
// Groups have whole fours.
void whole_panels(const Product& p, int64_t first, int64_t last) {
  Scratch sums(least(p.rows, kMostRows) * kTile);
  OfPanels panels(p);
  for (int64_t row = 0; row < p.rows; row += kMostRows) {
    const int64_t rows = least(kMostRows, p.rows - row);
    for (int64_t column = first, end; column < last; column = end) {
      const int64_t in_panel = column % kTile, panel = column - in_panel;
      end = least(last, panel + kTile);
      panels.multiply(row, rows, panel, in_panel, end - panel, sums.data);
      for (int64_t r = 0; r < rows; ++r)
        write(p, row + r, column, sums.data + r * kTile + in_panel, end - column);
    }
  }
}

// Rows [first, last) of y, float32 [.., inputs]: the outputs `at` of codes in panels, as an embedding
// reads them whose table is the transpose. A row of an output that is not there is NaN.
void take_of_panels(const Product& p, const int32_t* at, int64_t first, int64_t last) {
  const int64_t of_group = panel_group_bytes(p), groups = p.inputs / p.group;
  const bool half = p.format == Format::kFourBits;
  const int64_t bytes = half ? p.group / 2 : p.group, header = of_group - kTile * bytes;
  auto* to = static_cast<float*>(p.y) + first * p.inputs;
  for (int64_t row = first; row < last; ++row) {
    const int64_t output = at[row] < 0 ? at[row] + p.outputs : at[row];
    if (output < 0 || output >= p.outputs) {
      for (int64_t i = 0; i < p.inputs; ++i) *to++ = __builtin_nanf("");
      continue;
    }
    const int64_t column = output % kTile;
    auto* group = static_cast<const uint8_t*>(p.w) + output / kTile * groups * of_group;
    for (int64_t g = 0; g < groups; ++g, group += of_group) {
      const PanelGroup numbers(p, group);
      const float scale = numbers.scale[column], zero = numbers.zero ? numbers.zero[column] : 0;
      const uint8_t* codes = group + header + 4 * column;
      for (int64_t i = 0; i < bytes; ++i) {
        const uint8_t byte = codes[i / 4 * 4 * kTile + i % 4];
        *to++ = ((half ? byte & 15 : static_cast<int8_t>(byte)) - zero) * scale;
        if (half) *to++ = ((byte >> 4) - zero) * scale;
      }
    }
  }
}

}  // namespace
}  // namespace ed
