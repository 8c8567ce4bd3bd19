// Products of rows of x with the rows of a stored matrix, for the kernels beside this file. The matrix is decoded in
// registers for few rows of x, and a panel of it in the cache for more.

#pragma once

#include "formats.h"

namespace {

// Rows of a weight that are decoded together, whose sums are kept in registers for up to FEW_ROWS rows of x; the tile of
// TALL rows of x by WIDE of the weight; rows of a panel, and rows of x that it is decoded for.
constexpr int STRIP = 4;
template <class F>
constexpr int FEW_ROWS = F::IN_LANE == 2 && !F::DENSE ? 5 : 3;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int TALL = 6, WIDE = 4, PANEL = 24;
#else
constexpr int TALL = 4, WIDE = 3, PANEL = 24;
#endif
constexpr int64_t BLOCK = 64;
// Up to so many rows are multiplied by a dense weight as it lies.
template <class F>
constexpr int64_t IN_PLACE = F::REGISTERS == 1 ? BLOCK : 16;
// Bytes of a step.
constexpr int64_t BYTES = 4 * LANES;
// Bytes ahead of their use at which a weight is asked for.
constexpr int64_t AHEAD = 4096;
// The STRIP rows of a dense weight are asked for one after another if they have fewer bytes than a page, else all at
// once: a processor that reads several places of a page in turn does not foresee the next. Others are decoded too slowly
// for that to pay.
constexpr int64_t PAGE = 4096;

// Floats of a row that is laid out: whole steps, of which the longest has 128 numbers, and such rows begin in other
// lines of the cache.
inline int64_t padded(int64_t inner) { return (inner + 127) / 128 * 128 + 16; }

// F's order of a row.
template <class F>
struct Order {
  using Laid = std::conditional_t<F::IN_LANE == 2, BFloat16, float>;
  int16_t from[F::STEP], to[F::STEP];

  Order() {
    for (int k = 0; k < F::REGISTERS; k++) {
      for (int lane = 0; lane < LANES; lane++) {
        for (int i = 0; i < F::IN_LANE; i++) {
          const int64_t place = (k * LANES + lane) * F::IN_LANE + i, element = F::element(k, lane) + i * F::APART;
          from[place] = element;
          to[element] = place;
        }
      }
    }
  }

  static const Order& own() {
    static const Order order;
    return order;
  }

  // Lays out a row, with zeros behind it.
  template <class T>
  void lay(const T* row, int64_t inner, float* laid) const {
    Laid* to = reinterpret_cast<Laid*>(laid);
    const int64_t end = (inner + F::STEP - 1) / F::STEP * F::STEP;
    for (int64_t i = 0; i < end; i += F::STEP) {
      if (i + F::STEP <= inner) {
        for (int j = 0; j < F::STEP; j++) narrow(widened(row[i + from[j]]), &to[i + j]);
      } else {
        for (int j = 0; j < F::STEP; j++) narrow(i + from[j] < inner ? widened(row[i + from[j]]) : 0, &to[i + j]);
      }
    }
  }

  // Writes number i of a row that is laid out.
  void put(int64_t i, float x, float* laid) const {
    narrow(x, reinterpret_cast<Laid*>(laid) + i / F::STEP * F::STEP + to[i % F::STEP]);
  }

  // The zeros behind it.
  void end(int64_t inner, float* laid) const {
    for (int64_t i = inner; i % F::STEP; i++) put(i, 0, laid);
  }
};

// True if one of the bytes is 255.
inline bool any_255(Bytes bytes) {
  const Bytes found = (Bytes)(bytes == 255);
  uint64_t eights[LANES / 2], all = 0;
  std::memcpy(eights, &found, sizeof found);
  for (uint64_t eight : eights) all |= eight;
  return all;
}

template <class F>
INLINE bool is_open(const F& weight, int64_t outer, int64_t part, typename F::Scale* scales) {
  if constexpr (F::DENSE) return true;
  else return weight.open(outer, part, scales);
}

// The sums of four registers' numbers, each that of `total`.
INLINE void totals(const Lanes* lanes, float* to) {
#if defined(__AVX__)
  __m128 halves[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
#if defined(__AVX512F__)
    const __m512d all = (__m512d)lanes[i];
    const __m256 half = _mm256_add_ps((__m256)_mm512_castpd512_pd256(all), (__m256)_mm512_extractf64x4_pd(all, 1));
#else
    const __m256 half = (__m256)lanes[i];
#endif
    halves[i] = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  }
  const __m128 a = _mm_add_ps(_mm_unpacklo_ps(halves[0], halves[1]), _mm_unpackhi_ps(halves[0], halves[1]));
  const __m128 b = _mm_add_ps(_mm_unpacklo_ps(halves[2], halves[3]), _mm_unpackhi_ps(halves[2], halves[3]));
  _mm_storeu_ps(to, _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a)));
