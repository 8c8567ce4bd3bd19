// x Wᵀ and the experts' feed-forward with matrices in 8 and 4 bits, for `quantized_cpu.py`. A matrix is decoded in
// registers for few rows of x, and a panel of it in the cache for more.

#include "experts_cpu.h"
#include "quantized_cpu.h"

namespace {

// Rows of a weight that are decoded together, whose sums are kept in registers for up to FEW_ROWS rows of x; the tile of
// TALL rows of x by WIDE of the weight; rows of a panel, and rows of x that it is decoded for.
constexpr int STRIP = 4, FEW_ROWS = 3;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int TALL = 6, WIDE = 4, PANEL = 12;
#else
constexpr int TALL = 4, WIDE = 3, PANEL = 12;
#endif
constexpr int64_t BLOCK = 128;
// Numbers of a row are laid out for whole steps; no step is longer.
constexpr int64_t LONGEST = 128;
// Numbers from one decoded row to the next, which begin in other lines of the cache.
constexpr int64_t ROW = PART + 16;
// Bytes ahead of their use at which a weight is asked for.
constexpr int64_t AHEAD = 4096;

inline int64_t padded(int64_t inner) { return (inner + LONGEST - 1) / LONGEST * LONGEST; }

// Where F's order has a number of a row.
template <class F>
struct Order {
  int16_t from[F::STEP], to[F::STEP];

