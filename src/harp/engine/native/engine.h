// What the Python side and the kernels agree on. bindings.py declares the same structures.
//
// A tensor lives in an arena of floats as one plane a channel. A plane has rows of `pitch` positions, with zeros
// above, below and between the rows, so that a convolution reads its padding like any other number. A position holds
// `lanes` floats: the same pixel of so many images, or of one.
#pragma once
#include <stdint.h>

enum Op : int64_t { PRODUCT, MOVE, MAXPOOL, MAXPOOL_BACK, PACK, UNPACK, WEIGHTS, WINOGRAD, NARROW };
enum Activation : int64_t { LINEAR, RELU, LEAKY, CLIP, CLAMP };  // CLAMP: with a gradient at its bounds, as in torch
enum Mask : int64_t { NO_MASK, WRITE_MASK, APPLY_MASK };

struct Step {
  int64_t op;
  int64_t x, y, r;              // where input, output and summand begin in the arena, in floats; r < 0: no summand
  int64_t rows, block;          // blocks of rows and rows in a block; channels, for other steps
  const int32_t *place;         // the channel of every row
  const int32_t *start, *stop;  // PRODUCT: where the taps of each block begin and end
  int64_t goes_on;              // whether sums start from what y holds
  const int32_t *tap;           // what to read, in floats from the position that is computed
  const float *weight;          // `block` numbers a tap
  const float *bias;            // a number a row, or null
  int64_t runs;                 // pieces that the planes are computed in
  const int32_t *run;           // start in floats, length in vectors; MOVE: start in the source, start in the target
  int64_t zeros;                // gaps between the rows that have to become zero again
  const int32_t *zero;          // start, length, in floats
  int64_t xplane, yplane;       // floats from one channel to the next
  int64_t activation;
  float low, high;              // of CLIP and CLAMP; `low` is the slope of LEAKY
  int64_t mask, kept, maskrow;  // Mask; where its bits begin in the memory that is kept, bytes of a row
  int64_t size[14];             // MOVE, pooling, PACK, UNPACK, WINOGRAD, NARROW: see there
  int64_t joint;                // whether all groups of a thread are computed in one call
};

struct Program {
  const Step *steps;
  int64_t count;
  int64_t lanes;                // images in a group
  float *arena;                 // `together` for each thread, zero where no step writes
  int64_t arena_size;           // in floats
  int64_t together;             // groups that a thread computes side by side, where steps are joint
  float *scratch;               // memory within a step, for each thread
  int64_t scratch_size;         // in floats
  int64_t worth;                // whether a group is worth the work of several threads
  int64_t input, more, output;  // floats of a group: of the input, the second input, the output
  int64_t kept;                 // bytes of a group that are kept for the backward pass
};

// What a step reads and writes outside its arena, of one group of images.
struct Outside {
  const float *in, *more;
  float *out;
  uint8_t *kept;
};

// A group of images: its arena, and its part of what is outside.
struct Group {
  float *arena;
  Outside outside;
};

struct Kernels {
  const char *name;
  int64_t lanes, word;          // floats of a vector; bytes of its mask
  int64_t widest[4];            // vectors of a run, for blocks of one to four rows
  // Several threads may share a step: each computes its share of it.
  void (*step)(const Step *, const Group *, int64_t groups, float *scratch, int64_t lanes, int64_t share, int64_t shares);
};
