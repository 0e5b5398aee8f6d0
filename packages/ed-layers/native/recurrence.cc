// Recurrences as XLA calls them: checks the buffers, shares out the heads.
#include "library.h"

namespace {

using Owners = ffi::Buffer<ffi::S32, 1>;
using Marks = ffi::Buffer<ffi::S32, 2>;
using Floats3 = ffi::Buffer<ffi::F32, 3>;
using Floats4 = ffi::Buffer<ffi::F32, 4>;

// Numbers of states that a task updates at least.
constexpr int64_t kLeast = 1 << 12;

// See `Recurrence` of recur.h. The states may have any shape whose first axis counts them. `rates`
// and `beta` are empty if a call has none. XLA may pass one buffer as the states and as their result.
ffi::Error recurrence(ffi::ThreadPool pool, ffi::AnyBuffer states, Owners owner, Marks marks,
                      Floats4 query, Floats4 key, Floats4 value, Floats4 decay, Floats3 rates,
                      Floats3 beta, ffi::Result<ffi::AnyBuffer> after, ffi::Result<Floats4> out,
                      bool keys_last) {
  ed::Checks checks("recurrence");
  ed::Recurrence p{};
  auto of_value = value.dimensions(), of_query = query.dimensions();
  p.rows = of_value[0], p.columns = of_value[1], p.heads = of_value[2], p.values = of_value[3];
  p.groups = of_query[2], p.keys = of_query[3], p.keys_last = keys_last;
  int64_t size = p.heads * p.keys * p.values, numbers = states.element_count();
  int64_t count = states.dimensions().size() > 0 ? states.dimensions()[0] : 0;
  checks.dtype("the states", states.element_type(), {ffi::F32});
  checks.dtype("the states after the call", after->element_type(), {ffi::F32});
  checks.that(numbers == count * size, "a state must have the matrices of all heads");
  checks.that(static_cast<int64_t>(after->element_count()) == numbers,
              "the states after the call must have the size of the states");
  checks.shape("the owners", owner, {p.rows});
  checks.shape("the marks", marks, {p.rows, p.columns});
  checks.shape("the queries", query, {p.rows, p.columns, p.groups, p.keys});
  checks.shape("the keys", key, {p.rows, p.columns, p.groups, p.keys});
  checks.shape("the outputs", *out, {p.rows, p.columns, p.heads, p.values});
  bool has_rates = rates.element_count() > 0, has_beta = beta.element_count() > 0;
  p.decays = has_rates ? p.values : decay.dimensions()[3];
  checks.shape("the decays", decay, {p.rows, p.columns, p.heads, p.decays});
  if (has_rates) checks.shape("the rates", rates, {p.heads, p.values, p.keys});
  if (has_beta) checks.shape("beta", beta, {p.rows, p.columns, p.heads});
  checks.that(has_rates || p.decays == 1 || (p.decays == p.keys && !keys_last),
              "a head needs one decay, or one for each key if values are last");
  checks.that(keys_last || !has_rates, "rates need states whose keys are last");
  checks.that(!keys_last || !has_beta, "beta needs states whose values are last");
  if (!checks.that(p.groups > 0 && p.heads % p.groups == 0,
                   "the number of groups must be at least 1 and divide the heads"))
    return checks.error();
  for (int64_t row = 0; row < p.rows; ++row) {
    int64_t at = owner.typed_data()[row];
    if (!checks.that(at >= 0 && at < count, "a row has a state beyond the states"))
      return checks.error();
  }
  p.owner = owner.typed_data(), p.marks = marks.typed_data();
  p.query = query.typed_data(), p.key = key.typed_data(), p.value = value.typed_data();
  p.decay = decay.typed_data(), p.states = after->typed_data<float>(), p.out = out->typed_data();
  if (has_rates) p.rates = rates.typed_data();
  if (has_beta) p.beta = beta.typed_data();
  if (p.states != states.untyped_data() && states.size_bytes() > 0)
    std::memcpy(p.states, states.untyped_data(), states.size_bytes());
  int64_t share = std::max<int64_t>(1, kLeast / std::max<int64_t>(1, p.keys * p.values));
  ed::parallel(pool, (p.heads + share - 1) / share, [&](int64_t task) {
    ed::level().recur(p, task * share, std::min(p.heads, (task + 1) * share));
  });
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(ed_recurrence, recurrence,
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