#else
  for (int i = 0; i < 4; i++) to[i] = total(lanes[i]);
#endif
}

// Where the products of some rows of x with some of a weight go: at to[row][outer], after the last part. Until then they
// are in sums[row · SUMS + outer].
struct Place {
  Lanes* sums;
  bool first, last;  // of the parts
  float* const* to;
  int64_t outer;

  template <int SUMS, int R, int O>
  INLINE void put(Lanes (&own)[R][O]) const {
    if (!first) {
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
        for (int o = 0; o < O; o++) own[r][o] = sums[r * SUMS + o] + own[r][o];
      }
    }
    if (!last) {
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
        for (int o = 0; o < O; o++) sums[r * SUMS + o] = own[r][o];
      }
      return;
    }
    float numbers[R * O + 3];
#pragma GCC unroll 8
    for (int i = 0; i < R * O; i += 4) {
      Lanes four[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) four[j] = i + j < R * O ? own[(i + j) / O][(i + j) % O] : Lanes{};
      totals(four, numbers + i);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
      for (int o = 0; o < O; o++) to[r][outer + o] = numbers[r * O + o];
    }
  }
};

// Decodes a part of a row, in the format's order, to every WIDE-th register; how many it fills.
template <class F>
inline int64_t decode(const F& weight, int64_t outer, int64_t part, float* to) {
  constexpr int64_t LINE = PART / F::STEP * BYTES;
  const int64_t bytes = std::min(LINE, weight.bytes - part * LINE), steps = (bytes + BYTES - 1) / BYTES;
  typename F::Scale scales[UNITS + LANES];
  if (is_open(weight, outer, part, scales)) {
    const uint8_t* at = weight.row(outer) + part * LINE;
    Bytes worst{};
    auto step = [&](int64_t i, const uint8_t* at) {
      Lanes numbers[F::REGISTERS];
      weight.step(at, scales + i * F::STEP / UNIT, numbers, worst);
#pragma GCC unroll 8
      for (int k = 0; k < F::REGISTERS; k++) {
        std::memcpy(to + (i * F::REGISTERS + k) * WIDE * LANES, &numbers[k], sizeof numbers[k]);
      }
    };
    for (int64_t i = 0; i < bytes / BYTES; i++) step(i, at + i * BYTES);
    if (bytes % BYTES) {
      uint8_t last[BYTES] = {};
      std::memcpy(last, at + bytes / BYTES * BYTES, bytes % BYTES);
      step(steps - 1, last);
    }
    if (!F::HAS_NAN || !any_255(worst)) return steps * F::REGISTERS;
  }
  if constexpr (!F::DENSE) {
    using Laid = typename Order<F>::Laid;
    constexpr int64_t IN_REGISTER = LANES * F::IN_LANE;
    const Order<F>& order = Order<F>::own();
    for (int64_t i = 0; i < steps * F::STEP; i++) {
      const int64_t column = part * PART + i / F::STEP * F::STEP + order.from[i % F::STEP];
      Laid* own = reinterpret_cast<Laid*>(to + i / IN_REGISTER * WIDE * LANES) + i % IN_REGISTER;
      narrow(column < weight.inner ? weight.number(outer, column) : 0, own);
    }
  }
  return steps * F::REGISTERS;
}

// The products of R rows of x with O rows of a weight, of `steps` steps, whose registers `read(o, step, registers)` gives,
// and x's from the float `from` on.
template <class F, int R, int O, int SUMS, class Read>
INLINE void tile(const float* const* x, int64_t from, int64_t steps, const Place& place, Read read) {
  Lanes own[R][O] = {};
  const float* rows[R];
  for (int r = 0; r < R; r++) rows[r] = x[r] + from;
  for (int64_t i = 0; i < steps; i++) {
    Lanes weight[O][F::REGISTERS];
#pragma GCC unroll 8
    for (int o = 0; o < O; o++) {
      read(o, i, weight[o]);
#pragma GCC unroll 8
      for (int k = 0; k < F::REGISTERS; k++) weight[o][k] = kept(weight[o][k]);
    }
#pragma GCC unroll 8
    for (int k = 0; k < F::REGISTERS; k++) {
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const Lanes row = kept(load(rows[r] + (i * F::REGISTERS + k) * LANES));
#pragma GCC unroll 8
        for (int o = 0; o < O; o++) own[r][o] = add_products<F::IN_LANE>(weight[o][k], row, own[r][o]);
      }
    }
  }
  place.put<SUMS>(own);
}

