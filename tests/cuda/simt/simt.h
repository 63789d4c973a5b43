// Definitions for compiling the kernels' subset of CUDA C with g++. See simt.cpp for its checks.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include "fault.h"
using std::max;
using std::min;
#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define DEVICE __forceinline__
#define __restrict__
#define __launch_bounds__(...)
// All static shared memory of a block lies in one section, which is reset before each block and checked.
#define __shared__ static __attribute__((section("simt_shared")))
#define DYNAMIC_SHARED(name) uint4* name = (uint4*)simt_dynamic_shared()

struct uint3 { unsigned x, y, z; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

extern "C" {
// Constant per thread, regardless of other fibers on its processor.
uint3 simt_thread() __attribute__((const));
uint3 simt_block() __attribute__((const));
uint3 simt_block_dim() __attribute__((const));
uint3 simt_grid_dim() __attribute__((const));
void* simt_dynamic_shared();
void simt_barrier(int line);
void simt_warp_barrier(unsigned mask, int line);
unsigned simt_shuffle(unsigned mask, unsigned value, int kind, int operand, int line);
void simt_mma(int* d, const uint32_t* a, const uint32_t* b, int depth, int line);
void simt_vector(const void* p, int bytes, int write, void* data);
void simt_copy_async(void* to, const void* from, int bytes);
void simt_copies_commit();
void simt_copies_wait(int left);
unsigned simt_atomic(uint32_t* p, uint32_t v, int kind);
// Number of the planted fault, by SIMT_FAULT in the environment, or 0.
uint32_t simt_fault() __attribute__((const));
void simt_fence();
}
#define threadIdx simt_thread()
#define blockIdx simt_block()
#define blockDim simt_block_dim()
#define gridDim simt_grid_dim()
#define __syncthreads() simt_barrier(__LINE__)
#define __syncwarp() simt_warp_barrier(0xffffffffu, __LINE__)

template <class T> inline unsigned simt_bits(T v) { static_assert(sizeof(T) == 4, "32 bits"); unsigned b; memcpy(&b, &v, 4); return b; }
template <class T> inline T simt_value(unsigned b) { T v; memcpy(&v, &b, 4); return v; }
template <class T> inline T simt_shfl(unsigned mask, T v, int kind, int operand, int line) {
  return simt_value<T>(simt_shuffle(mask, simt_bits(v), kind, operand, line));
}
#define __shfl_xor_sync(mask, v, m) simt_shfl(mask, v, 0, m, __LINE__)
#define __shfl_down_sync(mask, v, d) simt_shfl(mask, v, 1, d, __LINE__)
#define __shfl_sync(mask, v, lane) simt_shfl(mask, v, 2, lane, __LINE__)
#define __ballot_sync(mask, p) simt_shuffle(mask, (p) ? 1u : 0u, 3, 0, __LINE__)
#define mma_16x8x32(d, a, b) simt_mma(d, a, b, 32, __LINE__)
#define mma_16x8x16(d, a, b) { const uint32_t b_of_mma = (b); simt_mma(d, a, &b_of_mma, 16, __LINE__); }

inline int dp4a(int a, int b, int c) { for (int i = 0; i < 4; i++) c += (int)(int8_t)(a >> 8 * i) * (int)(int8_t)(b >> 8 * i); return c; }
inline int dp4a_unsigned(uint32_t a, int b, int c) { for (int i = 0; i < 4; i++) c += (int)(a >> 8 * i & 255u) * (int)(int8_t)(b >> 8 * i); return c; }
inline int dp2a_of(int a, int b, int c, int from) { for (int i = 0; i < 2; i++) c += (int)(int16_t)(a >> 16 * i) * (int)(int8_t)(b >> 8 * (from + i)); return c; }
inline int dp2a_lo(int a, int b, int c) { return dp2a_of(a, b, c, 0); }
inline int dp2a_hi(int a, int b, int c) { return dp2a_of(a, b, c, 2); }
inline uint32_t funnel(uint32_t low, uint32_t high, uint32_t bits) { return (uint32_t)(((uint64_t)high << 32 | low) >> (bits & 31)); }
inline uint32_t permuted(uint32_t a, uint32_t b, uint32_t which) {
  uint32_t d = 0;
  for (int i = 0; i < 4; i++) { const uint32_t n = which >> 4 * i & 15u, v = (n & 4u ? b : a) >> 8 * (n & 3u) & 255u; d |= (n & 8u ? (v >> 7) * 255u : v) << 8 * i; }
  return d;
}
inline float half_bits(uint32_t b) {
  const uint32_t sign = (b & 0x8000u) << 16, exponent = b >> 10 & 31u, rest = b & 0x3ffu;
  if (exponent == 31u) return simt_value<float>(sign | 0x7f800000u | rest << 13);
  const float size = exponent ? simt_value<float>((exponent + 112u) << 23 | rest << 13) : (float)rest * 5.9604644775390625e-8f;
  return simt_value<float>(simt_bits(size) | sign);
}
inline float __uint_as_float(unsigned b) { return simt_value<float>(b); }
inline unsigned __float_as_uint(float v) { return simt_bits(v); }
inline uint4 load16(const void* p) { uint4 v; simt_vector(p, 16, 0, &v); return v; }
inline uint4 load16_once(const void* p) { return load16(p); }
inline uint2 load8(const void* p) { uint2 v; simt_vector(p, 8, 0, &v); return v; }
inline void store16(void* p, uint4 v) { simt_vector(p, 16, 1, &v); }
inline void store8(void* p, uint2 v) { simt_vector(p, 8, 1, &v); }
inline float load_shared_by_blocks(const float* p) { return *p; }
typedef uintptr_t Shared;
inline Shared shared_of(const void* p) { return (Shared)p; }
inline void copy16_async(Shared to, const void* from) { simt_copy_async((void*)to, from, 16); }
inline void copy4_async(Shared to, const void* from) { simt_copy_async((void*)to, from, 4); }
inline void copies_commit() { simt_copies_commit(); }
template <int left> inline void copies_wait() { simt_copies_wait(left); }
inline void load_matrices_at(uint32_t (&r)[4], Shared at, int line) {
  const unsigned lane = simt_thread().x & 31u;
  for (unsigned m = 0; m < 4; m++) {
    // An address has two words.
    const uint64_t low = simt_shuffle(0xffffffffu, (uint32_t)at, 2, m * 8 + lane / 4, line), high = simt_shuffle(0xffffffffu, (uint32_t)((uint64_t)at >> 32), 2, m * 8 + lane / 4, line);
    r[m] = *(const uint32_t*)((high << 32 | low) + lane % 4 * 4);
  }
  if (at % 16) simt_vector((const void*)at, 16, 0, r);                  // reports that it is no multiple
}
#define load_matrices(r, at) load_matrices_at(r, at, __LINE__)
inline uint32_t atomic_add(uint32_t* p, uint32_t v) { return simt_atomic(p, v, 0); }
inline void atomic_or(uint32_t* p, uint32_t v) { simt_atomic(p, v, 1); }
inline void fence() { simt_fence(); }

#ifdef SIMT_WATCH       // with -fsanitize=thread: every access is watched
extern "C" bool simt_watching;
static const bool simt_watching_on = simt_watching = true;
#define PLANTED(name) (simt_fault() == std::integral_constant<uint32_t, simt_fault_number(#name)>::value)
#else
#define PLANTED(name) false
#endif
// Kernels are found by name, with the sizes of their parameters.
typedef void (*simt_thunk)(void** parameters);
extern "C" void simt_register(const char* name, simt_thunk thunk, const int* sizes, int count);
namespace simt_detail {
template <auto F> struct Caller;
template <class... A, void (*F)(A...)> struct Caller<F> {
  static constexpr int sizes[sizeof...(A) + 1] = {(int)sizeof(A)..., 0};
  template <size_t... I> __attribute__((no_sanitize("thread"))) static void with(void** p, std::index_sequence<I...>) {
    F(*(std::remove_cv_t<A>*)p[I]...);
  }
  __attribute__((no_sanitize("thread"))) static void call(void** p) { with(p, std::index_sequence_for<A...>{}); }
  explicit Caller(const char* name) { simt_register(name, call, sizes, sizeof...(A)); }
};
}
#define SIMT_EXPORT(name) static const simt_detail::Caller<&name> simt_export_##name(#name);
