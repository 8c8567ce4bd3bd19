// Products of rows of x with a weight's rows, for the kernels beside this file. A weight is read in place, once for all
// rows, and asked for ahead of its use: a product with few rows takes as long as reading the weight.
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
#include <utility>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// Floats in a register; registers of outputs, and rows of x, whose sums are kept in registers together; how few rows of
// x are multiplied with what has just been turned.
#if defined(__AVX512F__)
constexpr int LANES = 16, VECTORS = 2, ROWS = 12, FEW = 4;
#elif defined(__AVX__)
constexpr int LANES = 8, VECTORS = 2, ROWS = 6, FEW = 2;
#elif defined(__aarch64__)
constexpr int LANES = 4, VECTORS = 4, ROWS = 6, FEW = 4;
#else
constexpr int LANES = 4, VECTORS = 2, ROWS = 6, FEW = 2;
#endif
// Rows of a weight that are multiplied together.
constexpr int OUTER = VECTORS * LANES;
// Words of a row whose products are summed before they are added to those of the words before.
constexpr int64_t CHUNK = 128;

typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef float LooseLanes __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t LooseHalves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

// bfloat16 is the upper half of a float32.
struct BFloat16 {
  uint16_t bits;
};

// The number is ±0: its bits but for the sign are.
inline bool is_zero(float number) { return number == 0; }
inline bool is_zero(BFloat16 number) { return uint16_t(number.bits << 1) == 0; }

// True for a row of zeros, as padding is: its products with finite numbers are zeros, and need not be computed.
template <class T>
inline bool all_zero(const T* row, int64_t count) {
  return std::all_of(row, row + count, [](T number) { return is_zero(number); });
}

// Numbers of a type as they are multiplied. A word is one number, or two whose products are added to one sum.
template <class T>
struct Numbers;

