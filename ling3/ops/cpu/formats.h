// The formats in which a matrix is stored, decoded in registers, for `products.h`. The numbers are those of the plain
// forms in `quantized.py`, bit for bit.
//
// A format decodes a step of a row at once: 4 · LANES bytes become STEP numbers in REGISTERS registers, in an order of
// its own in which x is laid out too. `step` is for scales that are neither extreme nor NaN, which `open` says;
// `number` is for all.

#pragma once

#include <type_traits>

#include "lanes.h"

namespace {

typedef uint8_t Bytes __attribute__((vector_size(4 * LANES)));
typedef uint8_t LooseBytes __attribute__((vector_size(4 * LANES), aligned(1), may_alias));

// Steps of a row whose products are summed before they are added to those before; numbers of such a part, and the units
// in it: neighbours that have one scale, at least.
constexpr int64_t CHUNK = 128, PART = CHUNK * LANES, UNIT = 32, UNITS = PART / UNIT;
// Quarters of a register, of 128 bits each.
constexpr int QUARTERS = LANES / 4;

struct Float16 {
  uint16_t bits;
};

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float widened(Float16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#endif
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
  if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  if (rest < 0x400) return (sign ? -1.0f : 1.0f) * float(rest) * 0x1p-24f;
  return from_bits(sign | ((rest << 13) + (112u << 23)));
}

// x rounded to the nearest number of type S, ties to even.
template <class S>
inline float rounded(float x) {
  if constexpr (std::is_same_v<S, BFloat16>) {
    BFloat16 narrowed;
    narrow(x, &narrowed);
    return widened(narrowed);
  } else if constexpr (std::is_same_v<S, Float16>) {
    const float size = std::fabs(x);
    if (!(size < 65520.0f)) return std::isnan(x) ? x : std::copysign(HUGE_VALF, x);
    // Adding it makes the unit in the last place that of the nearest float16: 2^-24 at least.
    const float unit = 0x1p13f * from_bits(std::max(bits_of(size) & 0x7f800000, 113u << 23));
    return std::copysign((size + unit) - unit, x);
  } else {
    return x;
  }
}

// 2^(byte - 127), the numbers of E8M0.
inline float power_of_two(uint8_t byte) {
  return from_bits(byte == 0 ? 1u << 22 : byte == 255 ? 0x7fc00000 : uint32_t(byte) << 23);
}

// A register by whose numbers each quarter has table's bytes; zero for an index of 128 and above.
INLINE Bytes lookup(Bytes table, Bytes index) {
#if defined(__AVX512BW__)
  return (Bytes)_mm512_shuffle_epi8((__m512i)table, (__m512i)index);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return (Bytes)_mm256_shuffle_epi8((__m256i)table, (__m256i)index);
#elif defined(__ARM_NEON) && defined(__aarch64__)
  return (Bytes)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)index);
#elif defined(__SSSE3__) && !defined(__AVX__)
  return (Bytes)_mm_shuffle_epi8((__m128i)table, (__m128i)index);
#else
  Bytes found;
  for (int i = 0; i < 4 * LANES; i++) found[i] = index[i] & 128 ? 0 : table[i / 16 * 16 + index[i] % 16];
  return found;
#endif
}

// A register of the 16 bytes at each quarter's place.
INLINE Bytes joined(const uint8_t* const* at) {
#if defined(__AVX512F__)
  auto quarter = [&](int i) { return _mm_load_si128((const __m128i*)at[i]); };
  __m512i all = _mm512_castsi128_si512(quarter(0));
  all = _mm512_inserti32x4(all, quarter(1), 1);
  all = _mm512_inserti32x4(all, quarter(2), 2);
  return (Bytes)_mm512_inserti32x4(all, quarter(3), 3);
#elif defined(__AVX2__)
  const __m256i first = _mm256_castsi128_si256(_mm_load_si128((const __m128i*)at[0]));
  return (Bytes)_mm256_inserti128_si256(first, _mm_load_si128((const __m128i*)at[1]), 1);
#else
  Bytes all;
  for (int i = 0; i < QUARTERS; i++) std::memcpy((char*)&all + 16 * i, at[i], 16);
  return all;
#endif
}

