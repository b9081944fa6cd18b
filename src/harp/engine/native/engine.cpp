// Runs programs: which kernels this CPU has, and which thread computes which images.
#include "engine.h"
#include <pthread.h>
#include <sched.h>
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
static bool cpu_has(unsigned leaf, unsigned ebx_bits, unsigned ecx_bits) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(leaf, 0, &a, &b, &c, &d) && (b & ebx_bits) == ebx_bits && (c & ecx_bits) == ecx_bits;
}

// Which registers the system saves when it switches between programs.
static bool system_saves(unsigned registers) {
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & registers) == registers;
}
#endif

static const Kernels *best() {
#if HARP_X86
  constexpr unsigned FMA_OSXSAVE_AVX = 1u << 12 | 1u << 27 | 1u << 28;
  constexpr unsigned AVX2 = 1u << 5, AVX512_F_DQ_BW_VL = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
  if (cpu_has(1, 0, FMA_OSXSAVE_AVX) && system_saves(0x6) && cpu_has(7, AVX2, 0))
    return cpu_has(7, AVX512_F_DQ_BW_VL, 0) && system_saves(0xe6) ? &harp_kernels_avx512 : &harp_kernels_avx2;
#endif
  return &harp_kernels_baseline;
}

API int64_t harp_abi(void) { return 8; }
API int64_t harp_step_size(void) { return sizeof(Step); }
API int64_t harp_program_size(void) { return sizeof(Program); }

// The kernels of a name; the best for this CPU without one; null if there are none, or the CPU can't run them.
API const Kernels *harp_kernels(const char *name) {
  const Kernels *all[] = {
#if HARP_X86
      &harp_kernels_avx512, &harp_kernels_avx2,
#endif
      &harp_kernels_baseline};
  const Kernels *fit = best();
  if (!name || !*name) return fit;
  bool supported = false;
  for (const Kernels *kernels : all) {
    supported = supported || kernels == fit;
    if (supported && !strcmp(kernels->name, name)) return kernels;
  }
  return nullptr;
}

namespace {
constexpr int64_t MOST = 256, MOST_TOGETHER = 8;

struct Work {
  const Kernels *kernels;
  const Program *program;
  Outside first;
  // Threads take chunks of groups on their own, large ones, then smaller ones; the groups that are left they compute
  // together, each its share of every step.
  int64_t large, large_size, small, small_size, left;
  int64_t next;               // the next chunk that no thread has begun
  int64_t threads;            // 0 until all threads are started
  int64_t arrived, round;     // of the threads that wait for each other
};
struct Worker {
  Work *work;
  int64_t number;
};
} // namespace

static int64_t shared(const int64_t *number) { return __atomic_load_n(number, __ATOMIC_ACQUIRE); }

static void pause_shortly(int64_t times) {
  if (times > 2000) {
    sched_yield();
    return;
  }
#if HARP_X86
  __builtin_ia32_pause();
#endif
}

// Wait until all threads have come here.
static void wait_for_all(Work *work) {
  const int64_t round = shared(&work->round);
  if (__atomic_add_fetch(&work->arrived, 1, __ATOMIC_ACQ_REL) == work->threads) {
    __atomic_store_n(&work->arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&work->round, round + 1, __ATOMIC_RELEASE);
    return;
  }
  for (int64_t i = 0; shared(&work->round) == round; i++) pause_shortly(i);
}

static Group group_of(const Work *work, int64_t group, int64_t arena) {
  const Program *p = work->program;
  const Outside &first = work->first;
  return {p->arena + arena * p->arena_size,
          {first.in + group * p->input, first.more ? first.more + group * p->more : nullptr,
           first.out ? first.out + group * p->output : nullptr, first.kept ? first.kept + group * p->kept : nullptr}};
}

// All steps for some groups. Steps that are not joint run for one group after the other: its numbers stay in the cache.
static void run_groups(const Work *work, int64_t number, int64_t from, int64_t count) {
  const Program *p = work->program;
  float *scratch = p->scratch + number * p->scratch_size;
  Group groups[MOST_TOGETHER];
  for (int64_t i = 0; i < count; i++) groups[i] = group_of(work, from + i, number * p->together + i);
  for (int64_t i = 0; i < p->count;) {
    int64_t end = i;
    while (end < p->count && !p->steps[end].joint) end++;
    for (int64_t group = 0; group < count; group++)
      for (int64_t k = i; k < end; k++) work->kernels->step(&p->steps[k], &groups[group], 1, scratch, p->lanes, 0, 1);
    if (end < p->count) work->kernels->step(&p->steps[end++], groups, count, scratch, p->lanes, 0, 1);
    i = end;
  }
}

static void *run_worker(void *pointer) {
  const Worker *worker = (const Worker *)pointer;
  Work *work = worker->work;
  const Program *p = work->program;
  for (int64_t i = 0; !shared(&work->threads); i++) pause_shortly(i);
  const int64_t threads = work->threads, number = worker->number;
  for (;;) {
    const int64_t chunk = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
    if (chunk >= work->large + work->small) break;
    const int64_t after = chunk - work->large;
    if (after < 0)
      run_groups(work, number, chunk * work->large_size, work->large_size);
    else
      run_groups(work, number, work->large * work->large_size + after * work->small_size, work->small_size);
  }
  const int64_t done = work->large * work->large_size + work->small * work->small_size;
  float *scratch = p->scratch + number * p->scratch_size;
  for (int64_t i = 0; i < work->left; i++) {
    const Group group = group_of(work, done + i, 0);
    if (threads > 1) wait_for_all(work);  // the arenas are in use until then
    for (int64_t k = 0; k < p->count; k++) {
      work->kernels->step(&p->steps[k], &group, 1, scratch, p->lanes, number, threads);
      if (threads > 1) wait_for_all(work);
    }
  }
  return nullptr;
}

// Compute groups of images with at most `threads` threads; each needs arenas of its own.
API void harp_run(const Kernels *kernels, const Program *program, const float *in, const float *more, float *out,
                  uint8_t *kept, int64_t groups, int64_t threads) {
  Work work = {kernels, program, {in, more, out, kept}, 0, 1, 0, 1, 0, 0, 0, 0, 0};
  Worker workers[MOST];
  pthread_t others[MOST];
  threads = threads < 1 ? 1 : threads > MOST ? MOST : threads;
  if (!program->worth && threads > groups) threads = groups < 1 ? 1 : groups;
  int64_t started = 1;
  for (int64_t t = 0; t < threads; t++) workers[t] = {&work, t};
  for (; started < threads; started++)
    if (pthread_create(&others[started], nullptr, run_worker, &workers[started])) break;  // then there are fewer
  const int64_t together = program->together > MOST_TOGETHER ? MOST_TOGETHER : program->together;
  const int64_t two = groups / (2 * started);  // chunks for each at least, as threads are not equally fast
  work.large_size = two < 1 ? 1 : two < together ? two : together;
  work.large = groups / work.large_size / started * started;
  int64_t left = groups - work.large * work.large_size;
  work.small_size = left / started;
  work.small = work.small_size ? started : 0;
  left -= work.small * work.small_size;
  if (program->worth) {
    work.left = left;
  } else if (left) {  // one by one
    work.small = groups - work.large * work.large_size, work.small_size = 1;
  }
  __atomic_store_n(&work.threads, started, __ATOMIC_RELEASE);
  run_worker(&workers[0]);
  for (int64_t t = 1; t < started; t++) pthread_join(others[t], nullptr);
}
