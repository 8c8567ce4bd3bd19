// The experts' feed-forward on a CPU, for `experts_cpu.py`: each expert's weights are read in place, once for every 32
// of its rows.
//
// Every number is a sum in one fixed order, whatever else is computed: a row's bits depend on nothing but the row
// and its expert. So products are added by `fused` alone, and nothing else may be contracted (-ffp-contract=off).

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

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
// Rows that go through a piece of their expert's weights together: both stay in a core's cache.
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

// a · b + c, rounded once where the processor can.
inline Lanes fused(Lanes a, Lanes b, Lanes c) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX__) && defined(__FMA__)
  return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON) && defined(__aarch64__)
  return (Lanes)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

inline Lanes load(const float* at) { return *reinterpret_cast<const LooseLanes*>(at); }

inline Lanes load(const BFloat16* at) {
  return (Lanes)(__builtin_convertvector(*reinterpret_cast<const LooseHalves*>(at), Words) << 16);
}

// The first `count` numbers from `at` on, and zeros after them.
template <class T>
inline Lanes load_some(const T* at, int64_t count) {
  T some[LANES] = {};
  std::memcpy(some, at, count * sizeof(T));
  return load(some);
}

inline void narrow(float x, float* to) { *to = x; }

// Rounds to nearest, ties to even; NaN stays NaN.
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
template <int R, class T>
inline void tile(const T* const* weights, const T* const* rows, int64_t inner, float (&y)[WEIGHTS][ROWS]) {
  Lanes sums[WEIGHTS][R] = {};
  auto add = [&](auto loaded) {
    Lanes row[R];
#pragma GCC unroll 4
    for (int c = 0; c < R; c++) row[c] = loaded(rows[c]);
#pragma GCC unroll 4
    for (int r = 0; r < WEIGHTS; r++) {
      const Lanes weight = loaded(weights[r]);
#pragma GCC unroll 4
      for (int c = 0; c < R; c++) sums[r][c] = fused(weight, row[c], sums[r][c]);
    }
  };
  int64_t i = 0;
  for (; i + LANES <= inner; i += LANES) add([i](const T* at) { return load(at + i); });
  if (i < inner) add([i, inner](const T* at) { return load_some(at + i, inner - i); });
  for (int r = 0; r < WEIGHTS; r++) {
    for (int c = 0; c < R; c++) {
      y[r][c] = 0;
      for (int lane = 0; lane < LANES; lane++) y[r][c] += sums[r][c][lane];
    }
  }
}

// put(row, outer, x[row] · weight[outer]) for `count` rows and the weight's rows from `begin` to `end`.
template <class T, class Put>
void multiply(const T* weight, int64_t begin, int64_t end, int64_t inner, const T* const* x, int64_t count, Put put) {
  float y[WEIGHTS][ROWS];
  for (int64_t outer = begin; outer < end; outer += WEIGHTS) {
    // Past the end, the last row again.
    const T* weights[WEIGHTS];
    for (int r = 0; r < WEIGHTS; r++) weights[r] = weight + std::min(outer + r, end - 1) * inner;
    for (int64_t row = 0; row < count; row += ROWS) {
      const int some = int(std::min<int64_t>(ROWS, count - row));
      switch (some) {
        case 1: tile<1>(weights, x + row, inner, y); break;
        case 2: tile<2>(weights, x + row, inner, y); break;
        case 3: tile<std::min(3, ROWS)>(weights, x + row, inner, y); break;
        default: tile<ROWS>(weights, x + row, inner, y);
      }
      for (int64_t r = 0; r < std::min<int64_t>(WEIGHTS, end - outer); r++) {
        for (int c = 0; c < some; c++) put(row + c, outer + r, y[r][c]);
      }
    }
  }
}

// task(0) to task(total - 1), on this thread and on idle threads of the pool. It waits only for threads that have
// started a task, so that a pool whose threads are all here does not deadlock. Tasks must not throw: unwinding would
// destroy what the helpers work on.
void each(ffi::ThreadPool& pool, int64_t total, const std::function<void(int64_t)>& task) noexcept {
  struct Progress {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto progress = std::make_shared<Progress>();
  // A helper that starts late finds no task left and does not touch this call's variables, which are gone.
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
  // In the order of the groups: each row's own x, and its numbers between the two products.
  std::vector<const T*> in(rows), middle(rows);
  for (int64_t r = 0; r < rows; r++) {
    in[r] = x + groups.order[r] / sizes.top_k * hidden;
    middle[r] = between + r * intermediate;
  }
  // Rows without an expert come last in the order.
  for (int64_t r = rows; r < sizes.tokens * sizes.top_k; r++) {
    std::fill_n(out + groups.order[r] * hidden, hidden, 0.0f);
  }
  const int64_t first = pieces_of(intermediate), second = pieces_of(hidden);
  each(pool, busy.size() * first, [&](int64_t task) {
    const int64_t e = busy[task / first], begin = task % first * PIECE, end = std::min(begin + PIECE, intermediate);
    const int64_t last = groups.starts[e] + groups.counts[e];
    for (int64_t row = groups.starts[e]; row < last; row += BLOCK) {
      const int64_t some = std::min<int64_t>(BLOCK, last - row);
      float gates[BLOCK][PIECE];
      multiply(gate + e * intermediate * hidden, begin, end, hidden, &in[row], some,
               [&](int64_t r, int64_t i, float value) { gates[r][i - begin] = value; });
      multiply(up + e * intermediate * hidden, begin, end, hidden, &in[row], some,
               [&](int64_t r, int64_t i, float value) {
                 narrow(swiglu(gates[r][i - begin], value, limit), between + (row + r) * intermediate + i);
               });
    }
  });
  each(pool, busy.size() * second, [&](int64_t task) {
    const int64_t e = busy[task / second], begin = task % second * PIECE, end = std::min(begin + PIECE, hidden);
    const int64_t last = groups.starts[e] + groups.counts[e];
    for (int64_t row = groups.starts[e]; row < last; row += BLOCK) {
      multiply(down + e * hidden * intermediate, begin, end, intermediate, &middle[row],
               std::min<int64_t>(BLOCK, last - row), [&](int64_t r, int64_t h, float value) {
                 out[groups.order[row + r] * hidden + h] = value;
               });
    }
  });
}

ffi::Error Experts(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> order, ffi::Buffer<ffi::S32> starts,
                   ffi::Buffer<ffi::S32> counts, ffi::AnyBuffer gate, ffi::AnyBuffer up, ffi::AnyBuffer down,
                   float limit, ffi::ResultBuffer<ffi::F32> out, ffi::Result<ffi::AnyBuffer> between) {
  for (ffi::AnyBuffer* weight : {&gate, &up, &down}) {
    if (weight->element_type() != x.element_type()) return ffi::Error::InvalidArgument("x and weights differ in dtype");
  }
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
