// XLA handlers of attention over a contiguous cache and over pages.
#include <vector>

#include "attention_handlers.h"

namespace {

using ed::FloatMatrix, ed::FloatVector, ed::IntVector, ed::MaskArrays, ed::AnyArray, ed::IntMatrix;
using Shape = ffi::Span<const int64_t>;

// An array with an optional leading axis of layers.
struct LayeredArray {
  LayeredArray(AnyArray array, size_t axes)
      : all(array.dimensions()),
        has_valid_rank(all.size() == axes || all.size() == axes + 1),
        has_layers(all.size() == axes + 1) {}
  int64_t layers() const { return has_layers ? all[0] : 1; }
  int64_t operator[](size_t axis) const {
    return all[axis + has_layers];
  }  // without the axis of layers

  // Return the size of one layer.
  int64_t count() const {
    int64_t numbers = 1;
    for (size_t axis = has_layers; axis < all.size(); ++axis) numbers *= all[axis];
    return numbers;
  }

  // Require the sizes of the axes after the layers.
  bool shape(ed::Checks& checks, const char* name, AnyArray array, int64_t layers,
             std::initializer_list<int64_t> sizes) const {
    bool same = has_valid_rank && this->layers() == layers &&
                std::equal(sizes.begin(), sizes.end(), all.end() - sizes.size());
    if (!same)
      checks.reject(std::string(name) + " has shape " + ed::format_shape(array.dimensions()) +
                    ", the call requires " + ed::format_shape(sizes) + " in each of " +
                    std::to_string(layers) + " layers");
    return checks.ok();
  }

