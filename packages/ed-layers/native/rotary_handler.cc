// XLA handler of rotary positions.
#include "handlers.h"

namespace {

using Angles = ffi::Buffer<ffi::F32, 3>;

// The smallest number of elements of a task. The start of a thread takes longer than a smaller
// task.
constexpr int64_t kMinTaskElements = 1 << 14;

// Rotate x [batch, tokens, heads, dim] by cos and sin [batch, tokens, pairs].
ffi::Error run_rotary(ffi::ThreadPool pool, ffi::AnyBuffer x, Angles cos, Angles sin,
                      ffi::Result<ffi::AnyBuffer> y, bool interleaved, bool inverse) {
  ed::Checks checks("rotary");
  checks.require_dtype("x", x.element_type(), {ffi::F32, ffi::BF16});
  checks.require_dtype("the result", y->element_type(), {x.element_type()});
  if (!checks.require_shape("x", x, {ed::kAny, ed::kAny, ed::kAny, ed::kAny}))
    return checks.error();
  auto shape = x.dimensions();
  int64_t pairs = cos.dimensions()[2];
  checks.require_shape("the result", *y, {shape[0], shape[1], shape[2], shape[3]});
  checks.require_shape("cos", cos, {shape[0], shape[1], pairs});
  checks.require_shape("sin", sin, {shape[0], shape[1], pairs});
  if (!checks.require(pairs <= shape[3] / 2, "a head must hold all pairs of angles"))
    return checks.error();
  ed::RotaryArgs p{};
  p.x = x.untyped_data(), p.y = y->untyped_data();
  p.is_bfloat16 = x.element_type() == ffi::BF16;
  p.tokens = shape[0] * shape[1], p.heads = shape[2], p.dim = shape[3], p.pairs = pairs;
  p.cos = cos.typed_data(), p.sin = sin.typed_data();
  p.interleaved = interleaved, p.inverse = inverse;
  int64_t task_tokens =
      std::max<int64_t>(1, kMinTaskElements / std::max<int64_t>(1, p.heads * p.dim));
  auto rotate_task = [&](int64_t task) {
    ed::level().apply_rotary(p, task * task_tokens, std::min(p.tokens, (task + 1) * task_tokens));
  };
  ed::parallel_for(pool, (p.tokens + task_tokens - 1) / task_tokens, rotate_task);
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(ed_rotary, run_rotary,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Angles>()
                                  .Arg<Angles>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("neighbours")
                                  .Attr<bool>("back"));

#pragma GCC visibility pop
