// Weights in GGUF's types, each by what it takes to read it: a step is 256 columns, sub-block `p` of 0..7 of it 32 columns.
#pragma once
#include "subset.cuh"

enum Type { TYPE_F32, TYPE_F16, TYPE_BF16, TYPE_Q4_0, TYPE_Q4_1, TYPE_Q5_0, TYPE_Q5_1, TYPE_Q8_0, TYPE_Q2_K, TYPE_Q3_K, TYPE_Q4_K, TYPE_Q5_K, TYPE_Q6_K };

// `W` consecutive words from an address that is a multiple of `ALIGN`.
template <int ALIGN, int W> DEVICE void words_at(const uint8_t* p, uint32_t (&out)[W]) {
  if constexpr (ALIGN >= 16 && W % 4 == 0) {
#pragma unroll
    for (int i = 0; i < W; i += 4) { const uint4 v = load16(p + 4 * i); out[i] = v.x; out[i + 1] = v.y; out[i + 2] = v.z; out[i + 3] = v.w; }
  } else if constexpr (ALIGN >= 4) {
#pragma unroll
    for (int i = 0; i < W; i++) out[i] = *(const uint32_t*)(p + 4 * i);
  } else if constexpr (W == 1) {
    out[0] = *(const uint16_t*)p | (uint32_t)*(const uint16_t*)(p + 2) << 16;
  } else {
    const uint32_t odd = (uint32_t)(size_t)p & 2u;
    const uint32_t* from = (const uint32_t*)(p - odd);
    uint32_t raw[W + 1];
#pragma unroll
    for (int i = 0; i < W; i++) raw[i] = from[i];
    raw[W] = odd ? from[W] : 0u;
#pragma unroll
    for (int i = 0; i < W; i++) out[i] = funnel(raw[i], raw[i + 1], odd * 8u);
  }
}
DEVICE float half_at(const uint8_t* p) { return half_bits(*(const uint16_t*)p); }

