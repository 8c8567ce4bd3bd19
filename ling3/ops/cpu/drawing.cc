// A token of each row of logits, drawn after temperature, top-k, top-p and min-p, for `drawing.py`.

#include <limits>
#include <numeric>

#include "lanes.h"

namespace {

constexpr float INFINITE = std::numeric_limits<float>::infinity();
// More than the largest noise, -log(-log(1 - 2^-23)) = 15.94.
constexpr double LOUDEST = 16;
// Distances from the likeliest that are surveyed.
constexpr int LEVELS = 8;
// Logits of a task.
constexpr int64_t SEGMENT = 1 << 14;

inline Words rotated(Words x, int by) { return (x << by) | (x >> (32 - by)); }

// JAX's noise: -log(-log(u)) of random numbers u in (0, 1) that Threefry-2x32 (Salmon et al. 2011) makes of an id.
struct Noise {
  uint32_t first, second;

  Lanes of(Words ids) const {
    const uint32_t keys[3] = {first, second, first ^ second ^ 0x1BD11BDA};
    constexpr int TURNS[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
    Words a = Words{} + keys[0], b = ids + keys[1];
#pragma GCC unroll 5
    for (uint32_t round = 0; round < 5; round++) {
#pragma GCC unroll 4
      for (int turn : TURNS[round % 2]) {
        a += b;
        b = rotated(b, turn) ^ a;
      }
      a += keys[(round + 1) % 3];
      b += keys[(round + 2) % 3] + (round + 1);
    }
    const Words bits = ((a ^ b) >> 9) | 0x3f800000u;
    Lanes u;
    std::memcpy(&u, &bits, sizeof u);
    u -= 1.0f;
    u = u > 0.0f ? u : every(std::numeric_limits<float>::min());
    return -logarithm(-logarithm(u));
  }
};

// The best id so far, the first of several.
struct Best {
  float score = -INFINITE;
  int32_t id = 0;

  void offer(float own, int32_t at) {
    if (own > score || (own == score && at < id)) *this = {own, at};
  }
};

struct Row {
  const float* logits;
  int64_t vocab;
  float temperature, top_p, min_p;
  int64_t top_k;
  Noise noise;

  bool narrows() const { return top_k < vocab || top_p < 1; }
  bool filters() const { return narrows() || min_p > 0; }

  // Registers from `begin` to `end`: run(LANES logits, the first's id); behind the last comes -inf.
  template <class Run>
  void each_register(int64_t begin, int64_t end, Run run) const {
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES) run(load(logits + i), i);
    if (i < end) {
      float last[LANES];
      std::fill_n(last, LANES, -INFINITE);
      std::copy(logits + i, logits + end, last);
      run(load(last), i);
    }
  }

  float largest(int64_t begin, int64_t end) const {
    Lanes tops = every(-INFINITE);
    each_register(begin, end, [&](Lanes z, int64_t) { tops = z > tops ? z : tops; });
    float top = -INFINITE;
    for (int i = 0; i < LANES; i++) top = std::max(top, tops[i]);
    return top;
  }

  static Words ids_from(int64_t first) {
    Words ids;
    for (int i = 0; i < LANES; i++) ids[i] = uint32_t(first + i);
    return ids;
  }

  // No logit below this can reach `score`, whatever its noise. It is a little too low, as products are rounded.
  float hopeless(float score) const {
    const double least = (double(score) - LOUDEST) * temperature;
    return float(least - 1e-6 * std::fabs(double(score) * temperature) - 1e-30);
  }

  // The best of the ids from `begin` to `end` whose logit over the temperature is at least `floor`.
  Best scan(int64_t begin, int64_t end, float floor) const {
    Best best;
    const float top = largest(begin, end);
    if (!std::isfinite(top)) return best;
    // The score of the likeliest is a first bound.
    const int64_t likeliest = std::find(logits + begin, logits + end, top) - logits;
    if (top / temperature >= floor) best = {top / temperature + noise.of(ids_from(likeliest))[0], int32_t(likeliest)};
    float least = hopeless(best.score);
    each_register(begin, end, [&](Lanes z, int64_t first) {
      if (!any(z >= every(least))) return;
      const Lanes scaled = z / every(temperature);
      Lanes scores = scaled + noise.of(ids_from(first));
      scores = scaled >= floor ? scores : every(-INFINITE);
      if (!any(scores >= every(best.score))) return;
      for (int i = 0; i < LANES; i++) best.offer(scores[i], int32_t(first + i));
      least = hopeless(best.score);
    });
    return best;
  }

  struct Candidate {
    float scaled;
    int32_t id;
    // The likeliest come first, and of equals the first.
    bool operator<(const Candidate& other) const {
      return scaled > other.scaled || (scaled == other.scaled && id < other.id);
    }
  };

  using Candidates = std::vector<Candidate>;

  // The candidates whose logit over the temperature is at least `least`.
  void gather(float least, Candidates& to) const {
    each_register(0, vocab, [&](Lanes z, int64_t first) {
      const Lanes scaled = z / every(temperature);
      if (!any(scaled >= every(least))) return;
      for (int i = 0; i < std::min<int64_t>(LANES, vocab - first); i++) {
        if (scaled[i] >= least) to.push_back({scaled[i], int32_t(first + i)});
      }
    });
  }

  // What is at most 2^(k - 1) below the likeliest: how many, and their Σ e^(z / temperature - top); the last is all.
  struct Survey {
    int64_t count[LEVELS + 1];
    double mass[LEVELS + 1];
  };