// In each quarter the bytes of the lower (or UPPER) half of a's and b's in turn.
template <bool UPPER, int... I>
INLINE Bytes interleaved(Bytes a, Bytes b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (I / 16 * 16 + UPPER * 8 + I % 16 / 2 + I % 2 * 4 * LANES)...);
#else
  return __builtin_shuffle(a, b, Bytes{uint8_t(I / 16 * 16 + UPPER * 8 + I % 16 / 2 + I % 2 * 4 * LANES)...});
#endif
}
constexpr std::make_integer_sequence<int, 4 * LANES> EVERY_BYTE;

// Scales of a row's units in a part. `of(i)` is the row's i-th scale of `count`, and each is for 2^shift units. Those
// past the end repeat the last.
template <class S, class Of>
inline void spread(int64_t part, int64_t count, int shift, S* scales, Of of) {
  const int64_t from = part * UNITS, units = std::min(UNITS, (count << shift) - from);
  if (from >> shift == (from + units - 1) >> shift) {
    std::fill(scales, scales + UNITS, of(from >> shift));
    return;
  }
  if (shift == 0 && units == UNITS) {
    for (int64_t u = 0; u < UNITS; u++) scales[u] = of(from + u);
  } else if (shift == 0) {
    for (int64_t u = 0; u < units; u++) scales[u] = of(from + u);
  } else if (shift == 2) {
    for (int64_t u = 0; u < units; u += 4) {
      const S own = of((from + u) / 4);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) scales[u + i] = own;
    }
  } else {
    for (int64_t u = 0; u < units; u++) scales[u] = of((from + u) >> shift);
  }
  if (units < UNITS) std::fill(scales + units, scales + UNITS, scales[units - 1]);
}

INLINE bool any(Words bits) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)bits, (__m512i)bits) != 0;
#elif defined(__AVX__)
  return !_mm256_testz_si256((__m256i)bits, (__m256i)bits);
#else
  uint64_t halves[sizeof bits / 8], all = 0;
  std::memcpy(halves, &bits, sizeof bits);
  for (uint64_t half : halves) all |= half;
  return all != 0;
#endif
}

// True if one of the `scales` of a part, whose sizes are their bits in `size`, is less than `least` or `end` and more;
// but a size of 0 may be among those with `zeros`.
template <class T>
INLINE bool extreme(const void* scales, T size, T least, T end, bool zeros) {
  typedef T Group __attribute__((vector_size(4 * LANES)));
  constexpr int GROUPS = UNITS * sizeof(T) / sizeof(Group);
  Words found = {};
#pragma GCC unroll 4
  for (int i = 0; i < GROUPS; i++) {
    Group sizes;
    std::memcpy(&sizes, (const char*)scales + i * sizeof sizes, sizeof sizes);
    sizes &= size;
    Words own = (Words)(sizes - least >= T(end - least));
    if (zeros) own &= (Words)(sizes != 0);
    found |= own;
  }
  return any(found);
}

// A matrix as its arrays lie.
struct Stored {
  const uint8_t* numbers;
  const uint8_t* scales;
  const uint8_t* zeros;  // the zero points, if it has any
  int64_t inner, bytes;  // numbers of a row, and the bytes it takes
  int64_t stride;        // bytes from one row to the next
  int64_t groups;        // scales of a row
  int shift;             // a scale is for 2^shift units

  // True if `step` alone decodes it, at the cost of a load: it is decoded again for every few rows of x.
  static constexpr bool DENSE = false;
  // Numbers in a lane, and how far apart they are in a row: one in float32, or two in bfloat16.
  static constexpr int IN_LANE = 1, APART = 1;

