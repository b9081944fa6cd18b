// The steps of a program, for one instruction set: compiled once for each, with -DISA=name.
//
// Every number is the sum of its products in the order of its taps, each fused into the sum where the CPU can. So
// neither the width of a run, nor the block, nor the number of images or threads changes a bit of it. Winograd's tiles have
// an order of their own, which does not depend on those either.
#include "narrow.h"
#include "winograd.h"

namespace {

// The rows that a thread computes of those of a step.
struct Share {
  long first, last;
  Share(long rows, long share, long shares) : first(rows * share / shares), last(rows * (share + 1) / shares) {}
};

// The block where a share of the taps begins.
long block_of(const Step &s, long share, long shares) {
  if (share == shares) return s.rows;
  const long taps = s.stop[s.rows - 1] - s.start[0], from = s.start[0] + taps * share / shares;
  long low = 0, high = s.rows;
  if (taps == 0) return s.rows * share / shares;
  while (low < high) {
    const long middle = (low + high) / 2;
    s.start[middle] < from ? low = middle + 1 : high = middle;
  }
  return low;
}

// Some blocks, over one run.
template <int B, int V>
void product(const Step &s, float *arena, uint8_t *kept, long at, long vector, long first, long last) {
  const float *x = arena + s.x + at;
  float *y = arena + s.y + at;
  const float *r = s.r < 0 ? nullptr : arena + s.r + at;
  for (long block = first; block < last; block++) {
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
      ended<V>(s, a[b], r ? r + row * s.yplane : nullptr, mask);
#pragma GCC unroll 16
      for (int v = 0; v < V; v++) store(to + v * VL, a[b][v]);
    }
  }
}

typedef void (*Product)(const Step &, float *, uint8_t *, long, long, long, long);
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

void products(const Step &s, float *arena, uint8_t *kept, long share, long shares) {
  const long first = block_of(s, share, shares), last = block_of(s, share + 1, shares);
  const Product *of = PRODUCTS[s.block - 1];
  long vector = 0;
  for (long i = 0; i < s.runs; i++) {
    of[s.run[2 * i + 1] - 1](s, arena, kept, s.run[2 * i], vector, first, last);
    vector += s.run[2 * i + 1];
  }
  for (long row = first * s.block; s.zeros && row < last * s.block; row++)
    for (long i = 0; i < s.zeros; i++) {
      float *to = arena + s.y + s.place[row] * s.yplane + s.zero[2 * i];
      for (long j = 0; j < s.zero[2 * i + 1]; j++) to[j] = 0;  // a few numbers: a function call would take longer
    }
}

// Copies numbers: size = how many in a run, the distance between them in the source and in the target, in floats.
void moved(const Step &s, float *arena, int64_t lanes, Share mine) {
  const long n = s.size[0], there = s.size[1], here = s.size[2];
  for (long row = mine.first; row < mine.last; row++)
    for (long i = 0; i < s.runs; i++) {
      const float *from = arena + s.x + s.place[row] * s.xplane + s.run[2 * i];
      float *to = arena + s.y + s.place[row] * s.yplane + s.run[2 * i + 1];
      if (lanes == VL)
        for (long j = 0; j < n; j++) store(to + j * here, load(from + j * there));
      else if (there == 2 && here == 1)  // with constant distances the compiler uses vectors
        for (long j = 0; j < n; j++) to[j] = from[2 * j];
      else if (there == 1 && here == 2)
        for (long j = 0; j < n; j++) to[2 * j] = from[j];
      else
        for (long j = 0; j < n; j++) to[j * here] = from[j * there];
    }
}

// Pooling: size = height and width of the output, of the input; kernel, stride, padding, dilation (y, x); pitches of
// output and input. What was largest is kept as its number in the window, a byte a float; NONE if all of it is padding.
constexpr uint8_t NONE = 255;
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

// The first number of a window, which is the largest if all are minus infinity, as in torch.
inline uint8_t first_of(const Window &w, long top, long left, long bottom, long right) {
  const long ky = from(top, w.dh), kx = from(left, w.dw);
  return ky < bottom && kx < right ? ky * w.kw + kx : NONE;
}

typedef uint8_t Bytes __attribute__((vector_size(VL)));

