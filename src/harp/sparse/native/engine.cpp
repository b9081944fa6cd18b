// Runs programs: which kernels this CPU has, and which thread computes which images.
#include "engine.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#if HARP_X86
#include <cpuid.h>
#endif

#define API extern "C" __attribute__((visibility("default")))

extern const Kernels harp_kernels_baseline;
#if HARP_X86
extern const Kernels harp_kernels_avx2, harp_kernels_avx512;
#endif

#if HARP_X86
// The compilers' own test needs a run-time library that not all of them have.
static bool has(unsigned leaf, unsigned ebx_bits, unsigned ecx_bits) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(leaf, 0, &a, &b, &c, &d) && (b & ebx_bits) == ebx_bits && (c & ecx_bits) == ecx_bits;
}

// Which registers the system saves when it switches between programs.
static bool saves(unsigned registers) {
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & registers) == registers;
}
#endif

static const Kernels *best() {
#if HARP_X86
  constexpr unsigned FMA_OSXSAVE_AVX = 1u << 12 | 1u << 27 | 1u << 28;
  constexpr unsigned AVX2 = 1u << 5, AVX512_F_DQ_BW_VL = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
  if (has(1, 0, FMA_OSXSAVE_AVX) && saves(0x6) && has(7, AVX2, 0))
    return has(7, AVX512_F_DQ_BW_VL, 0) && saves(0xe6) ? &harp_kernels_avx512 : &harp_kernels_avx2;
#endif
  return &harp_kernels_baseline;
}

API int64_t harp_abi(void) { return 6; }

// The kernels of a name; the best for this CPU without one; null if there are none, or the CPU can't run them.
API const Kernels *harp_kernels(const char *name) {
  const Kernels *all[] = {
#if HARP_X86
      &harp_kernels_avx512, &harp_kernels_avx2,
#endif
      &harp_kernels_baseline};
  const Kernels *fit = best();
  if (!name || !*name) return fit;
  bool able = false;
  for (const Kernels *each : all) {
    able = able || each == fit;
    if (able && !strcmp(each->name, name)) return each;
  }
  return nullptr;
}

namespace {
struct Work {
  const Kernels *kernels;
  const Program *program;
  Outside first;
  int64_t groups;
  int64_t next;  // the group that nobody has begun, shared by the threads
};
struct Worker {
  Work *work;
  float *arena;
};
} // namespace

static void *labour(void *pointer) {
  const Worker *worker = (const Worker *)pointer;
  Work *work = worker->work;
  const Program *p = work->program;
  for (;;) {
    const int64_t group = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
    if (group >= work->groups) return nullptr;
    const Outside &first = work->first;
    const Outside outside = {first.in + group * p->input, first.more ? first.more + group * p->more : nullptr,
                             first.out ? first.out + group * p->output : nullptr,
                             first.kept ? first.kept + group * p->kept : nullptr};
    for (int64_t i = 0; i < p->count; i++) work->kernels->step(&p->steps[i], worker->arena, &outside, p->lanes);
  }
}

// Compute groups of images with at most so many threads; each needs an arena of its own.
API void harp_run(const Kernels *kernels, const Program *program, const float *in, const float *more, float *out,
                  uint8_t *kept, int64_t groups, int64_t threads) {
  Work work = {kernels, program, {in, more, out, kept}, groups, 0};
  constexpr int64_t MOST = 256;
  Worker workers[MOST];
  pthread_t others[MOST];
  threads = threads < 1 ? 1 : threads > MOST ? MOST : threads > groups ? groups : threads;
  int64_t started = 1;
  for (int64_t t = 0; t < threads; t++) workers[t] = {&work, program->arena + t * program->arena_size};
  for (; started < threads; started++)
    if (pthread_create(&others[started], nullptr, labour, &workers[started])) break;  // fewer will do
  labour(&workers[0]);
  for (int64_t t = 1; t < started; t++) pthread_join(others[t], nullptr);
}