  const uint8_t* row(int64_t outer) const { return numbers + outer * stride; }
};

// IN_LANE of a weight whose numbers are bfloat16's, for rows of x of type X. (PAIRS: as other processors can.)
#if defined(__AVX512BF16__) || defined(PAIRS)
template <class X>
constexpr int LANE_OF = std::is_same_v<X, BFloat16> ? 2 : 1;
#else
template <class X>
constexpr int LANE_OF = 1;
#endif

// The products of a weight's and x's numbers, added to `sum`: of two in a lane each with a rounding of its own.
template <int IN_LANE>
INLINE Lanes add_products(Lanes weight, Lanes x, Lanes sum) {
  if constexpr (IN_LANE == 1) return multiply_add(weight, x, sum);
#if defined(__AVX512BF16__)
  return (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weight, (__m512bh)x);
#else
  sum = multiply_add((Lanes)((Words)weight << 16), (Lanes)((Words)x << 16), sum);
  return multiply_add((Lanes)((Words)weight & 0xffff0000), (Lanes)((Words)x & 0xffff0000), sum);
#endif
}

// Writes a register of two numbers in a lane as IN_LANE says: the same, or one register for each of the two.
template <int IN_LANE>
INLINE void put_pairs(Words pairs, Lanes* out) {
  out[0] = (Lanes)(IN_LANE == 2 ? pairs : pairs << 16);
  if constexpr (IN_LANE == 1) out[1] = (Lanes)(pairs & 0xffff0000);
}

// ---- numbers as they are multiplied ----

// Of the same type as x.
template <class T>
struct Dense : Stored {
  static constexpr bool DENSE = true, HAS_NAN = false;
  static constexpr int IN_LANE = LANE_OF<T>, IN_WORD = 4 / sizeof(T), REGISTERS = IN_WORD / IN_LANE;
  static constexpr int64_t STEP = IN_WORD * LANES;
  using Scale = uint8_t;

  static constexpr int64_t element(int k, int lane) { return lane * IN_WORD + k; }

  INLINE static void step(const uint8_t* at, const Scale*, Lanes* out, Bytes&) {
    const Words words = (Words) * reinterpret_cast<const LooseBytes*>(at);
    if constexpr (IN_WORD == 1) {
      out[0] = (Lanes)words;
    } else {
      put_pairs<IN_LANE>(words, out);
    }
  }
};

// ---- four bits whose sixteen numbers are looked up ----

#if defined(__AVX512BF16__)
// Steps of two numbers a byte, the first in the lower bits. `Codes` has the sixteen numbers and the scales. Two units
// are looked up at once, half of their numbers in each of two registers.
template <class Codes, int PER_LANE>
struct Nibbles : Stored {
  static constexpr bool HAS_NAN = false;
  static constexpr int IN_LANE = PER_LANE, OF_PAIRS = 2 / IN_LANE, REGISTERS = 4 * OF_PAIRS, APART = 4;
  static constexpr int64_t STEP = 4 * UNIT;
  using Scale = float;

  static constexpr int64_t element(int k, int lane) {
    const int looked_up = k / OF_PAIRS, unit = looked_up / 2 * 2 + lane / 8;
    return unit * UNIT + lane % 4 * 8 + k % OF_PAIRS * APART + looked_up % 2 * 2 + lane / 4 % 2;
  }

  bool open(int64_t outer, int64_t part, Scale* to) const {
    const auto own = [own = Codes::scales(*this, outer)](int64_t i) { return widened(Codes::bfloat16(own[i])); };
    spread(part, groups, shift, to, own);
    return !extreme<uint32_t>(to, 0x7fffffff, 3u << 23, 248u << 23, false);  // with two binades to spare at both ends
  }