template <>
struct Numbers<float> {
  static constexpr int IN_WORD = 1;
  using Word = float;
  static Word word(const float* at) { return *at; }
  static Lanes words(const float* at) { return *reinterpret_cast<const LooseLanes*>(at); }
  // As one load: zeros + word would be an addition.
  static Lanes every(Word word) {
#if defined(__AVX512F__)
    return (Lanes)_mm512_set1_ps(word);
#elif defined(__AVX__) && defined(__FMA__)
    return (Lanes)_mm256_set1_ps(word);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (Lanes)vdupq_n_f32(word);
#else
    return Lanes{} + word;
#endif
  }
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
// Each of a word's products is added with a rounding of its own.
template <>
struct Numbers<BFloat16> {
  static constexpr int IN_WORD = 2;
  using Word = uint32_t;
  static Word word(const BFloat16* at) {
    Word word;
    std::memcpy(&word, at, sizeof word);
    return word;
  }
  static Lanes words(const BFloat16* at) { return *reinterpret_cast<const LooseLanes*>(at); }
  static Lanes every(Word word) { return (Lanes)(Words{} + word); }
  static Lanes add(Lanes a, Lanes b, Lanes sum) {
    return (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
};
#else
template <>
struct Numbers<BFloat16> : Numbers<float> {
  static Word word(const BFloat16* at) {
    const uint32_t word = uint32_t(at->bits) << 16;
    float wide;
    std::memcpy(&wide, &word, sizeof wide);
    return wide;
  }
  static Lanes words(const BFloat16* at) {
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

// Rows of x, for `multiply`: in tiles of up to ROWS rows, whose words lie in the order of their use.
template <class T>
class Rows {
  using N = Numbers<T>;
  using Word = typename N::Word;

 public:
  const int64_t count, inner, steps;  // rows; numbers and words of a row
  const int64_t tiles = (count + ROWS - 1) / ROWS;

  // Rows to `fill`.
  Rows(int64_t count, int64_t inner)
      : count(count), inner(inner), steps((inner + N::IN_WORD - 1) / N::IN_WORD), words_(new Word[count * steps]) {}

  Rows(const T* const* rows, int64_t count, int64_t inner) : Rows(count, inner) {
    for (int64_t tile = 0; tile < tiles; tile++) fill(tile, rows + begin(tile));
  }

  // Lays out the rows of a tile.
  void fill(int64_t tile, const T* const* rows) {
    const int64_t in_tile = begin(tile + 1) - begin(tile), left = inner % N::IN_WORD;
    Word* to = words_.get() + begin(tile) * steps;
    for (int64_t i = 0; i + N::IN_WORD <= inner; i += N::IN_WORD) {
      for (int64_t r = 0; r < in_tile; r++) *to++ = N::word(rows[r] + i);
    }
    for (int64_t r = 0; left && r < in_tile; r++) {
      T last[N::IN_WORD] = {};
      std::memcpy(last, rows[r] + inner - left, left * sizeof(T));
      *to++ = N::word(last);
    }
  }

  // The first row of a tile. All tiles have one size or the next smaller one.
  int64_t begin(int64_t tile) const { return (tile * count + tiles - 1) / tiles; }

  // The words of a tile from step `step` on: each step's of all rows.
  const Word* at(int64_t tile, int64_t step) const {
    return words_.get() + begin(tile) * steps + step * (begin(tile + 1) - begin(tile));
  }

 private:
  std::unique_ptr<Word[]> words_;
};

// Words of two registers, by constant indices: b's come after a's.
template <class Index, int... I>
inline Lanes picked(Lanes a, Lanes b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, Index::of(I)...);
#else
  return __builtin_shuffle(a, b, Words{uint32_t(Index::of(I))...});
#endif
}

// In each quarter of 128 bits, the units of SIZE words from the lower (or UPPER) half of a's and b's in turn.
template <int SIZE, bool UPPER>
struct Interleaved {
  static constexpr int of(int i) {
    const int unit = i % 4 / SIZE;
    return i / 4 * 4 + (unit / 2 + UPPER * 2 / SIZE) * SIZE + i % SIZE + unit % 2 * LANES;
  }
};

// The even (or ODD) quarters of a, and then of b.
template <bool ODD>
struct Quarters {
  static constexpr int of(int i) { return (i / 4 * 2 + ODD) * 4 + i % 4; }
};

// LANES registers, the columns of what they were the rows of.
inline void turn(Lanes* rows) {
  constexpr std::make_integer_sequence<int, LANES> ALL;
  constexpr int QUARTERS = LANES / 4;
#pragma GCC unroll 4
  for (int i = 0; i < LANES; i += 4) {
    Lanes pairs[4];
    for (int j = 0; j < 2; j++) {
      pairs[j] = picked<Interleaved<1, false>>(rows[i + 2 * j], rows[i + 2 * j + 1], ALL);
      pairs[2 + j] = picked<Interleaved<1, true>>(rows[i + 2 * j], rows[i + 2 * j + 1], ALL);
    }
    for (int j = 0; j < 2; j++) {
      rows[i + 2 * j] = picked<Interleaved<2, false>>(pairs[2 * j], pairs[2 * j + 1], ALL);
      rows[i + 2 * j + 1] = picked<Interleaved<2, true>>(pairs[2 * j], pairs[2 * j + 1], ALL);
    }
  }
#pragma GCC unroll 4
  for (int round = 1; round < QUARTERS; round *= 2) {
    Lanes next[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES / 2; i++) {
      const Lanes a = rows[i / 4 * 8 + i % 4], b = rows[i / 4 * 8 + 4 + i % 4];
      next[i] = picked<Quarters<false>>(a, b, ALL);
      next[LANES / 2 + i] = picked<Quarters<true>>(a, b, ALL);
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) rows[i] = next[i];
  }
}

// OUTER rows of a weight, from some number on.
template <class T>
struct Strip {
  using N = Numbers<T>;
  static constexpr int64_t WIDTH = LANES * N::IN_WORD, LINE = 64 / sizeof(T);
  const T* rows[OUTER];

  // The first row is `outer`; past the end comes the last one again.
  Strip(const T* numbers, int64_t stride, int64_t outer, int64_t end, int64_t from) {
    for (int w = 0; w < OUTER; w++) rows[w] = numbers + std::min(outer + w, end - 1) * stride + from;
  }

  // LANES words of LANES rows from number `at` on, turned: each register has a word of every row. After `left` numbers
  // come zeros.
  void turned(int first, int64_t at, int64_t left, Lanes* words) const {
    if (left >= WIDTH) {
#pragma GCC unroll 16
      for (int w = 0; w < LANES; w++) words[w] = N::words(rows[first + w] + at);
    } else {
      for (int w = 0; w < LANES; w++) {
        T last[WIDTH] = {};
        std::memcpy(last, rows[first + w] + at, left * sizeof(T));
        words[w] = N::words(last);
      }
    }
    turn(words);
  }

  // Asks for a cache line, of all rows' first lines, their second ones and so on.
  void ask(int64_t line) const { __builtin_prefetch(rows[line % OUTER] + line / OUTER * LINE, 0, 1); }
};

// Adds the products of `steps` words of OUTER turned rows with those of R rows of x to sums[row][outer]. Before each it
// calls `ask`, for what is read next.
template <int R, class T, class Ask>
inline void tile(const typename Numbers<T>::Word* turned, const typename Numbers<T>::Word* x, int64_t steps,
                 float* sums, Ask ask) {
  using N = Numbers<T>;
  Lanes own[R][VECTORS] = {};
  for (int64_t i = 0; i < steps; i++) {
    ask(i);
    Lanes weight[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) {
      std::memcpy(&weight[v], turned + i * OUTER + v * LANES, sizeof weight[v]);
      weight[v] = kept(weight[v]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const Lanes row = N::every(x[i * R + r]);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) own[r][v] = N::add(weight[v], row, own[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) *reinterpret_cast<LooseLanes*>(sums + r * OUTER + v * LANES) += own[r][v];
  }
}

template <class T, int R, class... Arguments>
inline void tile_of(int64_t rows, Arguments... arguments) {
  if constexpr (R > 1) {
    if (rows < R) return tile_of<T, R - 1>(rows, arguments...);
  }
  tile<R, T>(arguments...);
}

// The same for all rows of x, of which there are R: what has just been turned is multiplied in registers. `left` numbers
// of the weight's rows are there.
template <int R, class T>
inline void few(const Strip<T>& weight, int64_t left, const typename Numbers<T>::Word* x, int64_t steps, float* sums,
                const Strip<T>& next) {
  using N = Numbers<T>;
  Lanes own[VECTORS][R] = {};
  for (int64_t i = 0; i < steps; i += LANES) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
      const int64_t at = i * N::IN_WORD;
#pragma GCC unroll 16
      for (int w = 0; w < LANES; w++) __builtin_prefetch(next.rows[v * LANES + w] + at, 0, 1);
      Lanes words[LANES];
      weight.turned(v * LANES, at, left - at, words);
      auto step = [&](int k) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) own[v][r] = N::add(words[k], N::every(x[(i + k) * R + r]), own[v][r]);
      };
      if (i + LANES <= steps) {
#pragma GCC unroll 16
        for (int k = 0; k < LANES; k++) step(k);
      } else {
        for (int k = 0; i + k < steps; k++) step(k);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) *reinterpret_cast<LooseLanes*>(sums + r * OUTER + v * LANES) += own[v][r];
  }
}

template <class T, int R, class... Arguments>
inline void few_of(int64_t rows, const Arguments&... arguments) {
  if constexpr (R > 1) {
    if (rows < R) return few_of<T, R - 1>(rows, arguments...);
  }
  few<R, T>(arguments...);
}

// put(row, outer, x[row] · weight[outer]) for all rows of x and the weight's rows from `begin` to `end`, which have
// x.inner numbers and lie `stride` numbers apart.
template <class T, class Put>
void multiply(const T* weight, int64_t stride, int64_t begin, int64_t end, const Rows<T>& x, Put put) {
  using N = Numbers<T>;
  // Lines that are read for each word of a chunk.
  constexpr int64_t ASKED = std::max<int64_t>(1, OUTER * N::IN_WORD / Strip<T>::LINE);
  alignas(4 * LANES) typename N::Word turned[CHUNK * OUTER];
  const std::unique_ptr<float[]> sums(new float[x.count * OUTER]);
  for (int64_t outer = begin; outer < end; outer += OUTER) {
    std::fill_n(sums.get(), x.count * OUTER, 0.0f);
    for (int64_t from = 0, to; from < x.steps; from = to) {
      to = std::min(from + CHUNK, x.steps);
      const int64_t left = x.inner - from * N::IN_WORD;
      const Strip<T> strip(weight, stride, outer, end, from * N::IN_WORD);
      const bool same = to < x.steps;
      const Strip<T> next(weight, stride, same ? outer : outer + OUTER, end, same ? to * N::IN_WORD : 0);
      if (x.count <= FEW) {
        few_of<T, FEW>(x.count, strip, left, x.at(0, from), to - from, sums.get(), next);
        continue;
      }
      for (int v = 0; v < VECTORS; v++) {
        for (int64_t i = 0; i < to - from; i += LANES) {
          Lanes words[LANES];
          strip.turned(v * LANES, i * N::IN_WORD, left - i * N::IN_WORD, words);
#pragma GCC unroll 16
          for (int k = 0; k < LANES; k++) std::memcpy(turned + (i + k) * OUTER + v * LANES, &words[k], sizeof words[k]);
        }
      }
      for (int64_t t = 0; t < x.tiles; t++) {
        auto run = [&](auto ask) {
          tile_of<T, ROWS>(x.begin(t + 1) - x.begin(t), turned, x.at(t, from), to - from,
                           sums.get() + x.begin(t) * OUTER, ask);
        };
        if (x.tiles == 1) {
          run([&](int64_t i) {
#pragma GCC unroll 2
            for (int64_t k = 0; k < ASKED; k++) next.ask(i * ASKED + k);
          });
        } else if (t < ASKED) {
          run([&, t](int64_t i) { next.ask(t * CHUNK + i); });
        } else {
          run([](int64_t) {});
        }
      }
    }
    for (int64_t r = 0; r < x.count; r++) {
      for (int64_t w = 0; w < std::min<int64_t>(OUTER, end - outer); w++) put(r, outer + w, sums[r * OUTER + w]);
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
