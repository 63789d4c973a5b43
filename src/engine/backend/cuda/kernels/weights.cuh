// Readers of weights in GGUF's types: a step is 256 columns, each of its sub-blocks `p` = 0..7 is 32 columns.
#pragma once
#include "subset.cuh"

enum Type { TYPE_F32, TYPE_F16, TYPE_BF16, TYPE_Q4_0, TYPE_Q4_1, TYPE_Q5_0, TYPE_Q5_1, TYPE_Q8_0, TYPE_Q2_K, TYPE_Q3_K, TYPE_Q4_K, TYPE_Q5_K, TYPE_Q6_K,
  TYPE_IQ4_NL, TYPE_IQ4_XS, TYPE_MXFP4 };

// `W` consecutive words at `at` bytes, a multiple of four, from an address that is a multiple of `ALIGN`. With an even address, they
// are also shifted right by `right`, less than 16 bits; with any other, `right` is 0. `MORE`: the following word may be read.
template <int ALIGN, int W, bool MORE = false> DEVICE void words_at(const uint8_t* base, int at, uint32_t (&out)[W], int right = 0) {
  const uint8_t* p = base + at;
  if constexpr (ALIGN >= 16 && W % 4 == 0) {
#pragma unroll
    for (int i = 0; i < W; i += 4) { const uint4 v = load16(p + 4 * i); out[i] = v.x; out[i + 1] = v.y; out[i + 2] = v.z; out[i + 3] = v.w; }
  } else if constexpr (ALIGN >= 4) {
#pragma unroll
    for (int i = 0; i < W; i++) out[i] = *(const uint32_t*)(p + 4 * i);
  } else if constexpr (W == 1 && ALIGN == 2) {
    out[0] = *(const uint16_t*)p | (uint32_t)*(const uint16_t*)(p + 2) << 16;
  } else {
    const uint32_t odd = (uint32_t)(size_t)base & (ALIGN == 2 ? 2u : 3u);
    const uint32_t* from = (const uint32_t*)(base - odd + at);
    uint32_t raw[W + 1];
#pragma unroll
    for (int i = 0; i < W; i++) raw[i] = from[i];
    raw[W] = MORE || odd ? from[W] : 0u;
#pragma unroll
    for (int i = 0; i < W; i++) out[i] = funnel(raw[i], raw[i + 1], odd * 8u + right);
  }
}
// Bits `of_a` of a and bits `of_b` of b.
DEVICE uint32_t joined(uint32_t a, uint32_t b, uint32_t of_a, uint32_t of_b) { return (a & of_a) | (b & of_b); }
DEVICE float half_at(const uint8_t* p) { return half_bits(*(const uint16_t*)p); }

