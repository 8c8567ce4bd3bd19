// Products of a weight's rows with a few rows of x, for the kernels beside this file. A weight is read in place, once
// for all rows, and asked for ahead of its use: a product with few rows takes as long as reading the weight.
//
// Every number is a sum in one fixed order, whatever else is computed: a row's bits depend on nothing but the row and
// the weight. So products are added by `Numbers::add` alone, and nothing else may be contracted (-ffp-contract=off).

#pragma once

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
constexpr int LANES = 16, WEIGHTS = 5, ROWS = 5;
#elif defined(__AVX__)
constexpr int LANES = 8, WEIGHTS = 3, ROWS = 4;
#else
constexpr int LANES = 4, WEIGHTS = 5, ROWS = 4;
#endif
// Rows of x that a weight is read once for.
constexpr int BLOCK = 64;
// Registers of each weight row that go through all rows of x together, while the next are fetched.
constexpr int PANEL = 32;

typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef float LooseLanes __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t LooseHalves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

// bfloat16 is the upper half of a float32.
struct BFloat16 {
  uint16_t bits;
};

// Numbers of a type as they are multiplied: WIDTH at a time. A row of x is kept as `Row`s.
template <class T>
struct Numbers;

template <>
struct Numbers<float> {
  static constexpr int WIDTH = LANES;
  using Row = float;
  static Row row(float x) { return x; }
  static Lanes load(const float* at) { return *reinterpret_cast<const LooseLanes*>(at); }
  // a · b + sum, rounded once where the processor can.
  static Lanes add(Lanes a, Lanes b, Lanes sum) {
#if defined(__AVX512F__)
    return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__AVX__) && defined(__FMA__)
    return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (Lanes)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + sum;
#endif
  }
};

#if defined(__AVX512BF16__)
// Two products to a lane, each added with a rounding of its own.
template <>
struct Numbers<BFloat16> {
  static constexpr int WIDTH = 2 * LANES;
  using Row = BFloat16;
  static Row row(BFloat16 x) { return x; }
  static Lanes load(const BFloat16* at) { return *reinterpret_cast<const LooseLanes*>(at); }
  static Lanes add(Lanes a, Lanes b, Lanes sum) {
    return (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
};
#else
template <>
struct Numbers<BFloat16> : Numbers<float> {
  static Row row(BFloat16 x) {
    const uint32_t word = uint32_t(x.bits) << 16;
    float wide;
    std::memcpy(&wide, &word, sizeof wide);
    return wide;
  }
  using Numbers<float>::load;
  static Lanes load(const BFloat16* at) {
    return (Lanes)(__builtin_convertvector(*reinterpret_cast<const LooseHalves*>(at), Words) << 16);
  }
};
#endif

// `lanes` in a register: the compiler would load it again for every product.
inline Lanes kept(Lanes lanes) {
#if defined(__AVX512F__)
  asm("" : "+v"(lanes));
#elif defined(__AVX__)
  asm("" : "+x"(lanes));
#endif
  return lanes;
}

// The sum of a register's numbers: of its halves, their halves and so on.
inline float total(Lanes lanes) {
  float numbers[LANES];
  std::memcpy(numbers, &lanes, sizeof numbers);
#pragma GCC unroll 4
  for (int half = LANES / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; i++) numbers[i] += numbers[half + i];
  }
  return numbers[0];
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

// Up to BLOCK rows of x, for `multiply`: in tiles of up to ROWS rows, whose registers lie in the order of their use.
template <class T>
class Rows {
  using N = Numbers<T>;
  using Row = typename N::Row;

 public:
  const int64_t count, steps;  // rows; registers of a row, the last one filled with zeros
  const int64_t tiles = (count + ROWS - 1) / ROWS;

  Rows(const T* const* rows, int64_t count, int64_t inner)
      : count(count), steps((inner + N::WIDTH - 1) / N::WIDTH), packed_(count * steps) {
    for (int64_t tile = 0; tile < tiles; tile++) {
      const int64_t first = begin(tile), in_tile = begin(tile + 1) - first;
      for (int64_t r = 0; r < in_tile; r++) {
        const T* from = rows[first + r];
        Register* to = &packed_[first * steps + r];
        int64_t i = 0;
        for (; i + N::WIDTH <= inner; i += N::WIDTH, to += in_tile) {
          for (int k = 0; k < N::WIDTH; k++) to->numbers[k] = N::row(from[i + k]);
        }
        for (int k = 0; i + k < inner; k++) to->numbers[k] = N::row(from[i + k]);
      }
    }
  }

  // The first row of a tile. All tiles have one size or the next smaller one.
  int64_t begin(int64_t tile) const { return (tile * count + tiles - 1) / tiles; }

  // The registers of a tile from step `step` on: each step's of all rows.
  const Row* at(int64_t tile, int64_t step) const {
    return reinterpret_cast<const Row*>(&packed_[begin(tile) * steps + step * (begin(tile + 1) - begin(tile))]);
  }

 private:
  struct Register {
    alignas(4 * LANES) Row numbers[N::WIDTH] = {};
  };
  std::vector<Register> packed_;
};

// Adds the products of `steps` registers of WEIGHTS rows of a weight with those of R rows of x to sums[weight][row].
// Meanwhile it asks for `asked` rows of what is read next.
template <int R, class T>
inline void tile(const T* const* weights, const typename Numbers<T>::Row* x, int64_t steps, int64_t some, Lanes* sums,
                 const T* const* next, int asked) {
  using N = Numbers<T>;
  Lanes own[WEIGHTS][R];
#pragma GCC unroll 8
  for (int w = 0; w < WEIGHTS; w++) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) own[w][r] = sums[w * R + r];
  }
  auto step = [&](int64_t i, auto loaded) {
    Lanes weight[WEIGHTS];
#pragma GCC unroll 8
    for (int w = 0; w < WEIGHTS; w++) weight[w] = kept(loaded(weights[w] + i * N::WIDTH));
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Lanes row = N::load(x + (i * R + r) * N::WIDTH);
#pragma GCC unroll 8
      for (int w = 0; w < WEIGHTS; w++) own[w][r] = N::add(weight[w], row, own[w][r]);
    }
  };
  auto whole = [](const T* at) { return N::load(at); };
  auto each_step = [&](auto ask) {
    for (int64_t i = 0; i < steps; i++) {
      ask(i);
      step(i, whole);
    }
  };
  switch (asked) {
    case 0: each_step([](int64_t) {}); break;
    case 1: each_step([&](int64_t i) { __builtin_prefetch(next[0] + i * N::WIDTH, 0, 1); }); break;
    case WEIGHTS:
      each_step([&](int64_t i) {
#pragma GCC unroll 8
        for (int w = 0; w < WEIGHTS; w++) __builtin_prefetch(next[w] + i * N::WIDTH, 0, 1);
      });
      break;
    default:
      each_step([&](int64_t i) {
        for (int w = 0; w < asked; w++) __builtin_prefetch(next[w] + i * N::WIDTH, 0, 1);
      });
  }
  if (some) {  // numbers of the row's last register
    step(steps, [some](const T* at) {
      T last[N::WIDTH] = {};
      std::memcpy(last, at, some * sizeof(T));
      return N::load(last);
    });
  }
