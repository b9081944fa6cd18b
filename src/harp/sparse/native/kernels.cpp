// The steps of a program, for one instruction set: compiled once for each, with -DISA=name.
//
// Every number is the sum of its products in the order of its taps, each fused into the sum where the CPU can. So
// neither the width of a run, nor the block, nor the number of images or threads changes a bit of it.
#include "engine.h"
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int VL = 16, WIDEST[] = {12, 8, 6, 6};
typedef uint16_t Word;
#elif defined(__AVX2__)
constexpr int VL = 8, WIDEST[] = {12, 4, 3, 3};
typedef uint8_t Word;
#else
constexpr int VL = 4, WIDEST[] = {12, 4, 3, 3};
typedef uint8_t Word;
#endif
// WIDEST: vectors of a run that the registers hold, for blocks of one to four rows.

typedef float Vec __attribute__((vector_size(VL * 4)));
typedef int32_t Ints __attribute__((vector_size(VL * 4)));
typedef float Loose __attribute__((vector_size(VL * 4), aligned(4), may_alias));

inline Vec load(const float *p) { return *(const Loose *)p; }
inline void store(float *p, Vec v) { *(Loose *)p = v; }
inline Vec splat(float f) { return f - Vec{}; }

inline Vec fused(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_NEON)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

// One bit for every lane that is true.
inline Word packed(Ints m) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)m);
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)m);
#else
  Word w = 0;
  for (int i = 0; i < VL; i++) w |= (m[i] & 1) << i;
  return w;
#endif
}

inline Ints unpacked(Word w) {
  Ints bits{};
#pragma GCC unroll 16
  for (int i = 0; i < VL; i++) bits[i] = 1 << i;
  return ((int32_t)w & bits) != 0;
}

inline Vec choose(Ints m, Vec a, Vec b) { return (Vec)((m & (Ints)a) | (~m & (Ints)b)); }

// All blocks, over one run.
template <int B, int V> void product(const Step &s, float *arena, uint8_t *kept, long at, long vector) {
  const float *x = arena + s.x + at;
  float *y = arena + s.y + at;
  const float *r = s.r < 0 ? nullptr : arena + s.r + at;
  for (long block = 0; block < s.rows; block++) {
    Vec a[B][V];
#pragma GCC unroll 16
    for (int b = 0; b < B; b++) {
      const float *sum = y + s.place[block * B + b] * s.yplane;
      const Vec bias = s.bias ? splat(s.bias[block * B + b]) : Vec{};
#pragma GCC unroll 16
      for (int v = 0; v < V; v++) a[b][v] = s.goes_on ? load(sum + v * VL) : bias;
    }
    for (long k = s.start[block]; k < s.stop[block]; k++) {
      const float *p = x + s.tap[k];
      if constexpr (B == 1) {
        const Vec w = splat(s.weight[k]);
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) a[0][v] = fused(w, load(p + v * VL), a[0][v]);
      } else {
        Vec read[V];
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) read[v] = load(p + v * VL);
#pragma GCC unroll 16
        for (int b = 0; b < B; b++) {
          const Vec w = splat(s.weight[k * B + b]);
#pragma GCC unroll 16
          for (int v = 0; v < V; v++) a[b][v] = fused(w, read[v], a[b][v]);
        }
      }
    }
#pragma GCC unroll 16
    for (int b = 0; b < B; b++) {
      const long row = s.place[block * B + b];
      float *to = y + row * s.yplane;
      Word *mask = s.mask ? (Word *)(kept + s.kept + row * s.maskrow) + vector : nullptr;
      if (r) {
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) a[b][v] += load(r + row * s.yplane + v * VL);
      }
      if (s.mask == APPLY_MASK) {
        const Vec slope = splat(s.activation == LEAKY ? s.low : 0.f);
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) {
          const Ints on = unpacked(mask[v]);
          a[b][v] = s.activation == LEAKY ? choose(on, a[b][v], a[b][v] * slope) : (Vec)((Ints)a[b][v] & on);
        }
      } else if (s.activation == RELU) {
        if (s.mask == WRITE_MASK) {
#pragma GCC unroll 16
          for (int v = 0; v < V; v++) mask[v] = packed(a[b][v] > Vec{});
        }
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) a[b][v] = (Vec)((Ints)a[b][v] & ~(a[b][v] < Vec{}));  // NaN stays NaN
      } else if (s.activation == LEAKY) {
        const Vec slope = splat(s.low);
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) {
          const Ints on = a[b][v] > Vec{};
          if (s.mask == WRITE_MASK) mask[v] = packed(on);
          a[b][v] = choose(on, a[b][v], a[b][v] * slope);
        }
      } else if (s.activation == CLIP) {
        const Vec low = splat(s.low), high = splat(s.high);
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) {
          const Ints under = a[b][v] < low, over = a[b][v] > high;
          if (s.mask == WRITE_MASK) mask[v] = packed((a[b][v] > low) & (a[b][v] < high));
          a[b][v] = choose(under, low, choose(over, high, a[b][v]));
        }
      }