// Types with blocks of 32 columns: value = d * (quant - LESS) + m. A step has eight blocks.
template <int BLOCK_BYTES, int AT, int LESSENED, bool MIN, bool FIFTH> struct Small {
  static constexpr bool SUPER = false, MINIMUM = MIN;
  static constexpr int STEP = 8 * BLOCK_BYTES, LESS = LESSENED, ALIGN = BLOCK_BYTES % 8 == 0 ? 8 : BLOCK_BYTES % 4 == 0 ? 4 : 2;
  // W words of sub-block `p` from `w` on, with four unsigned quants each. W is 8 (then w is 0), 2 or 1.
  template <int W> static DEVICE void quads(const uint8_t* step, int p, int w, uint32_t (&q)[W]) {
    const uint8_t* block = step + p * BLOCK_BYTES;
    if constexpr (AT < 0) {
      words_at<ALIGN, W>(block + 2, 4 * w, q);
    } else {
      uint32_t fifth[1] = {0};
      if constexpr (FIFTH) words_at<ALIGN, 1>(block + AT - 4, 0, fifth);
      if constexpr (W == 8) {
        uint32_t raw[4];
        words_at<ALIGN, 4>(block + AT, 0, raw);
#pragma unroll
        for (int i = 0; i < 4; i++) { q[i] = raw[i] & 0x0f0f0f0fu; q[i + 4] = raw[i] >> 4 & 0x0f0f0f0fu; }
      } else {
        words_at<ALIGN, W>(block + AT, 4 * (w & 3), q);
#pragma unroll
        for (int i = 0; i < W; i++) q[i] = q[i] >> (w & 4) & 0x0f0f0f0fu;
      }
      // Moves bits 0..3 to bit 4 of bytes 0..3: the four terms of the product cause no carry.
      if constexpr (FIFTH)
#pragma unroll
        for (int i = 0; i < W; i++) q[i] |= (fifth[0] >> (4 * (w + i)) & 15u) * 0x02040810u & 0x10101010u;
    }
  }
  // Products of the first and the last 16 quants of sub-block `p` with bytes.
  static DEVICE void dots(const uint8_t* step, int p, const int (&x)[8], int& low, int& high) {
    if constexpr (AT >= 0 && !FIFTH) {
      uint32_t raw[4];
      words_at<ALIGN, 4>(step + p * BLOCK_BYTES + AT, 0, raw);
      low = high = 0;
#pragma unroll
      for (int i = 0; i < 4; i++) { low = dp4a(raw[i] & 0x0f0f0f0fu, x[i], low); high = dp4a_unsigned(raw[i] & 0xf0f0f0f0u, x[i + 4], high); }
      high >>= 4;
    } else {
      uint32_t q[8];
      quads<8>(step, p, 0, q);
      low = high = 0;
#pragma unroll
      for (int i = 0; i < 4; i++) { low = dp4a((int)q[i], x[i], low); high = dp4a((int)q[i + 4], x[i + 4], high); }
    }
  }
  static DEVICE float2 factors(const uint8_t* step, int p) {
    const uint8_t* block = step + p * BLOCK_BYTES;
    return make_float2(half_at(block), MIN ? half_at(block + 2) : 0.0f);
  }
  static DEVICE uint32_t centred(uint32_t q) { return LESS == 0 ? q : (q + (128 - LESS) * 0x01010101u) ^ 0x80808080u; }
};
typedef Small<18, 2, 8, false, false> Q4_0;
typedef Small<20, 4, 0, true, false> Q4_1;
typedef Small<22, 6, 16, false, true> Q5_0;
typedef Small<24, 8, 0, true, true> Q5_1;
typedef Small<34, -1, 0, false, false> Q8_0;

// Tables of sixteen signed bytes: for IQ4_NL and IQ4_XS (`kvalues_iq4nl` in ggml's `ggml-common.h`), and for MXFP4 twice the values of E2M1
// ("OCP Microscaling Formats" 1.0, table 5).
struct Iq4 { static constexpr uint32_t A = 0xbfad9881u, B = 0xf6eaddcfu, C = 0x26190d01u, D = 0x71594535u; };
struct E2m1 { static constexpr uint32_t A = 0x03020100u, B = 0x0c080604u, C = 0xfdfeff00u, D = 0xf4f8fafcu; };
// Looks up the eight indices of a word: those in the lower halves of its bytes, and those in the upper halves.
template <class V> DEVICE uint2 looked_up(uint32_t word) {
  // Three bits select one of eight values in each half of the table, the fourth bit selects the half.
  const uint32_t at = word & 0x77777777u, half = (word >> 1 & 0x44444444u) | 0x32103210u;
  const uint32_t a = permuted(permuted(V::A, V::B, at), permuted(V::C, V::D, at), half);
  const uint32_t b = permuted(permuted(V::A, V::B, at >> 16), permuted(V::C, V::D, at >> 16), half >> 16);
  return make_uint2(permuted(a, b, 0x6420u), permuted(a, b, 0x7531u));
}

