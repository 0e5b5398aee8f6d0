// XLA handler of recurrences.
#include "handlers.h"

namespace {

using Owners = ffi::Buffer<ffi::S32, 1>;
using Marks = ffi::Buffer<ffi::S32, 2>;
using Floats3 = ffi::Buffer<ffi::F32, 3>;
using Floats4 = ffi::Buffer<ffi::F32, 4>;

// The smallest number of state elements that a task updates.
constexpr int64_t kMinTaskElements = 1 << 12;

// See `RecurrenceArgs` of recurrence_args.h. The first axis of the states counts them; other axes
// may have any shape. Empty `rates` and `beta` mean none. XLA may pass one buffer as the states and
// as their result.
ffi::Error run_recurrence(ffi::ThreadPool pool, ffi::AnyBuffer states, Owners owner, Marks marks,
                          Floats4 query, Floats4 key, Floats4 value, Floats4 decay, Floats3 rates,
                          Floats3 beta, ffi::Result<ffi::AnyBuffer> next_states,
                          ffi::Result<Floats4> out, bool keys_last) {
  ed::Checks checks("recurrence");
  ed::RecurrenceArgs p{};
  auto value_shape = value.dimensions(), query_shape = query.dimensions();
  p.rows = value_shape[0], p.columns = value_shape[1], p.heads = value_shape[2],
  p.values = value_shape[3];
  p.groups = query_shape[2], p.keys = query_shape[3], p.keys_last = keys_last;
  int64_t size = p.heads * p.keys * p.values, numbers = states.element_count();
  int64_t count = states.dimensions().size() > 0 ? states.dimensions()[0] : 0;
  checks.require_dtype("the states", states.element_type(), {ffi::F32});
  checks.require_dtype("the states after the call", next_states->element_type(), {ffi::F32});
  checks.require(numbers == count * size, "a state must have the matrices of all heads");
  checks.require(static_cast<int64_t>(next_states->element_count()) == numbers,
                 "the states after the call must have the size of the states");
  checks.require_shape("the owners", owner, {p.rows});
  checks.require_shape("the marks", marks, {p.rows, p.columns});
  checks.require_shape("the queries", query, {p.rows, p.columns, p.groups, p.keys});
  checks.require_shape("the keys", key, {p.rows, p.columns, p.groups, p.keys});
  checks.require_shape("the outputs", *out, {p.rows, p.columns, p.heads, p.values});
  bool has_rates = rates.element_count() > 0, has_beta = beta.element_count() > 0;
  p.decays = has_rates ? p.values : decay.dimensions()[3];
  checks.require_shape("the decays", decay, {p.rows, p.columns, p.heads, p.decays});
  if (has_rates) checks.require_shape("the rates", rates, {p.heads, p.values, p.keys});
  if (has_beta) checks.require_shape("beta", beta, {p.rows, p.columns, p.heads});
  checks.require(has_rates || p.decays == 1 || (p.decays == p.keys && !keys_last),
                 "a head needs one decay, or one for each key if values are last");
  checks.require(keys_last || !has_rates, "rates need states whose keys are last");
  checks.require(!keys_last || !has_beta, "beta needs states whose values are last");
  if (!checks.require(p.groups > 0 && p.heads % p.groups == 0,
                      "the number of groups must be at least 1 and divide the heads"))
    return checks.error();
  for (int64_t row = 0; row < p.rows; ++row) {
    int64_t at = owner.typed_data()[row];
    if (!checks.require(at >= 0 && at < count, "a row has a state beyond the states"))
      return checks.error();
  }
  p.owner = owner.typed_data(), p.marks = marks.typed_data();
  p.query = query.typed_data(), p.key = key.typed_data(), p.value = value.typed_data();
  p.decay = decay.typed_data(), p.states = next_states->typed_data<float>(),
  p.out = out->typed_data();
  if (has_rates) p.rates = rates.typed_data();
  if (has_beta) p.beta = beta.typed_data();
  if (p.states != states.untyped_data() && states.size_bytes() > 0)
    std::memcpy(p.states, states.untyped_data(), states.size_bytes());
  int64_t task_heads =
      std::max<int64_t>(1, kMinTaskElements / std::max<int64_t>(1, p.keys * p.values));
  ed::parallel_for(pool, (p.heads + task_heads - 1) / task_heads, [&](int64_t task) {
    ed::level().run_recurrence(p, task * task_heads, std::min(p.heads, (task + 1) * task_heads));
  });
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(ed_recurrence, run_recurrence,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Owners>()
                                  .Arg<Marks>()
                                  .Arg<Floats4>()
                                  .Arg<Floats4>()
                                  .Arg<Floats4>()
                                  .Arg<Floats4>()
                                  .Arg<Floats3>()
                                  .Arg<Floats3>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<Floats4>()
                                  .Attr<bool>("keys_last"));

#pragma GCC visibility pop
