// The experts' feed-forward on a CPU, for `experts_cpu.py`: each expert's weights are read where they lie, and once for
// every 32 rows it has.
//
// Every number is a sum in one fixed order, whatever is computed beside it: a row's bits depend on nothing but the row
// and its expert.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// Floats in a register, and the rows of a weight and of x whose sums of products are kept in registers together.
#if defined(__AVX512F__)
constexpr int LANES = 16, WEIGHTS = 4, ROWS = 4;
#elif defined(__AVX__)
constexpr int LANES = 8, WEIGHTS = 4, ROWS = 2;
#else
constexpr int LANES = 4, WEIGHTS = 4, ROWS = 4;
#endif
// Rows of an expert that go through a piece of its weights together: both stay in a core's cache.
constexpr int BLOCK = 32;
// Rows of a weight that make a task.
constexpr int PIECE = 64;

typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef float LooseLanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t LooseHalves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

// bfloat16 is the upper half of a float32.
struct BFloat16 {
  uint16_t bits;
};

inline Lanes load(const float* at) { return *reinterpret_cast<const LooseLanes*>(at); }

inline Lanes load(const BFloat16* at) {
  return (Lanes)(__builtin_convertvector(*reinterpret_cast<const LooseHalves*>(at), Words) << 16);
}

inline float widened(float x) { return x; }

inline float widened(BFloat16 x) {
  const uint32_t word = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &word, sizeof y);
  return y;
}

inline void narrow(float x, float* to) { *to = x; }

// To the nearest, ties to even; a NaN stays one.
inline void narrow(float x, BFloat16* to) {
  uint32_t word;
  std::memcpy(&word, &x, sizeof word);
  if (std::isnan(x)) {
    to->bits = uint16_t(word >> 16) | 0x40;
  } else {
    to->bits = uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16);
  }
}

// y[r][c] = weights[r] · rows[c]: LANES sums over every LANES-th product, then their sum.
template <int W, int R, class T>
inline void tile(const T* weights, const T* const* rows, int64_t inner, float (&y)[WEIGHTS][ROWS]) {
  Lanes sums[W][R] = {};
  int64_t i = 0;
  for (; i + LANES <= inner; i += LANES) {
    Lanes row[R];
#pragma GCC unroll 4
    for (int c = 0; c < R; c++) row[c] = load(rows[c] + i);
#pragma GCC unroll 4
    for (int r = 0; r < W; r++) {
      const Lanes weight = load(weights + r * inner + i);
#pragma GCC unroll 4
      for (int c = 0; c < R; c++) sums[r][c] += weight * row[c];
    }
  }
  for (int r = 0; r < W; r++) {
    for (int c = 0; c < R; c++) {
      float sum = 0;
      for (int lane = 0; lane < LANES; lane++) sum += sums[r][c][lane];
      for (int64_t j = i; j < inner; j++) sum += widened(weights[r * inner + j]) * widened(rows[c][j]);
      y[r][c] = sum;
    }
  }
}

template <int W, class T>
inline void tiles(const T* weights, const T* const* rows, int64_t count, int64_t inner, float (&y)[WEIGHTS][ROWS]) {
  switch (count) {
    case 1: return tile<W, 1>(weights, rows, inner, y);
    case 2: return tile<W, 2>(weights, rows, inner, y);
#if !defined(__AVX__) || defined(__AVX512F__)
    case 3: return tile<W, 3>(weights, rows, inner, y);
    case 4: return tile<W, 4>(weights, rows, inner, y);
#endif
  }
}

// put(row, outer, x[row] · weight[outer]) for the weight's rows from `begin` to `end`.
template <class T, class Put>
void multiply(const T* weight, int64_t begin, int64_t end, int64_t inner, const std::vector<const T*>& x, Put put) {
  const int64_t count = x.size();
  float y[WEIGHTS][ROWS];
  for (int64_t block = 0; block < count; block += BLOCK) {
    const int64_t last = std::min<int64_t>(block + BLOCK, count);
    for (int64_t outer = begin; outer < end;) {
      const int64_t taken = outer + WEIGHTS <= end ? WEIGHTS : 1;
      for (int64_t row = block; row < last; row += ROWS) {
        const int64_t some = std::min<int64_t>(ROWS, last - row);
        if (taken == 1) {
          tiles<1>(weight + outer * inner, &x[row], some, inner, y);
        } else {
          tiles<WEIGHTS>(weight + outer * inner, &x[row], some, inner, y);
        }
        for (int64_t r = 0; r < taken; r++) {
          for (int64_t c = 0; c < some; c++) put(row + c, outer + r, y[r][c]);
        }
      }
      outer += taken;
    }
  }
}