// Types whose blocks have 32 columns: value = d * (quant - LESS) + m. A step has eight blocks.
template <int BLOCK_BYTES, int AT, int LESSENED, bool MIN, bool FIFTH> struct Small {
  static constexpr bool SUPER = false, MINIMUM = MIN;
  static constexpr int STEP = 8 * BLOCK_BYTES, LESS = LESSENED, ALIGN = BLOCK_BYTES % 8 == 0 ? 8 : BLOCK_BYTES % 4 == 0 ? 4 : 2;
  // Words `w` and following of sub-block `p`: four unsigned quants each. W is 8 (then w is 0), 2 or 1.
  template <int W> static DEVICE void quads(const uint8_t* step, int p, int w, uint32_t (&q)[W]) {
    const uint8_t* block = step + p * BLOCK_BYTES;
    if constexpr (AT < 0) {
      words_at<ALIGN, W>(block + 2 + 4 * w, q);
    } else {
      uint32_t fifth[1] = {0};
      if constexpr (FIFTH) words_at<ALIGN, 1>(block + AT - 4, fifth);
      if constexpr (W == 8) {
        uint32_t raw[4];
        words_at<ALIGN, 4>(block + AT, raw);
#pragma unroll
        for (int i = 0; i < 4; i++) { q[i] = raw[i] & 0x0f0f0f0fu; q[i + 4] = raw[i] >> 4 & 0x0f0f0f0fu; }
      } else {
        words_at<ALIGN, W>(block + AT + 4 * (w & 3), q);
#pragma unroll
        for (int i = 0; i < W; i++) q[i] = q[i] >> (w & 4) & 0x0f0f0f0fu;
      }
      // Bits 0..3 become bit 4 of bytes 0..3: of the four terms of the product none is carried.
      if constexpr (FIFTH)
#pragma unroll
        for (int i = 0; i < W; i++) q[i] |= (fifth[0] >> (4 * (w + i)) & 15u) * 0x02040810u & 0x10101010u;
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

// Types whose blocks have 256 columns: value = d * scale * (quant - LESS) - dmin * least. `SUB` columns share a scale.
struct SixBitHead {
  static constexpr bool SUPER = true, MINIMUM = true;
  static constexpr int LESS = 0, SUB = 32, ALIGN = 16;
  static DEVICE float2 factors(const uint8_t* step) { const uint32_t d = *(const uint32_t*)step; return make_float2(half_bits(d), half_bits(d >> 16)); }
  static DEVICE void scales(const uint8_t* step, int p, int (&scale)[2], int (&least)[2]) {
    const uint4 head = load16(step);
    const int low = p & 3;
    const uint32_t a = byte_of(head.y, low), b = byte_of(head.z, low), c = byte_of(head.w, low);
    scale[0] = scale[1] = (int)(p < 4 ? a & 63u : (c & 15u) | (a >> 6) << 4);
    least[0] = least[1] = (int)(p < 4 ? b & 63u : c >> 4 | (b >> 6) << 4);
  }
  static DEVICE uint32_t centred(uint32_t q) { return q; }
};
struct Q4_K : SixBitHead {
  static constexpr int STEP = 144;
  template <int W> static DEVICE void quads(const uint8_t* step, int p, int w, uint32_t (&q)[W]) {
    words_at<ALIGN, W>(step + 16 + 32 * (p >> 1) + 4 * w, q);
    const int shift = 4 * (p & 1);
#pragma unroll
    for (int i = 0; i < W; i++) q[i] = q[i] >> shift & 0x0f0f0f0fu;
  }
};
struct Q5_K : SixBitHead {
  static constexpr int STEP = 176;
  template <int W> static DEVICE void quads(const uint8_t* step, int p, int w, uint32_t (&q)[W]) {
    uint32_t fifth[W];
    words_at<ALIGN, W>(step + 48 + 32 * (p >> 1) + 4 * w, q);
    words_at<ALIGN, W>(step + 16 + 4 * w, fifth);
    const int shift = 4 * (p & 1);
#pragma unroll
    for (int i = 0; i < W; i++) q[i] = (q[i] >> shift & 0x0f0f0f0fu) | (fifth[i] >> p & 0x01010101u) << 4;
  }
};
struct Q2_K {
  static constexpr bool SUPER = true, MINIMUM = true;
  static constexpr int STEP = 84, LESS = 0, SUB = 16, ALIGN = 4;
  template <int W> static DEVICE void quads(const uint8_t* step, int p, int w, uint32_t (&q)[W]) {
    words_at<ALIGN, W>(step + 16 + 32 * (p >> 2) + 4 * w, q);
    const int shift = 2 * (p & 3);
#pragma unroll
    for (int i = 0; i < W; i++) q[i] = q[i] >> shift & 0x03030303u;
  }
  static DEVICE float2 factors(const uint8_t* step) { const uint32_t d = *(const uint32_t*)(step + 80); return make_float2(half_bits(d), half_bits(d >> 16)); }
  static DEVICE void scales(const uint8_t* step, int p, int (&scale)[2], int (&least)[2]) {
    const uint32_t both = *(const uint16_t*)(step + 2 * p);
    scale[0] = (int)(both & 15u); scale[1] = (int)(both >> 8 & 15u);
    least[0] = (int)(both >> 4 & 15u); least[1] = (int)(both >> 12);
  }
  static DEVICE uint32_t centred(uint32_t q) { return q; }
};
struct Q3_K {
  static constexpr bool SUPER = true, MINIMUM = false;
  static constexpr int STEP = 110, LESS = 4, SUB = 16, ALIGN = 2;
  template <int W> static DEVICE void quads(const uint8_t* step, int p, int w, uint32_t (&q)[W]) {
    uint32_t third[W];
    words_at<ALIGN, W>(step + 32 + 32 * (p >> 2) + 4 * w, q);
    words_at<ALIGN, W>(step + 4 * w, third);
    const int shift = 2 * (p & 3);
#pragma unroll
    for (int i = 0; i < W; i++) q[i] = (q[i] >> shift & 0x03030303u) | (third[i] >> p & 0x01010101u) << 2;
  }
  static DEVICE float2 factors(const uint8_t* step) { return make_float2(half_at(step + 108), 0.0f); }
  static DEVICE void scales(const uint8_t* step, int p, int (&scale)[2], int (&least)[2]) {
    // Scale 2p and 2p + 1: four bits each of bytes 2p mod 8, two bits each of bytes 8 + 2p mod 4.
    const uint32_t low = *(const uint16_t*)(step + 96 + (2 * p & 7)) >> (p & 4), high = *(const uint16_t*)(step + 104 + (2 * p & 3)) >> (p & 6);
    scale[0] = (int)((low & 15u) | (high & 3u) << 4) - 32;
    scale[1] = (int)((low >> 8 & 15u) | (high >> 8 & 3u) << 4) - 32;
    least[0] = least[1] = 0;
  }
  static DEVICE uint32_t centred(uint32_t q) { return (q + 0x7c7c7c7cu) ^ 0x80808080u; }
};
struct Q6_K {
  static constexpr bool SUPER = true, MINIMUM = false;
  static constexpr int STEP = 210, LESS = 32, SUB = 16, ALIGN = 2;
  template <int W> static DEVICE void quads(const uint8_t* step, int p, int w, uint32_t (&q)[W]) {
    uint32_t upper[W];
    words_at<ALIGN, W>(step + 64 * (p >> 2) + 32 * (p & 1) + 4 * w, q);
    words_at<ALIGN, W>(step + 128 + 32 * (p >> 2) + 4 * w, upper);
    const int four = 2 * (p & 2), two = 2 * (p & 3);
#pragma unroll
    for (int i = 0; i < W; i++) q[i] = (q[i] >> four & 0x0f0f0f0fu) | (upper[i] >> two & 0x03030303u) << 4;
  }
  static DEVICE float2 factors(const uint8_t* step) { return make_float2(half_at(step + 208), 0.0f); }
  static DEVICE void scales(const uint8_t* step, int p, int (&scale)[2], int (&least)[2]) {
    const uint32_t both = *(const uint16_t*)(step + 192 + 2 * p);
    scale[0] = signed_byte(both, 0); scale[1] = signed_byte(both, 1);
    least[0] = least[1] = 0;
  }
  static DEVICE uint32_t centred(uint32_t q) { return (q + 0x60606060u) ^ 0x80808080u; }
};

// Types without quants: eight columns from an address that is a multiple of 16, or 32 for F32.
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
