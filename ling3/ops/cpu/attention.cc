// Attention over pages on a CPU, for `attention.py`: keys and values are read where they lie, and only those that
// are seen. Beside it, what changes sides between a head's channels and the latents.

#include <limits>

#include "products.h"

namespace {

// If a head has one block of queries, its positions are cut into parts, that several threads can share them: up to
// PARTS, of at least LEAST positions. The cut depends on nothing but the row.
constexpr int64_t PARTS = 8, LEAST = 256;
// Positions whose scores are kept together, and queries of a block.
constexpr int64_t SCORES = 64, QUERIES_AT_ONCE = 128;
// Registers of a value, and queries, whose sums are kept in registers together.
constexpr int CHANNELS = LANES == 8 ? 2 : 4, QUERIES = 4;
constexpr float INFINITE = std::numeric_limits<float>::infinity();

inline void store(float* at, Lanes x) { std::memcpy(at, &x, sizeof x); }

inline float exponential(float x) { return exponential(every(x))[0]; }

struct Sizes {
  int64_t heads, rows, width, value, pages, page, entry, columns, values, window;
};

// The softmax over some positions of a block of queries, not yet divided.
struct Part {
  int64_t row, head, begin, count;  // the block's queries
  int64_t from, to;                 // positions
  std::vector<float> top, total, sums;
};

// Some rows of numbers, which lie `stride` numbers apart.
struct Strided {
  const float* at;
  int64_t stride;
};

// sums[q] = rescale[q] · sums[q] + Σ_j weights[q][j] · values[j] for Q rows and R registers of a value, of `count` values.
template <int Q, int R>
inline void add_values(Strided values, int64_t count, Strided weights, const float* rescale, float* sums, int64_t stride) {
  Lanes own[Q][R];
#pragma GCC unroll 4
  for (int q = 0; q < Q; q++) {
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) own[q][r] = load(sums + q * stride + r * LANES) * rescale[q];
  }
  for (int64_t j = 0; j < count; j++) {
    Lanes loaded[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) loaded[r] = kept(load(values.at + j * values.stride + r * LANES));
#pragma GCC unroll 4
    for (int q = 0; q < Q; q++) {
      const Lanes weight = every(weights.at[q * weights.stride + j]);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) own[q][r] = multiply_add(weight, loaded[r], own[q][r]);
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < Q; q++) {
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) store(sums + q * stride + r * LANES, own[q][r]);
  }
}

// The same for all numbers of a value.
template <int Q>
inline void add_values_of(Strided values, int64_t count, Strided weights, const float* rescale, float* sums, int64_t value) {
  int64_t c = 0;
  for (; c + CHANNELS * LANES <= value; c += CHANNELS * LANES) {
    add_values<Q, CHANNELS>({values.at + c, values.stride}, count, weights, rescale, sums + c, value);
  }
  for (; c + LANES <= value; c += LANES) {
    add_values<Q, 1>({values.at + c, values.stride}, count, weights, rescale, sums + c, value);
  }
  for (; c < value; c++) {
    for (int q = 0; q < Q; q++) {
      float sum = sums[q * value + c] * rescale[q];
      for (int64_t j = 0; j < count; j++) sum += weights.at[q * weights.stride + j] * values.at[j * values.stride + c];
      sums[q * value + c] = sum;
    }
  }
}

// The same for all rows.
void add_values(int64_t rows, Strided values, int64_t count, Strided weights, const float* rescale, float* sums,
                int64_t value) {
  for (int64_t q = 0; q < rows; q += QUERIES) {
    const Strided own{weights.at + q * weights.stride, weights.stride};
    switch (rows - q) {
      case 1: add_values_of<1>(values, count, own, rescale + q, sums + q * value, value); break;
      case 2: add_values_of<2>(values, count, own, rescale + q, sums + q * value, value); break;
      case 3: add_values_of<3>(values, count, own, rescale + q, sums + q * value, value); break;
      default: add_values_of<QUERIES>(values, count, own, rescale + q, sums + q * value, value);
    }
  }
}