// A register of decoded numbers is a step of one, whatever their format was.
template <int OF_LANE>
struct Decoded {
  static constexpr int REGISTERS = 1, IN_LANE = OF_LANE;
};

// The same for rows that are decoded.
template <int IN_LANE, int R, int O, int SUMS>
void decoded_tile(const float* weight, const float* const* x, int64_t from, int64_t registers, const Place& place) {
  tile<Decoded<IN_LANE>, R, O, SUMS>(x, from, registers, place, [=](int o, int64_t i, Lanes* to) ALWAYS {
    *to = load(weight + (i * WIDE + o) * LANES);
  });
}

// The same for rows as they lie, of a dense format. ASK: asks for the O rows after them.
template <class F, int R, int O, int SUMS, bool ASK>
void dense_tile(const uint8_t* weight, int64_t stride, const float* const* x, int64_t from, int64_t steps,
                const Place& place) {
  tile<F, R, O, SUMS>(x, from, steps, place, [=](int o, int64_t i, Lanes* to) ALWAYS {
    const uint8_t* at = weight + o * stride + i * BYTES;
    if (ASK) __builtin_prefetch(at + O * stride, 0, 1);
    Bytes none;
    F::step(at, nullptr, to, none);
  });
}

// run(R, O) for the `rows` and `outer` that there are, as constants up to these.
template <int R, int O, class Run>
INLINE void sized(int64_t rows, int64_t outer, Run run) {
  if constexpr (R > 1) {
    if (rows < R) return sized<R - 1, O>(rows, outer, run);
  }
  if constexpr (O > 1) {
    if (outer < O) return sized<R, O - 1>(rows, outer, run);
  }
  run(std::integral_constant<int, R>(), std::integral_constant<int, O>());
}

// The products of a part of STRIP rows of a weight with R rows of x, whose numbers of this part x[r] are; false if they
// have to be computed from `decode`d numbers.
template <int R, class F>
inline bool fused(const F& weight, int64_t outer, int64_t part, const float* const* x, int64_t ahead,
                  Lanes (&own)[R][STRIP]) {
  constexpr int64_t LINE = PART / F::STEP * BYTES;
  // Whether there are registers to hold x's numbers of a step in.
  constexpr bool HELD = F::IN_LANE == 2 && R * F::REGISTERS <= 8;
  const int64_t bytes = std::min(LINE, weight.bytes - part * LINE), stride = weight.stride;
  alignas(64) typename F::Scale scales[STRIP * UNITS + LANES];
  bool plain = bytes % BYTES == 0;
  for (int o = 0; o < STRIP; o++) plain &= is_open(weight, outer + o, part, scales + o * UNITS);
  if (!plain) return false;
  const uint8_t* at = weight.row(outer) + part * LINE;
  const bool in_turn = F::DENSE && stride < PAGE;
  const int64_t apart = in_turn ? BYTES : stride, onward = in_turn ? STRIP * BYTES : BYTES;
  const uint8_t* asked = weight.row(outer) + ahead + part * LINE / BYTES * onward;
  const float* rows[R];
  for (int r = 0; r < R; r++) rows[r] = x[r];
  Bytes worst{};
  Lanes sums[R][STRIP] = {};
  for (int64_t i = 0; i < bytes / BYTES; i++) {
    const typename F::Scale* scale = scales + i * F::STEP / UNIT;
    Lanes held[R][F::REGISTERS];
    if constexpr (HELD) {
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
        for (int k = 0; k < F::REGISTERS; k++) held[r][k] = kept(load(rows[r] + k * LANES));
      }
    }
#pragma GCC unroll 8
    for (int o = 0; o < STRIP; o++) {
      __builtin_prefetch(asked + o * apart, 0, 1);
      Lanes numbers[F::REGISTERS];
      weight.step(at + o * stride, scale + o * UNITS, numbers, worst);
      // Otherwise the compiler holds all of x's numbers from one row of the weight to the next, on the stack.
#pragma GCC unroll 8
      for (int r = 0; r < (HELD ? 0 : R); r++) asm("" : "+r"(rows[r]));
#pragma GCC unroll 8
      for (int k = 0; k < F::REGISTERS; k++) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          const Lanes own = HELD ? held[r][k] : load(rows[r] + k * LANES);
          sums[r][o] = add_products<F::IN_LANE>(numbers[k], own, sums[r][o]);
        }
      }
    }
    at += BYTES, asked += onward;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) rows[r] += F::REGISTERS * LANES;
  }
  if (F::HAS_NAN && any_255(worst)) return false;
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
    for (int o = 0; o < STRIP; o++) own[r][o] = sums[r][o];
  }
  return true;
}

