// The block types of ggml, in which GGUF files store matrices, for `products.cc`. The numbers are those of
// `formats/gguf_blocks.py`, bit for bit.
//
// A row is a sequence of blocks, each with its scales beside its codes. Codes times scales are exact in float32, and
// at most a minimum is added, so that multiply_add and two operations give the same. x is laid out in natural order.
//
// A type has NUMBERS in a block of BYTES, which it decodes in STEPS: `Open` holds the scales of a block, and `step`
// decodes the numbers of one step to registers, in their order. Scales of any kind need no other form.

#pragma once

#include <string_view>

#include "products.h"

namespace {

typedef uint8_t Sixteen __attribute__((vector_size(16)));
typedef uint16_t Pairs __attribute__((vector_size(16)));

// Registers of sixteen numbers.
constexpr int OF_SIXTEEN = 16 / LANES;

INLINE Sixteen sixteen(const uint8_t* at) {
  Sixteen bytes;
  std::memcpy(&bytes, at, sizeof bytes);
  return bytes;
}

// The bits of each byte, BITS further down and masked; further up if BITS is negative.
template <int BITS>
INLINE Sixteen shifted(Sixteen bytes, uint8_t mask) {
  if constexpr (BITS > 0) bytes = (Sixteen)((Pairs)bytes >> BITS);
  if constexpr (BITS < 0) bytes = (Sixteen)((Pairs)bytes << -BITS);
  return bytes & mask;
}

// Signed bytes as floats.
INLINE void in_floats(Sixteen codes, Lanes* out) {
#if defined(__AVX512F__)
  out[0] = (Lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)codes));
#elif defined(__AVX2__)
  out[0] = (Lanes)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32((__m128i)codes));
  out[1] = (Lanes)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128((__m128i)codes, 8)));
#else
  float numbers[16];
  for (int i = 0; i < 16; i++) numbers[i] = float(int8_t(codes[i]));
  std::memcpy(out, numbers, sizeof numbers);
#endif
}

// Sixteen signed codes times a scale, and plus a minimum.
INLINE void numbers_of(Sixteen codes, Lanes scale, Lanes* out) {
  in_floats(codes, out);
#pragma GCC unroll 4
  for (int i = 0; i < OF_SIXTEEN; i++) out[i] *= scale;
}

INLINE void numbers_of(Sixteen codes, Lanes scale, Lanes minimum, Lanes* out) {
  in_floats(codes, out);
#pragma GCC unroll 4
  for (int i = 0; i < OF_SIXTEEN; i++) out[i] = multiply_add(out[i], scale, minimum);
}

// A float16.
INLINE float half(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#else
  return widened(Float16{bits});
#endif
}

INLINE Lanes every_half(const uint8_t* at) {
#if defined(__AVX512F__)
  int16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  return (Lanes)_mm512_cvtph_ps(_mm256_set1_epi16(bits));
#elif defined(__F16C__) && defined(__AVX2__)
  int16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  return (Lanes)_mm256_cvtph_ps(_mm_set1_epi16(bits));
#else
  return every(half(at));
#endif
}

// ---- codes of four bits, two in a byte ----

// Each has the sixteen numbers that a code stands for.
struct Unsigned4 {
  static constexpr int8_t LEVELS[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  static Sixteen of(Sixteen codes) { return codes; }
};

struct Signed4 {
  static constexpr int8_t LEVELS[] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
  static Sixteen of(Sixteen codes) { return codes - 8; }
};

template <class Levels>
INLINE Sixteen looked_up(Sixteen codes) {
#if defined(__SSSE3__)
  return (Sixteen)_mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)Levels::LEVELS), (__m128i)codes);
#elif defined(__ARM_NEON) && defined(__aarch64__)
  return (Sixteen)vqtbl1q_u8(vld1q_u8((const uint8_t*)Levels::LEVELS), (uint8x16_t)codes);
#else
  Sixteen found;
  for (int i = 0; i < 16; i++) found[i] = uint8_t(Levels::LEVELS[codes[i]]);
  return found;