#pragma GCC unroll 16
      for (int v = 0; v < V; v++) store(to + v * VL, a[b][v]);
    }
  }
}

typedef void (*Product)(const Step &, float *, uint8_t *, long, long);
template <int B, int V> constexpr Product fitting() {
  if constexpr (V <= WIDEST[B - 1])
    return product<B, V>;
  else
    return nullptr;
}
template <int B> struct Table {
  static constexpr Product of[] = {fitting<B, 1>(), fitting<B, 2>(), fitting<B, 3>(),  fitting<B, 4>(),
                                   fitting<B, 5>(), fitting<B, 6>(), fitting<B, 7>(),  fitting<B, 8>(),
                                   fitting<B, 9>(), fitting<B, 10>(), fitting<B, 11>(), fitting<B, 12>()};
};
constexpr const Product *PRODUCTS[] = {Table<1>::of, Table<2>::of, Table<3>::of, Table<4>::of};

void products(const Step &s, float *arena, uint8_t *kept) {
  const Product *of = PRODUCTS[s.block - 1];
  long vector = 0;
  for (long i = 0; i < s.runs; i++) {
    of[s.run[2 * i + 1] - 1](s, arena, kept, s.run[2 * i], vector);
    vector += s.run[2 * i + 1];
  }
  for (long row = 0; s.zeros && row < s.rows * s.block; row++)
    for (long i = 0; i < s.zeros; i++) {
      float *to = arena + s.y + s.place[row] * s.yplane + s.zero[2 * i];
      for (long j = 0; j < s.zero[2 * i + 1]; j++) to[j] = 0;  // a few: a call would cost more
    }
}

// Numbers to other places: size = how many in a run, their distance there and here, in floats.
void moved(const Step &s, float *arena, int64_t lanes) {
  const long n = s.size[0], there = s.size[1], here = s.size[2];
  for (long row = 0; row < s.rows; row++)
    for (long i = 0; i < s.runs; i++) {
      const float *from = arena + s.x + s.place[row] * s.xplane + s.run[2 * i];
      float *to = arena + s.y + s.place[row] * s.yplane + s.run[2 * i + 1];
      if (lanes == VL)
        for (long j = 0; j < n; j++) store(to + j * here, load(from + j * there));
      else if (there == 2 && here == 1)  // with known distances the compiler finds vectors
        for (long j = 0; j < n; j++) to[j] = from[2 * j];
      else if (there == 1 && here == 2)
        for (long j = 0; j < n; j++) to[2 * j] = from[j];
      else
        for (long j = 0; j < n; j++) to[j * here] = from[j * there];
    }
}

// Pooling: size = height and width of the output, of the input; kernel, stride, padding, dilation (y, x); pitches of
// output and input. What was largest is kept as its number in the window, a byte a float.
struct Window {
  long oh, ow, ih, iw, kh, kw, sh, sw, ph, pw, dh, dw, opitch, ipitch;
  explicit Window(const int64_t *n)
      : oh(n[0]), ow(n[1]), ih(n[2]), iw(n[3]), kh(n[4]), kw(n[5]), sh(n[6]), sw(n[7]), ph(n[8]), pw(n[9]), dh(n[10]),
        dw(n[11]), opitch(n[12]), ipitch(n[13]) {}
};

// The part of a window that is inside the image: first and last number, in rows or columns.
inline long from(long at, long dilation) { return at >= 0 ? 0 : (-at + dilation - 1) / dilation; }
inline long until(long at, long dilation, long size, long kernel) {
  if (at + (kernel - 1) * dilation < size) return kernel;
  return at >= size ? 0 : (size - at + dilation - 1) / dilation;
}

typedef uint8_t Bytes __attribute__((vector_size(VL)));

