// What kernels of the experts' feed-forward share: the rows of each expert, and what is between its two products.

#pragma once

#include "products_cpu.h"

namespace {

struct Sizes {
  int64_t tokens, top_k, experts, intermediate, hidden;
};

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

}  // namespace
