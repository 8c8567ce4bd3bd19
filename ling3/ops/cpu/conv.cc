// The short convolution with its silu, for `conv.py`: the tail moves on where it lies, and padding costs nothing.

#include "lanes.h"

namespace {

// Tokens and channels of a task.
constexpr int64_t TOKENS = 32, CHANNELS = 512;
// Outputs that one thread computes in less time than another takes to wake.
constexpr int64_t FEW = 1 << 16;

// y · sigmoid(y)
inline Lanes silu(Lanes y) {
  const Lanes small = exponential(y < 0.0f ? y : -y);
  return y * ((y < 0.0f ? small : every(1)) / (small + 1.0f));
}

template <class X, class T>
struct Convolution {
  const X* x;          // [batch, seq, channels]
  T* tail;             // [batch, back, all], from the first of this convolution's channels on
  const float* weight; // [channels, back + 1]
  const int32_t* length;
  float* y;            // as x
  int64_t batch, seq, channels, back, all;

  // An input as the convolution takes it: rounded to the tail's type, so that it does not matter how tokens are split.
  static float seen(X number) {
    T kept;
    narrow(widened(number), &kept);
    return widened(kept);
  }

  // The `count` outputs from `channel` on of a row's tokens `begin` to `end`. `room` holds, in whole registers, `count`
  // inputs of each of these tokens and of the `back` before them, and then `count` weights of each tap.
  void outputs(int64_t row, int64_t begin, int64_t end, int64_t channel, int64_t count, float* room) const {
    const int64_t padded = (count + LANES - 1) / LANES * LANES;
    const auto input = [&](int64_t token) { return room + (token - begin + back) * padded; };
    for (int64_t token = begin - back; token < end; token++) {
      float* to = input(token);
      if (token < 0) {
        const T* from = tail + (row * back + back + token) * all + channel;
        std::transform(from, from + count, to, [](T number) { return widened(number); });
      } else {
        const X* from = x + (row * seq + token) * channels + channel;
        std::transform(from, from + count, to, seen);
      }
      std::fill(to + count, to + padded, 0.0f);
    }
    float* taps = input(end);
    for (int64_t j = 0; j <= back; j++) {
      for (int64_t c = 0; c < padded; c++) {
        taps[j * padded + c] = c < count ? weight[(channel + c) * (back + 1) + j] : 0;
      }
    }
    for (int64_t token = begin; token < end; token++) {
      float* to = y + (row * seq + token) * channels + channel;
      for (int64_t i = 0; i < count; i += LANES) {
        Lanes sum = {};
        for (int64_t j = 0; j <= back; j++) {
          sum = multiply_add(load(taps + j * padded + i), load(input(token - back + j) + i), sum);
        }
        const Lanes own = silu(sum);
        std::memcpy(to + i, &own, std::min<int64_t>(LANES, count - i) * sizeof(float));
      }
    }
  }

  // The tail after the row's last token, in place of the one before its first.
  void move_on(int64_t row) const {
    for (int64_t i = 0; i < back; i++) {  // slot i takes a later one's number, or an input
      const int64_t token = length[row] - back + i;
      T* to = tail + (row * back + i) * all;
      if (token < 0) {
        std::copy_n(to + length[row] * all, channels, to);
      } else {
        const X* from = x + (row * seq + token) * channels;
        for (int64_t c = 0; c < channels; c++) narrow(widened(from[c]), to + c);
      }
    }
  }

  void run(ffi::ThreadPool& pool) const {
    struct Task {
      int64_t row, begin, channel;
    };
    std::vector<Task> tasks;
    std::vector<int64_t> busy;
    int64_t tokens = 0;
    for (int64_t row = 0; row < batch; row++) {
      std::fill(y + (row * seq + length[row]) * channels, y + (row + 1) * seq * channels, 0.0f);
      if (length[row] > 0) busy.push_back(row);
      tokens += length[row];
      for (int64_t begin = 0; begin < length[row]; begin += TOKENS) {
        for (int64_t channel = 0; channel < channels; channel += CHANNELS) tasks.push_back({row, begin, channel});
      }
    }
    const auto task = [&](int64_t i) {
      const auto [row, begin, channel] = tasks[i];
      const int64_t end = std::min<int64_t>(begin + TOKENS, length[row]);
      const std::unique_ptr<float[]> room(new float[(end - begin + 2 * back + 1) * (CHANNELS + LANES)]);
      outputs(row, begin, end, channel, std::min(CHANNELS, channels - channel), room.get());
    };
    if (tokens * channels <= FEW) {
      for (size_t i = 0; i < tasks.size(); i++) task(i);
    } else {
      each(pool, tasks.size(), task);
    }
    for (int64_t row : busy) move_on(row);
  }
};

ffi::Error Run(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> weight, ffi::AnyBuffer tail,
               ffi::Buffer<ffi::S32> length, int64_t first, ffi::ResultBuffer<ffi::F32> y,
               ffi::Result<ffi::AnyBuffer> after) {
  const auto sizes = x.dimensions();
  const int64_t back = tail.dimensions()[1], all = tail.dimensions()[2];
  if (after->untyped_data() != tail.untyped_data()) {
    std::memcpy(after->untyped_data(), tail.untyped_data(), tail.size_bytes());
  }
  const auto as = [&](auto input, auto kept) {
    using X = decltype(input);
    using T = decltype(kept);
    Convolution<X, T>{static_cast<const X*>(x.untyped_data()), static_cast<T*>(after->untyped_data()) + first,
                      weight.typed_data(), length.typed_data(), y->typed_data(), sizes[0], sizes[1], sizes[2], back, all}
        .run(pool);
  };
  const auto over = [&](auto input) {
    tail.element_type() == ffi::BF16 ? as(input, BFloat16{}) : as(input, float{});
  };
  x.element_type() == ffi::BF16 ? over(BFloat16{}) : over(float{});
  return ffi::Error::Success();
}

}  // namespace

HANDLER(short_conv, Run, "first")
