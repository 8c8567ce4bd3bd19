// x Wᵀ on a CPU, for `matmul_cpu.py`: the weight is read in place, once for every block of rows.

#include "products_cpu.h"

namespace {

// Numbers of the rows that the weight is read once for, which all threads find in their caches; at least so many rows.
constexpr int64_t BLOCK = 1 << 20, FEWEST = 64;
// Tasks that a thread should find, so that none waits long for another; rows of a weight that a task has at least.
constexpr int64_t TASKS = 8, LEAST = 2 * OUTER;

template <class T>
void run(ffi::ThreadPool& pool, int64_t rows, int64_t outer, int64_t inner, const T* x, const T* weight, float* out) {
  const int64_t share = std::max(LEAST, outer / (TASKS * std::max<int64_t>(pool.num_threads(), 1)));
  const int64_t piece = (share + OUTER - 1) / OUTER * OUTER;
  const int64_t most = std::max(FEWEST, BLOCK / std::max<int64_t>(inner, 1));
  std::vector<int64_t> others;
  for (int64_t r = 0; r < rows; r++) {
    if (all_zero(x + r * inner, inner)) {
      std::fill_n(out + r * outer, outer, 0.0f);
    } else {
      others.push_back(r);
    }
  }
  const int64_t count = others.size();
  for (int64_t row = 0; row < count; row += most) {
    Rows<T> block(std::min(most, count - row), inner);
    each(pool, block.tiles, [&](int64_t tile) {
      const T* own[ROWS];
      const int64_t begin = block.begin(tile), in_tile = block.begin(tile + 1) - begin;
      for (int64_t r = 0; r < in_tile; r++) own[r] = x + others[row + begin + r] * inner;
      block.fill(tile, own);
    });
    each(pool, (outer + piece - 1) / piece, [&](int64_t task) {
      multiply(weight, inner, task * piece, std::min((task + 1) * piece, outer), block,
               [&](int64_t r, int64_t o, float value) { out[others[row + r] * outer + o] = value; });
    });
  }
}

ffi::Error Matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::ResultBuffer<ffi::F32> out) {
  if (weight.element_type() != x.element_type()) return ffi::Error::InvalidArgument("x and the weight differ in dtype");
  auto run_as = [&](auto type) {
    using T = decltype(type);
    run<T>(pool, x.dimensions()[0], weight.dimensions()[0], weight.dimensions()[1],
           static_cast<T*>(x.untyped_data()), static_cast<T*>(weight.untyped_data()), out->typed_data());
  };
  if (x.element_type() == ffi::BF16) {
    run_as(BFloat16{});
  } else {
    run_as(float{});
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(matmul, Matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()                // x
                                  .Arg<ffi::AnyBuffer>()                // weight
                                  .Ret<ffi::Buffer<ffi::F32>>());       // out