  INLINE static void step(const uint8_t* at, const Scale* scales, Lanes* out, Bytes&) {
    const __m512 numbers = _mm512_load_ps(Codes::NUMBERS);
    // A word has four codes. Its first two go to the quarters of a unit, and so do the other two.
    const __m512i first = _mm512_maskz_set1_epi16(0xff00ff00, 4), last = _mm512_add_epi16(first, _mm512_set1_epi16(8));
    const __m512i fifteen = _mm512_set1_epi16(15), second_unit = _mm512_maskz_set1_epi16(0xffff0000, 16);
    const __m512i quarters = _mm512_set_epi64(3, 2, 3, 2, 1, 0, 1, 0);
#pragma GCC unroll 2
    for (int unit = 0; unit < 4; unit += 2) {
      const __m512 lower = _mm512_mul_ps(numbers, _mm512_set1_ps(scales[unit]));
      const __m512 upper = _mm512_mul_ps(numbers, _mm512_set1_ps(scales[unit + 1]));
      const __m512i table = (__m512i)_mm512_cvtne2ps_pbh(upper, lower);
      const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + UNIT / 2 * unit));
      const __m512i words = _mm512_permutexvar_epi64(quarters, _mm512_castsi256_si512(codes));
      const __m512i places[2] = {_mm512_srlv_epi16(words, first), _mm512_srlv_epi16(words, last)};
#pragma GCC unroll 2
      for (int i = 0; i < 2; i++) {
        // places & 15 | second_unit
        const __m512i index = _mm512_ternarylogic_epi32(places[i], fifteen, second_unit, 0xea);
        put_pairs<IN_LANE>((Words)_mm512_permutexvar_epi16(index, table), out + (unit + i) * OF_PAIRS);
      }
    }
  }

  float number(int64_t outer, int64_t i) const {
    const int code = row(outer)[i / 2] >> i % 2 * 4 & 15;
    return Codes::number(code, Codes::scales(*this, outer)[(i / UNIT) >> shift]);
  }
};
#else
// The sixteen numbers of all scales in bfloat16, in two planes of bytes. The lower byte of a scale tells the lower ones;
// to the upper ones of it, its own is added. `zero` says which codes are zeros, whose upper byte nothing is added to.
struct Table {
  alignas(64) uint8_t low[256][16], high[256][16];
  alignas(64) uint8_t place[4 * LANES];

  explicit Table(const float* numbers) {
    for (int byte = 0; byte < 256; byte++) {
      const BFloat16 scale{uint16_t(0x4000 | byte)};
      for (int code = 0; code < 16; code++) {
        BFloat16 own;
        narrow(numbers[code] * widened(scale), &own);
        const bool zero = numbers[code] == 0;
        low[byte][code] = uint8_t(own.bits);
        high[byte][code] = zero ? 0 : uint8_t((own.bits >> 8) - 0x40);
        for (int q = 0; q < QUARTERS; q++) place[16 * q + code] = zero ? 128 : 2 * q + 1;
      }
      for (int code = 0; code < 16; code++) if (numbers[code] == 0) low[byte][code] = 0;
    }
  }
};

template <class Codes>
const Table TABLE(Codes::NUMBERS);

// Steps of two numbers a byte, the first in the lower bits. `Codes` has the sixteen numbers and the scales.
template <class Codes, int>
struct Nibbles : Stored {
  static constexpr int REGISTERS = 8;
  static constexpr bool HAS_NAN = false;
  static constexpr int64_t STEP = REGISTERS * LANES;
  using Scale = uint16_t;

  static constexpr int64_t element(int k, int lane) {
    return lane / 4 * 32 + k / 2 % 2 * 16 + lane % 4 * 4 + k % 2 * 2 + k / 4;
  }

  bool open(int64_t outer, int64_t part, Scale* to) const {
    const auto own = [own = Codes::scales(*this, outer)](int64_t i) { return Codes::bfloat16(own[i]).bits; };
    spread(part, groups, shift, to, own);
    return !extreme<uint16_t>(to, 0x7fff, 0x180, 0x7c00, false);  // with two binades to spare at both ends
  }

