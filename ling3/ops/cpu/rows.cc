// Rows of an array by their indices, for `rows.py`.

#include "lanes.h"

namespace {

// Bytes of a task.
constexpr int64_t PIECE = 1 << 18;

ffi::Error Take(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> rows, ffi::Result<ffi::AnyBuffer> out) {
  const int64_t held = x.dimensions()[0], bytes = held ? int64_t(x.size_bytes()) / held : 0;
  const auto* from = static_cast<const char*>(x.untyped_data());
  auto* to = static_cast<char*>(out->untyped_data());
  std::vector<int64_t> used;
  for (int64_t r = 0; r < int64_t(rows.element_count()); r++) {
    const int64_t own = rows.typed_data()[r];
    if (own >= 0 && own < held) used.push_back(r);
  }
  const int64_t pieces = (bytes + PIECE - 1) / PIECE;
  each(pool, int64_t(used.size()) * pieces, [&](int64_t task) {
    const int64_t r = used[task / pieces], begin = task % pieces * PIECE;
    const char* row = from + rows.typed_data()[r] * bytes;
    std::memcpy(to + r * bytes + begin, row + begin, std::min(PIECE, bytes - begin));
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(take_rows, Take,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()             // x
                                  .Arg<ffi::Buffer<ffi::S32>>()      // rows
                                  .Ret<ffi::AnyBuffer>());           // out
