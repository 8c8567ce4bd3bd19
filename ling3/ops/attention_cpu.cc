// Attention of a few queries over pages on a CPU, for `attention_cpu.py`: keys and values are read where they lie, and
// only up to a row's own length.

#include <limits>

#include "products_cpu.h"

namespace {

// A row's positions are cut into parts, that several threads can share them: up to PARTS, of at least LEAST positions.
// The cut depends on nothing but the row.
constexpr int64_t PARTS = 8, LEAST = 256;
// Positions whose scores are kept together.
constexpr int64_t SCORES = 64;
// Registers of a value, and rows, whose sums are kept in registers together.
constexpr int CHANNELS = 4, QUERIES = 4;
constexpr float INFINITE = std::numeric_limits<float>::infinity();

inline Lanes every(float x) { return Lanes{} + x; }

inline void store(float* at, Lanes x) { std::memcpy(at, &x, sizeof x); }

inline Lanes fused(Lanes a, Lanes b, Lanes sum) { return Numbers<float>::add(a, b, sum); }

// e^x for x <= 0, to a last bit or two; NaN stays NaN. 2^n times Cephes' polynomial for e^f, |f| <= log(2) / 2.
inline Lanes exponential(Lanes x) {
  constexpr float SHIFT = 12582912;  // 1.5 · 2^23: a sum with it is rounded to an integer
  const Lanes shifted = fused(x, every(1.44269504f), every(SHIFT));
  const Lanes n = shifted - SHIFT;
  const Lanes f = fused(n, every(2.12194440e-4f), fused(n, every(-0.693359375f), x));
  Lanes y = every(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    y = fused(y, f, every(c));
  }
  y = fused(y, f * f, f + 1.0f);
  Words bits, exponent;
  std::memcpy(&bits, &y, sizeof bits);
  std::memcpy(&exponent, &shifted, sizeof exponent);
  bits += exponent << 23;  // the bits of SHIFT leave on the left
  Lanes scaled;
  std::memcpy(&scaled, &bits, sizeof scaled);
  scaled = x != x ? x : scaled;
  return x < -87.0f ? Lanes{} : scaled;
}

inline float exponential(float x) { return exponential(every(x))[0]; }

// What scores are compared with: their largest, or 0 where there is none.
inline float shift_of(float top) { return std::isfinite(top) ? top : 0; }

struct Sizes {
  int64_t heads, rows, width, value, pages, page, entry, columns, values, window;
};

// The softmax over some positions of `rows` queries, not yet divided.
struct Part {
  int64_t row, head, from, to;
  std::vector<float> top, total, sums;
};

// sums[q] = rescale[q] · sums[q] + Σ_j weights[q][j] · values[j] for Q queries and R registers of a value.
template <int Q, int R>
inline void add_values(const float* values, int64_t stride, int64_t count, const float (*weights)[SCORES],
                       const float* rescale, float* sums, int64_t value) {
  Lanes own[Q][R];
#pragma GCC unroll 4
  for (int q = 0; q < Q; q++) {
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) own[q][r] = Numbers<float>::load(sums + q * value + r * LANES) * rescale[q];
  }
  for (int64_t j = 0; j < count; j++) {
    Lanes loaded[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) loaded[r] = kept(Numbers<float>::load(values + j * stride + r * LANES));
#pragma GCC unroll 4
    for (int q = 0; q < Q; q++) {
      const Lanes weight = every(weights[q][j]);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) own[q][r] = fused(weight, loaded[r], own[q][r]);
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < Q; q++) {
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) store(sums + q * value + r * LANES, own[q][r]);
  }
}

// The same for `queries` of them and all channels.
template <int Q>
inline void add_values_of(int64_t queries, const float* values, int64_t stride, int64_t count,
                          const float (*weights)[SCORES], const float* rescale, float* sums, int64_t value) {
  if constexpr (Q > 1) {
    if (queries < Q) return add_values_of<Q - 1>(queries, values, stride, count, weights, rescale, sums, value);
  }
  int64_t c = 0;
  for (; c + CHANNELS * LANES <= value; c += CHANNELS * LANES) {
    add_values<Q, CHANNELS>(values + c, stride, count, weights, rescale, sums + c, value);
  }
  for (; c + LANES <= value; c += LANES) {
    add_values<Q, 1>(values + c, stride, count, weights, rescale, sums + c, value);
  }
  for (; c < value; c++) {
    for (int q = 0; q < Q; q++) {
      float sum = sums[q * value + c] * rescale[q];
      for (int64_t j = 0; j < count; j++) sum += weights[q][j] * values[j * stride + c];
      sums[q * value + c] = sum;
    }
  }
}

