// Winograd's F(2x2, 3x3): a tile of 2x2 outputs of a 3x3 convolution needs 16 products a channel instead of 36.
//
// Tiles of 4x4 inputs are transformed to 16 numbers, as the weights were before. For each of the 16 there is a matrix
// product over the channels; its result is transformed back. A vector holds the same number of a tile of several
// images, or of several tiles of one image. Every number is the sum of the same terms in the same order, whatever is
// computed with it.
#pragma once
#include "endings.h"

namespace {

constexpr int PANEL = 6;  // rows of weights that lie together
constexpr int ACROSS = 4;  // vectors of tiles that are multiplied together
constexpr int MOST_TILES = 32;  // vectors of tiles of a block

// size = height, width and pitch of the output, channels of the input, the first shift downwards and to the right,
// numbers of a row in the mask, vectors of tiles of a block, channels of a part.
struct Tiled {
  long h, w, pitch, planes, down, right, maskpitch, block, part;
  long tall, wide, tiles;  // tiles of an image
  long panels, apart, back;  // panels of rows; floats from one of the 16 to the next, of inputs and of outputs
  explicit Tiled(const Step &s)
      : h(s.size[0]), w(s.size[1]), pitch(s.size[2]), planes(s.size[3]), down(s.size[4]), right(s.size[5]),
        maskpitch(s.size[6]), block(s.size[7]), part(s.size[8]), tall((h + 1) / 2), wide((w + 1) / 2),
        tiles(tall * wide), panels((s.rows + PANEL - 1) / PANEL), apart(planes * block * VL + 80),
        back(panels * PANEL * block * VL + 80) {}  // 80: an odd number of cache lines
};

// R rows of a panel times V vectors of tiles.
template <int R, int V>
inline void multiplied(const float *u, const float *x, long step, long channels, float *m, long row, bool goes_on) {
  Vec a[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) a[r][v] = goes_on ? load(m + r * row + v * VL) : Vec{};
  for (long c = 0; c < channels; c++) {
    if (V < ACROSS) __builtin_prefetch(u + (c + channels) * PANEL);  // the next panel: there is little else to do
    Vec w[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) w[r] = splat(u[c * PANEL + r]);
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) {
      const Vec read = load(x + c * step + v * VL);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) a[r][v] = fused(w[r], read, a[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) store(m + r * row + v * VL, a[r][v]);
}

// The 16 matrix products of a block of n vectors of tiles, for some panels.
void multiply_tiles(const Tiled &t, const float *weight, const float *x, float *m, long n, long first, long last) {
  const long width = t.panels * PANEL, step = t.block * VL;
  for (int f = 0; f < 16; f++, x += t.apart, m += t.back)
    for (long c = 0; c < t.planes; c += t.part) {
      const long channels = t.planes - c < t.part ? t.planes - c : t.part;
      const float *part = weight + (f * t.planes + c) * width;
      for (long v = 0; v < n; v += ACROSS)
        for (long panel = first; panel < last; panel++) {
          const float *u = part + panel * channels * PANEL, *from = x + c * step + v * VL;
          float *to = m + panel * PANEL * step + v * VL;
          switch (n - v) {
          case 1: multiplied<6, 1>(u, from, step, channels, to, step, c); break;
          case 2: multiplied<6, 2>(u, from, step, channels, to, step, c); break;
          case 3:
            multiplied<3, 3>(u, from, step, channels, to, step, c);
            multiplied<3, 3>(u + 3, from, step, channels, to + 3 * step, step, c);
            break;
          default:
            multiplied<3, 4>(u, from, step, channels, to, step, c);
            multiplied<3, 4>(u + 3, from, step, channels, to + 3 * step, step, c);
          }
        }
    }
}

// The transforms of 4x4 numbers, to 16 places that are `apart`, and of 16 to 2x2.
inline void transformed(const Vec d[4][4], float *to, long apart) {
  Vec t[4][4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    t[0][j] = d[0][j] - d[2][j];
    t[1][j] = d[1][j] + d[2][j];
    t[2][j] = d[2][j] - d[1][j];
    t[3][j] = d[1][j] - d[3][j];
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    store(to + (4 * i) * apart, t[i][0] - t[i][2]);
    store(to + (4 * i + 1) * apart, t[i][1] + t[i][2]);
    store(to + (4 * i + 2) * apart, t[i][2] - t[i][1]);
    store(to + (4 * i + 3) * apart, t[i][1] - t[i][3]);
  }
}

inline void restored(const float *m, long apart, Vec bias, Vec y[2][2]) {
  Vec t[2][4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    const Vec a = load(m + j * apart), b = load(m + (4 + j) * apart), c = load(m + (8 + j) * apart),
              d = load(m + (12 + j) * apart);
    t[0][j] = a + b + c;
    t[1][j] = b - c - d;
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    y[i][0] = t[i][0] + t[i][1] + t[i][2] + bias;
    y[i][1] = t[i][1] - t[i][2] - t[i][3] + bias;
  }
}

// Several images in the lanes: tiles of all groups one after another.
struct Tile {
  const Group *group;
  long row, column;
};

void tiles_in(const Step &s, const Tiled &t, const Tile *tile, long n, float *to) {
  for (long c = 0; c < t.planes; c++, to += t.block * VL)
    for (long i = 0; i < n; i++) {
      const long row = 2 * tile[i].row, column = 2 * tile[i].column;
      const float *x = tile[i].group->arena + s.x + s.tap[c] * s.xplane +
                       ((row + t.down) * t.pitch + column + t.right) * VL;
      Vec d[4][4];
      if (row + 1 < t.h && column + 1 < t.w) {
#pragma GCC unroll 4
        for (int y = 0; y < 4; y++)
#pragma GCC unroll 4
          for (int z = 0; z < 4; z++) d[y][z] = load(x + (y * t.pitch + z) * VL);
      } else {  // memory beyond the plane is not read: it may hold anything
        for (int y = 0; y < 4; y++)
          for (int z = 0; z < 4; z++) {
            const bool inside = (y < 3 || row + 1 < t.h) && (z < 3 || column + 1 < t.w);
            d[y][z] = inside ? load(x + (y * t.pitch + z) * VL) : Vec{};
          }
      }
      transformed(d, to + i * VL, t.apart);
    }
}

void tiles_out(const Step &s, const Tiled &t, const Tile *tile, long n, const float *m, long first, long last) {
  for (long k = first; k < last; k++)
    for (long i = 0; i < n; i++) {
      Vec y[2][2];
      restored(m + (k * t.block + i) * VL, t.back, s.bias ? splat(s.bias[k]) : Vec{}, y);
      const long row = 2 * tile[i].row, column = 2 * tile[i].column, plane = s.place[k] * s.yplane;
      for (int j = 0; j < 2 && row + j < t.h; j++) {
        const long at = plane + ((row + j) * t.pitch + column) * VL;
        float *arena = tile[i].group->arena, *to = arena + s.y + at;
        const float *r = s.r < 0 ? nullptr : arena + s.r + at;
        Word *mask = nullptr;
        if (s.mask)
          mask = (Word *)(tile[i].group->outside.kept + s.kept + s.place[k] * s.maskrow) +
                 (row + j) * t.maskpitch + column;
        if (column + 1 < t.w) {
          ended<2>(s, y[j], r, mask);
          store(to, y[j][0]);
          store(to + VL, y[j][1]);
        } else {
          ended<1>(s, y[j], r, mask);
          store(to, y[j][0]);
        }
      }
    }
}

// One image: a vector holds consecutive tiles of it. Sums are only stored; another step adds summand and activation.
// Columns 0 to 3 of all tiles are first copied to four arrays, even and odd rows apart, so that the numbers of
// consecutive tiles are consecutive in memory.
void single_in(const Step &s, const Tiled &t, const float *arena, long from, long n, float *to, float *memory) {
  const long top = from * VL / t.wide, end = (from + n) * VL < t.tiles ? (from + n) * VL : t.tiles;
  const long rows = (end - 1) / t.wide - top + 1, each = (rows + 1) * t.wide + VL;
  for (long c = 0; c < t.planes; c++, to += t.block * VL) {
    const float *x = arena + s.x + s.tap[c] * s.xplane + (2 * top + t.down) * t.pitch + t.right;
    for (long y = 0; y < 2 * rows + 2; y++)
      for (int j = 0; j < 4; j++) {
        float *column = memory + (2 * j + y % 2) * each + y / 2 * t.wide;
        const float *row = x + y * t.pitch + j;
        const bool below = 2 * top + y > t.h + 1;  // beyond what a number of the output depends on
        const long inside = below ? 0 : j == 3 ? t.w / 2 : t.wide;
        for (long i = 0; i < inside; i++) column[i] = row[2 * i];
        for (long i = inside; i < t.wide; i++) column[i] = 0;
      }
    for (long v = 0; v < n; v++) {
      const float *tile = memory + (from + v) * VL - top * t.wide;
      Vec d[4][4];
#pragma GCC unroll 4
      for (int y = 0; y < 4; y++)
#pragma GCC unroll 4
        for (int z = 0; z < 4; z++) d[y][z] = load(tile + (2 * z + y % 2) * each + y / 2 * t.wide);
      transformed(d, to + v * VL, t.apart);
    }
  }
}

void single_out(const Step &s, const Tiled &t, float *arena, long from, long n, const float *m, float *memory,
                long first, long last) {
  const long begin = from * VL, end = (from + n) * VL < t.tiles ? (from + n) * VL : t.tiles, each = n * VL;
  for (long k = first; k < last; k++) {
    for (long v = 0; v < n; v++) {
      Vec y[2][2];
      restored(m + (k * t.block + v) * VL, t.back, s.bias ? splat(s.bias[k]) : Vec{}, y);
      for (int j = 0; j < 4; j++) store(memory + j * each + v * VL, y[j / 2][j % 2]);
    }
    for (long at = begin; at < end;) {
      const long row = at / t.wide, column = at % t.wide;
      const long count = t.wide - column < end - at ? t.wide - column : end - at;
      const bool cut = 2 * (column + count) > t.w;  // the last tile has one column
      for (int j = 0; j < 2 && 2 * row + j < t.h; j++) {
        float *to = arena + s.y + s.place[k] * s.yplane + (2 * row + j) * t.pitch + 2 * column;
        const float *even = memory + 2 * j * each + at - begin, *odd = even + each;
        for (long i = 0; i < count - cut; i++) to[2 * i] = even[i], to[2 * i + 1] = odd[i];
        if (cut) to[2 * count - 2] = even[count - 1];
      }
      at += count;
    }
  }
}

// Threads that share a step take blocks of tiles, or rows where there are few blocks.
void winograd(const Step &s, const Group *groups, long count, float *scratch, bool single, long share, long shares) {
  const Tiled t(s);
  float *sums = scratch + 16 * t.apart, *memory = sums + 16 * t.back;
  const long total = single ? (t.tiles + VL - 1) / VL : t.tiles * count;
  const long blocks = (total + t.block - 1) / t.block;
  const bool by_block = blocks >= shares;
  const long begin = by_block ? blocks * share / shares : 0, end = by_block ? blocks * (share + 1) / shares : blocks;
  const long first = by_block ? 0 : t.panels * share / shares;
  const long last = by_block ? t.panels : t.panels * (share + 1) / shares;
  const long rows = last * PANEL < s.rows ? last * PANEL : s.rows;
  for (long block = begin; block < end; block++) {
    const long from = total * block / blocks, n = total * (block + 1) / blocks - from;
    Tile tile[MOST_TILES];
    if (single) {
      single_in(s, t, groups->arena, from, n, scratch, memory);
    } else {
      for (long i = 0; i < n; i++) {
        const long at = from + i, within = at % t.tiles;
        tile[i] = {groups + at / t.tiles, within / t.wide, within % t.wide};
      }
      tiles_in(s, t, tile, n, scratch);
    }
    multiply_tiles(t, s.weight, scratch, sums, n, first, last);
    if (single)
      single_out(s, t, groups->arena, from, n, sums, memory, first * PANEL, rows);
    else
      tiles_out(s, t, tile, n, sums, first * PANEL, rows);
  }
}

} // namespace