  Survey survey(float top) const {
    Words counts[LEVELS] = {};
    Lanes masses[LEVELS + 1] = {};
    each_register(0, vocab, [&](Lanes z, int64_t) {
      const Lanes below = z / every(temperature) - top;
      const Lanes own = exponential(below == below ? below : every(-INFINITE));
      masses[LEVELS] += own;
#pragma GCC unroll 8
      for (int k = 0; k < LEVELS; k++) {
        const auto near = below >= every(-0.5f * float(1 << k));
        counts[k] -= (Words)near;
        masses[k] += near ? own : Lanes{};
      }
    });
    Survey found{};
    for (int k = 0; k < LEVELS; k++) {
      for (int i = 0; i < LANES; i++) found.count[k] += counts[k][i];
    }
    found.count[LEVELS] = vocab;
    for (int k = 0; k <= LEVELS; k++) found.mass[k] = total(masses[k]);
    return found;
  }

  static double mass(Candidates::iterator begin, Candidates::iterator end, float top) {
    return std::accumulate(begin, end, 0.0, [&](double sum, const Candidate& own) {
      return sum + std::exp(double(own.scaled) - top);
    });
  }

  // The end of the likeliest, as few as reach `most` together; at least one. It orders only what lies about the end.
  static Candidates::iterator reaching(double most, Candidates::iterator begin, Candidates::iterator end, float top) {
    double before = 0;
    while (end - begin > 32) {
      const auto middle = begin + (end - begin) / 2;
      std::nth_element(begin, middle, end);
      const double own = mass(begin, middle, top);
      if (before + own >= most) {
        end = middle;
      } else {
        before += own;
        begin = middle;
      }
    }
    std::sort(begin, end);
    for (; begin < end && before < most; begin++) before += mass(begin, begin + 1, top);
    return begin;
  }

  // The ids that top-k and top-p keep: the likeliest, as few as have `top_p` of the mass of the first top_k.
  Candidates likeliest(float top) const {
    const Survey all = survey(top);
    // Sums in float32 are off by less than a hundred-thousandth.
    const auto suffices = [&](int k) {
      return all.count[k] >= top_k || (top_k >= vocab && all.mass[k] >= top_p * all.mass[LEVELS] * 1.00001);
    };
    int level = 0;
    while (level < LEVELS && !suffices(level)) level++;
    Candidates found;
    gather(level < LEVELS ? top - 0.5f * float(1 << level) : -std::numeric_limits<float>::max(), found);
    if (int64_t(found.size()) > top_k) {
      std::nth_element(found.begin(), found.begin() + top_k, found.end());
      found.resize(top_k);
    }
    if (top_p < 1) {
      const double whole = top_k < vocab ? mass(found.begin(), found.end(), top) : all.mass[LEVELS];
      // The likeliest is kept by the smallest top_p too.
      const double most = std::max<double>(top_p * whole, std::numeric_limits<double>::min());
      found.erase(reaching(most, found.begin(), found.end(), top), found.end());
    }
    return found;
  }

  // The best of the ids that the row's filters keep.
  Best drawn() const {
    const float top = largest(0, vocab) / temperature;
    if (!std::isfinite(top)) return {};
    const float floor = top + std::log(min_p);
    if (!narrows()) return scan(0, vocab, floor);
    const Candidates kept = likeliest(top);
    Best best;
    for (size_t i = 0; i < kept.size(); i += LANES) {
      const int some = int(std::min<size_t>(LANES, kept.size() - i));
      Words ids = {};
      for (int j = 0; j < some; j++) ids[j] = uint32_t(kept[i + j].id);
      const Lanes noises = noise.of(ids);
      for (int j = 0; j < some; j++) {
        if (kept[i + j].scaled >= floor) best.offer(kept[i + j].scaled + noises[j], kept[i + j].id);
      }
    }
    return best;
  }
};

ffi::Error Draw(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> logits, ffi::Buffer<ffi::PRED> active,
                ffi::Buffer<ffi::U32> key, ffi::Buffer<ffi::F32> temperature, ffi::Buffer<ffi::S32> top_k,
                ffi::Buffer<ffi::F32> top_p, ffi::Buffer<ffi::F32> min_p, ffi::ResultBuffer<ffi::S32> token) {
  const int64_t rows = logits.dimensions()[0], vocab = logits.dimensions()[1];
  struct Task {
    int64_t row, begin, end;  // of the whole row where it needs its likeliest token first
    Best best;
  };
  std::vector<Row> all;
  std::vector<Task> tasks;
  for (int64_t r = 0; r < rows; r++) {
    token->typed_data()[r] = 0;
    const uint32_t* own = key.typed_data() + 2 * r;
    all.push_back({logits.typed_data() + r * vocab, vocab, temperature.typed_data()[r], top_p.typed_data()[r],
                   min_p.typed_data()[r], std::max(1, top_k.typed_data()[r]), Noise{own[0], own[1]}});
    if (!active.typed_data()[r]) continue;
    const int64_t step = all[r].filters() ? vocab : SEGMENT;
    for (int64_t begin = 0; begin < vocab; begin += step) tasks.push_back({r, begin, std::min(vocab, begin + step), {}});
  }
  each(pool, tasks.size(), [&](int64_t i) {
    Task& task = tasks[i];
    const Row& row = all[task.row];
    task.best = row.filters() ? row.drawn() : row.scan(task.begin, task.end, -INFINITE);
  });
  std::vector<Best> best(rows);
  for (const Task& task : tasks) best[task.row].offer(task.best.score, task.best.id);
  for (const Task& task : tasks) token->typed_data()[task.row] = best[task.row].id;
  return ffi::Error::Success();
}

}  // namespace

HANDLER(draw, Draw)
