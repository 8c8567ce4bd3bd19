// Rows of an array by their indices, and sums of rows times weights, for `rows.py`.

#include "lanes.h"

namespace {

// Bytes of a task.
constexpr int64_t PIECE = 1 << 18;

ffi::Error Take(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> rows, ffi::Result<ffi::AnyBuffer> out) {
  const int64_t held = x.dimensions()[0], bytes = held ? int64_t(x.size_bytes()) / held : 0;
  const auto* from = static_cast<const char*>(x.untyped_data());
  auto* to = static_cast<char*>(out->untyped_data());
  std::vector<int64_t> used;
  for (int64_t r = 0; r < int64_t(rows.element_count()); r++) {
    const int64_t own = rows.typed_data()[r];
    if (own >= 0 && own < held) used.push_back(r);
  }
  const int64_t pieces = (bytes + PIECE - 1) / PIECE;
  each(pool, int64_t(used.size()) * pieces, [&](int64_t task) {
    const int64_t r = used[task / pieces], begin = task % pieces * PIECE;
    const char* row = from + rows.typed_data()[r] * bytes;
    std::memcpy(to + r * bytes + begin, row + begin, std::min(PIECE, bytes - begin));
  });
  return ffi::Error::Success();
}

// Product by product and sum by sum, each rounded: within a program of XLA it would depend on what is fused with it.
ffi::Error Weighted(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> weights, ffi::Buffer<ffi::F32> rows,
                    ffi::ResultBuffer<ffi::F32> out) {
  const int64_t tokens = weights.dimensions()[0], top_k = weights.dimensions()[1], width = out->dimensions()[1];
  const int64_t each_task = std::max<int64_t>(1, PIECE / std::max<int64_t>(1, 4 * top_k * width));
  each(pool, (tokens + each_task - 1) / each_task, [&](int64_t task) {
    for (int64_t t = task * each_task; t < std::min(tokens, (task + 1) * each_task); t++) {
      float* sum = out->typed_data() + t * width;
      for (int64_t j = 0; j < top_k; j++) {
        const float weight = weights.typed_data()[t * top_k + j];
        const float* row = rows.typed_data() + (t * top_k + j) * width;
        for (int64_t i = 0; i < width; i++) sum[i] = j ? sum[i] + weight * row[i] : weight * row[i];
      }
    }
  });
  return ffi::Error::Success();
}

}  // namespace

HANDLER(weighted_rows, Weighted)

HANDLER(take_rows, Take)