template <bool KEEP> void maxpool_lanes(const Step &s, float *arena, uint8_t *kept) {
  const Window w(s.size);
  for (long row = 0; row < s.rows; row++) {
    const long c = s.place[row];
    const float *in = arena + s.x + c * s.xplane;
    float *out = arena + s.y + c * s.yplane;
    uint8_t *which = KEEP ? kept + s.kept + c * w.oh * w.ow * VL : nullptr;
    for (long y = 0; y < w.oh; y++)
      for (long x = 0; x < w.ow; x++) {
        const long top = y * w.sh - w.ph, left = x * w.sw - w.pw;
        const long bottom = until(top, w.dh, w.ih, w.kh), right = until(left, w.dw, w.iw, w.kw);
        Vec best = splat(-__builtin_inff());
        Ints first{};
        for (long ky = from(top, w.dh); ky < bottom; ky++)
          for (long kx = from(left, w.dw); kx < right; kx++) {
            const Vec v = load(in + ((top + ky * w.dh) * w.ipitch + left + kx * w.dw) * VL);
            const Ints more = ~(v <= best);  // NaN wins, as in torch
            best = choose(more, v, best);
            if (KEEP) first = (more & (int32_t)(ky * w.kw + kx)) | (~more & first);
          }
        store(out + (y * w.opitch + x) * VL, best);
        if (KEEP) {
          const Bytes bytes = __builtin_convertvector(first, Bytes);
          memcpy(which + (y * w.ow + x) * VL, &bytes, VL);
        }
      }
  }
}

template <bool KEEP> void maxpool_single(const Step &s, float *arena, uint8_t *kept) {
  const Window w(s.size);
  const bool halves = !KEEP && w.kh == 2 && w.kw == 2 && w.sh == 2 && w.sw == 2 && !w.ph && !w.pw && w.dh == 1 &&
                      w.dw == 1 && 2 * w.oh <= w.ih && 2 * w.ow <= w.iw;
  for (long row = 0; row < s.rows; row++) {
    const long c = s.place[row];
    const float *in = arena + s.x + c * s.xplane;
    float *out = arena + s.y + c * s.yplane;
    uint8_t *which = KEEP ? kept + s.kept + c * w.oh * w.ow : nullptr;
    for (long y = 0; y < w.oh; y++) {
      if (halves) {  // the usual case, of which the compiler makes vectors
        const float *up = in + 2 * y * w.ipitch, *down = up + w.ipitch;
        float *to = out + y * w.opitch;
        for (long x = 0; x < w.ow; x++) {
          float best = up[2 * x];
          best = up[2 * x + 1] <= best ? best : up[2 * x + 1];
          best = down[2 * x] <= best ? best : down[2 * x];
          to[x] = down[2 * x + 1] <= best ? best : down[2 * x + 1];
        }
        continue;
      }
      for (long x = 0; x < w.ow; x++) {
        const long top = y * w.sh - w.ph, left = x * w.sw - w.pw;
        const long bottom = until(top, w.dh, w.ih, w.kh), right = until(left, w.dw, w.iw, w.kw);
        float best = -__builtin_inff();
        uint8_t first = 0;
        for (long ky = from(top, w.dh); ky < bottom; ky++)
          for (long kx = from(left, w.dw); kx < right; kx++) {
            const float v = in[(top + ky * w.dh) * w.ipitch + left + kx * w.dw];
            if (!(v <= best)) best = v, first = ky * w.kw + kx;
          }
        out[y * w.opitch + x] = best;
        if (KEEP) which[y * w.ow + x] = first;
      }
    }
  }
}

template <int L, bool KEEP> void maxpool(const Step &s, float *arena, uint8_t *kept) {
  L == 1 ? maxpool_single<KEEP>(s, arena, kept) : maxpool_lanes<KEEP>(s, arena, kept);
}

// x is the gradient of the output, y of the input; the sizes are those of the way forward.
template <int L> void maxpool_back(const Step &s, float *arena, uint8_t *kept) {
  const Window w(s.size);
  for (long row = 0; row < s.rows; row++) {
    const long c = s.place[row];
    const float *given = arena + s.x + c * s.xplane;
    float *to = arena + s.y + c * s.yplane;
    const uint8_t *which = kept + s.kept + c * w.oh * w.ow * L;
    for (long y = 0; y < w.ih; y++) memset(to + y * w.ipitch * L, 0, w.iw * L * sizeof(float));
    for (long y = 0; y < w.oh; y++)
      for (long x = 0; x < w.ow; x++) {
        const long top = y * w.sh - w.ph, left = x * w.sw - w.pw;
        const float *g = given + (y * w.opitch + x) * L;
        const uint8_t *first = which + (y * w.ow + x) * L;
        if constexpr (L == 1) {
          const long ky = *first / w.kw, kx = *first % w.kw;
          to[(top + ky * w.dh) * w.ipitch + left + kx * w.dw] += *g;
        } else {
          const long bottom = until(top, w.dh, w.ih, w.kh), right = until(left, w.dw, w.iw, w.kw);
          Bytes bytes;
          memcpy(&bytes, first, VL);
          const Ints number = __builtin_convertvector(bytes, Ints);
          const Vec gradient = load(g);
          for (long ky = from(top, w.dh); ky < bottom; ky++)
            for (long kx = from(left, w.dw); kx < right; kx++) {
              float *p = to + ((top + ky * w.dh) * w.ipitch + left + kx * w.dw) * L;
              const Ints mine = number == (int32_t)(ky * w.kw + kx);
              store(p, load(p) + (Vec)((Ints)gradient & mine));
            }
        }
      }
  }
}

