// Rotary positions as XLA calls them: checks the arrays, shares out the work.
#include "library.h"

namespace {

using ed::wrong;
using Angles = ffi::Buffer<ffi::F32, 3>;
using Shape = ffi::Span<const int64_t>;

bool same(Shape a, Shape b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); }

// Numbers below which threads would take longer to begin than to work.
constexpr int64_t kLeast = 1 << 14;

// x [batch, tokens, heads, dim] turned by cos and sin [batch, tokens, pairs].
ffi::Error rotated(ffi::ThreadPool pool, ffi::AnyBuffer x, Angles cos, Angles sin,
                   ffi::Result<ffi::AnyBuffer> y, bool neighbours, bool back) {
  auto shape = x.dimensions();
  if (shape.size() != 4 || (x.element_type() != ffi::F32 && x.element_type() != ffi::BF16))
    return wrong("rotary: x should be float32 or bfloat16, with four axes");
  if (y->element_type() != x.element_type() || !same(y->dimensions(), shape))
    return wrong("rotary: the result should be as x");
  auto angles = cos.dimensions();
  if (!same(sin.dimensions(), angles) || angles[0] != shape[0] || angles[1] != shape[1] ||
      2 * angles[2] > shape[3])
    return wrong("rotary: cos and sin should be [batch, tokens, pairs] of x");
  ed::Rotary p{};
  p.x = x.untyped_data(), p.y = y->untyped_data();
  p.is_bfloat16 = x.element_type() == ffi::BF16;
  p.tokens = shape[0] * shape[1], p.heads = shape[2], p.dim = shape[3], p.pairs = angles[2];
  p.cos = cos.typed_data(), p.sin = sin.typed_data();
  p.neighbours = neighbours, p.back = back;
  int64_t share = std::max<int64_t>(1, kLeast / std::max<int64_t>(1, p.heads * p.dim));
  auto turn = [&](int64_t task) {
    ed::level().rotate(p, task * share, std::min(p.tokens, (task + 1) * share));
  };
  ed::parallel(pool, (p.tokens + share - 1) / share, turn);
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(ed_rotary, rotated,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Angles>()
                                  .Arg<Angles>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("neighbours")
                                  .Attr<bool>("back"));

#pragma GCC visibility pop