  INLINE static void step(const uint8_t* at, const Scale* scales, Lanes* out, Bytes&) {
    const Table& table = TABLE<Codes>;
    const uint8_t *lows[QUARTERS], *highs[QUARTERS];
#pragma GCC unroll 4
    for (int q = 0; q < QUARTERS; q++) {
      const uint8_t byte = uint8_t(scales[q]);
      lows[q] = table.low[byte];
      highs[q] = table.high[byte];
    }
    Bytes place, exponents;
    std::memcpy(&place, table.place, sizeof place);
    if constexpr (QUARTERS == 4) {
      typedef uint64_t Pairs __attribute__((vector_size(4 * LANES)));
      uint64_t four;
      std::memcpy(&four, scales, sizeof four);
      exponents = (Bytes)(Pairs{} + four);
    } else {
      uint32_t two = scales[0];
      if constexpr (QUARTERS == 2) std::memcpy(&two, scales, sizeof two);
      exponents = (Bytes)(Words{} + two);
    }
    const Bytes low = joined(lows), high = joined(highs) + lookup(exponents, place);
    const Bytes both = *reinterpret_cast<const LooseBytes*>(at);
    const Bytes halves[2] = {both & 15, (Bytes)((Words)both >> 4) & 15};
#pragma GCC unroll 2
    for (int n = 0; n < 2; n++) {
      const Bytes lower = lookup(low, halves[n]), upper = lookup(high, halves[n]);
      const Words pairs[2] = {(Words)interleaved<false>(lower, upper, EVERY_BYTE),
                              (Words)interleaved<true>(lower, upper, EVERY_BYTE)};
      put_pairs<1>(pairs[0], out + 4 * n);
      put_pairs<1>(pairs[1], out + 4 * n + 2);
    }
  }

  float number(int64_t outer, int64_t i) const {
    const int code = row(outer)[i / 2] >> i % 2 * 4 & 15;
    return Codes::number(code, Codes::scales(*this, outer)[(i / UNIT) >> shift]);
  }
};
#endif

// Integers with scales in bfloat16.
struct Int4Codes {
  alignas(64) static constexpr float NUMBERS[] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
  static const BFloat16* scales(const Stored& from, int64_t outer) {
    return reinterpret_cast<const BFloat16*>(from.scales) + outer * from.groups;
  }
  static BFloat16 bfloat16(BFloat16 scale) { return scale; }
  static float number(int code, BFloat16 scale) { return rounded<BFloat16>(NUMBERS[code] * widened(scale)); }
};

// E2M1 with exponents.
struct Mxfp4Codes {
  alignas(64) static constexpr float NUMBERS[] = {0, .5, 1, 1.5, 2, 3, 4, 6, -0.0, -.5, -1, -1.5, -2, -3, -4, -6};
  static const uint8_t* scales(const Stored& from, int64_t outer) { return from.scales + outer * from.groups; }
  static BFloat16 bfloat16(uint8_t scale) { return {uint16_t(scale << 7)}; }
  static float number(int code, uint8_t scale) { return NUMBERS[code] * power_of_two(scale); }
};

// ---- integers that are multiplied by their scale ----

// The numbers of x rounded to the nearest of type S, for x of 2^-100 to 2^112 or 0.
template <class S>
INLINE Lanes nearest(Lanes x) {
  if constexpr (std::is_same_v<S, BFloat16>) {
    // 2^16 times x's power of two makes the unit in the last place that of bfloat16.
    const Lanes unit = (Lanes)(((Words)x & 0xff800000) + (16u << 23));
    return (x + unit) - unit;
  } else if constexpr (std::is_same_v<S, Float16>) {
#if defined(__AVX512F__)
    return (Lanes)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)x, 0));
#elif defined(__F16C__) && defined(__AVX__)
    return (Lanes)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)x, 0));
#else
    return x;  // nothing is `open`
