// x Wᵀ and the experts' feed-forward, for `products.py`. Each matrix is read in place. One macro says which kinds of
// matrices this is compiled for, since few need several and compiling takes its time: floats without one, with QUANTIZED
// those in 8 and 4 bits, with ZEROS integers with zero points, with CHANNELS 8 bits with a scale for each row, and with
// BLOCKS ggml's block types.

#include <string_view>

#if defined(BLOCKS)
#include "blocks.h"
#else
#include "products.h"
#endif

namespace {

#if !defined(BLOCKS)
struct BlockType;
inline const BlockType* block_type_of(std::string_view) { return nullptr; }
#endif

// A matrix, or a stack of them, as the arguments of a call have it. E4M3 numbers tell FP8 and bytes MXFP4; words are
// integers. Numbers in float32 and bfloat16 are what they are, and have no scales; blocks hold their scales themselves.
struct Arrays {
  ffi::AnyBuffer numbers, scales, zeros;
  int64_t inner;    // numbers of a row
  ffi::DataType x;  // the type of the rows that it is multiplied by
  const BlockType* type;

  int64_t outer() const { return numbers.dimensions()[numbers.dimensions().size() - 2]; }

  // Matrix i of the stack.
  Stored at(int64_t i) const {
    const auto shape = numbers.dimensions(), of_scales = scales.dimensions();
    const size_t last = shape.size() - 1;
    Stored own{};
    own.inner = inner;
    own.bytes = own.stride = shape[last] * int64_t(ffi::ByteWidth(numbers.element_type()));
    own.numbers = static_cast<const uint8_t*>(numbers.untyped_data()) + i * shape[last - 1] * own.bytes;
#if defined(BLOCKS)
    return own;
#endif
    if (is_dense()) return own;
    own.groups = of_scales[last];
    const int64_t units = std::max<int64_t>(1, (is_fp8() ? 128 : inner / own.groups) / UNIT);
    // One scale for a whole row may have any width.
    own.shift = own.groups == 1 ? 40 : std::ilogb(double(units));
    own.scales = static_cast<const uint8_t*>(scales.untyped_data()) +
                 i * of_scales[last - 1] * own.groups * int64_t(ffi::ByteWidth(scales.element_type()));
#if defined(ZEROS)
    own.zeros = static_cast<const uint8_t*>(zeros.untyped_data()) +
                i * zeros.dimensions()[last - 1] * own.groups * int64_t(sizeof(uint32_t));
#endif
    return own;
  }

  bool is_dense() const { return numbers.element_type() == ffi::F32 || numbers.element_type() == ffi::BF16; }

  bool is_fp8() const { return numbers.element_type() == ffi::F8E4M3FN; }

  // run(matrix i of the stack, in its format).
  template <class Run>
  void with(int64_t i, Run run) const {
#if defined(BLOCKS)
    return with_rows_of<float>(at(i), run);  // the same for rows of both types
#endif
    x == ffi::BF16 ? with_rows_of<BFloat16>(at(i), run) : with_rows_of<float>(at(i), run);
  }

  // Lays out a row of x in the order of the format.
  template <class T>
  void lay(const T* row, float* laid) const {
    with(0, [&](auto format) { Order<decltype(format)>::own().lay(row, inner, laid); });
  }

 private:
  // The same for rows of x of type X.
  template <class X, class Run>
  void with_rows_of(const Stored& stored, Run run) const {
    auto as = [&](auto format) {
      static_cast<Stored&>(format) = stored;
      run(format);
    };
#if defined(BLOCKS)
    Blocks blocks{};
    blocks.type = type;
    as(blocks);
#elif defined(CHANNELS)
    of_scale<X>([&](auto scale, auto per_lane) {
      if (is_fp8()) as(E4M3<decltype(scale), 1>{});
      else as(Scaled<8, decltype(scale), per_lane, SIGNED>{});
    });
#elif defined(ZEROS)
    of_scale<X>([&](auto scale, auto per_lane) {
      if (stored.bytes >= inner) as(Scaled<8, decltype(scale), per_lane, ZERO_POINTS>{});
      else as(Scaled<4, decltype(scale), per_lane, ZERO_POINTS>{});
    });
#elif !defined(QUANTIZED)
    as(Dense<X>{});
#else
    if (is_fp8()) {
      scales.element_type() == ffi::F32 ? as(E4M3<float>{}) : as(E4M3<uint8_t>{});
    } else if (numbers.element_type() == ffi::U8) {
      as(Nibbles<Mxfp4Codes, LANE_OF<X>>{});
    } else {
      of_scale<X>([&](auto scale, auto per_lane) {
        using S = decltype(scale);
        if (stored.bytes >= inner) as(Scaled<8, S, per_lane>{});
        else if constexpr (std::is_same_v<S, BFloat16>) as(Nibbles<Int4Codes, per_lane>{});
        else as(Scaled<4, S>{});
      });
    }
#endif
  }