// Types with blocks of 32 columns, a scale followed by indices into a table: value = d * quant.
template <class T, class V, int AT> struct SmallTable {
  static constexpr bool SUPER = false, MINIMUM = false;
  static constexpr int STEP = 8 * (AT + 16), LESS = 0;
  template <int W> static DEVICE void quads(const uint8_t* step, int p, int w, uint32_t (&q)[W]) {
    const uint8_t* indices = step + p * (AT + 16) + AT;
    constexpr int WORDS = W == 8 ? 4 : W;
    uint32_t raw[WORDS];
    words_at<T::ALIGN, WORDS>(indices, 4 * (w & 3), raw);
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
      const uint2 both = looked_up<V>(raw[i]);
      if constexpr (W == 8) { q[i] = both.x; q[i + 4] = both.y; } else q[i] = w & 4 ? both.y : both.x;
    }
  }
  static DEVICE void dots(const uint8_t* step, int p, const int (&x)[8], int& low, int& high) {
    uint32_t q[8];
    quads<8>(step, p, 0, q);
    low = high = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) { low = dp4a((int)q[i], x[i], low); high = dp4a((int)q[i + 4], x[i + 4], high); }
  }
  static DEVICE float2 factors(const uint8_t* step, int p) { return make_float2(T::scale(step + p * (AT + 16)), 0.0f); }
  static DEVICE uint32_t centred(uint32_t q) { return q; }
};
struct IQ4_NL : SmallTable<IQ4_NL, Iq4, 2> {
  static constexpr int ALIGN = 2;
  static DEVICE float scale(const uint8_t* block) { return half_at(block); }
};
struct MXFP4 : SmallTable<MXFP4, E2m1, 1> {
  static constexpr int ALIGN = 1;
  // 2^(exponent - 127), halved for the table, bit-identical to cpu/table.rs: the smallest power is subnormal, and infinity minus itself
  // is NaN.
  static DEVICE float scale(const uint8_t* block) {
    const uint32_t bits = (uint32_t)*block << 23;
    const float power = as_float(bits == 0u ? 1u << 22 : bits);
    return fmaf(power, -0.5f, power);
  }
};