#endif
}

struct Nonlinear4 {
  static constexpr int8_t LEVELS[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  static Sixteen of(Sixteen codes) { return looked_up<Nonlinear4>(codes); }
};

// E2M1, doubled.
struct Float4 {
  static constexpr int8_t LEVELS[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  static Sixteen of(Sixteen codes) { return looked_up<Float4>(codes); }
};

// The numbers of all codes under one scale, and one minimum if there is one.
template <class Levels, bool MINIMUM>
struct Numbers {
#if defined(__AVX512F__)
  Lanes all;

  INLINE Numbers(Lanes scale, Lanes minimum) {
    const Lanes levels = (Lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(sixteen_levels()));
    all = MINIMUM ? multiply_add(levels, scale, minimum) : levels * scale;
  }

  static __m128i sixteen_levels() { return _mm_loadu_si128((const __m128i*)Levels::LEVELS); }
#else
  Lanes scale, minimum;

  INLINE Numbers(Lanes scale, Lanes minimum) : scale(scale), minimum(minimum) {}

  INLINE void put(Sixteen codes, Lanes* out) const {
    MINIMUM ? numbers_of(Levels::of(codes), scale, minimum, out) : numbers_of(Levels::of(codes), scale, out);
  }
#endif

  // Decodes sixteen bytes: the codes in the lower bits by `low`, and those in the upper by `high`.
  INLINE static void pairs(const uint8_t* at, const Numbers& low, const Numbers& high, Lanes* lows, Lanes* highs) {
#if defined(__AVX512F__)
    // An index is the lower four bits of a word.
    const __m512i words = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at));
    lows[0] = (Lanes)_mm512_permutexvar_ps(words, (__m512)low.all);
    highs[0] = (Lanes)_mm512_permutexvar_ps(_mm512_srli_epi32(words, 4), (__m512)high.all);
#else
    const Sixteen bytes = sixteen(at);
    low.put(shifted<0>(bytes, 15), lows);
    high.put(shifted<4>(bytes, 15), highs);
#endif
  }
};

struct Q4_0 {
  static constexpr int NUMBERS = 32, BYTES = 18, STEPS = 1;
  using Open = const uint8_t*;

  template <int>
  INLINE static void step(const uint8_t* block, const Open&, Lanes* out) {
    const Numbers<Signed4, false> own(every_half(block), Lanes{});
    own.pairs(block + 2, own, own, out, out + OF_SIXTEEN);
  }
};

struct Q4_1 {
  static constexpr int NUMBERS = 32, BYTES = 20, STEPS = 1;
  using Open = const uint8_t*;

  template <int>
  INLINE static void step(const uint8_t* block, const Open&, Lanes* out) {
    const Numbers<Unsigned4, true> own(every_half(block), every_half(block + 2));
    own.pairs(block + 4, own, own, out, out + OF_SIXTEEN);
  }
};

struct IQ4_NL {
  static constexpr int NUMBERS = 32, BYTES = 18, STEPS = 1;
  using Open = const uint8_t*;

  template <int>
  INLINE static void step(const uint8_t* block, const Open&, Lanes* out) {
    const Numbers<Nonlinear4, false> own(every_half(block), Lanes{});
    own.pairs(block + 2, own, own, out, out + OF_SIXTEEN);
  }
};

struct MXFP4 {
  static constexpr int NUMBERS = 32, BYTES = 17, STEPS = 1;
  using Open = const uint8_t*;

  template <int>
  INLINE static void step(const uint8_t* block, const Open&, Lanes* out) {
    // 2^(exponent - 128), and four times that where it is subnormal, which the processor may take for zero.
    const uint32_t exponent = block[0];
    const bool tiny = exponent < 2;
    const Numbers<Float4, false> own(every(from_bits((tiny ? exponent + 1 : exponent - 1) << 23)), Lanes{});
    own.pairs(block + 1, own, own, out, out + OF_SIXTEEN);
    if (tiny) {
      for (int i = 0; i < 2 * OF_SIXTEEN; i++) out[i] *= 0.25f;
    }
  }
};

