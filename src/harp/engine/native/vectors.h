// Vectors of floats, for the instruction set that a file is compiled for.
#pragma once
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

} // namespace