void attend(const Sizes& sizes, const float* q, const int32_t* positions, const float* pages, const int32_t* table,
            Part& part) {
  const float* const first = q + ((part.row * sizes.heads + part.head) * sizes.rows + part.begin) * sizes.width;
  const std::unique_ptr<float[]> laid(new float[part.count * padded(sizes.width)]);
  alignas(4 * LANES) float scores[QUERIES_AT_ONCE][SCORES];
  const float* queries[QUERIES_AT_ONCE];
  float* rows[QUERIES_AT_ONCE];
  for (int64_t r = 0; r < part.count; r++) {
    float* own = laid.get() + r * padded(sizes.width);
    Order<Dense<float>>::own().lay(first + r * sizes.width, sizes.width, own);
    queries[r] = own;
    rows[r] = scores[r];
  }
  Dense<float> keys{};
  keys.inner = sizes.width;
  keys.bytes = sizes.width * sizeof(float);
  keys.stride = sizes.entry * sizeof(float);
  float rescale[QUERIES_AT_ONCE];
  part.top.assign(part.count, -INFINITE);
  part.total.assign(part.count, 0);
  part.sums.assign(part.count * sizes.value, 0);
  for (int64_t p = part.from, count; p < part.to; p += count) {
    const int64_t inside = p % sizes.page;
    count = std::min({SCORES, part.to - p, sizes.page - inside});
    const int64_t page = table[part.row * sizes.columns + p / sizes.page];
    const float* at = pages + (std::clamp<int64_t>(page, 0, sizes.pages - 1) * sizes.page + inside) * sizes.entry;
    keys.numbers = reinterpret_cast<const uint8_t*>(at + part.head * sizes.width);
    products(keys, 0, count, queries, part.count, rows);
    for (int64_t r = 0; r < part.count; r++) {
      const int64_t own = positions[part.row * sizes.rows + part.begin + r];
      const int64_t oldest = sizes.window ? own - sizes.window + 1 - p : 0;
      std::fill_n(scores[r], std::clamp<int64_t>(oldest, 0, count), -INFINITE);
      const int64_t end = std::clamp<int64_t>(own + 1 - p, 0, count);
      std::fill(scores[r] + end, scores[r] + SCORES, -INFINITE);
      Lanes largest = every(part.top[r]), sum{};
      for (int64_t j = 0; j < SCORES; j += LANES) {
        const Lanes score = load(&scores[r][j]);
        largest = score > largest ? score : largest;
      }
      float top = part.top[r];
      for (int lane = 0; lane < LANES; lane++) top = std::max(top, largest[lane]);
      const float shift = shift_of(top);
      for (int64_t j = 0; j < SCORES; j += LANES) {
        const Lanes weight = exponential(load(&scores[r][j]) - shift);
        store(&scores[r][j], weight);
        sum += weight;
      }
      rescale[r] = exponential(part.top[r] - shift);
      part.total[r] = part.total[r] * rescale[r] + total(sum);
      part.top[r] = top;
    }
    const Strided values{at + sizes.values + part.head * sizes.value, sizes.entry};
    add_values(part.count, values, count, {scores[0], SCORES}, rescale, part.sums.data(), sizes.value);
  }
}