// to[r][outer] = x[r] · weight[outer] from `begin` to `end` for R rows, which are laid out in F's order.
template <int R, class F>
void few(const F& weight, int64_t begin, int64_t end, const float* const* x, float* const* to) {
  const int64_t parts = (weight.inner + PART - 1) / PART, strip = STRIP * weight.stride;
  const int64_t ahead = (AHEAD + strip - 1) / strip * strip;
  for (int64_t outer = begin; outer < end; outer += STRIP) {
    const int64_t wide = std::min<int64_t>(STRIP, end - outer);
    Lanes sums[R * STRIP];
    for (int64_t p = 0; p < parts; p++) {
      const float* rows[R];
      for (int r = 0; r < R; r++) rows[r] = x[r] + p * PART / F::IN_LANE;
      const Place place{sums, p == 0, p == parts - 1, to, outer};
      Lanes own[R][STRIP];
      if (wide == STRIP && fused<R>(weight, outer, p, rows, ahead, own)) {
        place.put<STRIP>(own);
        continue;
      }
      alignas(64) float decoded[WIDE * PART];
      for (int64_t o = 0; o < wide; o++) {
        const int64_t registers = decode(weight, outer + o, p, decoded);
        const Place own_place{sums + o, p == 0, p == parts - 1, to, outer + o};
        decoded_tile<F::IN_LANE, R, 1, STRIP>(decoded, rows, 0, registers, own_place);
      }
    }
  }
}

// What `products` writes for itself, in whole lines of the cache: a thread keeps it from one call to the next.
struct Scratch {
  alignas(64) float panel[PANEL * PART];
  alignas(64) Lanes sums[BLOCK * PANEL];

  static Scratch& of_this_thread() {
    static thread_local const std::unique_ptr<Scratch> own(new Scratch);
    return *own;
  }
};

// to[r][outer] = x[r] · weight[outer] from `begin` to `end` for rows that are laid out in F's order. Every sum is one
// of the same terms in the same order, whatever the number of rows.
template <class F>
void products(const F& weight, int64_t begin, int64_t end, const float* const* x, int64_t rows, float* const* to) {
  if (rows <= FEW_ROWS<F>) {
    if (rows > 0) sized<FEW_ROWS<F>, 1>(rows, 1, [&](auto r, auto) { few<r>(weight, begin, end, x, to); });
    return;
  }
  constexpr int64_t LINE = PART / F::STEP * BYTES;
  const int64_t parts = (weight.inner + PART - 1) / PART;
  auto& [panel, sums] = Scratch::of_this_thread();
  for (int64_t row = 0; row < rows; row += BLOCK) {
    const int64_t some = std::min(BLOCK, rows - row), tiles = (some + TALL - 1) / TALL;
    const bool in_place = F::DENSE && weight.bytes % BYTES == 0 && some <= IN_PLACE<F>;
    for (int64_t outer = begin; outer < end; outer += PANEL) {
      const int64_t wide = std::min<int64_t>(PANEL, end - outer);
      for (int64_t p = 0; p < parts; p++) {
        const int64_t from = p * PART / F::IN_LANE;
        int64_t registers = 0;
        if (!in_place) {
          for (int64_t o = 0; o < wide; o++) {
            registers = decode(weight, outer + o, p, panel + o / WIDE * WIDE * PART + o % WIDE * LANES);
          }
        }
        for (int64_t t = 0; t < tiles; t++) {
          const int64_t first = t * some / tiles, last = (t + 1) * some / tiles;
          const float* const* own = x + row + first;
          auto place = [&](int64_t o) {
            return Place{sums + first * PANEL + o, p == 0, p == parts - 1, to + row + first, outer + o};
          };
          if constexpr (F::DENSE) {
            if (in_place) {
              const uint8_t* at = weight.row(outer) + p * LINE;
              const int64_t steps = std::min(LINE, weight.bytes - p * LINE) / BYTES;
              constexpr int WIDE = F::REGISTERS == 1 ? ::WIDE : 2;
              for (int64_t o = 0; o < wide; o += WIDE) {
                sized<TALL, WIDE>(last - first, wide - o, [&](auto r, auto columns) {
                  const uint8_t* weights = at + o * weight.stride;
                  if (t == 0) {
                    dense_tile<F, r, columns, PANEL, true>(weights, weight.stride, own, from, steps, place(o));
                  } else {
                    dense_tile<F, r, columns, PANEL, false>(weights, weight.stride, own, from, steps, place(o));
                  }
                });
              }
              continue;
            }
          }
          for (int64_t o = 0; o < wide; o += WIDE) {
            sized<TALL, WIDE>(last - first, wide - o, [&](auto r, auto columns) {
              decoded_tile<F::IN_LANE, r, columns, PANEL>(panel + o * PART, own, from, registers, place(o));
            });
          }
        }
      }
    }
  }
}

}  // namespace