  Order() {
    for (int k = 0; k < F::REGISTERS; k++) {
      for (int lane = 0; lane < LANES; lane++) {
        const int place = k * LANES + lane;
        from[place] = F::element(k, lane);
        to[F::element(k, lane)] = place;
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
    for (int64_t i = 0; i < padded(inner); i += F::STEP) {
      if (i + F::STEP <= inner) {
        for (int j = 0; j < F::STEP; j++) laid[i + j] = widened(row[i + from[j]]);
      } else {
        for (int j = 0; j < F::STEP; j++) laid[i + j] = i + from[j] < inner ? widened(row[i + from[j]]) : 0;
      }
    }
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

// The sums of four registers' numbers, each that of `total`.
inline void totals(const Lanes* lanes, float* to) {
#if defined(__AVX__) && !defined(__AVX512F__)
  __m128 halves[4];
  for (int i = 0; i < 4; i++) {
    halves[i] = _mm_add_ps(_mm256_castps256_ps128((__m256)lanes[i]), _mm256_extractf128_ps((__m256)lanes[i], 1));
  }
  const __m128 a = _mm_add_ps(_mm_unpacklo_ps(halves[0], halves[1]), _mm_unpackhi_ps(halves[0], halves[1]));
  const __m128 b = _mm_add_ps(_mm_unpacklo_ps(halves[2], halves[3]), _mm_unpackhi_ps(halves[2], halves[3]));
  _mm_storeu_ps(to, _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a)));
#else
  for (int i = 0; i < 4; i++) to[i] = total(lanes[i]);
#endif
}

// The sums of `count` registers' numbers.
inline void totals(const Lanes* lanes, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) totals(lanes + i, to + i);
  for (; i < count; i++) to[i] = total(lanes[i]);
}

// Decodes a part of a row, in the format's order.
template <class F>
inline int64_t decode(const F& weight, int64_t outer, int64_t part, float* to) {
  constexpr int64_t BYTES = 4 * LANES, LINE = PART / F::STEP * BYTES;
  const int64_t bytes = std::min(LINE, weight.bytes - part * LINE), steps = (bytes + BYTES - 1) / BYTES;
  typename F::Scale scales[UNITS + LANES];
  if (weight.open(outer, part, scales)) {
    const uint8_t* at = weight.row(outer) + part * LINE;
    Bytes worst{};
    auto step = [&](int64_t i, const uint8_t* at) {
      Lanes numbers[F::REGISTERS];
      F::step(at, scales + i * F::STEP / UNIT, numbers, worst);
#pragma GCC unroll 8
      for (int k = 0; k < F::REGISTERS; k++) std::memcpy(to + i * F::STEP + k * LANES, &numbers[k], sizeof numbers[k]);
    };
    for (int64_t i = 0; i < bytes / BYTES; i++) step(i, at + i * BYTES);
    if (bytes % BYTES) {
      uint8_t last[BYTES] = {};
      std::memcpy(last, at + bytes / BYTES * BYTES, bytes % BYTES);
      step(steps - 1, last);
    }
    if (!F::HAS_NAN || !any_255(worst)) return steps * F::REGISTERS;
  }
  const Order<F>& order = Order<F>::own();
  const int64_t begin = part * PART;
  for (int64_t i = 0; i < steps * F::STEP; i++) {
    const int64_t column = begin + i / F::STEP * F::STEP + order.from[i % F::STEP];
    to[i] = column < weight.inner ? weight.number(outer, column) : 0;
  }
  return steps * F::REGISTERS;
}

// Adds the products of `registers` registers of O decoded rows, ROW numbers apart, with those of R rows of x to
// sums[row · stride + outer].
template <int R, int O>
inline void tile(const float* decoded, const float* const* x, int64_t from, int64_t registers, Lanes* sums,
                 int64_t stride) {
  Lanes own[R][O] = {};
  const float* rows[R];
  for (int r = 0; r < R; r++) rows[r] = x[r] + from;
  for (int64_t i = 0; i < registers * LANES; i += LANES) {
    Lanes weight[O];
#pragma GCC unroll 8
    for (int o = 0; o < O; o++) weight[o] = kept(*reinterpret_cast<const LooseLanes*>(decoded + o * ROW + i));
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Lanes row = kept(*reinterpret_cast<const LooseLanes*>(rows[r] + i));
#pragma GCC unroll 8
      for (int o = 0; o < O; o++) own[r][o] = Numbers<float>::add(weight[o], row, own[r][o]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
    for (int o = 0; o < O; o++) sums[r * stride + o] += own[r][o];
  }
}

template <int R, int O, class... Arguments>
inline void tile_of(int64_t rows, int64_t outer, Arguments... arguments) {
  if constexpr (R > 1) {
    if (rows < R) return tile_of<R - 1, O>(rows, outer, arguments...);
  }
  if constexpr (O > 1) {
    if (outer < O) return tile_of<R, O - 1>(rows, outer, arguments...);
  }
  tile<R, O>(arguments...);
}

// The products of a part of STRIP rows of a weight with R rows of x, whose numbers of this part x[r] are; false if they
// have to be computed from `decode`d numbers.
template <int R, class F>
inline bool fused(const F& weight, int64_t outer, int64_t part, const float* const* x, int64_t ahead,
                  Lanes (&own)[R][STRIP]) {
  constexpr int64_t BYTES = 4 * LANES, LINE = PART / F::STEP * BYTES;
  const int64_t bytes = std::min(LINE, weight.bytes - part * LINE), stride = weight.bytes;
  alignas(64) typename F::Scale scales[STRIP * UNITS + LANES];
  bool plain = bytes % BYTES == 0;
  for (int o = 0; o < STRIP; o++) plain &= weight.open(outer + o, part, scales + o * UNITS);
  if (!plain) return false;
  const uint8_t* at = weight.row(outer) + part * LINE;
  const float* rows[R];
  for (int r = 0; r < R; r++) rows[r] = x[r];
  Bytes worst{};
  Lanes sums[R][STRIP] = {};
  for (int64_t i = 0; i < bytes / BYTES; i++) {
    const typename F::Scale* scale = scales + i * F::STEP / UNIT;
#pragma GCC unroll 8
    for (int o = 0; o < STRIP; o++) {
      __builtin_prefetch(at + o * stride + ahead, 0, 1);
      Lanes numbers[F::REGISTERS];
      F::step(at + o * stride, scale + o * UNITS, numbers, worst);
      // Otherwise the compiler keeps all of x's numbers from one row of the weight to the next, on the stack.
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) asm("" : "+r"(rows[r]));
#pragma GCC unroll 8
      for (int k = 0; k < F::REGISTERS; k++) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          const Lanes row = *reinterpret_cast<const LooseLanes*>(rows[r] + k * LANES);
          sums[r][o] = Numbers<float>::add(numbers[k], row, sums[r][o]);
        }
      }
    }
    at += BYTES;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) rows[r] += F::STEP;
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
  const int64_t parts = (weight.inner + PART - 1) / PART, strip = STRIP * weight.bytes;
  const int64_t ahead = (AHEAD + strip - 1) / strip * strip;
  for (int64_t outer = begin; outer < end; outer += STRIP) {
    const int64_t wide = std::min<int64_t>(STRIP, end - outer);
    Lanes sums[R * STRIP] = {};
    for (int64_t p = 0; p < parts; p++) {
      const float* rows[R];
      for (int r = 0; r < R; r++) rows[r] = x[r] + p * PART;
      Lanes own[R][STRIP];
      if (wide == STRIP && fused<R>(weight, outer, p, rows, ahead, own)) {
        for (int r = 0; r < R; r++) {
          for (int o = 0; o < STRIP; o++) sums[r * STRIP + o] += own[r][o];
        }
        continue;
      }
      alignas(64) float decoded[STRIP * ROW];
      int64_t registers = 0;
      for (int64_t o = 0; o < wide; o++) registers = decode(weight, outer + o, p, decoded + o * ROW);
      for (int64_t o = 0; o < wide; o += WIDE) {
        tile_of<R, WIDE>(R, wide - o, decoded + o * ROW, rows, int64_t(0), registers, sums + o, int64_t(STRIP));
      }
    }
    for (int r = 0; r < R; r++) totals(sums + r * STRIP, wide, to[r] + outer);
  }
}