#endif
  } else {
    return x;
  }
}

// True if `nearest` rounds to S on this processor.
template <class S>
constexpr bool ROUNDS =
#if defined(__F16C__)
    true;
#else
    !std::is_same_v<S, Float16>;
#endif

// Which integer stands for 0: the middle one of unsigned codes, a zero point of each unit, or 0 of signed bytes.
enum Zero { MIDDLE, ZERO_POINTS, SIGNED };

// The scale of a unit, and its zero point.
struct ScaleAndZero {
  float scale, zero;
};

// Each of a's words N times: of every one, or of every second from FROM on.
template <int N, int APART = 1, int FROM = 0>
struct Repeated {
  static constexpr int of(int i) { return i / N * APART + FROM; }
};

template <int BITS, class S, int PER_LANE = 1, Zero ZERO = MIDDLE>
struct Scaled : Stored {
  static constexpr bool HAS_NAN = false, POINTS = ZERO == ZERO_POINTS;
#if defined(__AVX512BF16__)
  // Two registers are rounded to bfloat16 at once, and then lie in one in turn.
  static constexpr bool IN_PAIRS = std::is_same_v<S, BFloat16>;
#else
  static constexpr bool IN_PAIRS = false;
#endif
  static constexpr int IN_WORD = 32 / BITS, IN_LANE = IN_PAIRS ? PER_LANE : 1;
  static constexpr int REGISTERS = IN_WORD / IN_LANE, APART = IN_WORD;
  static constexpr int64_t STEP = IN_WORD * LANES;
  static constexpr int OFFSET = 1 << (BITS - 1);
  static constexpr uint32_t MASK = (1u << BITS) - 1;
  using Scale = std::conditional_t<POINTS, ScaleAndZero, float>;

  static constexpr int64_t element(int k, int lane) {
    if (!IN_PAIRS) return lane * IN_WORD + k;
    const int number = k * IN_LANE, half = LANES / 2;
    return (lane % half * 2 + number % 2) * IN_WORD + number / 2 * 2 + lane / half;
  }

  const S* scales_of(int64_t outer) const { return reinterpret_cast<const S*>(scales) + outer * groups; }

  // The codes that stand for 0 in the groups of a row, which lie as `zeros_of` and are in bits from `zeros_at` on.
  const uint32_t* zeros_of(int64_t outer) const {
    return reinterpret_cast<const uint32_t*>(zeros) + outer / IN_WORD * groups;
  }
  static int zeros_at(int64_t outer) { return outer % IN_WORD * BITS; }

  bool open(int64_t outer, int64_t part, Scale* to) const {
    if (!ROUNDS<S>) return false;
    const S* own = scales_of(outer);
    // Scales of 2^-100 to 2^100, or 0.
    if constexpr (POINTS) {
      const uint32_t* words = zeros_of(outer);
      const int at = zeros_at(outer);
      spread(part, groups, shift, to, [=](int64_t i) {
        return ScaleAndZero{widened(own[i]), float(int(words[i] >> at & MASK))};
      });
      return !extreme<uint64_t>(to, 0x7fffffff, uint64_t(27) << 23, uint64_t(227) << 23, true);
    } else {
      spread(part, groups, shift, to, [own](int64_t i) { return widened(own[i]); });
      return !extreme<uint32_t>(to, 0x7fffffff, 27u << 23, 227u << 23, true);
    }
  }

  // (code - zero) · scale, not rounded to S yet.
  INLINE static Lanes product(Words code, Lanes scale, Lanes zero) {
    typedef int32_t Signed __attribute__((vector_size(4 * LANES)));
    const Lanes number = __builtin_convertvector((Signed)code, Lanes);
#if defined(__FMA__) || defined(__AVX512F__) || defined(__aarch64__)
    // Rounded once, it is the product, if zero · scale is exact.
    if constexpr (!POINTS || !std::is_same_v<S, float>) return multiply_add(number, scale, scale * -zero);
#endif
    return (number - zero) * scale;
  }

