// The KDA recurrence on a CPU, for `kda.py`: token by token, each state updated where it lies. A state goes through a
// run of tokens some columns at a time, which stay in the first cache: no value of one column depends on another's.

#include <limits>

#include "lanes.h"

namespace {

// Columns of a state that go through a run of tokens together.
constexpr int WIDTH = 4 * LANES;
constexpr int BLOCK = WIDTH / LANES;

// Tokens whose decay, and k and q with it, are computed at once.
constexpr int64_t RUN = 32;

struct Sizes {
  int64_t seq, heads, key, value;
};

// A head of a row: its first token's inputs and output; the next token's are `heads` heads further.
struct Head {
  const float *q, *k, *v, *g, *beta;
  float* o;
};

// What a token has for all columns.
struct Token {
  const float *k, *decay, *v;
  float *decayed_k, *decayed_q, *o;
  float both, beta;  // both: q·k
  bool idle, changes;
};

// S <- decay S + k uᵀ, which is written when the next token reads.
struct Written {
  const float *decay, *k;
  Lanes u[BLOCK];
};

// e^g for each of some numbers, in an order of operations that no caller changes.
inline void decays(const float* g, int64_t count, float* decay) {
  for (int64_t i = 0; i < count; i += LANES) {
    const int64_t some = std::min<int64_t>(LANES, count - i);
    Lanes numbers = {};
    std::memcpy(&numbers, g + i, some * sizeof(float));
    numbers = numbers > 88.0f ? every(std::numeric_limits<float>::infinity()) : exponential(numbers);
    std::memcpy(decay + i, &numbers, some * sizeof(float));
  }
}

inline float dot(const float* a, const float* b, int64_t count) {
  Lanes sums = {};
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) sums = multiply_add(load(a + i), load(b + i), sums);
  float sum = total(sums);
  for (; i < count; i++) sum += a[i] * b[i];
  return sum;
}

// One way through the columns: what the last token wrote, and the sums over the keys that this one reads, in order.
template <bool WRITES, bool READS>
INLINE void pass(float* columns, int64_t stride, int64_t keys, const Written& last, const Token& token,
                 Lanes (&read)[2][BLOCK]) {
  // In variables of its own: for all that the compiler knows, writing a row changes the others.
  const float *const decay = last.decay, *const k = last.k, *const first = token.decayed_k, *const second = token.decayed_q;
  Lanes u[BLOCK], sums[2][BLOCK] = {};
  if (WRITES) std::memcpy(u, last.u, sizeof u);
  for (int64_t key = 0; key < keys; key++) {
    float* const row = columns + key * stride;
    const Lanes kept = WRITES ? every(decay[key]) : Lanes{}, written = WRITES ? every(k[key]) : Lanes{};
    const Lanes own = READS ? every(first[key]) : Lanes{}, other = READS ? every(second[key]) : Lanes{};
#pragma GCC unroll 4
    for (int i = 0; i < BLOCK; i++) {
      Lanes numbers = load(row + i * LANES);
      if (WRITES) {
        numbers = multiply_add(kept, numbers, written * u[i]);
        std::memcpy(row + i * LANES, &numbers, sizeof numbers);
      }
      if (READS) {
        sums[0][i] = multiply_add(numbers, own, sums[0][i]);
        sums[1][i] = multiply_add(numbers, other, sums[1][i]);
      }
    }
  }
  if (READS) std::memcpy(read, sums, sizeof sums);
}

// The columns `first` to `first + width` of a state through a run of tokens.
void advance(const std::vector<Token>& tokens, float* columns, int64_t stride, int64_t keys, int64_t first,
             int64_t width) {
  Written last{};
  bool waits = false;
  for (const Token& token : tokens) {
    if (token.idle) {
      std::fill_n(token.o + first, width, 0.0f);
      continue;
    }
    Lanes sums[2][BLOCK] = {}, values[BLOCK] = {}, out[BLOCK];
    if (waits) {
      pass<true, true>(columns, stride, keys, last, token, sums);
    } else {
      pass<false, true>(columns, stride, keys, last, token, sums);
    }
    std::memcpy(values, token.v + first, width * sizeof(float));
    for (int i = 0; i < BLOCK; i++) {
      last.u[i] = every(token.beta) * (values[i] - sums[0][i]);
      out[i] = sums[1][i] + every(token.both) * last.u[i];
    }
    std::memcpy(token.o + first, out, width * sizeof(float));
    last.decay = token.decay;
    last.k = token.k;
    waits = token.changes;
  }
  Lanes none[2][BLOCK];
  if (waits) pass<true, false>(columns, stride, keys, last, tokens[0], none);
}

