// Rotary positions as XLA calls them: checks the buffers, shares out the work.
#include "library.h"

namespace {

using Angles = ffi::Buffer<ffi::F32, 3>;

// Numbers below which threads would take longer to begin than to work.
constexpr int64_t kLeast = 1 << 14;

// x [batch, tokens, heads, dim] turned by cos and sin [batch, tokens, pairs].
ffi::Error rotated(ffi::ThreadPool pool, ffi::AnyBuffer x, Angles cos, Angles sin,
                   ffi::Result<ffi::AnyBuffer> y, bool neighbours, bool back) {
  ed::Checks checks("rotary");
  checks.dtype("x", x.element_type(), {ffi::F32, ffi::BF16});
  checks.dtype("the result", y->element_type(), {x.element_type()});
  if (!checks.shape("x", x, {ed::kAny, ed::kAny, ed::kAny, ed::kAny})) return checks.error();
  auto shape = x.dimensions();
  int64_t pairs = cos.dimensions()[2];
  checks.shape("the result", *y, {shape[0], shape[1], shape[2], shape[3]});
  checks.shape("cos", cos, {shape[0], shape[1], pairs});
  checks.shape("sin", sin, {shape[0], shape[1], pairs});
  if (!checks.that(pairs <= shape[3] / 2, "a head must hold all pairs of angles"))
    return checks.error();
  ed::Rotary p{};
  p.x = x.untyped_data(), p.y = y->untyped_data();
  p.is_bfloat16 = x.element_type() == ffi::BF16;
  p.tokens = shape[0] * shape[1], p.heads = shape[2], p.dim = shape[3], p.pairs = pairs;
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
