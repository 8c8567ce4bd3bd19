// The block types of ggml, in which GGUF files store matrices, for `products.cc`. The numbers are those of
// `formats/gguf_blocks.py`, bit for bit.
//
// A row is a sequence of blocks, each with its scales beside its codes. Codes times scales are exact in float32, and
// at most a minimum is added, so that multiply_add and two operations give the same. x is laid out in natural order.
//
// A type has NUMBERS in a block of BYTES, which it decodes in STEPS: `Open` holds the scales of a block, and `step`
// decodes the numbers of one step to registers, in their order. Scales of any kind need no other form. A new type is a
// struct here, a line in BLOCK_TYPES, and a name in `products.LAYOUTS`.

#pragma once

#include <string_view>

#include "products.h"

namespace {

typedef uint8_t Sixteen __attribute__((vector_size(16)));
typedef uint8_t Codes __attribute__((vector_size(32)));
typedef uint16_t CodePairs __attribute__((vector_size(32)));

// Registers of sixteen numbers.
constexpr int OF_SIXTEEN = 16 / LANES;

INLINE Codes codes_at(const uint8_t* at) {
  Codes codes;
  std::memcpy(&codes, at, sizeof codes);
  return codes;
}

// The bits of each byte, BITS further down and masked; further up if BITS is negative.
template <int BITS>
INLINE Codes shifted(Codes bytes, uint8_t mask) {
  if constexpr (BITS > 0) bytes = (Codes)((CodePairs)bytes >> BITS);
  if constexpr (BITS < 0) bytes = (Codes)((CodePairs)bytes << -BITS);
  return bytes & mask;
}

// The lower four bits of sixteen bytes, then the upper.
INLINE Codes nibbles_at(const uint8_t* at) {
#if defined(__AVX2__)
  const __m128i bytes = _mm_loadu_si128((const __m128i*)at);
  return (Codes)_mm256_inserti128_si256(_mm256_castsi128_si256(bytes), _mm_srli_epi16(bytes, 4), 1) & 15;
#else
  uint8_t both[32];
  for (int i = 0; i < 16; i++) both[i] = at[i] & 15, both[16 + i] = at[i] >> 4;
  return codes_at(both);
#endif
}

// Sixteen signed bytes as floats.
INLINE void in_floats(Sixteen codes, Lanes* out) {
#if defined(__AVX512F__)
  out[0] = (Lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)codes));
#elif defined(__AVX2__)
  out[0] = (Lanes)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32((__m128i)codes));
  out[1] = (Lanes)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128((__m128i)codes, 8)));
#elif defined(__SSE4_1__)
  out[0] = (Lanes)_mm_cvtepi32_ps(_mm_cvtepi8_epi32((__m128i)codes));
  out[1] = (Lanes)_mm_cvtepi32_ps(_mm_cvtepi8_epi32(_mm_srli_si128((__m128i)codes, 4)));
  out[2] = (Lanes)_mm_cvtepi32_ps(_mm_cvtepi8_epi32(_mm_srli_si128((__m128i)codes, 8)));
  out[3] = (Lanes)_mm_cvtepi32_ps(_mm_cvtepi8_epi32(_mm_srli_si128((__m128i)codes, 12)));
#else
  float numbers[16];
  for (int i = 0; i < 16; i++) numbers[i] = float(int8_t(codes[i]));
  std::memcpy(out, numbers, sizeof numbers);
#endif
}

INLINE void in_floats(Codes codes, Lanes* out) {
  Sixteen halves[2];
  std::memcpy(halves, &codes, sizeof halves);
  in_floats(halves[0], out);
  in_floats(halves[1], out + OF_SIXTEEN);
}

// Signed codes times their scale: of all, or of each half.
INLINE void numbers_of(Codes codes, Lanes first, Lanes second, Lanes* out) {
  in_floats(codes, out);
#pragma GCC unroll 8
  for (int i = 0; i < 2 * OF_SIXTEEN; i++) out[i] *= i < OF_SIXTEEN ? first : second;
}

INLINE void numbers_of(Codes codes, Lanes scale, Lanes* out) { numbers_of(codes, scale, scale, out); }

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

// `x` in all lanes, by way of memory, from where loads spread it at no cost. (The compiler would permute.)
INLINE Lanes in_memory(float x) {
  asm("" : "+m"(x));
  return every(x);
}

