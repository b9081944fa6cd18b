// Products for a single image of few pixels: a vector holds the same pixel of several output channels.
//
// What is read of the image is multiplied by all weights that lie beside each other in a panel. The weights are read
// from memory once; a part of them stays in the cache until all pixels are multiplied by it, while the next part is
// fetched. Sums are only stored; another step adds summand and activation.
#pragma once
#include "vectors.h"

namespace {

constexpr int DEEP = 3;  // vectors of a panel
constexpr int MOST_NARROW = 64;  // pixels of an image

// n pixels times a panel, over a part of the taps.
template <int N>
inline void met(const float *const *x, const int32_t *tap, long taps, const float *weight, float *sums,
                const float *bias, const float *next, long ahead) {
  Vec a[N][DEEP];
#pragma GCC unroll 16
  for (int n = 0; n < N; n++)
#pragma GCC unroll 16
    for (int v = 0; v < DEEP; v++) a[n][v] = bias ? load(bias + v * VL) : load(sums + (n * DEEP + v) * VL);
  for (long k = 0; k < taps; k++, weight += DEEP * VL, next += ahead) {
    __builtin_prefetch(next, 0, 3);
    if (ahead > 16) __builtin_prefetch(next + 16, 0, 3);
    const long at = tap[k];
    Vec w[DEEP];
#pragma GCC unroll 16
    for (int v = 0; v < DEEP; v++) w[v] = load(weight + v * VL);
#pragma GCC unroll 16
    for (int n = 0; n < N; n++) {
      const Vec read = splat(x[n][at]);
#pragma GCC unroll 16
      for (int v = 0; v < DEEP; v++) a[n][v] = fused(w[v], read, a[n][v]);
    }
  }
#pragma GCC unroll 16
  for (int n = 0; n < N; n++)
#pragma GCC unroll 16
    for (int v = 0; v < DEEP; v++) store(sums + (n * DEEP + v) * VL, a[n][v]);
}

// size = height, width and pitch of the output, taps, taps of a part.
void narrow(const Step &s, float *arena, float *scratch, long share, long shares) {
  const long height = s.size[0], width = s.size[1], pitch = s.size[2], taps = s.size[3], part = s.size[4];
  const long pixels = height * width, deep = DEEP * VL, panels = (s.rows + deep - 1) / deep;
  const float *x[MOST_NARROW];
  for (long i = 0; i < pixels; i++) x[i] = arena + s.x + i / width * pitch + i % width;
  const long last = panels * (share + 1) / shares;
  for (long panel = panels * share / shares; panel < last; panel++) {
    const long rows = s.rows - panel * deep < deep ? s.rows - panel * deep : deep;
    float bias[DEEP * VL] = {};
    for (long k = 0; s.bias && k < rows; k++) bias[k] = s.bias[panel * deep + k];
    for (long from = 0; from < taps; from += part) {
      const long n = taps - from < part ? taps - from : part;
      const float *weight = s.weight + (panel * taps + from) * deep;
      const long ahead = deep * (pixels < 4 ? 1 : 4) / (pixels < 4 ? 1 : pixels);
      for (long i = 0; i < pixels; i += 4) {
        const float *next = weight + n * deep + i / 4 * n * ahead;
        float *sums = scratch + i * deep;
        const float *first = from ? nullptr : bias;
        switch (pixels - i) {
        case 1: met<1>(x + i, s.tap + from, n, weight, sums, first, next, ahead); break;
        case 2: met<2>(x + i, s.tap + from, n, weight, sums, first, next, ahead); break;
        case 3: met<3>(x + i, s.tap + from, n, weight, sums, first, next, ahead); break;
        default: met<4>(x + i, s.tap + from, n, weight, sums, first, next, ahead);
        }
      }
    }
    for (long k = 0; k < rows; k++) {
      const long row = panel * deep + k;
      float *to = arena + s.y + s.place[row] * s.yplane;
      for (long i = 0; i < pixels; i++) to[i / width * pitch + i % width] = scratch[i * deep + k];
    }
  }
}

} // namespace