// Types with blocks of 256 columns: value = d * scale * (quant - LESS) - dmin * least. `SUB` columns share a scale.
//
// Scales and minimums of a half, 128 columns, are signed bytes in column order. Quants are stored in planes of bytes, each with
// some bits of several sub-blocks: `plane` returns the position and the shift of those of sub-block `p`.
//
// Products for a few tokens avoid shifting bits. Lane `p` of four has 16 columns of each sub-block of a half: `sixteens` reads
// them, multiplied by 2^(RAISED - up(j)) for sub-block `j` of the half. With the scale times 2^up(j), the sum is 2^RAISED times its
// true value, which is exact.
struct Plane { int at; uint32_t mask; int right, left; };
template <class T> struct Super {
  static constexpr bool SUPER = true;
  // c plus the products of four quants with bytes.
  static DEVICE int dot(uint32_t quants, uint32_t bytes, int c) { return dp4a_unsigned(quants, (int)bytes, c); }
  // W words of sub-block `p` from `w` on, with four unsigned quants each.
  template <int W> static DEVICE void quads(const uint8_t* step, int p, int w, uint32_t (&q)[W]) {
#pragma unroll
    for (int n = 0; n < T::PLANES; n++) {
      const Plane plane = T::plane(n, p);
      uint32_t raw[W];
      words_at<T::ALIGN, W>(step, plane.at + 4 * w, raw);
#pragma unroll
      for (int i = 0; i < W; i++) { const uint32_t bits = (raw[i] & plane.mask) >> plane.right << plane.left; q[i] = n ? q[i] | bits : bits; }
    }
  }
};
// One scale per 16 columns.
template <class T> struct Super16 : Super<T> {
  static constexpr int SUB = 16, WORDS = 2;
  // Scale of the first or the last 16 columns of sub-block `j`.
  static DEVICE int scale_of(const uint32_t (&scales)[2], int j, int last) { return signed_byte((j & 2 ? scales[1] : scales[0]) >> 8 * last, 2 * (j & 1)); }
  // The four scales of the first or the last two sub-blocks of the half.
  static DEVICE uint32_t four_of(const uint32_t (&scales)[2], int last) { return last ? scales[1] : scales[0]; }
};
template <class T> struct SixBitHead : Super<T> {
  static constexpr bool MINIMUM = true;
  static constexpr int LESS = 0, SUB = 32, WORDS = 1, ALIGN = 16;
  static DEVICE float2 factors(const uint8_t* step) { const uint32_t d = *(const uint32_t*)step; return make_float2(half_bits(d), half_bits(d >> 16)); }
  static DEVICE void scales(const uint8_t* step, int half, uint32_t (&scale)[1], uint32_t (&least)[1]) {
    const uint4 head = load16(step);
    // Six bits in one byte for the first half; for the second, four bits here and two above those of the first.
    const uint32_t six = half ? 0u : 0x3f3f3f3fu, four = half ? 0x0f0f0f0fu : 0u, two = half ? 0x30303030u : 0u;
    scale[0] = (head.y & six) | (head.w & four) | (head.y >> 2 & two);
    least[0] = (head.z & six) | (head.w >> 4 & four) | (head.z >> 2 & two);
  }
  static DEVICE int scale_of(const uint32_t (&scales)[1], int j, int) { return signed_byte(scales[0], j); }
  static DEVICE uint32_t four_of(const uint32_t (&scales)[1], int last) {
    const uint32_t two = scales[0] >> 16 * last;
    return joined(two, two << 8, 0x000000ffu, 0x00ff0000u) * 0x0101u;
  }
  static DEVICE uint32_t centred(uint32_t q) { return q; }
};
struct Q4_K : SixBitHead<Q4_K> {
  static constexpr int STEP = 144, PLANES = 1, RAISED = 4;
  static DEVICE Plane plane(int, int p) { const int s = 4 * (p & 1); return {16 + 32 * (p >> 1), 0x0f0f0f0fu << s, s, 0}; }
  static DEVICE int up(int j) { return j & 1 ? 0 : 4; }
  static DEVICE void sixteens(const uint8_t* step, int p, uint32_t (&q)[4][4]) {
    uint32_t a[4], b[4];
    words_at<16>(step, 16 + 64 * (p >> 1) + 16 * (p & 1), a); words_at<16>(step, 48 + 64 * (p >> 1) + 16 * (p & 1), b);
#pragma unroll
    for (int i = 0; i < 4; i++) { q[0][i] = a[i] & 0x0f0f0f0fu; q[1][i] = a[i] & 0xf0f0f0f0u; q[2][i] = b[i] & 0x0f0f0f0fu; q[3][i] = b[i] & 0xf0f0f0f0u; }
  }
};
struct Q5_K : SixBitHead<Q5_K> {
  static constexpr int STEP = 176, PLANES = 2, RAISED = 3;
  static DEVICE Plane plane(int n, int p) {
    const int s = 4 * (p & 1);
    if (n) return {16, 0x01010101u << p, p, 4};
    return {48 + 32 * (p >> 1), 0x0f0f0f0fu << s, s, 0};
  }
  static DEVICE int up(int j) { return j == 3 ? 0 : j == 1 ? 2 : 3; }
  static DEVICE void sixteens(const uint8_t* step, int p, uint32_t (&q)[4][4]) {
    uint32_t a[4], b[4], fifth[4];
    words_at<16>(step, 48 + 64 * (p >> 1) + 16 * (p & 1), a); words_at<16>(step, 80 + 64 * (p >> 1) + 16 * (p & 1), b);
    words_at<16>(step, 16 + 16 * (p & 1), fifth);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t f = fifth[i] << (p & 2 ? 0 : 4);           // bit 4 + j of sub-block j
      q[0][i] = joined(a[i], f, 0x0f0f0f0fu, 0x10101010u); q[1][i] = joined(a[i] >> 3, f, 0x1e1e1e1eu, 0x20202020u);
      q[2][i] = joined(b[i], f >> 2, 0x0f0f0f0fu, 0x10101010u); q[3][i] = joined(b[i] >> 1, f, 0x78787878u, 0x80808080u);
    }
  }
};
struct Q2_K : Super16<Q2_K> {
  static constexpr bool MINIMUM = true;
  static constexpr int STEP = 84, LESS = 0, ALIGN = 4, PLANES = 1, RAISED = 6;
  static DEVICE Plane plane(int, int p) { const int s = 2 * (p & 3); return {16 + 32 * (p >> 2), 0x03030303u << s, s, 0}; }
  static DEVICE float2 factors(const uint8_t* step) { const uint32_t d = *(const uint32_t*)(step + 80); return make_float2(half_bits(d), half_bits(d >> 16)); }
  static DEVICE void scales(const uint8_t* step, int half, uint32_t (&scale)[2], uint32_t (&least)[2]) {
    words_at<4>(step, 8 * half, scale);
#pragma unroll
    for (int i = 0; i < 2; i++) { least[i] = scale[i] >> 4 & 0x0f0f0f0fu; scale[i] &= 0x0f0f0f0fu; }
  }
  static DEVICE int up(int j) { return 6 - 2 * j; }
  static DEVICE void sixteens(const uint8_t* step, int p, uint32_t (&q)[4][4]) {
    uint32_t a[4];
    words_at<4>(step, 16 + 16 * p, a);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) q[j][i] = a[i] & 0x03030303u << 2 * j;
  }
  static DEVICE uint32_t centred(uint32_t q) { return q; }
};
struct Q3_K : Super16<Q3_K> {
  static constexpr bool MINIMUM = false;
  static constexpr int STEP = 110, LESS = 4, ALIGN = 2, PLANES = 2, RAISED = 4;
  static DEVICE Plane plane(int n, int p) {
    const int s = 2 * (p & 3);
    if (n) return {0, 0x01010101u << p, p, 2};
    return {32 + 32 * (p >> 2), 0x03030303u << s, s, 0};
  }
  static DEVICE float2 factors(const uint8_t* step) { return make_float2(half_at(step + 108), 0.0f); }
  static DEVICE void scales(const uint8_t* step, int half, uint32_t (&scale)[2], uint32_t (&least)[2]) {
    // Eight bytes with four bits each, and four with two.
    uint32_t raw[3];
    words_at<2>(step, 96, raw, 4 * half);
#pragma unroll
    for (int i = 0; i < 2; i++) { scale[i] = (joined(raw[i], raw[2] << (i ? 2 : 4), 0x0f0f0f0fu, 0x30303030u) + 0x60606060u) ^ 0x80808080u; least[i] = 0u; }    // less 32
  }
  static DEVICE int up(int j) { return j == 3 ? 0 : j == 0 ? 4 : 2; }
  static DEVICE void sixteens(const uint8_t* step, int p, uint32_t (&q)[4][4]) {
    uint32_t a[4], third[4];
    words_at<2, 4, true>(step, 32 + 16 * p, a); words_at<2, 4, true>(step, 16 * (p & 1), third, 4 * (p >> 1));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t two = third[i] << 2, three = third[i] << 3, down = a[i] >> 2;
      q[0][i] = joined(a[i], two, 0x03030303u, 0x04040404u); q[1][i] = joined(a[i], three, 0x0c0c0c0cu, 0x10101010u);
      q[2][i] = joined(down, two, 0x0c0c0c0cu, 0x10101010u); q[3][i] = joined(down, three, 0x30303030u, 0x40404040u);
    }
  }
  static DEVICE uint32_t centred(uint32_t q) { return (q + 0x7c7c7c7cu) ^ 0x80808080u; }
};
struct Q6_K : Super16<Q6_K> {
  static constexpr bool MINIMUM = false;
  static constexpr int STEP = 210, LESS = 32, ALIGN = 2, PLANES = 2, RAISED = 2;
  static DEVICE Plane plane(int n, int p) {
    const int four = 2 * (p & 2), two = 2 * (p & 3);
    if (n) return {128 + 32 * (p >> 2), 0x03030303u << two, two, 4};
    return {64 * (p >> 2) + 32 * (p & 1), 0x0f0f0f0fu << four, four, 0};
  }
  static DEVICE float2 factors(const uint8_t* step) { return make_float2(half_at(step + 208), 0.0f); }
  static DEVICE void scales(const uint8_t* step, int half, uint32_t (&scale)[2], uint32_t (&least)[2]) {
    words_at<2>(step, 192 + 8 * half, scale); least[0] = least[1] = 0u;
  }
  static DEVICE int up(int j) { return j < 2 ? 2 : 0; }
  static DEVICE void sixteens(const uint8_t* step, int p, uint32_t (&q)[4][4]) {
    uint32_t a[4], b[4], two[4];
    words_at<2, 4, true>(step, 64 * (p >> 1) + 16 * (p & 1), a); words_at<2, 4, true>(step, 32 + 64 * (p >> 1) + 16 * (p & 1), b);
    words_at<2, 4, true>(step, 128 + 16 * p, two);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      q[0][i] = joined(a[i], two[i] << 4, 0x0f0f0f0fu, 0x30303030u); q[1][i] = joined(b[i], two[i] << 2, 0x0f0f0f0fu, 0x30303030u);
      q[2][i] = joined(a[i] >> 2, two[i] << 2, 0x3c3c3c3cu, 0xc0c0c0c0u); q[3][i] = joined(b[i] >> 2, two[i], 0x3c3c3c3cu, 0xc0c0c0c0u);
    }
  }
  static DEVICE uint32_t centred(uint32_t q) { return (q + 0x60606060u) ^ 0x80808080u; }
};