// ---- codes of five bits, whose upper ones are together ----

// 16 in the bytes whose bit of sixteen is set.
INLINE Sixteen sixteens(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
#if defined(__AVX512VL__) && defined(__AVX512BW__)
  return (Sixteen)_mm_maskz_set1_epi8(bits, 16);
#else
  const uint64_t both[] = {0x0101010101010101u * (bits & 255), 0x0101010101010101u * (bits >> 8)};
  const Sixteen masks = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  Sixteen spread;
  std::memcpy(&spread, both, sizeof spread);
  return (Sixteen)((spread & masks) == masks) & 16;
#endif
}

struct Q5_0 {
  static constexpr int NUMBERS = 32, BYTES = 22, STEPS = 1;
  using Open = const uint8_t*;

  template <int>
  INLINE static void step(const uint8_t* block, const Open&, Lanes* out) {
    const Lanes scale = every_half(block);
    const Sixteen bytes = sixteen(block + 6);
    numbers_of((shifted<0>(bytes, 15) | sixteens(block + 2)) - 16, scale, out);
    numbers_of((shifted<4>(bytes, 15) | sixteens(block + 4)) - 16, scale, out + OF_SIXTEEN);
  }
};

struct Q5_1 {
  static constexpr int NUMBERS = 32, BYTES = 24, STEPS = 1;
  using Open = const uint8_t*;

  template <int>
  INLINE static void step(const uint8_t* block, const Open&, Lanes* out) {
    const Lanes scale = every_half(block), minimum = every_half(block + 2);
    const Sixteen bytes = sixteen(block + 8);
    numbers_of(shifted<0>(bytes, 15) | sixteens(block + 4), scale, minimum, out);
    numbers_of(shifted<4>(bytes, 15) | sixteens(block + 6), scale, minimum, out + OF_SIXTEEN);
  }
};

// ---- codes of eight bits ----

struct Q8_0 {
  static constexpr int NUMBERS = 32, BYTES = 34, STEPS = 1;
  using Open = const uint8_t*;

  template <int>
  INLINE static void step(const uint8_t* block, const Open&, Lanes* out) {
    const Lanes scale = every_half(block);
    numbers_of(sixteen(block + 2), scale, out);
    numbers_of(sixteen(block + 18), scale, out + OF_SIXTEEN);
  }
};

// ---- blocks of 256, whose scales are codes too ----

// The scales of Q4_K and Q5_K: those of the eight units of 32 numbers, and the minima, which are subtracted.
struct Units {
  alignas(64) float scales[8], minima[8];

  INLINE explicit Units(const uint8_t* block) {
    uint32_t words[3], codes[4];
    std::memcpy(words, block + 4, sizeof words);
    codes[0] = words[0] & 0x3f3f3f3f;
    codes[1] = (words[2] & 0x0f0f0f0f) | (words[0] >> 2 & 0x30303030);
    codes[2] = words[1] & 0x3f3f3f3f;
    codes[3] = (words[2] >> 4 & 0x0f0f0f0f) | (words[1] >> 2 & 0x30303030);
    Lanes all[OF_SIXTEEN];
    in_floats(sixteen((const uint8_t*)codes), all);
    const float scale = half(block), minimum = -half(block + 2);
#if defined(__AVX512F__)
    all[0] = (Lanes)_mm512_mul_ps((__m512)all[0], _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(scale), _mm512_set1_ps(minimum)));
#else
    for (int i = 0; i < OF_SIXTEEN; i++) all[i] *= i < OF_SIXTEEN / 2 ? scale : minimum;
#endif
    std::memcpy(scales, all, sizeof scales);
    std::memcpy(minima, (const char*)all + sizeof scales, sizeof minima);
  }
};

struct Q4_K {
  static constexpr int NUMBERS = 256, BYTES = 144, STEPS = 4;
  using Open = Units;