#pragma GCC unroll 8
  for (int w = 0; w < WEIGHTS; w++) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) sums[w * R + r] = own[w][r];
  }
}

template <int R, class... Arguments>
inline void tile_of(int64_t rows, Arguments... arguments) {
  if constexpr (R > 1) {
    if (rows < R) return tile_of<R - 1>(rows, arguments...);
  }
  tile<R>(arguments...);
}

// put(row, outer, x[row] · weight[outer]) for all rows of x and the weight's rows from `begin` to `end`, which have
// `inner` numbers and lie `stride` numbers apart.
template <class T, class Put>
void multiply(const T* weight, int64_t stride, int64_t begin, int64_t end, int64_t inner, const Rows<T>& x, Put put) {
  constexpr int64_t WIDTH = Numbers<T>::WIDTH;
  const int64_t whole = inner / WIDTH, left = inner % WIDTH;
  const int64_t asked = (WEIGHTS + x.tiles - 1) / x.tiles;
  alignas(4 * LANES) Lanes sums[BLOCK * WEIGHTS];
  for (int64_t outer = begin; outer < end; outer += WEIGHTS) {
    std::fill_n(sums, x.count * WEIGHTS, Lanes{});
    for (int64_t from = 0; from < std::max<int64_t>(whole, 1); from += PANEL) {
      const int64_t steps = std::min<int64_t>(PANEL, whole - from), to = from + steps;
      const T *weights[WEIGHTS], *next[WEIGHTS];
      for (int w = 0; w < WEIGHTS; w++) {
        // Past the end, the last row again.
        weights[w] = weight + std::min(outer + w, end - 1) * stride + from * WIDTH;
        next[w] = to < whole ? weights[w] + PANEL * WIDTH : weight + std::min(outer + WEIGHTS + w, end - 1) * stride;
      }
      for (int64_t t = 0, ahead = 0; t < x.tiles; t++, ahead += asked) {
        const int some = int(std::max<int64_t>(0, std::min(asked, WEIGHTS - ahead)));
        tile_of<ROWS>(x.begin(t + 1) - x.begin(t), weights, x.at(t, from), steps, to == whole ? left : 0,
                      sums + x.begin(t) * WEIGHTS, next + ahead, some);
      }
    }
    for (int64_t t = 0; t < x.tiles; t++) {
      const int64_t first = x.begin(t), rows = x.begin(t + 1) - first;
      for (int64_t w = 0; w < std::min<int64_t>(WEIGHTS, end - outer); w++) {
        for (int64_t r = 0; r < rows; r++) {
          put(first + r, outer + w, total(sums[first * WEIGHTS + w * rows + r]));
        }
      }
    }
  }
}

// task(0) to task(total - 1), on this thread and on idle threads of the pool. It waits only for threads that have
// started a task, so that a pool whose threads are all here does not deadlock. Tasks must not throw: unwinding would
// destroy what the helpers work on.
inline void each(ffi::ThreadPool& pool, int64_t total, const std::function<void(int64_t)>& task) noexcept {
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

}  // namespace