// One scale per 32 columns, and indices into a table of signed values.
struct IQ4_XS : Super<IQ4_XS> {
  static constexpr bool MINIMUM = false;
  static constexpr int STEP = 136, LESS = 0, SUB = 32, WORDS = 1, ALIGN = 8, RAISED = 0;
  template <int W> static DEVICE void quads(const uint8_t* step, int p, int w, uint32_t (&q)[W]) {
    words_at<ALIGN, W>(step, 8 + 16 * p + 4 * (w & 3), q);
#pragma unroll
    for (int i = 0; i < W; i++) { const uint2 both = looked_up<Iq4>(q[i]); q[i] = w & 4 ? both.y : both.x; }
  }
  static DEVICE int dot(uint32_t quants, uint32_t bytes, int c) { return dp4a((int)quants, (int)bytes, c); }
  static DEVICE float2 factors(const uint8_t* step) { return make_float2(half_at(step), 0.0f); }
  static DEVICE void scales(const uint8_t* step, int half, uint32_t (&scale)[1], uint32_t (&least)[1]) {
    // After the factor: two bits of each of eight scales, then four bits of each.
    const uint2 head = load8(step);
    uint32_t two = head.x >> (16 + 8 * half) & 0xffu, four = head.y >> 16 * half & 0xffffu;
    two = (two | two << 12) & 0x000f000fu; two = (two | two << 6) & 0x03030303u;
    four = (four | four << 8) & 0x00ff00ffu; four = (four | four << 4) & 0x0f0f0f0fu;
    scale[0] = ((four | two << 4) + 0x60606060u) ^ 0x80808080u; least[0] = 0u;    // less 32
  }
  static DEVICE int scale_of(const uint32_t (&scales)[1], int j, int) { return signed_byte(scales[0], j); }
  static DEVICE int up(int) { return 0; }
  static DEVICE void sixteens(const uint8_t* step, int p, uint32_t (&q)[4][4]) {
    const int upper = 4 * (p & 1);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      uint32_t raw[4];
      words_at<ALIGN, 4>(step, 8 + 64 * (p >> 1) + 16 * j, raw);
      // Combines half bytes of two words in one.
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const uint2 both = looked_up<Iq4>(joined(raw[i] >> upper, raw[i + 1] << (4 - upper), 0x0f0f0f0fu, 0xf0f0f0f0u));
        q[j][i] = both.x; q[j][i + 1] = both.y;
      }
    }
  }
  static DEVICE uint32_t centred(uint32_t q) { return q; }
};

// Unquantised types: eight columns from an address that is a multiple of 16, or of 32 for F32.
template <int KIND> struct Plain {
  static constexpr int BYTES = KIND == TYPE_F32 ? 4 : 2;
  static DEVICE void eight(uint4 a, uint4 b, float (&v)[8]) {
    const uint32_t r[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if constexpr (KIND == TYPE_F32) v[i] = as_float(r[i]);
      else if constexpr (KIND == TYPE_F16) v[i] = half_bits(i & 1 ? r[i >> 1] >> 16 : r[i >> 1]);
      else v[i] = as_float(i & 1 ? r[i >> 1] & 0xffff0000u : r[i >> 1] << 16);
    }
  }
};