INLINE Lanes every_half(const uint8_t* at) { return in_memory(half(at)); }

// A scale, and the minimum that is added.
struct Line {
  float scale, minimum;

  INLINE explicit Line(const uint8_t* at) {
#if defined(__F16C__)
    uint32_t both;
    std::memcpy(&both, at, sizeof both);
    _mm_storel_pi((__m64*)this, _mm_cvtph_ps(_mm_cvtsi32_si128(both)));
#else
    scale = half(at), minimum = half(at + 2);
#endif
    asm("" : "+m"(*this));
  }
};

INLINE void lines_of(Codes codes, Lanes scale, Lanes minimum, Lanes* out) {
  in_floats(codes, out);
#pragma GCC unroll 8
  for (int i = 0; i < 2 * OF_SIXTEEN; i++) out[i] = multiply_add(out[i], scale, minimum);
}

// ---- codes of four bits, two in a byte ----

// Each has the sixteen numbers that a code stands for.
struct Unsigned4 {
  static constexpr int8_t LEVELS[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  static Codes of(Codes codes) { return codes; }
};

struct Signed4 {
  static constexpr int8_t LEVELS[] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
  static Codes of(Codes codes) { return codes - 8; }
};

template <class Levels>
INLINE Codes looked_up(Codes codes) {
#if defined(__AVX2__)
  const __m128i levels = _mm_loadu_si128((const __m128i*)Levels::LEVELS);
  return (Codes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(levels), (__m256i)codes);
#else
  Sixteen halves[2];
  std::memcpy(halves, &codes, sizeof halves);
  for (Sixteen& half : halves) {
#if defined(__SSSE3__)
    half = (Sixteen)_mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)Levels::LEVELS), (__m128i)half);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    half = (Sixteen)vqtbl1q_u8(vld1q_u8((const uint8_t*)Levels::LEVELS), (uint8x16_t)half);
#else
    for (int i = 0; i < 16; i++) half[i] = uint8_t(Levels::LEVELS[half[i]]);
#endif
  }
  std::memcpy(&codes, halves, sizeof codes);
  return codes;
#endif
}

struct Nonlinear4 {
  static constexpr int8_t LEVELS[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  static Codes of(Codes codes) { return looked_up<Nonlinear4>(codes); }
};

// E2M1, doubled.
struct Float4 {
  static constexpr int8_t LEVELS[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  static Codes of(Codes codes) { return looked_up<Float4>(codes); }
};

// The numbers of all codes under one scale, and with a minimum if there is one.
template <class Levels, bool MINIMUM>
struct Numbers {
#if defined(__AVX512F__)
  Lanes all;

  INLINE Numbers(Lanes scale, Lanes minimum) {
    Lanes levels;
    in_floats((Sixteen)_mm_loadu_si128((const __m128i*)Levels::LEVELS), &levels);
    all = MINIMUM ? multiply_add(levels, scale, minimum) : levels * scale;
  }

  // An index is the lower four bits of a word.
  INLINE Lanes at(__m512i words) const { return (Lanes)_mm512_permutexvar_ps(words, (__m512)all); }

  INLINE static __m512i words(const uint8_t* at) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at)); }
#else
  Lanes scale, minimum;

  INLINE Numbers(Lanes scale, Lanes minimum) : scale(scale), minimum(minimum) {}

  INLINE void put(Codes codes, Lanes* out) const {
    MINIMUM ? lines_of(Levels::of(codes), scale, minimum, out) : numbers_of(Levels::of(codes), scale, out);
  }
#endif

  // Decodes sixteen bytes: all codes in the lower bits, then all in the upper.
  INLINE void sixteen_pairs(const uint8_t* from, Lanes* out) const {
#if defined(__AVX512F__)
    const __m512i both = words(from);
    out[0] = at(both), out[1] = at(_mm512_srli_epi32(both, 4));
#else
    put(nibbles_at(from), out);
#endif
  }
};

struct Q4_0 {
  static constexpr int NUMBERS = 32, BYTES = 18, STEPS = 1;
  using Open = const uint8_t*;

  template <int>
  INLINE static void step(const uint8_t* block, const Open&, Lanes* out) {
    Numbers<Signed4, false>(every_half(block), Lanes{}).sixteen_pairs(block + 2, out);
  }
};

struct Q4_1 {
  static constexpr int NUMBERS = 32, BYTES = 20, STEPS = 1;
  using Open = Line;

