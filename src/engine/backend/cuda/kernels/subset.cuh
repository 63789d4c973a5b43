// Subset of CUDA C used by the kernels: compiled by NVRTC for devices, and by g++ with tests/cuda/simt/simt.h for tests.
// For its rules and their tests see docs/cuda.md.
#pragma once
#ifdef SIMT_HOST
#include "simt.h"
#else
typedef unsigned char uint8_t; typedef signed char int8_t; typedef unsigned short uint16_t; typedef short int16_t;
typedef unsigned int uint32_t; typedef int int32_t; typedef unsigned long long uint64_t;
#define SIMT_EXPORT(name)
// A fault injected by tests, which must detect it.
#define PLANTED(name) false
#define DYNAMIC_SHARED(name) extern __shared__ uint4 name[]
// One function per instruction, in PTX: NVRTC 12.2 leaves calls of `__dp4a` unresolved.
#define DEVICE __device__ __forceinline__
// c plus the products of four pairs of signed bytes.
DEVICE int dp4a(int a, int b, int c) { int d; asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); return d; }
// c plus the products of four unsigned bytes of a with four signed bytes of b.
DEVICE int dp4a_unsigned(uint32_t a, int b, int c) { int d; asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); return d; }
// c plus the products of two signed 16-bit numbers of a with the lower, or the upper, two signed bytes of b.
DEVICE int dp2a_lo(int a, int b, int c) { int d; asm("dp2a.lo.s32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); return d; }
DEVICE int dp2a_hi(int a, int b, int c) { int d; asm("dp2a.hi.s32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); return d; }
// Lower word of high:low shifted right.
DEVICE uint32_t funnel(uint32_t low, uint32_t high, uint32_t bits) { uint32_t d; asm("shf.r.wrap.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(low), "r"(high), "r"(bits)); return d; }
// Four of the eight bytes of b:a, each selected by four bits of `which`: a byte number in the lower three, the upper one clear.
DEVICE uint32_t permuted(uint32_t a, uint32_t b, uint32_t which) { uint32_t d; asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(which)); return d; }
DEVICE float half_bits(uint32_t b) { float f; asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(f) : "r"(b & 0xffffu)); return f; }
DEVICE uint4 load16(const void* p) { return *(const uint4*)p; }
DEVICE uint2 load8(const void* p) { return *(const uint2*)p; }
DEVICE void store16(void* p, uint4 v) { *(uint4*)p = v; }
DEVICE void store8(void* p, uint2 v) { *(uint2*)p = v; }
// Data read once bypasses the first-level cache, so that activations stay cached.
DEVICE uint4 load16_once(const void* p) {
  uint4 v; asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p)); return v;
}
// Load from the second-level cache: the first level may be stale for data written by another block of the grid.
DEVICE float load_shared_by_blocks(const float* p) { float v; asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory"); return v; }
// Address of shared memory, as an operand of instructions.
typedef uint32_t Shared;
DEVICE Shared shared_of(const void* p) { uint32_t s; asm("{.reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t;}" : "=r"(s) : "l"(p)); return s; }
// Prefetches the surrounding 128 bytes into the second-level cache.
DEVICE void copy16_async(Shared to, const void* from) { asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory"); }
DEVICE void copy4_async(Shared to, const void* from) { asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(from) : "memory"); }
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all but the last `left` committed groups of this thread have arrived.
template <int left> DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(left) : "memory"); }
// Four 8x8 matrices of 16-bit words: lane 8 m + r addresses row r of matrix m; a lane receives two words of row lane / 4 of each.
DEVICE void load_matrices(uint32_t (&r)[4], Shared at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
DEVICE uint32_t atomic_add(uint32_t* p, uint32_t v) { uint32_t d; asm volatile("atom.global.add.u32 %0, [%1], %2;" : "=r"(d) : "l"(p), "r"(v) : "memory"); return d; }
DEVICE void atomic_or(uint32_t* p, uint32_t v) { asm volatile("red.global.or.b32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
DEVICE void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// D (16x8, s32) += A (16x32, s8, by rows) * B (32x8, s8, by columns)
DEVICE void mma_16x8x32(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
    : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// D (16x8, s32) += A (16x16, s8, by rows) * B (16x8, s8, by columns)
DEVICE void mma_16x8x16(int (&d)[4], const uint32_t (&a)[2], uint32_t b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
    : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(b));
}
#endif

#define ALL 0xffffffffu
#define LEAST __uint_as_float(0xff800000u)
DEVICE float as_float(uint32_t b) { return __uint_as_float(b); }
DEVICE uint32_t as_bits(float v) { return __float_as_uint(v); }
DEVICE int byte_of(uint32_t word, int at) { return (int)(word >> 8 * at & 0xffu); }
DEVICE int signed_byte(uint32_t word, int at) { return (int)(int8_t)(word >> 8 * at & 0xffu); }
DEVICE int low_short(uint32_t word) { return (int)(int16_t)(word & 0xffffu); }
DEVICE int high_short(uint32_t word) { return (int)(int16_t)(word >> 16); }

// Pairwise sum over a warp, bit-identical in all lanes.
DEVICE float warp_sum(float v) {
#pragma unroll
  for (int m = 16; m > 0; m >>= 1) v += __shfl_xor_sync(ALL, v, m);
  return v;
}
DEVICE float warp_max(float v) {
#pragma unroll
  for (int m = 16; m > 0; m >>= 1) v = fmaxf(v, __shfl_xor_sync(ALL, v, m));
  return v;
}
// Maximum over the lanes that differ in the bits of `lanes` - 1.
template <int lanes> DEVICE uint32_t group_max(uint32_t v) {
#pragma unroll
  for (int m = lanes / 2; m > 0; m >>= 1) { const uint32_t other = __shfl_xor_sync(ALL, v, m); v = other > v ? other : v; }
  return v;
}

// e^x, bit-identical to the CPU backend (cpu/float.rs): clamped at -87 and 88; NaN stays NaN.
DEVICE float exp_of(float x) {
  x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
  const float rounded = fmaf(x, 1.44269504f, 12582912.0f), power = rounded - 12582912.0f;
  const float rest = fmaf(power, 2.12194440e-4f, fmaf(power, -0.693359375f, x));
  float series = fmaf(1.9875691e-4f, rest, 1.3982e-3f);
  series = fmaf(series, rest, 8.333452e-3f); series = fmaf(series, rest, 4.1665796e-2f);
  series = fmaf(series, rest, 0.16666665f); series = fmaf(series, rest, 0.5f);
  return (fmaf(series, rest * rest, rest) + 1.0f) * as_float((as_bits(rounded) << 23) + 0x3f800000u);
}
DEVICE float sigmoid_of(float x) { return 1.0f / (1.0f + exp_of(-x)); }
DEVICE float silu_of(float x) { return x / (1.0f + exp_of(-x)); }
DEVICE float gelu_of(float x) { return x * sigmoid_of(1.595769f * x * fmaf(0.044715f * x, x, 1.0f)); }
// ln x for normal x > 0 (Cephes' logf).
DEVICE float log_of(float x) {
  uint32_t bits = as_bits(x);
  int power = (int)(bits >> 23) - 126;
  float m = as_float((bits & 0x007fffffu) | 0x3f000000u);        // 0.5 to 1
  if (m < 0.70710678f) { m = m + m; power -= 1; }
  m -= 1.0f;
  const float z = m * m, e = (float)power;
  float p = fmaf(7.0376836292e-2f, m, -1.1514610310e-1f);
  p = fmaf(p, m, 1.1676998740e-1f); p = fmaf(p, m, -1.2420140846e-1f); p = fmaf(p, m, 1.4249322787e-1f);
  p = fmaf(p, m, -1.6668057665e-1f); p = fmaf(p, m, 2.0000714765e-1f); p = fmaf(p, m, -2.4999993993e-1f);
  p = fmaf(p, m, 3.3333331174e-1f);
  float y = fmaf(p * z, m, e * -2.12194440e-4f);
  y = fmaf(-0.5f, z, y);
  return fmaf(e, 0.693359375f, m + y);
}
// ln(1 + e^x)
DEVICE float softplus_of(float x) {
  if (x > 20.0f) return x;
  const float y = exp_of(x), u = 1.0f + y;
  return u == 1.0f ? y : log_of(u) + (y - (u - 1.0f)) / u;       // the second term restores what the addition lost
}
DEVICE float tanh_of(float x) {
  const float size = fabsf(x);
  if (size > 0.625f) { const float t = 1.0f - 2.0f / (exp_of(2.0f * size) + 1.0f); return x < 0.0f ? -t : t; }
  const float z = x * x;
  float p = fmaf(-5.70498872745e-3f, z, 2.06390887954e-2f);
  p = fmaf(p, z, -5.37397155531e-2f); p = fmaf(p, z, 1.33314422036e-1f); p = fmaf(p, z, -3.33332819422e-1f);
  return fmaf(p * z, x, x);
}

// Nearest finite f16, ties to even, bit-identical to cpu/cells.rs.
DEVICE uint32_t half_of(float x) {
  x = x < -65504.0f ? -65504.0f : x > 65504.0f ? 65504.0f : x;
  const uint32_t bits = as_bits(x), magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  const uint32_t small = as_bits(as_float(magnitude) + 0.5f) - (126u << 23);
  uint32_t half = magnitude < 113u << 23 ? small : normal;
  half = magnitude > 0x7f800000u ? 0x7e00u : half;
  return (half | (bits >> 16 & 0x8000u)) & 0xffffu;
}
// Nearest bf16, ties to even.
DEVICE uint32_t brain_of(float x) {
  const uint32_t bits = as_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bits >> 16 | 0x40u;
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
// Nearest integer, ties to even, in the lowest byte; for values between -2^22 and 2^22.
DEVICE uint32_t nearest(float x) { return as_bits(x + 12582912.0f) & 0xffu; }
DEVICE float clamp_to(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

// Returns whether this is the last of `expected` blocks to arrive, which sees what the others wrote before they arrived. No block
// waits. All threads of a block call it; `slot` is a word of shared memory.
DEVICE bool last_to_arrive(uint32_t* counter, uint32_t expected, uint32_t* slot) {
  __syncthreads();
  if (threadIdx.x == 0) {
    if (!PLANTED(NO_FENCE_BEFORE)) fence();
    const uint32_t before = atomic_add(counter, 1u);
    *slot = before == expected - 1u;
    if (!PLANTED(NO_FENCE_AFTER)) fence();
    if (before == expected - 1u) atomic_add(counter, 0u - expected);   // reset for the next launch
  }
  __syncthreads();
  return *slot != 0u;
}