// All tokens of a head of a row; the state is written if it `keeps` them, which at most RUN tokens need not. `room` has 3 · key numbers for each of RUN tokens, or of all, and WIDTH · key.
void head(const Head& at, float* state, const Sizes& sizes, bool keeps, float* room) {
  std::vector<Token> tokens;
  for (int64_t start = 0; start < sizes.seq; start += RUN) {
    tokens.clear();
    float* free = room;
    for (int64_t i = start; i < std::min(start + RUN, sizes.seq); i++) {
      const int64_t key = i * sizes.heads * sizes.key, value = i * sizes.heads * sizes.value;
      const float *q = at.q + key, *k = at.k + key, *g = at.g + key, beta = at.beta[i * sizes.heads];
      const bool changes = beta != 0 || !all_zero(g, sizes.key), idle = !changes && all_zero(q, sizes.key);
      float *const decay = free, *const decayed_k = decay + sizes.key, *const decayed_q = decayed_k + sizes.key;
      tokens.push_back({k, decay, at.v + value, decayed_k, decayed_q, at.o + value, dot(q, k, sizes.key), beta, idle,
                        changes});
      if (!idle) decays(g, sizes.key, decay);
      for (int64_t j = 0; !idle && j < sizes.key; j++) {
        decayed_k[j] = decay[j] * k[j];
        decayed_q[j] = decay[j] * q[j];
      }
      free += 3 * sizes.key;
    }
    const bool reads = std::any_of(tokens.begin(), tokens.end(), [](const Token& token) { return !token.idle; });
    const bool changes = std::any_of(tokens.begin(), tokens.end(), [](const Token& token) { return token.changes; });
    for (int64_t first = 0; first < sizes.value; first += WIDTH) {
      const int64_t width = std::min<int64_t>(WIDTH, sizes.value - first);
      if (!reads || (keeps && tokens.size() == 1 && width == WIDTH)) {
        advance(tokens, state + first, sizes.value, sizes.key, first, width);
        continue;
      }
      if (width < WIDTH) std::fill_n(free, WIDTH * sizes.key, 0.0f);
      for (int64_t j = 0; j < sizes.key; j++) {
        std::copy_n(state + j * sizes.value + first, width, free + j * WIDTH);
      }
      advance(tokens, free, WIDTH, sizes.key, first, width);
      for (int64_t j = 0; keeps && changes && j < sizes.key; j++) {
        std::copy_n(free + j * WIDTH, width, state + j * sizes.value + first);
      }
    }
  }
}

using F32 = ffi::Buffer<ffi::F32>;
using Out = ffi::ResultBuffer<ffi::F32>;

// All heads of all rows, with their states where they lie.
void run(ffi::ThreadPool& pool, const F32& q, const F32& k, const F32& v, const F32& g, const F32& beta,
         const Sizes& sizes, float* states, bool keeps, Out& o) {
  const int64_t batch = q.dimensions()[0], numbers = sizes.key * sizes.value;
  each(pool, batch * sizes.heads, [&](int64_t i) {
    const int64_t row = i / sizes.heads, first = row * sizes.seq * sizes.heads + i % sizes.heads;
    const Head at{q.typed_data() + first * sizes.key,   k.typed_data() + first * sizes.key,
                  v.typed_data() + first * sizes.value, g.typed_data() + first * sizes.key,
                  beta.typed_data() + first,            o->typed_data() + first * sizes.value};
    const int64_t run = std::min(RUN, sizes.seq);
    const std::unique_ptr<float[]> room(new float[sizes.key * (3 * run + WIDTH)]);
    head(at, states + i * numbers, sizes, keeps, room.get());
  });
}

Sizes sizes_of(const F32& q, const F32& state) {
  return {q.dimensions()[1], state.dimensions()[1], state.dimensions()[2], state.dimensions()[3]};
}

ffi::Error Run(ffi::ThreadPool pool, F32 q, F32 k, F32 v, F32 g, F32 beta, F32 state, Out o, Out after) {
  float* states = after->typed_data();
  if (states != state.typed_data()) std::copy_n(state.typed_data(), state.element_count(), states);
  run(pool, q, k, v, g, beta, sizes_of(q, state), states, true, o);
  return ffi::Error::Success();
}

ffi::Error Look(ffi::ThreadPool pool, F32 q, F32 k, F32 v, F32 g, F32 beta, F32 state, Out o) {
  const Sizes sizes = sizes_of(q, state);
  if (sizes.seq > RUN) return ffi::Error::InvalidArgument("more tokens than a look takes");
  run(pool, q, k, v, g, beta, sizes, state.typed_data(), false, o);
  return ffi::Error::Success();
}

}  // namespace

HANDLER(kda_run, Run)

HANDLER(kda_look, Look)