  template <int>
  INLINE static void step(const uint8_t* block, const Open& open, Lanes* out) {
    Numbers<Unsigned4, true>(every(open.scale), every(open.minimum)).sixteen_pairs(block + 4, out);
  }
};

struct IQ4_NL {
  static constexpr int NUMBERS = 32, BYTES = 18, STEPS = 1;
  using Open = const uint8_t*;

  template <int>
  INLINE static void step(const uint8_t* block, const Open&, Lanes* out) {
    Numbers<Nonlinear4, false>(every_half(block), Lanes{}).sixteen_pairs(block + 2, out);
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
    const Lanes power = in_memory(from_bits((tiny ? exponent + 1 : exponent - 1) << 23));
    Numbers<Float4, false>(power, Lanes{}).sixteen_pairs(block + 1, out);
    if (tiny) {
      for (int i = 0; i < 2 * OF_SIXTEEN; i++) out[i] *= 0.25f;
    }
  }
};

// ---- codes of five bits, whose upper ones are together ----

// The codes of sixteen bytes, and 16 in those whose bit of four bytes is set.
INLINE Codes fives_at(const uint8_t* fifths, const uint8_t* at) {
  uint32_t bits;
  std::memcpy(&bits, fifths, sizeof bits);
#if defined(__AVX512VL__) && defined(__AVX512BW__)
  return nibbles_at(at) | (Codes)_mm256_maskz_set1_epi8(bits, 16);
#else
  uint64_t eights[4];
  for (int i = 0; i < 4; i++) eights[i] = 0x0101010101010101u * (bits >> 8 * i & 255);
  uint8_t bit[32];
  for (int i = 0; i < 32; i++) bit[i] = 1 << i % 8;
  const Codes mask = codes_at(bit);
  return nibbles_at(at) | ((Codes)((codes_at((const uint8_t*)eights) & mask) == mask) & 16);
#endif
}

struct Q5_0 {
  static constexpr int NUMBERS = 32, BYTES = 22, STEPS = 1;
  using Open = const uint8_t*;

  template <int>
  INLINE static void step(const uint8_t* block, const Open&, Lanes* out) {
    numbers_of(fives_at(block + 2, block + 6) - 16, every_half(block), out);
  }
};

struct Q5_1 {
  static constexpr int NUMBERS = 32, BYTES = 24, STEPS = 1;
  using Open = Line;

  template <int>
  INLINE static void step(const uint8_t* block, const Open& open, Lanes* out) {
    lines_of(fives_at(block + 4, block + 8), every(open.scale), every(open.minimum), out);
  }
};

// ---- codes of eight bits ----

struct Q8_0 {
  static constexpr int NUMBERS = 32, BYTES = 34, STEPS = 1;
  using Open = const uint8_t*;

  template <int>
  INLINE static void step(const uint8_t* block, const Open&, Lanes* out) {
    numbers_of(codes_at(block + 2), every_half(block), out);
  }
};

// ---- blocks of 256, whose scales are codes too ----

// The scales of Q4_K and Q5_K: those of the eight units of 32 numbers, and the minima, which are subtracted.
struct Units {
  alignas(64) float scales[8], minima[8];

  INLINE explicit Units(const uint8_t* block) {
    uint32_t words[3];
    std::memcpy(words, block + 4, sizeof words);
    typedef uint32_t Four __attribute__((vector_size(16)));
    const Four codes = {words[0] & 0x3f3f3f3f, (words[2] & 0x0f0f0f0f) | (words[0] >> 2 & 0x30303030),
                        words[1] & 0x3f3f3f3f, (words[2] >> 4 & 0x0f0f0f0f) | (words[1] >> 2 & 0x30303030)};
    Lanes all[OF_SIXTEEN];
    in_floats((Sixteen)codes, all);
    const Lanes scale = every(half(block)), minimum = every(-half(block + 2));
#if defined(__AVX512F__)
    all[0] *= (Lanes)_mm512_mask_blend_ps(0xff00, (__m512)scale, (__m512)minimum);
#else
    for (int i = 0; i < OF_SIXTEEN; i++) all[i] *= i < OF_SIXTEEN / 2 ? scale : minimum;
#endif
    std::memcpy(scales, all, sizeof scales);
    std::memcpy(minima, (const char*)all + sizeof scales, sizeof minima);
    asm("" : "+m"(*this));
  }
};