template <int R, class F>
void few_of(int64_t rows, const F& weight, int64_t begin, int64_t end, const float* const* x, float* const* to) {
  if constexpr (R > 1) {
    if (rows < R) return few_of<R - 1>(rows, weight, begin, end, x, to);
  }
  few<R>(weight, begin, end, x, to);
}

// to[r][outer] = x[r] · weight[outer] from `begin` to `end` for rows that are laid out in F's order. Every sum is one
// of the same terms in the same order, whatever the number of rows.
template <class F>
void products(const F& weight, int64_t begin, int64_t end, const float* const* x, int64_t rows, float* const* to) {
  if (rows <= FEW_ROWS) {
    if (rows > 0) few_of<FEW_ROWS>(rows, weight, begin, end, x, to);
    return;
  }
  const int64_t parts = (weight.inner + PART - 1) / PART, most = std::min(rows, BLOCK);
  // Aligned by hand: a register must not cross lines.
  const std::unique_ptr<float[]> decoded(new float[PANEL * ROW + 16]);
  float* const panel = reinterpret_cast<float*>((uintptr_t(decoded.get()) + 63) / 64 * 64);
  const std::unique_ptr<float[]> kept_sums(new float[most * PANEL * LANES + 16]);
  Lanes* const sums = reinterpret_cast<Lanes*>((uintptr_t(kept_sums.get()) + 63) / 64 * 64);
  for (int64_t row = 0; row < rows; row += BLOCK) {
    const int64_t some = std::min(BLOCK, rows - row), tiles = (some + TALL - 1) / TALL;
    for (int64_t outer = begin; outer < end; outer += PANEL) {
      const int64_t wide = std::min<int64_t>(PANEL, end - outer);
      std::fill_n(reinterpret_cast<float*>(sums), some * PANEL * LANES, 0.0f);
      for (int64_t p = 0; p < parts; p++) {
        int64_t registers = 0;
        for (int64_t o = 0; o < wide; o++) registers = decode(weight, outer + o, p, panel + o * ROW);
        for (int64_t t = 0; t < tiles; t++) {
          const int64_t first = t * some / tiles, last = (t + 1) * some / tiles;
          for (int64_t o = 0; o < wide; o += WIDE) {
            tile_of<TALL, WIDE>(last - first, wide - o, panel + o * ROW, x + row + first, p * PART, registers,
                                sums + first * PANEL + o, int64_t(PANEL));
          }
        }
      }
      for (int64_t r = 0; r < some; r++) totals(sums + r * PANEL, wide, to[row + r] + outer);
    }
  }
}