  Shape all;
  bool has_valid_rank, has_layers;
};

// Skip the layers before `layer`.
void skip_layers(ed::SlotArray& s, const LayeredArray& numbers, const LayeredArray& scales,
                 int64_t layer) {
  if (layer == 0) return;
  s.data = static_cast<const char*>(s.data) + layer * numbers.count() * ed::get_byte_width(s.kind);
  if (s.scale) s.scale += layer * scales.count();
}

// Read the index of the layer, which must be below `layers`.
int64_t read_layer(ed::Checks& checks, IntVector layer, int64_t layers) {
  if (!checks.require_shape("layer", layer, {1})) return 0;
  int64_t at = layer.typed_data()[0];
  checks.require(at >= 0 && at < layers, "the cache has no layer of this index");
  return checks.ok() ? at : 0;
}

// Keys and values [layers, b, g, t, k], scales [layers, b, g, n, t], or without the axis of layers.
// XLA would copy the cache for a reshape that adds the axis.
ffi::Error run_cached_attention(ffi::ThreadPool pool, AnyArray q, AnyArray k, AnyArray v,
                                AnyArray k_scale, AnyArray v_scale, IntVector layer,
                                IntMatrix q_segments, IntMatrix q_index, IntMatrix k_segments,
                                IntMatrix k_index, IntVector limits, FloatVector sinks,
                                FloatMatrix distances, FloatVector slopes,
                                ffi::Result<AnyArray> out, float scale, float soft_cap,
                                float alibi_factor, bool alibi_rounded, bool causal,
                                bool fixed_order) {
  ed::Checks checks("attention over a cache");
  ed::AttentionArgs p{};
  LayeredArray shape(k, 4);
  if (!ed::read_queries(checks, p, q, *out, 4) ||
      !ed::read_scoring(checks, p, {limits, scale, soft_cap, causal, fixed_order}) ||
      !ed::read_sinks(checks, p, sinks) ||
      !ed::read_biases(checks, p, {distances, slopes, alibi_factor, alibi_rounded}) ||
      !checks.require(shape.has_valid_rank, "keys must have 4 axes, or 5 with layers"))
    return checks.error();
  p.batch = p.rows = q.dimensions()[0], p.queries = q.dimensions()[1];
  p.groups = shape[1], p.slots = shape[2];
  ed::check_groups(checks, p);
  int64_t at = read_layer(checks, layer, shape.layers());
  for (bool value : {false, true}) {
    AnyArray from = value ? v : k, scales = value ? v_scale : k_scale;
    const char* name = value ? "values" : "keys";
    ed::SlotArray& s = value ? p.values : p.keys;
    LayeredArray numbers(from, 4), scale_shape(scales, 4);
    s.slot = value ? p.value_dim : p.key_dim;
    s.head = p.slots * s.slot, s.row = p.groups * s.head;
    numbers.shape(checks, name, from, shape.layers(), {p.batch, p.groups, p.slots, s.slot});
    if (!ed::read_storage(checks, s, name, from, scales)) return checks.error();
    if (s.scale) {
      s.scale_groups = scale_shape[2], s.scale_slot = 1, s.scale_group = p.slots;
      s.scale_head = s.scale_groups * p.slots, s.scale_row = p.groups * s.scale_head;
      scale_shape.shape(checks, value ? "the scales of values" : "the scales of keys", scales,
                        shape.layers(), {p.batch, p.groups, s.scale_groups, p.slots});
      checks.require(s.scale_groups > 0 && s.slot % s.scale_groups == 0,
                     "the number of scales must divide the numbers of a head");
    }
    if (checks.ok()) skip_layers(s, numbers, scale_shape, at);
  }
  if (!ed::read_mask(checks, p, {q_segments, q_index, k_segments, k_index})) return checks.error();
  if (out->element_count() > 0) ed::run_forward(pool, p);
  return ffi::Error::Success();
}

// The sequences of a flat batch: offsets of their tokens [n + 1], lengths [n], the number in use
// [1], and pages [n, pages of a sequence].
struct SequenceBatch {
  IntVector first_query, lengths, used_count;
  IntMatrix pages;
};

// Read the sequences; every page that a query reads must be in the pool.
bool read_sequences(ed::Checks& checks, ed::AttentionArgs& p, const SequenceBatch& sequences,
                    int64_t tokens, int64_t pages_of_pool) {
  p.batch = sequences.pages.dimensions()[0], p.pages_of_row = sequences.pages.dimensions()[1];
  checks.require_shape("the offsets of queries", sequences.first_query, {p.batch + 1});
  checks.require_shape("the lengths", sequences.lengths, {p.batch});
  if (!checks.require_shape("the number of sequences", sequences.used_count, {1})) return false;
  p.rows = std::max<int64_t>(0, std::min<int64_t>(sequences.used_count.typed_data()[0], p.batch));
  p.first_query = sequences.first_query.typed_data(), p.lengths = sequences.lengths.typed_data();
  p.pages = sequences.pages.typed_data();
  int64_t max_length = p.pages_of_row * p.page_size;
  for (int64_t row = 0; row < p.rows; ++row) {
    int64_t first = p.first_query[row], count = p.first_query[row + 1] - first;
    int64_t length = p.lengths[row];
    if (!checks.require(first >= 0 && count >= 0 && first + count <= tokens && length >= count &&
                            length <= max_length,
                        "a sequence has tokens or pages beyond those of the batch"))
      return false;
    // Pages before the first query's window may be free. The kernel does not read them.
    int64_t position = length - count, begin = 0;
    if (p.window > 0) begin = std::max<int64_t>(begin, position - p.window + 1);
    if (p.chunk > 0) begin = std::max<int64_t>(begin, position / p.chunk * p.chunk);
    for (int64_t i = begin / p.page_size; i * p.page_size < length && count > 0; ++i) {
      int32_t page = p.pages[row * p.pages_of_row + i];
      if (!checks.require(page >= 0 && page < pages_of_pool,
                          "a sequence has a page beyond the pool"))
        return false;
    }
  }
  return true;
}

// Pages [layers, P, page_size, g, 2, k], scales [layers, P, g, 2, n, page_size], or without the
// axis of layers. With one entry instead of two, the first numbers of the keys are the values. q is
// [T, heads, k].
ffi::Error run_paged_attention(ffi::ThreadPool pool, AnyArray q, AnyArray pool_of_pages,
                               AnyArray scales, IntVector layer, IntVector first_query,
                               IntVector lengths, IntVector used_count, IntMatrix pages,
                               IntVector limits, FloatVector sinks, FloatMatrix distances,
                               FloatVector slopes, ffi::Result<AnyArray> out, float scale,
                               float soft_cap, float alibi_factor, bool alibi_rounded,
                               bool fixed_order) {
  ed::Checks checks("attention over pages");
  ed::AttentionArgs p{};
  LayeredArray shape(pool_of_pages, 5), scale_shape(scales, 5);
  if (!ed::read_queries(checks, p, q, *out, 3) ||
      !ed::read_scoring(checks, p, {limits, scale, soft_cap, true, fixed_order}) ||
      !ed::read_sinks(checks, p, sinks) ||
      !ed::read_biases(checks, p, {distances, slopes, alibi_factor, alibi_rounded}) ||
      !checks.require(shape.has_valid_rank, "the pool of pages must have 5 axes, or 6 with layers"))
    return checks.error();
  int64_t entries = shape[3], width = shape[4];
  p.page_size = shape[1], p.groups = shape[2];
  ed::check_groups(checks, p);
  checks.require(p.page_size > 0, "a page must have at least one slot");
  checks.require(entries == 1 || entries == 2, "a page must have keys, or keys and values");
  checks.require(p.key_dim <= width && p.value_dim <= width,
                 "a head of the pool must be as wide as a head of queries and of the result");
  int64_t at = read_layer(checks, layer, shape.layers());
  for (bool value : {false, true}) {
    ed::SlotArray& s = value ? p.values : p.keys;
    if (!ed::read_storage(checks, s, "the pool", pool_of_pages, scales)) return checks.error();
    s.head = entries * width, s.slot = p.groups * s.head, s.row = p.page_size * s.slot;
    if (s.scale) {
      s.scale_groups = scale_shape[3], s.scale_slot = 1, s.scale_group = p.page_size;
      s.scale_head = entries * s.scale_groups * p.page_size, s.scale_row = p.groups * s.scale_head;
      scale_shape.shape(checks, "the scales of the pool", scales, shape.layers(),
                        {shape[0], p.groups, entries, s.scale_groups, p.page_size});
      checks.require(
          s.scale_groups > 0 && width % s.scale_groups == 0 && p.key_dim == width &&
              p.value_dim == width,
          "pages of codes must be as wide as a head, and have scales that divide the head");
    }
    if (!checks.ok()) return checks.error();
    skip_layers(s, shape, scale_shape, at);
    if (value && entries == 2) {
      s.data = static_cast<const char*>(s.data) + width * ed::get_byte_width(s.kind);
      if (s.scale) s.scale += s.scale_groups * p.page_size;
    }
  }
  if (!read_sequences(checks, p, {first_query, lengths, used_count, pages}, q.dimensions()[0],
                      shape[0]))
    return checks.error();
  std::memset(p.out, 0, out->size_bytes());  // padding tokens
  if (out->element_count() > 0) ed::run_forward(pool, p);
  return ffi::Error::Success();
}

}  // namespace

