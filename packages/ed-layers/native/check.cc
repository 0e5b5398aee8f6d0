// A program that runs every kernel of one level over random shapes, for sanitizers: the nightly test
// compiles it with `sanitized` of ed_layers/native/build.py. ED_LAYERS_NATIVE_LEVEL names the level.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "check_panels.h"
#include "library.h"

namespace {

std::mt19937 bits(0);

int64_t draw(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(bits() % static_cast<uint32_t>(high - low + 1));
}

std::vector<float> floats(int64_t count) {
  std::vector<float> numbers(count);
  for (float& x : numbers) x = static_cast<float>(draw(-1000, 1000)) / 500;
  return numbers;
}

std::vector<uint8_t> bytes(int64_t count) {
  std::vector<uint8_t> codes(count);
  for (uint8_t& x : codes) x = static_cast<uint8_t>(bits());
  return codes;
}

bool finite(const std::vector<float>& numbers) {
  for (float x : numbers)
    if (!std::isfinite(x)) return false;
  return true;
}

// The numbers in bfloat16, without the lower bits.
std::vector<uint16_t> halves(const std::vector<float>& numbers) {
  std::vector<uint16_t> upper(numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i) {
    uint32_t of_number;
    std::memcpy(&of_number, &numbers[i], sizeof of_number);
    upper[i] = static_cast<uint16_t>(of_number >> 16);
  }
  return upper;
}

bool finite(const std::vector<uint16_t>& numbers) {
  for (uint16_t x : numbers)
    if ((x & 0x7f80) == 0x7f80) return false;
  return true;
}

// One product of a random shape and format.
bool product(const ed::Level& level) {
  ed::Product p{};
  int64_t groups = draw(1, 4), outputs = draw(0, 2) ? draw(1, 200) : ed::kTile * draw(1, 3);
  p.group = draw(0, 1) ? 2 * draw(1, 150) : 16 << draw(0, 3), p.inputs = groups * p.group;
  p.rows = draw(0, 3) ? draw(1, 20) : draw(60, 140);
  p.outputs = outputs, p.transposed = draw(0, 1);
  p.format = static_cast<ed::Format>(draw(0, 4));
  auto x = floats(p.rows * p.inputs), table = floats(16), scale = floats(groups * outputs);
  auto zero = floats(groups * outputs);
  std::vector<float> y(p.rows * outputs);
  int64_t width[] = {4, 2, 1, 1, 1};
  int64_t size = p.inputs * outputs * width[static_cast<int>(p.format)];
  auto w = bytes(p.format == ed::Format::kFourBits ? size / 2 : size);
  if (p.format == ed::Format::kFloat32) {
    auto numbers = floats(p.inputs * outputs);
    std::memcpy(w.data(), numbers.data(), w.size());
  }
  for (size_t i = 1; p.format == ed::Format::kBfloat16 && i < w.size(); i += 2) w[i] = 0x3f;
  for (uint8_t& code : w)
    if (p.format == ed::Format::kFp8 && (code & 127) == 127) code = 0;
  auto half_x = halves(x);
  p.x_is_bfloat16 = draw(0, 1);
  p.x = p.x_is_bfloat16 ? static_cast<void*>(half_x.data()) : x.data();
  p.y = y.data(), p.w = w.data(), p.table = table.data();
  p.scale.data = scale.data();
  bool codes = p.format >= ed::Format::kInt8;
  if (codes && p.format != ed::Format::kFp8 && draw(0, 1)) p.zero.data = zero.data();
  bool whole = (p.format == ed::Format::kInt8 || p.format == ed::Format::kFourBits) && draw(0, 1);
  int64_t fours = p.format == ed::Format::kFourBits ? 8 : 4;  // inputs of four bytes
  p.in_panels = !p.transposed && outputs % ed::kTile == 0 &&
                (codes ? whole && p.group % fours == 0 : draw(0, 1) && p.inputs % 2 == 0);
  if (codes && p.in_panels) {
    p.scale.kind = draw(0, 1) ? ed::Small::kFloat16 : ed::Small::kFloat32;
    p.zero.kind = draw(0, 1) ? ed::Small::kUint8 : ed::Small::kFloat32;
    const int64_t all = outputs / ed::kTile * groups;
    w.resize(all * ed::panel_group_bytes(p)), p.w = w.data();
    ed::fill_code_panels(p, all, w.data(), draw);
  }
  std::vector<int8_t> numbers;
  std::vector<int32_t> sums;
  std::vector<float> scales(p.rows * groups);
  if (whole) {
    ed::WholeSizes sizes = level.whole_sizes(p);
    numbers.resize(p.rows * sizes.numbers), sums.resize(p.rows * sizes.sums);
    p.numbers = numbers.data(), p.row_sums = sums.data(), p.row_scale = scales.data();
    for (int64_t row = 0; row < p.rows; ++row) level.round_row(p, row);
  }
  auto compute = whole ? level.whole : p.transposed ? level.rows : level.columns;
  int64_t share = p.in_panels ? ed::kTile / 2 * draw(1, 5)
                  : whole     ? 2 * ed::kTile
                              : ed::kUnit * draw(1, 9);
  auto up = floats(p.rows * outputs);
  ed::Product second = p;
  second.y = up.data();
  for (int64_t first = 0; first < outputs; first += share) {
    int64_t last = std::min(outputs, first + share);
    compute(p, first, last);
    level.gate(static_cast<ed::Act>(draw(1, 5)), p, second, first, last);
  }
  return finite(y);
}

// The gradient of a matrix of a random shape.
bool gradient(const ed::Level& level, bool in_halves) {
  ed::Product p{};
  p.inputs = draw(1, 200), p.rows = p.x_rows = draw(1, 150), p.outputs = draw(1, 200);
  auto x = floats(p.inputs * p.rows), w = floats(p.inputs * p.outputs), buffer = x;
  auto half_x = halves(x), half_w = halves(w);
  std::vector<float> y(p.rows * p.outputs);
  p.x = x.data(), p.w = w.data(), p.y = y.data(), p.x_across = true;
  if (in_halves) {
    p.format = ed::Format::kBfloat16, p.x_is_bfloat16 = true, p.w = half_w.data();
    p.x = buffer.data(), p.x_across = !level.across_in_rows;
    for (int64_t first = 0; first < p.inputs; first += ed::kTile)
      level.across(p, half_x.data(), buffer.data(), first, std::min(p.inputs, first + ed::kTile));
  }
  int64_t share = ed::kUnit * draw(1, 9);
  for (int64_t first = 0; first < p.outputs; first += share)
    level.columns(p, first, std::min(p.outputs, first + share));
  return finite(y);
}

// The forward pass of attention, in tasks.
void attend(const ed::Level& level, const ed::Attend& p) {
  int64_t share = level.attention.queries_of_block(p) * draw(1, ed::kBlocksOfTask);
  for (int64_t row = 0; row < p.batch; ++row)
    for (int64_t group = 0; group < p.groups; ++group)
      for (int64_t first = 0; first < p.queries; first += share)
        level.attention.forward(p, row, group, first, std::min(p.queries, first + share));
}

// Attention of a random shape, forward and backward.
bool attention(const ed::Level& level) {
  ed::Attend p{};
  p.batch = p.rows = draw(1, 2), p.queries = draw(1, 150), p.slots = p.queries;
  p.groups = draw(1, 2), p.heads = p.groups * draw(1, 3);
  p.key_dim = draw(1, 40), p.value_dim = draw(1, 40);
  int64_t tokens = p.batch * p.queries;
  auto q = floats(tokens * p.heads * p.key_dim), k = floats(tokens * p.groups * p.key_dim);
  auto v = floats(tokens * p.groups * p.value_dim), d_out = floats(tokens * p.heads * p.value_dim);
  auto shared = floats(tokens * p.heads), sinks = floats(p.heads);
  std::vector<float> out(d_out.size()), lse(shared.size()), d_q(q.size());
  std::vector<float> d_k(k.size()), d_v(v.size());
  p.reach = draw(1, 100);
  auto distances = floats(p.heads * (2 * p.reach + 1)), slopes = floats(p.heads);
  std::vector<float> d_distance(p.heads / p.groups * (2 * p.reach + 1));
  if (draw(0, 1)) p.by_distance = distances.data();
  if (draw(0, 1)) p.slopes = slopes.data(), p.alibi_factor = 0.1f, p.alibi_rounded = draw(0, 1);
  if (draw(0, 1)) p.drop_below = int64_t{1} << 31, p.keep = 2;
  std::vector<int32_t> segments(tokens), index(tokens);
  for (int64_t i = 0; i < tokens; ++i)
    segments[i] = draw(0, 9) != 0, index[i] = static_cast<int32_t>(i % p.queries);
  p.q = q.data(), p.out = out.data(), p.lse = lse.data();
  for (ed::Slots* s : {&p.keys, &p.values}) {
    s->data = s == &p.keys ? k.data() : v.data();
    s->head = s == &p.keys ? p.key_dim : p.value_dim;
    s->slot = p.groups * s->head, s->row = p.slots * s->slot;
  }
  p.q_segments = p.k_segments = segments.data(), p.q_index = p.k_index = index.data();
  p.causal = draw(0, 1), p.scale = 0.3f, p.soft_cap = draw(0, 1) ? 4.0f : 0.0f;
  p.window = draw(0, 1) ? draw(1, 80) : 0, p.chunk = draw(0, 1) ? draw(1, 80) : 0;
  if (draw(0, 1)) p.sinks = sinks.data();
  attend(level, p);
  ed::Attend in_halves = p;
  auto half_q = halves(q), half_k = halves(k), half_v = halves(v), half_d_out = halves(d_out);
  std::vector<uint16_t> half_out(out.size());
  in_halves.q = half_q.data(), in_halves.q_is_bfloat16 = true, in_halves.out = half_out.data();
  in_halves.keys.data = half_k.data(), in_halves.keys.kind = ed::Stored::kBfloat16;
  in_halves.values.data = half_v.data(), in_halves.values.kind = ed::Stored::kBfloat16;
  attend(level, in_halves);
  p.d_out = d_out.data(), p.shared = shared.data();
  p.d_k = d_k.data(), p.d_v = d_v.data();
  in_halves.lse = lse.data(), in_halves.shared = p.shared;
  in_halves.d_out = half_d_out.data(), in_halves.d_k = p.d_k, in_halves.d_v = p.d_v;
  bool fine = finite(out) && finite(half_out);
  for (const ed::Attend& of : {p, in_halves})
    for (int64_t group = 0; group < p.groups; ++group) {
      const int64_t middle = draw(0, p.slots);
      for (int64_t first : {int64_t{0}, middle})
        level.attention.backward(of, p.batch - 1, group, first, first ? p.slots : middle, d_q.data(),
                                 d_distance.data());
      fine = fine && finite(d_k) && finite(d_v) && finite(d_q) && finite(d_distance);
    }
  return fine;
}

// Rotary positions of a random shape.
bool rotary(const ed::Level& level) {
  ed::Rotary p{};
  p.tokens = draw(1, 20), p.heads = draw(1, 4), p.pairs = draw(1, 40);
  p.dim = 2 * p.pairs + draw(0, 1) * draw(0, 20);
  auto x = floats(p.tokens * p.heads * p.dim);
  auto cos = floats(p.tokens * p.pairs), sin = floats(p.tokens * p.pairs);
  std::vector<float> y(x.size());
  p.x = x.data(), p.y = y.data(), p.cos = cos.data(), p.sin = sin.data();
  p.neighbours = draw(0, 1), p.back = draw(0, 1);
  int64_t half = p.tokens / 2;
  level.rotate(p, 0, half), level.rotate(p, half, p.tokens);
  return finite(y);
}

// A recurrence of a random shape, in every form.
bool recurrence(const ed::Level& level) {
  ed::Recurrence p{};
  p.rows = draw(1, 3), p.columns = draw(1, 5), p.groups = draw(1, 2), p.heads = p.groups * draw(1, 3);
  p.keys = draw(1, 40), p.values = draw(1, 70), p.keys_last = draw(0, 1);
  bool has_rates = p.keys_last && draw(0, 1), has_beta = !p.keys_last && draw(0, 1);
  int64_t tokens = p.rows * p.columns;
  p.decays = has_rates ? p.values : p.keys_last || draw(0, 1) ? 1 : p.keys;
  auto states = floats(2 * p.heads * p.keys * p.values), value = floats(tokens * p.heads * p.values);
  auto query = floats(tokens * p.groups * p.keys), key = floats(tokens * p.groups * p.keys);
  auto decay = floats(tokens * p.heads * p.decays), rates = floats(p.heads * p.values * p.keys);
  auto beta = floats(tokens * p.heads);
  for (float& x : rates) x = -std::abs(x);
  for (float& x : decay) x = has_rates ? std::abs(x) : x / 2;
  for (float& x : key) x /= 8;
  std::vector<float> out(value.size());
  std::vector<int32_t> owner(p.rows), marks(tokens);
  for (int32_t& state : owner) state = static_cast<int32_t>(draw(0, 1));
  for (int32_t& mark : marks) mark = static_cast<int32_t>(draw(0, 2));
  p.states = states.data(), p.owner = owner.data(), p.marks = marks.data();
  p.query = query.data(), p.key = key.data(), p.value = value.data(), p.decay = decay.data();
  p.rates = has_rates ? rates.data() : nullptr, p.beta = has_beta ? beta.data() : nullptr;
  p.out = out.data();
  int64_t half = p.heads / 2;
  level.recur(p, 0, half), level.recur(p, half, p.heads);
  return finite(out) && finite(states);
}

}  // namespace

int main() {
  const ed::Level& level = ed::level();
  for (int turn = 0; turn < 150; ++turn)
    if (!product(level) || !gradient(level, turn % 2) || !attention(level) || !rotary(level) ||
        !recurrence(level)) {
      std::printf("%s: turn %d has a number that is not finite\n", level.name, turn);
      return 1;
    }
  std::printf("%s\n", level.name);
  return 0;
}
