// The likeliest token of each row of logits and log Σ e^logit, for `logits.py`.

#include <limits>

#include "lanes.h"

namespace {

// Logits that a task reads, which stay in the first cache between its two passes; registers at once.
constexpr int64_t SEGMENT = 1 << 12;
constexpr int WIDE = 4;
constexpr float INFINITE = std::numeric_limits<float>::infinity();

struct Part {
  float top;  // its largest logit; -inf if it has none but NaN
  float sum;  // of e^(logit - top), or of e^logit if `top` is not finite; NaN if a logit is
};

// run(LANES logits, which of WIDE registers they go to); behind the last comes -inf, which adds nothing.
template <class Run>
inline void each_register(const float* logits, int64_t count, Run run) {
  int64_t i = 0;
  for (; i + WIDE * LANES <= count; i += WIDE * LANES) {
#pragma GCC unroll 4
    for (int w = 0; w < WIDE; w++) run(load(logits + i + w * LANES), w);
  }
  for (; i < count; i += LANES) {
    float last[LANES];
    std::fill_n(last, LANES, -INFINITE);
    std::copy(logits + i, logits + std::min(count, i + LANES), last);
    run(load(last), 0);
  }
}

Part part_of(const float* logits, int64_t count) {
  Lanes tops[WIDE], sums[WIDE] = {};
  std::fill_n(tops, WIDE, every(-INFINITE));
  each_register(logits, count, [&](Lanes z, int w) { tops[w] = z > tops[w] ? z : tops[w]; });
  float top = -INFINITE;
  for (const Lanes& own : tops) {
    for (int i = 0; i < LANES; i++) top = std::max(top, own[i]);
  }
  if (top == INFINITE) {
    const bool lost = std::any_of(logits, logits + count, [](float z) { return std::isnan(z); });
    return {top, lost ? std::numeric_limits<float>::quiet_NaN() : INFINITE};
  }
  const Lanes shift = every(shift_of(top));
  each_register(logits, count, [&](Lanes z, int w) { sums[w] += exponential(z - shift); });
  return {top, total((sums[0] + sums[1]) + (sums[2] + sums[3]))};
}

ffi::Error Likeliest(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> logits, ffi::Buffer<ffi::PRED> active,
                     ffi::ResultBuffer<ffi::S32> token, ffi::ResultBuffer<ffi::F32> total) {
  const int64_t rows = logits.dimensions()[0], vocab = logits.dimensions()[1];
  const int64_t segments = (vocab + SEGMENT - 1) / SEGMENT;
  std::vector<int64_t> busy;
  for (int64_t r = 0; r < rows; r++) {
    token->typed_data()[r] = 0;
    total->typed_data()[r] = 0;
    if (active.typed_data()[r]) busy.push_back(r);
  }
  std::vector<Part> parts(busy.size() * segments);
  each(pool, parts.size(), [&](int64_t task) {
    const int64_t begin = task % segments * SEGMENT;
    const float* row = logits.typed_data() + busy[task / segments] * vocab;
    parts[task] = part_of(row + begin, std::min(SEGMENT, vocab - begin));
  });
  for (size_t i = 0; i < busy.size(); i++) {
    const Part* own = &parts[i * segments];
    int64_t first = 0;
    for (int64_t s = 1; s < segments; s++) first = own[s].top > own[first].top ? s : first;
    const float top = own[first].top, shift = shift_of(top);
    double sum = 0;
    for (int64_t s = 0; s < segments; s++) sum += own[s].sum * std::exp(double(own[s].top) - shift);
    const float *row = logits.typed_data() + busy[i] * vocab, *begin = row + first * SEGMENT;
    const float* end = row + std::min(vocab, (first + 1) * SEGMENT);
    token->typed_data()[busy[i]] = int32_t(std::min(std::find(begin, end, top), end - 1) - row);
    total->typed_data()[busy[i]] = float(shift + std::log(sum));
  }
  return ffi::Error::Success();
}

}  // namespace

HANDLER(likeliest, Likeliest)
