// One token of the KDA recurrence on a CPU, for `kda_cpu.py`: each state is updated where it lies, and that of a row
// without a token is not touched.

#include "lanes_cpu.h"

namespace {

struct Sizes {
  int64_t heads, key, value;
};

// Registers of values that are summed together.
constexpr int BLOCK = 4;

inline bool all_one(const float* numbers, int64_t count) {
  return std::all_of(numbers, numbers + count, [](float number) { return number == 1; });
}

// Sᵀ a and Sᵀ b, with the values of a row of S in registers: each sum runs over the keys in order.
inline void read(const float* state, const float* a, const float* b, const Sizes& sizes, float* first, float* second) {
  int64_t v = 0;
  for (; v + BLOCK * LANES <= sizes.value; v += BLOCK * LANES) {
    Lanes sums[2][BLOCK] = {};
    for (int64_t k = 0; k < sizes.key; k++) {
      const Lanes own = every(a[k]), other = every(b[k]);
#pragma GCC unroll 4
      for (int i = 0; i < BLOCK; i++) {
        const Lanes row = load(state + k * sizes.value + v + i * LANES);
        sums[0][i] = multiply_add(row, own, sums[0][i]);
        sums[1][i] = multiply_add(row, other, sums[1][i]);
      }
    }
    std::memcpy(first + v, sums[0], sizeof sums[0]);
    std::memcpy(second + v, sums[1], sizeof sums[1]);
  }
  for (; v < sizes.value; v++) {
    float sums[2] = {};
    for (int64_t k = 0; k < sizes.key; k++) {
      sums[0] += a[k] * state[k * sizes.value + v];
      sums[1] += b[k] * state[k * sizes.value + v];
    }
    first[v] = sums[0];
    second[v] = sums[1];
  }
}

// S <- decay S + k uᵀ
inline void write(float* state, const float* decay, const float* k, const float* u, const Sizes& sizes) {
  for (int64_t i = 0; i < sizes.key; i++) {
    float* row = state + i * sizes.value;
    const Lanes kept = every(decay[i]), written = every(k[i]);
    int64_t v = 0;
    for (; v + LANES <= sizes.value; v += LANES) {
      const Lanes next = multiply_add(kept, load(row + v), written * load(u + v));
      std::memcpy(row + v, &next, sizeof next);
    }
    for (; v < sizes.value; v++) row[v] = decay[i] * row[v] + k[i] * u[v];
  }
}

// A head of a row. `room` has 2 · key + 2 · value numbers.
void step(const float* q, const float* k, const float* v, const float* decay, float beta, float* state,
          const Sizes& sizes, float* o, float* room) {
  const bool unchanged = beta == 0 && all_one(decay, sizes.key);
  if (unchanged && all_zero(q, sizes.key)) {
    std::fill_n(o, sizes.value, 0.0f);
    return;
  }
  float *decayed_k = room, *decayed_q = decayed_k + sizes.key, *of_k = decayed_q + sizes.key, *u = of_k + sizes.value;
  float both = 0;
  for (int64_t i = 0; i < sizes.key; i++) {
    decayed_k[i] = decay[i] * k[i];
    decayed_q[i] = decay[i] * q[i];
    both += q[i] * k[i];
  }
  read(state, decayed_k, decayed_q, sizes, of_k, o);
  for (int64_t i = 0; i < sizes.value; i++) {
    u[i] = beta * (v[i] - of_k[i]);
    o[i] += both * u[i];
  }
  if (!unchanged) write(state, decay, k, u, sizes);
}

ffi::Error Step(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k, ffi::Buffer<ffi::F32> v,
                ffi::Buffer<ffi::F32> decay, ffi::Buffer<ffi::F32> beta, ffi::Buffer<ffi::F32> state,
                ffi::ResultBuffer<ffi::F32> o, ffi::ResultBuffer<ffi::F32> after) {
  const int64_t batch = state.dimensions()[0];
  const Sizes sizes{state.dimensions()[1], state.dimensions()[2], state.dimensions()[3]};
  const int64_t numbers = sizes.key * sizes.value;
  float* states = after->typed_data();
  if (states != state.typed_data()) std::copy_n(state.typed_data(), batch * sizes.heads * numbers, states);
  each(pool, batch * sizes.heads, [&](int64_t i) {
    const std::unique_ptr<float[]> room(new float[2 * (sizes.key + sizes.value)]);
    step(q.typed_data() + i * sizes.key, k.typed_data() + i * sizes.key, v.typed_data() + i * sizes.value,
         decay.typed_data() + i * sizes.key, beta.typed_data()[i], states + i * numbers, sizes,
         o->typed_data() + i * sizes.value, room.get());
  });
  return ffi::Error::Success();
}

}  // namespace

using F32 = ffi::Buffer<ffi::F32>;

XLA_FFI_DEFINE_HANDLER_SYMBOL(kda_step, Step,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()   // q
                                  .Arg<F32>()   // k
                                  .Arg<F32>()   // v
                                  .Arg<F32>()   // decay
                                  .Arg<F32>()   // beta
                                  .Arg<F32>()   // state
                                  .Ret<F32>()   // o
                                  .Ret<F32>()); // state
