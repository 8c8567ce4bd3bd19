// Registers of floats, for the kernels beside this file, and their tasks on the threads of XLA's pool.
//
// Every number is a sum in one fixed order, whatever else is computed: a row's bits depend on nothing but the row and
// what it is multiplied by. So products are added by `multiply_add` alone, and nothing else may be contracted
// (-ffp-contract=off).

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <memory>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

#define ALWAYS __attribute__((always_inline))
#define INLINE inline ALWAYS

namespace {

// Floats in a register.
#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef float LooseLanes __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

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

INLINE Lanes load(const float* at) { return *reinterpret_cast<const LooseLanes*>(at); }

// As one load: zeros + x would be an addition.
INLINE Lanes every(float x) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_set1_ps(x);
#elif defined(__AVX__) && defined(__FMA__)
  return (Lanes)_mm256_set1_ps(x);
#elif defined(__ARM_NEON) && defined(__aarch64__)
  return (Lanes)vdupq_n_f32(x);
#else
  return Lanes{} + x;
#endif
}

// a · b + sum, rounded once where the processor can.
INLINE Lanes multiply_add(Lanes a, Lanes b, Lanes sum) {
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

// e^x for x <= 0, to a last bit or two; NaN stays NaN. 2^n times Cephes' polynomial for e^f, |f| <= log(2) / 2.
inline Lanes exponential(Lanes x) {
  constexpr float SHIFT = 12582912;  // 1.5 · 2^23: a sum with it is rounded to an integer
  const Lanes shifted = multiply_add(x, every(1.44269504f), every(SHIFT));
  const Lanes n = shifted - SHIFT;
  const Lanes f = multiply_add(n, every(2.12194440e-4f), multiply_add(n, every(-0.693359375f), x));
  Lanes y = every(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    y = multiply_add(y, f, every(c));
  }
  y = multiply_add(y, f * f, f + 1.0f);
  Words bits, exponent;
  std::memcpy(&bits, &y, sizeof bits);
  std::memcpy(&exponent, &shifted, sizeof exponent);
  bits += exponent << 23;  // the bits of SHIFT leave on the left
  Lanes scaled;
  std::memcpy(&scaled, &bits, sizeof scaled);
  scaled = x != x ? x : scaled;
  return x < -87.0f ? Lanes{} : scaled;
}

// log(x) for normal numbers x = 2^e m above 0, to a last bit: e log(2), and Cephes' polynomial for m in [1/√2, √2).
inline Lanes logarithm(Lanes x) {
  Words bits;
  std::memcpy(&bits, &x, sizeof bits);
  const Words exponents = (bits - 0x3f3504f3u) >> 23;  // e modulo 512, where 0x3f3504f3 are the bits of 1/√2
  const Words shifted = (exponents & 0x1ffu) << 23;
  bits -= shifted;
  Lanes m;
  std::memcpy(&m, &bits, sizeof m);
  // The nine bits as a signed number, added to the last bits of 1.5 · 2^23, which is subtracted again as a float.
  const Words signed_bits = (((exponents & 0x1ffu) ^ 0x100u) - 0x100u) + 0x4b400000u;
  Lanes e;
  std::memcpy(&e, &signed_bits, sizeof e);
  e -= 12582912.0f;
  const Lanes f = m - 1.0f, square = f * f;
  Lanes y = every(7.0376836292e-2f);
  for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                  2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f}) {
    y = multiply_add(y, f, every(c));
  }
  y = multiply_add(y, f * square, e * -2.12194440e-4f);
  y = multiply_add(square, every(-0.5f), y);
  return multiply_add(e, every(0.693359375f), f + y);
}

// True if a comparison of registers is true anywhere.
template <class Mask>
INLINE bool any(Mask mask) {
  uint64_t parts[sizeof mask / 8], found = 0;
  std::memcpy(parts, &mask, sizeof mask);
#pragma GCC unroll 8
  for (uint64_t part : parts) found |= part;
  return found != 0;
}

// What is subtracted before `exponential`: the largest of its numbers, or 0 where that is not finite.
inline float shift_of(float top) { return std::isfinite(top) ? top : 0; }

// `lanes` in a register: the compiler would load it again for every product.
INLINE Lanes kept(Lanes lanes) {
#if defined(__AVX512F__)
  asm("" : "+v"(lanes));
#elif defined(__AVX__)
  asm("" : "+x"(lanes));
#endif
  return lanes;
}

// The sum of a register's numbers: of its halves, their halves and so on.
INLINE float total(Lanes lanes) {
  float numbers[LANES];
  std::memcpy(numbers, &lanes, sizeof numbers);
#pragma GCC unroll 4
  for (int half = LANES / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; i++) numbers[i] += numbers[half + i];
  }
  return numbers[0];
}

// Zeros from `begin` to `end`, written past the caches where the processor can.
inline void stream_zeros(float* begin, float* end) {
#if defined(__SSE2__)
  while (begin < end && reinterpret_cast<uintptr_t>(begin) % sizeof(__m128)) *begin++ = 0;
  for (; end - begin >= 4; begin += 4) _mm_stream_ps(begin, _mm_setzero_ps());
  _mm_sfence();
#endif
  std::fill(begin, end, 0.0f);
}

inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline float widened(float x) { return x; }
inline float widened(BFloat16 x) { return from_bits(uint32_t(x.bits) << 16); }

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

// Words of two registers, by constant indices: b's come after a's.
template <class Index, int... I>
INLINE Lanes picked(Lanes a, Lanes b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, Index::of(I)...);
#else
  return __builtin_shuffle(a, b, Words{uint32_t(Index::of(I))...});
#endif
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

template <class T>
constexpr bool IS_BUFFER = std::is_same_v<T, ffi::AnyBuffer>;
template <ffi::DataType type>
constexpr bool IS_BUFFER<ffi::Buffer<type>> = true;

// XLA's handler of a function, bound argument by argument, each by its type: the thread pool, a buffer, a result, or an
// attribute, which has the next of the `names`.
template <class F, class Binding>
auto bound(F function, Binding&& binding, const char* const*) { return std::move(binding).To(function); }

template <class F, class Binding, class T, class... More>
auto bound(F function, Binding&& binding, const char* const* names, T*, More*... more);

template <class F, class Binding, class T, class... More>
auto bound(F function, Binding&& binding, const char* const* names, ffi::Result<T>*, More*... more) {
  return bound(function, std::move(binding).template Ret<T>(), names, more...);
}

template <class F, class Binding, class T, class... More>
auto bound(F function, Binding&& binding, const char* const* names, T*, More*... more) {
  if constexpr (std::is_same_v<T, ffi::ThreadPool>) {
    return bound(function, std::move(binding).template Ctx<T>(), names, more...);
  } else if constexpr (IS_BUFFER<T>) {
    return bound(function, std::move(binding).template Arg<T>(), names, more...);
  } else {
    return bound(function, std::move(binding).template Attr<T>(*names), names + 1, more...);
  }
}

template <class... T>
auto handler_of(ffi::Error (*function)(T...), std::initializer_list<const char*> names) {
  return bound(function, ffi::Ffi::Bind(), names.begin(), (T*)nullptr...);
}

}  // namespace

// Exports `function` to XLA as `name`, with the names of its attributes, in their order.
#define HANDLER(name, function, ...)                                          \
  extern "C" XLA_FFI_Error* name(XLA_FFI_CallFrame* frame) {                  \
    static auto* handler = handler_of(function, {__VA_ARGS__}).release();     \
    return handler->Call(frame);                                              \
  }