  // run(a number of the scales' type, the numbers in a lane for rows of x of type X).
  template <class X, class Run>
  void of_scale(Run run) const {
    constexpr std::integral_constant<int, 1> one;
    const ffi::DataType scale = scales.element_type();
    if (scale == ffi::BF16) run(BFloat16{}, std::integral_constant<int, LANE_OF<X>>());
    else if (scale == ffi::F16) run(Float16{}, one);
    else run(float{}, one);
  }
};

// Tasks that a thread should find, so that none waits long for another; rows of a weight that a task has at least.
constexpr int64_t TASKS = 8, LEAST = 48;
// Bytes of zeros that are written past the caches, which they would fill.
constexpr int64_t STREAMED = 1 << 20;

// Lays out the rows of x that are not all zeros, in tasks of several; true for each of these.
std::vector<bool> lay(ffi::ThreadPool& pool, const Arrays& weight, ffi::AnyBuffer x, int64_t rows, float* laid) {
  const int64_t inner = weight.inner;
  const int64_t some = std::max<int64_t>(1, (int64_t(1) << 14) / std::max<int64_t>(inner, 1));
  std::vector<char> busy(rows);  // not of bits, which threads would share
  auto lay_as = [&](const auto* numbers) {
    each(pool, (rows + some - 1) / some, [&](int64_t task) {
      for (int64_t r = task * some; r < std::min(rows, (task + 1) * some); r++) {
        const auto* row = numbers + r * inner;
        busy[r] = !all_zero(row, inner);
        if (busy[r]) weight.lay(row, laid + r * padded(inner));
      }
    });
  };
  if (x.element_type() == ffi::BF16) {
    lay_as(static_cast<const BFloat16*>(x.untyped_data()));
  } else {
    lay_as(static_cast<const float*>(x.untyped_data()));
  }
  return {busy.begin(), busy.end()};
}

// The product with one matrix, or of each part of x with its matrix of a stack.
ffi::Error Product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer numbers, ffi::AnyBuffer scales,
                   ffi::AnyBuffer zeros, std::string_view block, ffi::ResultBuffer<ffi::F32> out,
                   ffi::ResultBuffer<ffi::F32> laid) {
  const auto shape = x.dimensions();
  const int64_t rows = shape[shape.size() - 2], inner = shape.back(), all = int64_t(x.element_count()) / inner;
  const Arrays weight{numbers, scales, zeros, inner, x.element_type(), block_type_of(block)};
  const int64_t outer = weight.outer(), matrices = all / rows;
  const std::vector<bool> busy = lay(pool, weight, x, all, laid->typed_data());
  // Those of each matrix in turn, `ends` behind one another.
  std::vector<const float*> from;
  std::vector<float*> to, idle;
  std::vector<int64_t> ends{0};
  for (int64_t r = 0; r < all; r++) {
    float* own = out->typed_data() + r * outer;
    if (busy[r]) from.push_back(laid->typed_data() + r * padded(inner));
    (busy[r] ? to : idle).push_back(own);
    if ((r + 1) % rows == 0) ends.push_back(int64_t(to.size()));
  }
  const bool streams = int64_t(idle.size()) * outer * int64_t(sizeof(float)) >= STREAMED;
  const int64_t share = std::max(LEAST, matrices * outer / (TASKS * std::max<int64_t>(pool.num_threads(), 1)));
  constexpr int64_t WHOLE = STRIP * WIDE;
  const int64_t piece = (share + WHOLE - 1) / WHOLE * WHOLE, pieces = (outer + piece - 1) / piece;
  each(pool, matrices * pieces, [&](int64_t task) {
    const int64_t i = task / pieces, begin = task % pieces * piece, end = std::min(begin + piece, outer);
    const int64_t first = ends[i], last = ends[i + 1], skipped = i * rows - first;
    weight.with(i, [&](const auto& format) {
      products(format, begin, end, from.data() + first, last - first, to.data() + first);
    });
    for (int64_t r = skipped; r < skipped + rows - (last - first); r++) {
      float *left = idle[r] + begin, *right = idle[r] + end;
      streams ? stream_zeros(left, right) : std::fill(left, right, 0.0f);
    }
  });
  return ffi::Error::Success();
}