  INLINE void step(const uint8_t* at, const Scale* scales, Lanes* out, Bytes&) const {
    constexpr auto every_lane = std::make_integer_sequence<int, LANES>();
    Words words = (Words) * reinterpret_cast<const LooseBytes*>(at);
    Lanes numbers[IN_WORD];
#if defined(__AVX512F__)
    if constexpr (BITS == 4) {
      // Where a step has one scale, its sixteen numbers are looked up.
      if (shift >= 2) {
        const Words codes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        Lanes scale, zero = every(float(OFFSET));
        if constexpr (POINTS) scale = every(scales[0].scale), zero = every(scales[0].zero);
        else scale = every(scales[0]);
        const Lanes table = nearest<S>(product(codes, scale, zero));
#pragma GCC unroll 8
        for (int k = 0; k < IN_WORD; k++) {
          numbers[k] = (Lanes)_mm512_permutexvar_ps((__m512i)(words >> (BITS * k)), (__m512)table);
        }
        return put(numbers, out);
      }
    }
#endif
    Lanes scale, zero = every(float(OFFSET));
    if constexpr (POINTS && BITS >= LANES) {
      scale = every(scales[0].scale);
      zero = every(scales[0].zero);
    } else if constexpr (POINTS) {
      const Lanes units = *reinterpret_cast<const LooseLanes*>(scales);
      scale = picked<Repeated<BITS, 2>>(units, units, every_lane);
      zero = picked<Repeated<BITS, 2, 1>>(units, units, every_lane);
    } else if constexpr (BITS >= LANES) {
      scale = every(scales[0]);
    } else {
      const Lanes units = *reinterpret_cast<const LooseLanes*>(scales);
      scale = picked<Repeated<BITS>>(units, units, every_lane);
    }
    if constexpr (ZERO == SIGNED) words ^= 0x80808080;
#pragma GCC unroll 8
    for (int k = 0; k < IN_WORD; k++) {
      const Words code = k == IN_WORD - 1 ? words >> (32 - BITS) : (words >> (BITS * k)) & MASK;
      numbers[k] = product(code, scale, zero);
      if constexpr (!IN_PAIRS) numbers[k] = nearest<S>(numbers[k]);
    }
    put(numbers, out);
  }

  // Writes the numbers in the order of `element`, rounded to bfloat16 where two are in a lane.
  INLINE static void put(const Lanes* numbers, Lanes* out) {
#if defined(__AVX512BF16__)
    if constexpr (IN_PAIRS) {
#pragma GCC unroll 4
      for (int k = 0; k < IN_WORD; k += 2) {
        const __m512bh pairs = _mm512_cvtne2ps_pbh((__m512)numbers[k + 1], (__m512)numbers[k]);
        put_pairs<IN_LANE>((Words)pairs, out + k / IN_LANE);
      }
      return;
    }
#endif
#pragma GCC unroll 8
    for (int k = 0; k < IN_WORD; k++) out[k] = numbers[k];
  }

  float number(int64_t outer, int64_t i) const {
    const int64_t group = (i / UNIT) >> shift;
    const int code = row(outer)[i * BITS / 8] >> i * BITS % 8 & MASK;
    int zero = OFFSET;
    if constexpr (POINTS) zero = int(zeros_of(outer)[group] >> zeros_at(outer) & MASK);
    return rounded<S>(float((ZERO == SIGNED ? code ^ OFFSET : code) - zero) * widened(scales_of(outer)[group]));
  }
};

// ---- E4M3 with scales of type S, each for ROWS rows and 128 columns or more ----

inline float e4m3(uint8_t code) {
  const uint32_t sign = uint32_t(code & 128) << 24, rest = code & 127;
  if (rest == 127) return from_bits(sign | 0x7fc00000);
  if (rest < 8) return (sign ? -1.0f : 1.0f) * float(rest) * 0x1p-9f;
  return from_bits(sign | ((rest << 20) + (120u << 23)));
}