// A matrix, or a stack of them, as the arguments of a call have it. E4M3 numbers tell FP8 and bytes MXFP4; words are
// integers.
struct Arrays {
  ffi::AnyBuffer numbers, scales;
  int64_t inner;  // numbers of a row

  int64_t outer() const { return numbers.dimensions()[numbers.dimensions().size() - 2]; }

  // Matrix i of the stack.
  Stored at(int64_t i) const {
    const auto shape = numbers.dimensions(), of_scales = scales.dimensions();
    const size_t last = shape.size() - 1;
    Stored own;
    own.inner = inner;
    own.bytes = shape[last] * int64_t(ffi::ByteWidth(numbers.element_type()));
    own.groups = of_scales[last];
    const int64_t units = std::max<int64_t>(1, (is_fp8() ? 128 : inner / own.groups) / UNIT);
    // One scale for a whole row may have any width.
    own.shift = own.groups == 1 ? 40 : std::ilogb(double(units));
    own.numbers = static_cast<const uint8_t*>(numbers.untyped_data()) + i * shape[last - 1] * own.bytes;
    own.scales = static_cast<const uint8_t*>(scales.untyped_data()) +
                 i * of_scales[last - 1] * own.groups * int64_t(ffi::ByteWidth(scales.element_type()));
    return own;
  }

  bool is_fp8() const { return numbers.element_type() == ffi::F8E4M3FN; }

  // run(matrix i of the stack, in its format).
  template <class Run>
  void with(int64_t i, Run run) const {
    const Stored stored = at(i);
    const ffi::DataType scale = scales.element_type();
    auto as = [&](auto format) {
      static_cast<Stored&>(format) = stored;
      run(format);
    };
    if (is_fp8()) {
      scale == ffi::F32 ? as(E4M3<float>{}) : as(E4M3<uint8_t>{});
    } else if (numbers.element_type() == ffi::U8) {
      as(Nibbles<Mxfp4Codes>{});
    } else if (stored.bytes >= inner) {
      scale == ffi::BF16 ? as(Scaled<8, BFloat16>{}) : scale == ffi::F16 ? as(Scaled<8, Float16>{}) : as(Scaled<8, float>{});
    } else {
      scale == ffi::BF16 ? as(Nibbles<Int4Codes>{}) : scale == ffi::F16 ? as(Scaled<4, Float16>{}) : as(Scaled<4, float>{});
    }
  }

  // Lays out rows of x, or writes a number of one, in the order of the format.
  template <class T>
  void lay(const T* row, float* laid) const {
    with(0, [&](auto format) { Order<decltype(format)>::own().lay(row, inner, laid); });
  }
};

// Tasks that a thread should find, so that none waits long for another; rows of a weight that a task has at least.
constexpr int64_t TASKS = 8, LEAST = 4 * PANEL;

// Lays out `rows` rows of x, in tasks of several.
template <class T>
void lay(ffi::ThreadPool& pool, const Arrays& weight, const T* x, int64_t rows, float* laid) {
  const int64_t inner = weight.inner, some = std::max<int64_t>(1, (int64_t(1) << 14) / std::max<int64_t>(inner, 1));
  each(pool, (rows + some - 1) / some, [&](int64_t task) {
    for (int64_t r = task * some; r < std::min(rows, (task + 1) * some); r++) {
      weight.lay(x + r * inner, laid + r * padded(inner));
    }
  });
}