  template <int I>
  INLINE static void step(const uint8_t* block, const Open& units, Lanes* out) {
    using Own = Numbers<Unsigned4, true>;
    const Own low(every(units.scales[2 * I]), every(units.minima[2 * I]));
    const Own high(every(units.scales[2 * I + 1]), every(units.minima[2 * I + 1]));
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      Own::pairs(block + 16 + 32 * I + 16 * i, low, high, out + i * OF_SIXTEEN, out + (2 + i) * OF_SIXTEEN);
    }
  }
};

struct Q5_K {
  static constexpr int NUMBERS = 256, BYTES = 176, STEPS = 4;
  using Open = Units;

  template <int I>
  INLINE static void step(const uint8_t* block, const Open& units, Lanes* out) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      const Sixteen fifth = sixteen(block + 16 + 16 * i), bytes = sixteen(block + 48 + 32 * I + 16 * i);
      const Sixteen low = shifted<0>(bytes, 15) | shifted<2 * I - 4>(fifth, 16);
      const Sixteen high = shifted<4>(bytes, 15) | shifted<2 * I - 3>(fifth, 16);
      numbers_of(low, every(units.scales[2 * I]), every(units.minima[2 * I]), out + i * OF_SIXTEEN);
      numbers_of(high, every(units.scales[2 * I + 1]), every(units.minima[2 * I + 1]), out + (2 + i) * OF_SIXTEEN);
    }
  }
};

struct Q6_K {
  static constexpr int NUMBERS = 256, BYTES = 210, STEPS = 8;

  struct Open {
    alignas(64) float scales[16];

    INLINE explicit Open(const uint8_t* block) {
      Lanes all[OF_SIXTEEN];
      numbers_of(sixteen(block + 192), every_half(block + 208), all);
      std::memcpy(scales, all, sizeof scales);
    }
  };

  template <int I>
  INLINE static void step(const uint8_t* block, const Open& open, Lanes* out) {
    constexpr int HALF = I / 4, QUARTER = I % 4;
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      const Sixteen lower = sixteen(block + 64 * HALF + QUARTER % 2 * 32 + 16 * i);
      const Sixteen upper = sixteen(block + 128 + 32 * HALF + 16 * i);
      const Sixteen codes = shifted<QUARTER / 2 * 4>(lower, 15) | shifted<2 * QUARTER - 4>(upper, 48);
      numbers_of(codes - 32, every(open.scales[2 * I + i]), out + i * OF_SIXTEEN);
    }
  }
};

// ---- what `products` needs of a type ----

// The kernels of a type: they decode some blocks to every WIDE-th register, and multiply those of STRIP rows by one, two
// or three rows of x while they ask for bytes further on. Both return to where `products` has the rest.
struct BlockType {
  std::string_view name;
  int64_t numbers, bytes;
  void (*decode)(const uint8_t* at, int64_t blocks, float* to);
  void (*fused[3])(const uint8_t* at, int64_t stride, int64_t blocks, const uint8_t* asked, const float* const* x,
                   Lanes (*own)[STRIP]);
};

struct Blocks : Stored {
  static constexpr bool HAS_NAN = false, NATURAL = true;
  static constexpr int REGISTERS = 1;
  static constexpr int64_t STEP = LANES;
  using Scale = uint8_t;
  const BlockType* type;

  static constexpr int64_t element(int, int lane) { return lane; }

  // A part of a row: where it is in a row, and its blocks.
  int64_t offset(int64_t part) const { return part * (PART / type->numbers) * type->bytes; }
  int64_t blocks(int64_t part) const { return std::min(PART, inner - part * PART) / type->numbers; }
};

// step<0>, step<1>, … of a block.
template <class Run, int... I>
INLINE void each_step(Run run, std::integer_sequence<int, I...>) {
  (run(std::integral_constant<int, I>()), ...);
}

template <class T>
constexpr int OF_STEP = T::NUMBERS / T::STEPS / LANES;