struct Q4_K {
  static constexpr int NUMBERS = 256, BYTES = 144, STEPS = 4;
  using Open = Units;

  template <int I>
  INLINE static void step(const uint8_t* block, const Open& units, Lanes* out) {
    const Numbers<Unsigned4, true> low(every(units.scales[2 * I]), every(units.minima[2 * I]));
    const Numbers<Unsigned4, true> high(every(units.scales[2 * I + 1]), every(units.minima[2 * I + 1]));
    const uint8_t* at = block + 16 + 32 * I;
#if defined(__AVX512F__)
    const __m512i first = low.words(at), second = low.words(at + 16);
    out[0] = low.at(first), out[1] = low.at(second);
    out[2] = high.at(_mm512_srli_epi32(first, 4)), out[3] = high.at(_mm512_srli_epi32(second, 4));
#else
    low.put(shifted<0>(codes_at(at), 15), out);
    high.put(shifted<4>(codes_at(at), 15), out + 2 * OF_SIXTEEN);
#endif
  }
};

struct Q5_K {
  static constexpr int NUMBERS = 256, BYTES = 176, STEPS = 8;
  using Open = Units;

  template <int I>
  INLINE static void step(const uint8_t* block, const Open& units, Lanes* out) {
    const Codes lower = shifted<I % 2 * 4>(codes_at(block + 48 + I / 2 * 32), 15);
    const Codes codes = lower | shifted<I - 4>(codes_at(block + 16), 16);
    lines_of(codes, every(units.scales[I]), every(units.minima[I]), out);
  }
};

struct Q6_K {
  static constexpr int NUMBERS = 256, BYTES = 210, STEPS = 8;

  struct Open {
    alignas(64) float scales[16];

    INLINE explicit Open(const uint8_t* block) {
      Sixteen codes;
      std::memcpy(&codes, block + 192, sizeof codes);
      Lanes all[OF_SIXTEEN];
      in_floats(codes, all);
      const Lanes scale = every(half(block + 208));
      for (int i = 0; i < OF_SIXTEEN; i++) all[i] *= scale;
      std::memcpy(scales, all, sizeof scales);
      asm("" : "+m"(*this));
    }
  };

  template <int I>
  INLINE static void step(const uint8_t* block, const Open& open, Lanes* out) {
    constexpr int HALF = I / 4, QUARTER = I % 4;
    const Codes lower = shifted<QUARTER / 2 * 4>(codes_at(block + 64 * HALF + QUARTER % 2 * 32), 15);
    const Codes codes = lower | shifted<2 * QUARTER - 4>(codes_at(block + 128 + 32 * HALF), 48);
    numbers_of(codes - 32, every(open.scales[2 * I]), every(open.scales[2 * I + 1]), out);
  }
};

// ---- what `products` needs of a type ----

// The kernels of a type: `decode` writes the numbers of some blocks to every WIDE-th register; `fused` multiplies the
// blocks of STRIP rows by one, two or three rows of x, and prefetches from `asked` on.
struct BlockType {
  std::string_view name;
  int64_t numbers, bytes;
  void (*decode)(const uint8_t* at, int64_t blocks, float* to);
  void (*fused[3])(const uint8_t* at, int64_t stride, int64_t blocks, const uint8_t* asked, const float* const* x,
                   Lanes (*own)[STRIP]);
};

struct Blocks : Stored {
  static constexpr bool HAS_NAN = false;
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
  // Whether there are registers to hold x's numbers of a step in.
  constexpr bool HELD = LANES == 16 && R * OF_STEP<T> <= 12;
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
      Lanes held[R][OF_STEP<T>];
      if constexpr (HELD) {
#pragma GCC unroll 3
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
          for (int k = 0; k < OF_STEP<T>; k++) held[r][k] = kept(load(rows[r] + k * LANES));
        }
      }
#pragma GCC unroll 4
      for (int o = 0; o < STRIP; o++) {
        Lanes numbers[OF_STEP<T>];
        T::template step<i>(at + o * stride, open[o], numbers);
#pragma GCC unroll 16
        for (int k = 0; k < OF_STEP<T>; k++) {
#pragma GCC unroll 3
          for (int r = 0; r < R; r++) {
            const Lanes row = HELD ? held[r][k] : load(rows[r] + k * LANES);
            sums[r][o] = multiply_add(numbers[k], row, sums[r][o]);
          }
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