void lay(ffi::ThreadPool& pool, const Arrays& weight, ffi::AnyBuffer x, float* laid) {
  if (x.element_type() == ffi::BF16) {
    lay(pool, weight, static_cast<BFloat16*>(x.untyped_data()), x.dimensions()[0], laid);
  } else {
    lay(pool, weight, static_cast<float*>(x.untyped_data()), x.dimensions()[0], laid);
  }
}

ffi::Error Product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer numbers, ffi::AnyBuffer scales,
                   ffi::ResultBuffer<ffi::F32> out, ffi::ResultBuffer<ffi::F32> laid) {
  const int64_t rows = x.dimensions()[0];
  const Arrays weight{numbers, scales, x.dimensions()[1]};
  const int64_t outer = weight.outer(), inner = weight.inner;
  lay(pool, weight, x, laid->typed_data());
  std::vector<const float*> from;
  std::vector<float*> to;
  for (int64_t r = 0; r < rows; r++) {
    const float* row = laid->typed_data() + r * padded(inner);
    if (all_zero(row, padded(inner))) {
      std::fill_n(out->typed_data() + r * outer, outer, 0.0f);
    } else {
      from.push_back(row);
      to.push_back(out->typed_data() + r * outer);
    }
  }
  const int64_t share = std::max(LEAST, outer / (TASKS * std::max<int64_t>(pool.num_threads(), 1)));
  const int64_t piece = (share + PANEL - 1) / PANEL * PANEL;
  weight.with(0, [&](const auto& format) {
    each(pool, (outer + piece - 1) / piece, [&](int64_t task) {
      products(format, task * piece, std::min((task + 1) * piece, outer), from.data(), from.size(), to.data());
    });
  });
  return ffi::Error::Success();
}

// Rows of a weight that make a task, and rows of x at once.
constexpr int64_t PIECE = 96, AT_ONCE = 64;