template <bool KEEP> void maxpool_lanes(const Step &s, float *arena, uint8_t *kept, Share mine) {
  const Window w(s.size);
  for (long row = mine.first; row < mine.last; row++) {
    const long c = s.place[row];
    const float *in = arena + s.x + c * s.xplane;
    float *out = arena + s.y + c * s.yplane;
    uint8_t *which = KEEP ? kept + s.kept + c * w.oh * w.ow * VL : nullptr;
    for (long y = 0; y < w.oh; y++)
      for (long x = 0; x < w.ow; x++) {
        const long top = y * w.sh - w.ph, left = x * w.sw - w.pw;
        const long bottom = until(top, w.dh, w.ih, w.kh), right = until(left, w.dw, w.iw, w.kw);
        Vec best = splat(-__builtin_inff());
        Ints first = Ints{} + (int32_t)first_of(w, top, left, bottom, right);
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

template <bool KEEP> void maxpool_single(const Step &s, float *arena, uint8_t *kept, Share mine) {
  const Window w(s.size);
  const bool halves = !KEEP && w.kh == 2 && w.kw == 2 && w.sh == 2 && w.sw == 2 && !w.ph && !w.pw && w.dh == 1 &&
                      w.dw == 1 && 2 * w.oh <= w.ih && 2 * w.ow <= w.iw;
  for (long row = mine.first; row < mine.last; row++) {
    const long c = s.place[row];
    const float *in = arena + s.x + c * s.xplane;
    float *out = arena + s.y + c * s.yplane;
    uint8_t *which = KEEP ? kept + s.kept + c * w.oh * w.ow : nullptr;
    for (long y = 0; y < w.oh; y++) {
      if (halves) {  // the usual case, for which the compiler uses vectors
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
        uint8_t first = first_of(w, top, left, bottom, right);
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

template <int L, bool KEEP> void maxpool(const Step &s, float *arena, uint8_t *kept, Share mine) {
  L == 1 ? maxpool_single<KEEP>(s, arena, kept, mine) : maxpool_lanes<KEEP>(s, arena, kept, mine);
}

// x is the gradient of the output, y of the input; the sizes are those of the forward pass.
template <int L> void maxpool_back(const Step &s, float *arena, uint8_t *kept, Share mine) {
  const Window w(s.size);
  for (long row = mine.first; row < mine.last; row++) {
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
          if (*first == NONE) continue;
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
// the offset of this tensor in the record of an image, and the length of that record; whether it is in the second
// input.
template <int L> void pack(const Step &s, float *arena, const float *in, Share mine) {
  const long h = s.size[0], w = s.size[1], pitch = s.size[2], image = s.size[4];
  for (long row = mine.first; row < mine.last; row++)
    for (long y = 0; y < h; y++) {
      const long c = s.place[row];
      const float *from = in + s.size[3] + (c * h + y) * w;
      float *to = arena + s.y + c * s.yplane + y * pitch * L;
      for (long x = 0; x < w; x++)
        for (int l = 0; l < L; l++) to[x * L + l] = from[l * image + x];
    }
}

template <int L> void unpack(const Step &s, const float *arena, float *out, Share mine) {
  const long h = s.size[0], w = s.size[1], pitch = s.size[2], image = s.size[4];
  for (long row = mine.first; row < mine.last; row++)
    for (long y = 0; y < h; y++) {
      const long c = s.place[row];
      const float *from = arena + s.x + c * s.xplane + y * pitch * L;
      float *to = out + s.size[3] + (c * h + y) * w;
      for (long x = 0; x < w; x++)
        for (int l = 0; l < L; l++) to[l * image + x] = from[x * L + l];
    }
}

// The gradient of every tap's weight: input times gradient of the output (here y), over a group of images. r is memory
// for a vector a tap; the sums go to the kept memory.
template <int V> void weigh(const Step &s, float *arena, long at, Share mine) {
  float *sums = arena + s.r;
  for (long row = mine.first; row < mine.last; row++) {
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

typedef void (*Weigh)(const Step &, float *, long, Share);
constexpr Weigh WEIGH[] = {nullptr,  weigh<1>, weigh<2>, weigh<3>,  weigh<4>,  weigh<5>, weigh<6>,
                           weigh<7>, weigh<8>, weigh<9>, weigh<10>, weigh<11>, weigh<12>};

void weights(const Step &s, float *arena, uint8_t *kept, Share mine) {
  if (mine.first == mine.last) return;
  const long first = s.start[mine.first], last = s.stop[mine.last - 1];
  memset(arena + s.r + first * VL, 0, (last - first) * VL * sizeof(float));
  for (long i = 0; i < s.runs; i++) WEIGH[s.run[2 * i + 1]](s, arena, s.run[2 * i], mine);
  float *to = (float *)(kept + s.kept);
  for (long k = first; k < last; k++) {
    float sum = 0;
    for (int i = 0; i < VL; i++) sum += arena[s.r + k * VL + i];
    to[k] = sum;
  }
}

template <int L> void one(const Step &s, const Group &group, long share, long shares) {
  float *arena = group.arena;
  const Outside &o = group.outside;
  const Share mine(s.rows, share, shares);
  switch (s.op) {
  case PRODUCT: return products(s, arena, o.kept, share, shares);
  case MOVE: return moved(s, arena, L, mine);
  case MAXPOOL:
    return s.mask == WRITE_MASK ? maxpool<L, true>(s, arena, o.kept, mine) : maxpool<L, false>(s, arena, o.kept, mine);
  case MAXPOOL_BACK: return maxpool_back<L>(s, arena, o.kept, mine);
  case PACK: return pack<L>(s, arena, s.size[5] ? o.more : o.in, mine);
  case UNPACK: return unpack<L>(s, arena, o.out, mine);
  case WEIGHTS: return weights(s, arena, o.kept, mine);
  }
}

void step(const Step *s, const Group *groups, int64_t count, float *scratch, int64_t lanes, int64_t share,
          int64_t shares) {
  if (s->op == WINOGRAD) return winograd(*s, groups, count, scratch, lanes == 1, share, shares);
  if (s->op == NARROW) return narrow(*s, groups->arena, scratch, share, shares);
  for (int64_t i = 0; i < count; i++)
    lanes == 1 ? one<1>(*s, groups[i], share, shares) : one<VL>(*s, groups[i], share, shares);
}

} // namespace

#define NAMED_(isa) harp_kernels_##isa
#define NAMED(isa) NAMED_(isa)
#define TEXT_(isa) #isa
#define TEXT(isa) TEXT_(isa)
extern const Kernels NAMED(ISA);
const Kernels NAMED(ISA) = {TEXT(ISA), VL, sizeof(Word), {WIDEST[0], WIDEST[1], WIDEST[2], WIDEST[3]}, step};