// The parts of a block, in order, as one.
void join(const Sizes& sizes, const Part* parts, int64_t count, float* out) {
  for (int64_t r = 0; r < parts[0].count; r++) {
    float top = -INFINITE, all = 0;
    float* own = out + ((parts[0].row * sizes.heads + parts[0].head) * sizes.rows + parts[0].begin + r) * sizes.value;
    for (int64_t i = 0; i < count; i++) top = std::max(top, parts[i].top[r]);
    std::fill_n(own, sizes.value, 0.0f);
    for (int64_t i = 0; i < count; i++) {
      const float share = exponential(parts[i].top[r] - shift_of(top));
      all += share * parts[i].total[r];
      for (int64_t c = 0; c < sizes.value; c++) own[c] += share * parts[i].sums[r * sizes.value + c];
    }
    // Nothing seen gives zeros.
    all = all < std::numeric_limits<float>::min() ? std::numeric_limits<float>::min() : all;
    for (int64_t c = 0; c < sizes.value; c++) own[c] /= all;
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
  const int64_t most = sizes.rows <= QUERIES_AT_ONCE ? PARTS : 1;
  std::vector<Part> parts;
  std::vector<int64_t> begins;  // of each block's parts
  for (int64_t row = 0; row < batch; row++) {
    for (int64_t begin = 0; begin < sizes.rows; begin += QUERIES_AT_ONCE) {
      const int64_t count = std::min(QUERIES_AT_ONCE, sizes.rows - begin);
      const int32_t* own = positions.typed_data() + row * sizes.rows + begin;
      const auto [first, last] = std::minmax_element(own, own + count);
      const int64_t from = window ? std::max<int64_t>(0, *first - window + 1) : 0;
      const int64_t to = std::min({int64_t(length.typed_data()[row]), *last + int64_t(1), sizes.columns * sizes.page});
      const int64_t size = most > 1 ? std::max(LEAST, (to - from + most - 1) / most) : std::max<int64_t>(to - from, 1);
      for (int64_t head = 0; head < sizes.heads; head++) {
        begins.push_back(parts.size());
        int64_t at = from;
        do {  // one part at least, though it may be empty
          parts.push_back({row, head, begin, count, at, std::min(at + size, to)});
        } while ((at += size) < to);
      }
    }
  }
  begins.push_back(parts.size());
  each(pool, parts.size(), [&](int64_t i) {
    attend(sizes, q.typed_data(), positions.typed_data(), pages.typed_data(), table.typed_data(), parts[i]);
  });
  each(pool, begins.size() - 1, [&](int64_t i) {
    join(sizes, parts.data() + begins[i], begins[i + 1] - begins[i], out->typed_data());
  });
  return ffi::Error::Success();
}

// ---- the two sides of the latents: W_uk and W_uv of each head, for a decode step ----

// Some rows of x, whose heads have `width` numbers each, and the rows of a stored matrix that belong to a head: `count`
// of them from `first` on, of every `stride`.
struct PerHead {
  int64_t batch, heads, width, stride, first, count, latent;

  PerHead(ffi::AnyBuffer x, ffi::AnyBuffer weight, int64_t first, int64_t count)
      : batch(x.dimensions()[0]), heads(x.dimensions()[1]), width(x.dimensions()[2]),
        stride(weight.dimensions()[0] / std::max<int64_t>(heads, 1)), first(first), count(count),
        latent(weight.dimensions()[1]) {}

  // run(head, the rows that are not zeros there), one head a task; the others' results are zeros.
  template <class T, class Run>
  void each_head(ffi::ThreadPool& pool, const T* x, float* out, int64_t outer, Run run) const {
    each(pool, heads, [&](int64_t head) {
      std::vector<const T*> from;
      std::vector<float*> to;
      for (int64_t b = 0; b < batch; b++) {
        const T* own = x + (b * heads + head) * width;
        float* result = out + (b * heads + head) * outer;
        if (all_zero(own, width)) {
          std::fill_n(result, outer, 0.0f);
        } else {
          from.push_back(own);
          to.push_back(result);
        }
      }
      if (!from.empty()) run(head, from, to);
    });
  }
};

INLINE Lanes widened_lanes(const float* at) { return load(at); }
INLINE Lanes widened_lanes(const BFloat16* at) {
  Words words;
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) words[i] = uint32_t(at[i].bits) << 16;
  return (Lanes)words;
}

