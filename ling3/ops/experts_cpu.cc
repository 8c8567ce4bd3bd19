// The experts' feed-forward on a CPU, for `experts_cpu.py`: each expert's weights are read in place, once for every
// block of its rows.

#include "experts_cpu.h"

namespace {

// Rows of a weight that make a task, and rows of x that they are read once for.
constexpr int PIECE = 80, BLOCK = 64;

inline int64_t pieces_of(int64_t outer) { return (outer + PIECE - 1) / PIECE; }

template <class T>
void run(ffi::ThreadPool& pool, const Sizes& sizes, const Groups& groups, const T* x, const T* gate, const T* up,
         const T* down, Limit limit, float* out, T* between) {
  const int64_t intermediate = sizes.intermediate, hidden = sizes.hidden;
  std::vector<int64_t> busy;
  int64_t rows = 0;
  for (int64_t e = 0; e < sizes.experts; e++) {
    if (groups.counts[e]) busy.push_back(e);
    rows += groups.counts[e];
  }
  // In the order of the groups: each row's own x, and its numbers between the two products.
  std::vector<const T*> in(rows), middle(rows);
  for (int64_t r = 0; r < rows; r++) {
    in[r] = x + groups.order[r] / sizes.top_k * hidden;
    middle[r] = between + r * intermediate;
  }
  // Rows without an expert come last in the order.
  for (int64_t r = rows; r < sizes.tokens * sizes.top_k; r++) {
    std::fill_n(out + groups.order[r] * hidden, hidden, 0.0f);
  }
  const int64_t first = pieces_of(intermediate), second = pieces_of(hidden);
  each(pool, busy.size() * first, [&](int64_t task) {
    const int64_t e = busy[task / first], begin = task % first * PIECE, end = std::min(begin + PIECE, intermediate);
    const int64_t last = groups.starts[e] + groups.counts[e];
    for (int64_t row = groups.starts[e]; row < last; row += BLOCK) {
      const int64_t some = std::min<int64_t>(BLOCK, last - row);
      const Rows<T> own(&in[row], some, hidden);
      float gates[BLOCK][PIECE];
      multiply(gate + e * intermediate * hidden, hidden, begin, end, own,
               [&](int64_t r, int64_t i, float value) { gates[r][i - begin] = value; });
      multiply(up + e * intermediate * hidden, hidden, begin, end, own, [&](int64_t r, int64_t i, float value) {
        narrow(swiglu(gates[r][i - begin], value, limit), between + (row + r) * intermediate + i);
      });
    }
  });
  each(pool, busy.size() * second, [&](int64_t task) {
    const int64_t e = busy[task / second], begin = task % second * PIECE, end = std::min(begin + PIECE, hidden);
    const int64_t last = groups.starts[e] + groups.counts[e];
    for (int64_t row = groups.starts[e]; row < last; row += BLOCK) {
      const Rows<T> own(&middle[row], std::min<int64_t>(BLOCK, last - row), intermediate);
      multiply(down + e * hidden * intermediate, intermediate, begin, end, own,
               [&](int64_t r, int64_t h, float value) { out[groups.order[row + r] * hidden + h] = value; });
    }
  });
}

ffi::Error Experts(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> order, ffi::Buffer<ffi::S32> starts,
                   ffi::Buffer<ffi::S32> counts, ffi::AnyBuffer gate, ffi::AnyBuffer up, ffi::AnyBuffer down,
                   float limit, bool limit_first, ffi::ResultBuffer<ffi::F32> out, ffi::Result<ffi::AnyBuffer> between) {
  for (ffi::AnyBuffer* weight : {&gate, &up, &down}) {
    if (weight->element_type() != x.element_type()) return ffi::Error::InvalidArgument("x and weights differ in dtype");
  }
  const int64_t tokens = x.dimensions()[0];
  const Sizes sizes{tokens, int64_t(order.dimensions()[0]) / std::max<int64_t>(tokens, 1), gate.dimensions()[0],
                    gate.dimensions()[1], gate.dimensions()[2]};
  const Groups groups{order.typed_data(), starts.typed_data(), counts.typed_data()};
  auto run_as = [&](auto type) {
    using T = decltype(type);
    auto at = [](ffi::AnyBuffer& buffer) { return static_cast<T*>(buffer.untyped_data()); };
    run<T>(pool, sizes, groups, at(x), at(gate), at(up), at(down), Limit{limit, limit_first}, out->typed_data(), at(*between));
  };
  if (x.element_type() == ffi::BF16) {
    run_as(BFloat16{});
  } else {
    run_as(float{});
  }
  return ffi::Error::Success();
}

}  // namespace

using Any = ffi::AnyBuffer;
using S32 = ffi::Buffer<ffi::S32>;

XLA_FFI_DEFINE_HANDLER_SYMBOL(experts, Experts,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Any>()  // x
                                  .Arg<S32>()  // order
                                  .Arg<S32>()  // starts
                                  .Arg<S32>()  // counts
                                  .Arg<Any>()  // gate
                                  .Arg<Any>()  // up
                                  .Arg<Any>()  // down
                                  .Attr<float>("limit")
                                  .Attr<bool>("limit_first")
                                  .Ret<ffi::Buffer<ffi::F32>>()  // out
                                  .Ret<Any>());                  // between