struct Groups {
  const int32_t *order, *starts, *counts;
};

struct Limit {
  float value;
  bool first;  // before silu
};

inline float swiglu(float gate, float up, Limit limit) {
  const float most = limit.value;
  if (most > 0 && limit.first) gate = gate > most ? most : gate;
  gate = gate / (1 + std::exp(-gate));
  if (most > 0) {
    gate = gate > most ? most : gate;  // silu(most) < most: nothing more where the limit came first
    up = up > most ? most : (up < -most ? -most : up);
  }
  return gate * up;
}

// Rows of a weight that make a task, and rows of x at once.
constexpr int64_t PIECE = 96, AT_ONCE = 64;

ffi::Error Experts(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> order, ffi::Buffer<ffi::S32> starts,
                   ffi::Buffer<ffi::S32> counts, ffi::AnyBuffer gate_numbers, ffi::AnyBuffer gate_scales,
                   ffi::AnyBuffer gate_zeros, ffi::AnyBuffer up_numbers, ffi::AnyBuffer up_scales,
                   ffi::AnyBuffer up_zeros, ffi::AnyBuffer down_numbers, ffi::AnyBuffer down_scales,
                   ffi::AnyBuffer down_zeros, float limit, bool limit_first, std::string_view gate_block,
                   std::string_view up_block, std::string_view down_block, ffi::ResultBuffer<ffi::F32> out,
                   ffi::ResultBuffer<ffi::F32> laid, ffi::ResultBuffer<ffi::F32> between) {
  const int64_t tokens = x.dimensions()[0], hidden = x.dimensions()[1], intermediate = gate_numbers.dimensions()[1];
  const int64_t experts = gate_numbers.dimensions()[0], slots = order.dimensions()[0];
  const int64_t top_k = slots / std::max<int64_t>(tokens, 1);
  const ffi::DataType type = x.element_type();
  const Arrays gate{gate_numbers, gate_scales, gate_zeros, hidden, type, block_type_of(gate_block)};
  const Arrays up{up_numbers, up_scales, up_zeros, hidden, type, block_type_of(up_block)};
  const Arrays down{down_numbers, down_scales, down_zeros, intermediate, type, block_type_of(down_block)};
  const Groups groups{order.typed_data(), starts.typed_data(), counts.typed_data()};
  const bool narrowed = x.element_type() == ffi::BF16;
  const std::vector<bool> laid_out = lay(pool, gate, x, tokens, laid->typed_data());
  const std::vector<float> zeros(padded(hidden));
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
    const int64_t token = groups.order[r] / top_k;
    in[r] = laid_out[token] ? laid->typed_data() + token * padded(hidden) : zeros.data();
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
        const auto& order = Order<decltype(format)>::own();
        for (int64_t r = 0; r < some; r++) {
          float* laid = between->typed_data() + (row + r) * padded(intermediate);
          for (int64_t i = begin; i < end; i++) {
            const float value = swiglu(at_gate[r][i], at_up[r][i], Limit{limit, limit_first});
            order.put(i, narrowed ? rounded<BFloat16>(value) : value, laid);
          }
          if (end == intermediate) order.end(end, laid);
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

HANDLER(product, Product, "block")

HANDLER(experts, Experts, "limit", "limit_first", "gate_block", "up_block", "down_block")