template <class T>
void decode_blocks(const uint8_t* at, int64_t blocks, float* to) {
  for (int64_t b = 0; b < blocks; b++, at += T::BYTES) {
    const typename T::Open open(at);
    each_step([&](auto i) ALWAYS {
      Lanes numbers[OF_STEP<T>];
      T::template step<i>(at, open, numbers);
#pragma GCC unroll 16
      for (int k = 0; k < OF_STEP<T>; k++, to += WIDE * LANES) std::memcpy(to, &numbers[k], sizeof numbers[k]);
    }, std::make_integer_sequence<int, T::STEPS>());
  }
}

template <class T, int R>
void fused_blocks(const uint8_t* at, int64_t stride, int64_t blocks, const uint8_t* asked, const float* const* x,
                  Lanes (*own)[STRIP]) {
  Lanes sums[R][STRIP] = {};
  const float* rows[R];
  for (int r = 0; r < R; r++) rows[r] = x[r];
  for (int64_t b = 0; b < blocks; b++, at += T::BYTES) {
    const typename T::Open open[STRIP] = {typename T::Open(at), typename T::Open(at + stride),
                                          typename T::Open(at + 2 * stride), typename T::Open(at + 3 * stride)};
#pragma GCC unroll 16
    for (int i = 0; i < STRIP * T::BYTES; i += 64) __builtin_prefetch(asked + i, 0, 1);
    asked += STRIP * T::BYTES;
    each_step([&](auto i) ALWAYS {
#pragma GCC unroll 4
      for (int o = 0; o < STRIP; o++) {
        Lanes numbers[OF_STEP<T>];
        T::template step<i>(at + o * stride, open[o], numbers);
#pragma GCC unroll 16
        for (int k = 0; k < OF_STEP<T>; k++) {
#pragma GCC unroll 3
          for (int r = 0; r < R; r++) sums[r][o] = multiply_add(numbers[k], load(rows[r] + k * LANES), sums[r][o]);
        }
      }
#pragma GCC unroll 3
      for (int r = 0; r < R; r++) rows[r] += OF_STEP<T> * LANES;
    }, std::make_integer_sequence<int, T::STEPS>());
  }
#pragma GCC unroll 3
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int o = 0; o < STRIP; o++) own[r][o] = sums[r][o];
  }
}

inline int64_t decode(const Blocks& weight, int64_t outer, int64_t part, float* to) {
  const int64_t blocks = weight.blocks(part);
  weight.type->decode(weight.row(outer) + weight.offset(part), blocks, to);
  return blocks * weight.type->numbers / LANES;
}

template <int R>
inline bool fused(const Blocks& weight, int64_t outer, int64_t part, const float* const* x, int64_t ahead,
                  Lanes (&own)[R][STRIP]) {
  const int64_t offset = weight.offset(part);
  const uint8_t* at = weight.row(outer);
  weight.type->fused[R - 1](at + offset, weight.stride, weight.blocks(part), at + ahead + STRIP * offset, x, own);
  return true;
}

template <class T>
constexpr BlockType block_type(std::string_view name) {
  return {name, T::NUMBERS, T::BYTES, decode_blocks<T>, {fused_blocks<T, 1>, fused_blocks<T, 2>, fused_blocks<T, 3>}};
}

constexpr BlockType BLOCK_TYPES[] = {
    block_type<Q4_0>("Q4_0"), block_type<Q4_1>("Q4_1"),     block_type<Q5_0>("Q5_0"),   block_type<Q5_1>("Q5_1"),
    block_type<Q8_0>("Q8_0"), block_type<Q4_K>("Q4_K"),     block_type<Q5_K>("Q5_K"),   block_type<Q6_K>("Q6_K"),
    block_type<MXFP4>("MXFP4"), block_type<IQ4_NL>("IQ4_NL"),
};

// The type of this name, or nullptr.
inline const BlockType* block_type_of(std::string_view name) {
  for (const BlockType& type : BLOCK_TYPES) if (type.name == name) return &type;
  return nullptr;
}

}  // namespace