// task(0) to task(total - 1), on this thread and those of the pool that have nothing else to do. Nobody waits for a
// thread that has not begun, so that a pool whose threads all wait here still comes to an end.
void each(ffi::ThreadPool& pool, int64_t total, const std::function<void(int64_t)>& task) {
  struct Progress {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto progress = std::make_shared<Progress>();
  // A helper that comes late finds no task left, and never touches what has gone with this call.
  auto work = [progress, total, &task] {
    for (int64_t i; (i = progress->next.fetch_add(1)) < total;) {
      task(i);
      progress->done.fetch_add(1, std::memory_order_release);
    }
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads() - 1, total - 1);
  for (int64_t i = 0; i < helpers; i++) pool.Schedule([work] { work(); });
  work();
  while (progress->done.load(std::memory_order_acquire) < total) std::this_thread::yield();
}

inline int64_t pieces_of(int64_t outer) { return (outer + PIECE - 1) / PIECE; }

struct Sizes {
  int64_t tokens, top_k, experts, intermediate, hidden;
};

struct Groups {
  const int32_t *order, *starts, *counts;
};

inline float swiglu(float gate, float up, float limit) {
  gate = gate / (1 + std::exp(-gate));
  if (limit > 0) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : (up < -limit ? -limit : up);
  }
  return gate * up;
}

template <class T>
void run(ffi::ThreadPool& pool, const Sizes& sizes, const Groups& groups, const T* x, const T* gate, const T* up,
         const T* down, float limit, float* out, T* between) {
  const int64_t intermediate = sizes.intermediate, hidden = sizes.hidden;
  std::vector<int64_t> busy;
  int64_t rows = 0;
  for (int64_t e = 0; e < sizes.experts; e++) {
    if (groups.counts[e]) busy.push_back(e);
    rows += groups.counts[e];
  }
  // Rows of no expert come last in the order.
  for (int64_t r = rows; r < sizes.tokens * sizes.top_k; r++) {
    std::fill_n(out + int64_t(groups.order[r]) * hidden, hidden, 0.0f);
  }
  const int64_t first = pieces_of(intermediate), second = pieces_of(hidden);
  each(pool, busy.size() * first, [&](int64_t task) {
    const int64_t e = busy[task / first], begin = task % first * PIECE, end = std::min(begin + PIECE, intermediate);
    const int64_t start = groups.starts[e], count = groups.counts[e], width = end - begin;
    std::vector<const T*> own(count);
    for (int64_t r = 0; r < count; r++) own[r] = x + groups.order[start + r] / sizes.top_k * hidden;
    std::vector<float> gates(count * width);
    multiply(gate + e * intermediate * hidden, begin, end, hidden, own,
             [&](int64_t r, int64_t i, float value) { gates[r * width + i - begin] = value; });
    multiply(up + e * intermediate * hidden, begin, end, hidden, own, [&](int64_t r, int64_t i, float value) {
      narrow(swiglu(gates[r * width + i - begin], value, limit), between + (start + r) * intermediate + i);
    });
  });
  each(pool, busy.size() * second, [&](int64_t task) {
    const int64_t e = busy[task / second], begin = task % second * PIECE, end = std::min(begin + PIECE, hidden);
    const int64_t start = groups.starts[e], count = groups.counts[e];
    std::vector<const T*> own(count);
    for (int64_t r = 0; r < count; r++) own[r] = between + (start + r) * intermediate;
    multiply(down + e * hidden * intermediate, begin, end, intermediate, own, [&](int64_t r, int64_t h, float value) {
      out[int64_t(groups.order[start + r]) * hidden + h] = value;
    });
  });
}

ffi::Error Experts(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> order, ffi::Buffer<ffi::S32> starts,
                   ffi::Buffer<ffi::S32> counts, ffi::AnyBuffer gate, ffi::AnyBuffer up, ffi::AnyBuffer down,
                   float limit, ffi::ResultBuffer<ffi::F32> out, ffi::Result<ffi::AnyBuffer> between) {
  const int64_t tokens = x.dimensions()[0];
  const Sizes sizes{tokens, int64_t(order.dimensions()[0]) / std::max<int64_t>(tokens, 1), gate.dimensions()[0],
                    gate.dimensions()[1], gate.dimensions()[2]};
  const Groups groups{order.typed_data(), starts.typed_data(), counts.typed_data()};
  auto run_as = [&](auto type) {
    using T = decltype(type);
    auto at = [](ffi::AnyBuffer& buffer) { return static_cast<T*>(buffer.untyped_data()); };
    run<T>(pool, sizes, groups, at(x), at(gate), at(up), at(down), limit, out->typed_data(), at(*between));
  };
  if (x.element_type() == ffi::BF16) {
    run_as(BFloat16{});
  } else {
    run_as(float{});
  }
  return ffi::Error::Success();
}

}  // namespace

using Any = ffi::AnyBuffer;
using S32 = ffi::Buffer<ffi::S32>;

XLA_FFI_DEFINE_HANDLER_SYMBOL(experts, Experts,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Any>()  // x
                                  .Arg<S32>()  // order
                                  .Arg<S32>()  // starts
                                  .Arg<S32>()  // counts
                                  .Arg<Any>()  // gate
                                  .Arg<Any>()  // up
                                  .Arg<Any>()  // down
                                  .Attr<float>("limit")
                                  .Ret<ffi::Buffer<ffi::F32>>()  // out
                                  .Ret<Any>());                  // between