ffi::Error Experts(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> order, ffi::Buffer<ffi::S32> starts,
                   ffi::Buffer<ffi::S32> counts, ffi::AnyBuffer gate_numbers, ffi::AnyBuffer gate_scales,
                   ffi::AnyBuffer up_numbers, ffi::AnyBuffer up_scales, ffi::AnyBuffer down_numbers,
                   ffi::AnyBuffer down_scales, float limit, bool limit_first, ffi::ResultBuffer<ffi::F32> out,
                   ffi::ResultBuffer<ffi::F32> laid, ffi::ResultBuffer<ffi::F32> between) {
  const int64_t tokens = x.dimensions()[0], hidden = x.dimensions()[1], intermediate = gate_numbers.dimensions()[1];
  const int64_t experts = gate_numbers.dimensions()[0], slots = order.dimensions()[0];
  const int64_t top_k = slots / std::max<int64_t>(tokens, 1);
  const Arrays gate{gate_numbers, gate_scales, hidden}, up{up_numbers, up_scales, hidden};
  const Arrays down{down_numbers, down_scales, intermediate};
  const Groups groups{order.typed_data(), starts.typed_data(), counts.typed_data()};
  const bool narrowed = x.element_type() == ffi::BF16;
  lay(pool, gate, x, laid->typed_data());
  std::vector<int64_t> busy;
  int64_t rows = 0;
  for (int64_t e = 0; e < experts; e++) {
    if (groups.counts[e]) busy.push_back(e);
    rows += groups.counts[e];
  }
  // In the order of the groups: each row's x, its numbers between the two products, and its result.
  std::vector<const float*> in(rows), middle(rows);
  std::vector<float*> to(rows);
  for (int64_t r = 0; r < rows; r++) {
    in[r] = laid->typed_data() + groups.order[r] / top_k * padded(hidden);
    middle[r] = between->typed_data() + r * padded(intermediate);
    to[r] = out->typed_data() + groups.order[r] * hidden;
  }
  // Rows without an expert come last in the order.
  for (int64_t r = rows; r < slots; r++) std::fill_n(out->typed_data() + groups.order[r] * hidden, hidden, 0.0f);
  const int64_t first = (intermediate + PIECE - 1) / PIECE, second = (hidden + PIECE - 1) / PIECE;
  each(pool, busy.size() * first, [&](int64_t task) {
    const int64_t e = busy[task / first], begin = task % first * PIECE, end = std::min(begin + PIECE, intermediate);
    const int64_t last = groups.starts[e] + groups.counts[e];
    const std::unique_ptr<float[]> gates(new float[2 * AT_ONCE * PIECE]);
    float *at_gate[AT_ONCE], *at_up[AT_ONCE];
    for (int64_t r = 0; r < AT_ONCE; r++) {
      // `products` writes to a row's place `begin` and on.
      at_gate[r] = gates.get() + r * PIECE - begin;
      at_up[r] = at_gate[r] + AT_ONCE * PIECE;
    }
    for (int64_t row = groups.starts[e]; row < last; row += AT_ONCE) {
      const int64_t some = std::min(AT_ONCE, last - row);
      gate.with(e, [&](const auto& format) { products(format, begin, end, &in[row], some, at_gate); });
      up.with(e, [&](const auto& format) { products(format, begin, end, &in[row], some, at_up); });
      down.with(e, [&](auto format) {
        using F = decltype(format);
        const Order<F>& order = Order<F>::own();
        for (int64_t r = 0; r < some; r++) {
          float* laid = between->typed_data() + (row + r) * padded(intermediate);
          for (int64_t i = begin; i < end; i++) {
            const float value = swiglu(at_gate[r][i], at_up[r][i], Limit{limit, limit_first});
            laid[i / F::STEP * F::STEP + order.to[i % F::STEP]] = narrowed ? rounded<BFloat16>(value) : value;
          }
          if (end < intermediate) continue;
          for (int64_t i = intermediate; i < padded(intermediate); i++) {
            laid[i / F::STEP * F::STEP + order.to[i % F::STEP]] = 0;
          }
        }
      });
    }
  });
  each(pool, busy.size() * second, [&](int64_t task) {
    const int64_t e = busy[task / second], begin = task % second * PIECE, end = std::min(begin + PIECE, hidden);
    const int64_t row = groups.starts[e], some = groups.counts[e];
    down.with(e, [&](const auto& format) { products(format, begin, end, &middle[row], some, &to[row]); });
  });
  return ffi::Error::Success();
}

}  // namespace

using Any = ffi::AnyBuffer;
using S32 = ffi::Buffer<ffi::S32>;
using F32 = ffi::Buffer<ffi::F32>;

XLA_FFI_DEFINE_HANDLER_SYMBOL(quantized, Product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Any>()    // x
                                  .Arg<Any>()    // numbers
                                  .Arg<Any>()    // scales
                                  .Ret<F32>()    // out
                                  .Ret<F32>());  // x, laid out

XLA_FFI_DEFINE_HANDLER_SYMBOL(quantized_experts, Experts,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Any>()  // x
                                  .Arg<S32>()  // order
                                  .Arg<S32>()  // starts
                                  .Arg<S32>()  // counts
                                  .Arg<Any>()  // gate: numbers, scales
                                  .Arg<Any>()
                                  .Arg<Any>()  // up
                                  .Arg<Any>()
                                  .Arg<Any>()  // down
                                  .Arg<Any>()
                                  .Attr<float>("limit")
                                  .Attr<bool>("limit_first")
                                  .Ret<F32>()    // out
                                  .Ret<F32>()    // x, laid out
                                  .Ret<F32>());  // between, laid out