// Images from and to the layout of torch, (image, channel, y, x): size = height, width, pitch here;
// where the numbers of this tensor begin among those of an image, and how many an image has in all; whether they
// are what else is given.
template <int L> void pack(const Step &s, float *arena, const float *in) {
  const long h = s.size[0], w = s.size[1], pitch = s.size[2], image = s.size[4];
  for (long row = 0; row < s.rows; row++)
    for (long y = 0; y < h; y++) {
      const long c = s.place[row];
      const float *from = in + s.size[3] + (c * h + y) * w;
      float *to = arena + s.y + c * s.yplane + y * pitch * L;
      for (long x = 0; x < w; x++)
        for (int l = 0; l < L; l++) to[x * L + l] = from[l * image + x];
    }
}

template <int L> void unpack(const Step &s, const float *arena, float *out) {
  const long h = s.size[0], w = s.size[1], pitch = s.size[2], image = s.size[4];
  for (long row = 0; row < s.rows; row++)
    for (long y = 0; y < h; y++) {
      const long c = s.place[row];
      const float *from = arena + s.x + c * s.xplane + y * pitch * L;
      float *to = out + s.size[3] + (c * h + y) * w;
      for (long x = 0; x < w; x++)
        for (int l = 0; l < L; l++) to[l * image + x] = from[x * L + l];
    }
}

// The gradient of every tap's weight: input times gradient of the output (here y), over a group of images. r is memory
// for a vector a tap; the sums go to what is kept.
template <int V> void weigh(const Step &s, float *arena, long at) {
  float *sums = arena + s.r;
  for (long row = 0; row < s.rows; row++) {
    Vec g[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) g[v] = load(arena + s.y + s.place[row] * s.yplane + at + v * VL);
    for (long k = s.start[row]; k < s.stop[row]; k++) {
      const float *p = arena + s.x + s.tap[k] + at;
      Vec sum = load(sums + k * VL);
#pragma GCC unroll 16
      for (int v = 0; v < V; v++) sum = fused(g[v], load(p + v * VL), sum);
      store(sums + k * VL, sum);
    }
  }
}

typedef void (*Weigh)(const Step &, float *, long);
constexpr Weigh WEIGH[] = {nullptr,  weigh<1>, weigh<2>, weigh<3>,  weigh<4>,  weigh<5>, weigh<6>,
                           weigh<7>, weigh<8>, weigh<9>, weigh<10>, weigh<11>, weigh<12>};

void weights(const Step &s, float *arena, uint8_t *kept) {
  const long taps = s.stop[s.rows - 1];
  memset(arena + s.r, 0, taps * VL * sizeof(float));
  for (long i = 0; i < s.runs; i++) WEIGH[s.run[2 * i + 1]](s, arena, s.run[2 * i]);
  float *to = (float *)(kept + s.kept);
  for (long k = 0; k < taps; k++) {
    float sum = 0;
    for (int i = 0; i < VL; i++) sum += arena[s.r + k * VL + i];
    to[k] = sum;
  }
}

template <int L> void one(const Step &s, float *arena, const Outside &o) {
  switch (s.op) {
  case PRODUCT: return products(s, arena, o.kept);
  case MOVE: return moved(s, arena, L);
  case MAXPOOL: return s.mask == WRITE_MASK ? maxpool<L, true>(s, arena, o.kept) : maxpool<L, false>(s, arena, o.kept);
  case MAXPOOL_BACK: return maxpool_back<L>(s, arena, o.kept);
  case PACK: return pack<L>(s, arena, s.size[5] ? o.more : o.in);
  case UNPACK: return unpack<L>(s, arena, o.out);
  case WEIGHTS: return weights(s, arena, o.kept);
  }
}

void step(const Step *s, float *arena, const Outside *outside, int64_t lanes) {
  lanes == 1 ? one<1>(*s, arena, *outside) : one<VL>(*s, arena, *outside);
}

} // namespace

#define NAMED_(isa) harp_kernels_##isa
#define NAMED(isa) NAMED_(isa)
#define TEXT_(isa) #isa
#define TEXT(isa) TEXT_(isa)
extern const Kernels NAMED(ISA);
const Kernels NAMED(ISA) = {TEXT(ISA), VL, sizeof(Word), {WIDEST[0], WIDEST[1], WIDEST[2], WIDEST[3]}, step};
