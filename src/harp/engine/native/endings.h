// How a sum ends: with a summand, an activation and its mask.
#pragma once
#include "vectors.h"

namespace {

template <int V> inline __attribute__((always_inline)) void ended(const Step &s, Vec *a, const float *r, Word *mask) {
  if (r) {
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) a[v] += load(r + v * VL);
  }
  if (s.mask == APPLY_MASK) {
    const Vec slope = splat(s.activation == LEAKY ? s.low : 0.f);
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) {
      const Ints on = unpacked(mask[v]);
      a[v] = s.activation == LEAKY ? choose(on, a[v], a[v] * slope) : (Vec)((Ints)a[v] & on);
    }
  } else if (s.activation == RELU) {
    if (s.mask == WRITE_MASK) {
#pragma GCC unroll 16
      for (int v = 0; v < V; v++) mask[v] = packed(a[v] > Vec{});
    }
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) a[v] = (Vec)((Ints)a[v] & ~(a[v] < Vec{}));  // NaN stays NaN
  } else if (s.activation == LEAKY) {
    const Vec slope = splat(s.low);
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) {
      const Ints on = a[v] > Vec{};
      if (s.mask == WRITE_MASK) mask[v] = packed(on);
      a[v] = choose(on, a[v], a[v] * slope);
    }
  } else if (s.activation == CLIP || s.activation == CLAMP) {
    const Vec low = splat(s.low), high = splat(s.high);
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) {
      const Ints under = a[v] < low, over = a[v] > high;
      if (s.mask == WRITE_MASK)
        mask[v] = packed(s.activation == CLAMP ? (a[v] >= low) & (a[v] <= high) : (a[v] > low) & (a[v] < high));
      a[v] = choose(under, low, choose(over, high, a[v]));
    }
  }
}

} // namespace