template <class S, int ROWS = 128>
struct E4M3 : Stored {
  static constexpr int REGISTERS = 4;
  static constexpr bool HAS_NAN = true;
  static constexpr int64_t STEP = REGISTERS * LANES;
  using Scale = float;
  // Numbers with a scale for each row are rounded to its type.
  using Rounded = std::conditional_t<ROWS == 1, S, float>;

  template <class T>
  static float wide(T scale) {
    if constexpr (std::is_same_v<T, uint8_t>) return power_of_two(scale);
    else return widened(scale);
  }
  const S* own(int64_t outer) const { return reinterpret_cast<const S*>(scales) + outer / ROWS * groups; }

  float number(int64_t outer, int64_t i) const {
    return rounded<Rounded>(e4m3(row(outer)[i]) * wide(own(outer)[(i / UNIT) >> shift]));
  }

#if defined(__AVX512F__) || (defined(__F16C__) && defined(__AVX2__))
  // By way of float16, of whose numbers these are 2^8 times as large.
  static constexpr float FACTOR = 256;

  static constexpr int64_t element(int k, int lane) { return 2 * (LANES * (k % 2) + lane) + k / 2; }

  INLINE static void step(const uint8_t* at, const Scale* scales, Lanes* out, Bytes& worst) {
    typedef int16_t Halves __attribute__((vector_size(4 * LANES)));
    const Bytes codes = *reinterpret_cast<const LooseBytes*>(at);
    const Bytes sized = codes | 128;
    worst = worst > sized ? worst : sized;
    const Halves odd = ((Halves)codes >> 1) & int16_t(0xbf80);
    const Halves even = ((Halves)codes << 8 >> 1) & int16_t(0xbf80);
    const Halves both[2] = {even, odd};
    const Lanes scale = every(scales[0]);
#pragma GCC unroll 2
    for (int n = 0; n < 2; n++) {
#if defined(__AVX512F__)
      const Lanes halves[2] = {(Lanes)_mm512_cvtph_ps(_mm512_castsi512_si256((__m512i)both[n])),
                               (Lanes)_mm512_cvtph_ps(_mm512_extracti64x4_epi64((__m512i)both[n], 1))};
#else
      const Lanes halves[2] = {(Lanes)_mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)both[n])),
                               (Lanes)_mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)both[n], 1))};
#endif
      out[2 * n] = nearest<Rounded>(halves[0] * scale);
      out[2 * n + 1] = nearest<Rounded>(halves[1] * scale);
    }
  }
#else
  static constexpr float FACTOR = 1;

  static constexpr int64_t element(int k, int lane) { return 4 * lane + k; }

  INLINE static void step(const uint8_t* at, const Scale* scales, Lanes* out, Bytes& worst) {
    const Bytes codes = *reinterpret_cast<const LooseBytes*>(at), sized = codes | 128;
    worst = worst > sized ? worst : sized;
#pragma GCC unroll 4
    for (int k = 0; k < REGISTERS; k++) {
      const Words code = (Words)codes >> (8 * k), rest = code & 127;
      const Lanes normal = (Lanes)((rest << 20) + (120u << 23)), subnormal = normal + normal - 0x1p-6f;
      const Words size = rest < 8 ? (Words)subnormal : (Words)normal;
      out[k] = nearest<Rounded>((Lanes)(size | (code & 128) << 24) * scales[0]);
    }
  }
#endif

  bool open(int64_t outer, int64_t part, Scale* to) const {
    if (!ROUNDS<Rounded>) return false;
    spread(part, groups, shift, to, [own = own(outer)](int64_t i) { return wide(own[i]) * FACTOR; });
    return !extreme<uint32_t>(to, 0x7fffffff, 27u << 23, 227u << 23, true);  // 2^-100 to 2^100
  }
};

}  // namespace