void attend(const Sizes& sizes, const float* q, const int32_t* positions, const float* pages, const int32_t* table,
            Part& part) {
  const float* queries[BLOCK];
  for (int64_t r = 0; r < sizes.rows; r++) {
    queries[r] = q + ((part.row * sizes.heads + part.head) * sizes.rows + r) * sizes.width;
  }
  const Rows<float> packed(queries, sizes.rows, sizes.width);
  alignas(4 * LANES) float scores[BLOCK][SCORES];
  float rescale[BLOCK];
  part.top.assign(sizes.rows, -INFINITE);
  part.total.assign(sizes.rows, 0);
  part.sums.assign(sizes.rows * sizes.value, 0);
  for (int64_t p = part.from, count; p < part.to; p += count) {
    const int64_t inside = p % sizes.page;
    count = std::min({SCORES, part.to - p, sizes.page - inside});
    const int64_t page = table[part.row * sizes.columns + p / sizes.page];
    const float* at = pages + (std::clamp<int64_t>(page, 0, sizes.pages - 1) * sizes.page + inside) * sizes.entry;
    multiply(at + part.head * sizes.width, sizes.entry, 0, count, sizes.width, packed,
             [&](int64_t r, int64_t j, float score) { scores[r][j] = score; });
    for (int64_t r = 0; r < sizes.rows; r++) {
      const int64_t own = positions[part.row * sizes.rows + r];
      for (int64_t j = 0; j < SCORES; j++) {
        const int64_t seen = p + j;
        if (j >= count || seen > own || (sizes.window && seen <= own - sizes.window)) scores[r][j] = -INFINITE;
      }
      Lanes largest = every(part.top[r]), sum{};
      for (int64_t j = 0; j < SCORES; j += LANES) {
        const Lanes score = Numbers<float>::load(&scores[r][j]);
        largest = score > largest ? score : largest;
      }
      float top = part.top[r];
      for (int lane = 0; lane < LANES; lane++) top = std::max(top, largest[lane]);
      const float shift = shift_of(top);
      for (int64_t j = 0; j < SCORES; j += LANES) {
        const Lanes weight = exponential(Numbers<float>::load(&scores[r][j]) - shift);
        store(&scores[r][j], weight);
        sum += weight;
      }
      rescale[r] = exponential(part.top[r] - shift);
      part.total[r] = part.total[r] * rescale[r] + total(sum);
      part.top[r] = top;
    }
    for (int64_t r = 0; r < sizes.rows; r += QUERIES) {
      add_values_of<QUERIES>(std::min<int64_t>(QUERIES, sizes.rows - r), at + sizes.values + part.head * sizes.value,
                             sizes.entry, count, scores + r, rescale + r, &part.sums[r * sizes.value], sizes.value);
    }
  }
}

// The parts of a head, in order, as one; zeros where nothing is seen.
void join(const Sizes& sizes, const Part* parts, int64_t count, float* out) {
  for (int64_t r = 0; r < sizes.rows; r++) {
    float top = -INFINITE, all = 0;
    for (int64_t i = 0; i < count; i++) top = std::max(top, parts[i].top[r]);
    std::fill_n(out + r * sizes.value, sizes.value, 0.0f);
    for (int64_t i = 0; i < count; i++) {
      const float share = exponential(parts[i].top[r] - shift_of(top));
      all += share * parts[i].total[r];
      for (int64_t c = 0; c < sizes.value; c++) out[r * sizes.value + c] += share * parts[i].sums[r * sizes.value + c];
    }
    all = all < std::numeric_limits<float>::min() ? std::numeric_limits<float>::min() : all;
    for (int64_t c = 0; c < sizes.value; c++) out[r * sizes.value + c] /= all;
  }
}

using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;

ffi::Error Attention(ffi::ThreadPool pool, Floats q, Ints positions, Floats pages, Ints table, Ints length,
                     int64_t values, int64_t window, ffi::ResultBuffer<ffi::F32> out) {
  const auto queries = q.dimensions(), held = pages.dimensions();
  const int64_t batch = queries[0];
  const Sizes sizes{queries[1], queries[2], queries[3], out->dimensions()[3],   held[0],
                    held[1],    held[2],    table.dimensions()[1], values, window};
  if (sizes.rows > BLOCK) return ffi::Error::InvalidArgument("more queries of a head than the kernel takes");
  std::vector<Part> parts;
  std::vector<int64_t> begins(1);  // of each head's parts
  for (int64_t row = 0; row < batch; row++) {
    const int32_t* own = positions.typed_data() + row * sizes.rows;
    const auto [first, last] = std::minmax_element(own, own + sizes.rows);
    const int64_t from = window ? std::max<int64_t>(0, *first - window + 1) : 0;
    const int64_t to = std::min({int64_t(length.typed_data()[row]), *last + int64_t(1), sizes.columns * sizes.page});
    const int64_t size = std::max(LEAST, (to - from + PARTS - 1) / PARTS);
    for (int64_t head = 0; head < sizes.heads; head++) {
      for (int64_t at = from; at < to; at += size) parts.push_back({row, head, at, std::min(at + size, to)});
      begins.push_back(parts.size());
    }
  }
  each(pool, parts.size(), [&](int64_t i) {
    attend(sizes, q.typed_data(), positions.typed_data(), pages.typed_data(), table.typed_data(), parts[i]);
  });
  each(pool, batch * sizes.heads, [&](int64_t i) {
    join(sizes, parts.data() + begins[i], begins[i + 1] - begins[i], out->typed_data() + i * sizes.rows * sizes.value);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(attention, Attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()               // q
                                  .Arg<Ints>()                 // positions
                                  .Arg<Floats>()               // pages
                                  .Arg<Ints>()                 // table
                                  .Arg<Ints>()                 // length
                                  .Attr<int64_t>("values")     // where values begin in an entry
                                  .Attr<int64_t>("window")     // 0: none
                                  .Ret<Floats>());             // out