// Exported symbols.
#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(ed_attention_cached, run_cached_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<AnyArray>()
                                  .Arg<AnyArray>()
                                  .Arg<AnyArray>()
                                  .Arg<AnyArray>()
                                  .Arg<AnyArray>()
                                  .Arg<IntVector>()
                                  .Arg<IntMatrix>()
                                  .Arg<IntMatrix>()
                                  .Arg<IntMatrix>()
                                  .Arg<IntMatrix>()
                                  .Arg<IntVector>()
                                  .Arg<FloatVector>()
                                  .Arg<FloatMatrix>()
                                  .Arg<FloatVector>()
                                  .Ret<AnyArray>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<float>("alibi_factor")
                                  .Attr<bool>("alibi_rounded")
                                  .Attr<bool>("causal")
                                  .Attr<bool>("fixed"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ed_attention_paged, run_paged_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<AnyArray>()
                                  .Arg<AnyArray>()
                                  .Arg<AnyArray>()
                                  .Arg<IntVector>()
                                  .Arg<IntVector>()
                                  .Arg<IntVector>()
                                  .Arg<IntVector>()
                                  .Arg<IntMatrix>()
                                  .Arg<IntVector>()
                                  .Arg<FloatVector>()
                                  .Arg<FloatMatrix>()
                                  .Arg<FloatVector>()
                                  .Ret<AnyArray>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<float>("alibi_factor")
                                  .Attr<bool>("alibi_rounded")
                                  .Attr<bool>("fixed"));

#pragma GCC visibility pop