// to[r] += Σ_n x[r][n] · weight[n] over N rows of a matrix, in their order; the first of them begin the sums.
template <int N, class T>
void add_rows(const T* weight, int64_t latent, const std::vector<const T*>& x, int64_t n, const std::vector<float*>& to) {
  for (size_t r = 0; r < x.size(); r++) {
    Lanes factors[N];
    for (int j = 0; j < N; j++) factors[j] = every(widened(x[r][n + j]));
    auto step = [&](const T* at, int64_t stride, float* sums) ALWAYS {
      Lanes sum = n ? load(sums) : Lanes{};
#pragma GCC unroll 8
      for (int j = 0; j < N; j++) sum = multiply_add(factors[j], widened_lanes(at + j * stride), sum);
      store(sums, sum);
    };
    int64_t l = 0;
    for (; l + LANES <= latent; l += LANES) step(weight + l, latent, to[r] + l);
    if (l == latent) continue;
    T last[N * LANES] = {};
    float sums[LANES] = {};
    std::copy_n(to[r] + l, latent - l, sums);
    for (int j = 0; j < N; j++) std::copy_n(weight + j * latent + l, latent - l, last + j * LANES);
    step(last, LANES, sums);
    std::copy_n(sums, latent - l, to[r] + l);
  }
}

// out[b, h] = x[b, h] W_h, for matrices of `count` rows.
template <class T>
void absorb(ffi::ThreadPool& pool, const PerHead& sizes, const T* x, const T* weight, float* out) {
  sizes.each_head(pool, x, out, sizes.latent, [&](int64_t head, const auto& from, const auto& to) {
    const T* own = weight + (head * sizes.stride + sizes.first) * sizes.latent;
    constexpr int N = 8;
    int64_t n = 0;
    for (; n + N <= sizes.count; n += N) add_rows<N>(own + n * sizes.latent, sizes.latent, from, n, to);
    for (; n < sizes.count; n++) add_rows<1>(own + n * sizes.latent, sizes.latent, from, n, to);
  });
}

// out[b, h] = W_h x[b, h].
template <class T>
void expand(ffi::ThreadPool& pool, const PerHead& sizes, const T* x, const T* weight, float* out) {
  sizes.each_head(pool, x, out, sizes.count, [&](int64_t head, const auto& from, const auto& to) {
    Dense<T> own{};
    own.inner = sizes.latent;
    own.bytes = own.stride = sizes.latent * sizeof(T);
    own.numbers = reinterpret_cast<const uint8_t*>(weight + (head * sizes.stride + sizes.first) * sizes.latent);
    const std::unique_ptr<float[]> laid(new float[from.size() * padded(sizes.latent)]);
    std::vector<const float*> rows;
    for (const T* row : from) {
      float* at = laid.get() + rows.size() * padded(sizes.latent);
      Order<Dense<T>>::own().lay(row, sizes.latent, at);
      rows.push_back(at);
    }
    products(own, 0, sizes.count, rows.data(), rows.size(), to.data());
  });
}

template <bool INTO>
ffi::Error Heads(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight, int64_t first, int64_t count,
                 ffi::ResultBuffer<ffi::F32> out) {
  const PerHead sizes(x, weight, first, count);
  auto as = [&](auto number) {
    using T = decltype(number);
    auto *from = static_cast<const T*>(x.untyped_data()), *matrix = static_cast<const T*>(weight.untyped_data());
    INTO ? absorb(pool, sizes, from, matrix, out->typed_data()) : expand(pool, sizes, from, matrix, out->typed_data());
  };
  x.element_type() == ffi::BF16 ? as(BFloat16{}) : as(float{});
  return ffi::Error::Success();
}

}  // namespace

HANDLER(attention, Attention, "values", "window")

HANDLER(absorb_keys, Heads<true>, "first", "count")

HANDLER(expand_values, Heads<false>, "first", "count")
