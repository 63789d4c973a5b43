// Activations in the input formats of products, with the same scales and bytes as in the CPU backend (cpu/quant.rs).
//
// The copies of a token are consecutive, each aligned to 16 bytes: floats; Q8_K as bytes, 16-bit sums of 16 bytes each and a scale
// per 256 bytes; Q8_0 the same with a scale per 32; f16; bf16. Only those in `formats` are present.
#pragma once
#include "subset.cuh"

enum Format { FORMAT_F32 = 1, FORMAT_Q8K = 2, FORMAT_Q8_0 = 4, FORMAT_F16 = 8, FORMAT_BF16 = 16 };

struct Copies { uint8_t* base; uint32_t formats, columns, stride, unused; };    // stride: bytes from one token to the next

DEVICE uint32_t format_bytes(uint32_t format, uint32_t columns) {
  const uint32_t bytes = format == FORMAT_F32 ? 4 * columns : format == FORMAT_Q8K ? columns + columns / 8 + columns / 64
    : format == FORMAT_Q8_0 ? columns + columns / 8 + columns / 8 : 2 * columns;
  return (bytes + 15u) & ~15u;
}
// Offset of the copy in `format` among those of a token.
DEVICE uint32_t format_offset(uint32_t formats, uint32_t format, uint32_t columns) {
  uint32_t at = 0;
#pragma unroll
  for (uint32_t f = FORMAT_F32; f <= FORMAT_BF16; f <<= 1) if (f < format && (formats & f)) at += format_bytes(f, columns);
  return at;
}

// Writes chunk `chunk`: eight elements per lane, 256 per warp. All lanes call it; lanes beyond the columns write nothing.
DEVICE void put_copies(const Copies& to, uint32_t token, uint32_t chunk, const float (&v)[8]) {
  const uint32_t lane = threadIdx.x & 31u, at = chunk * 256u + lane * 8u, columns = to.columns;
  const bool inside = at < columns;
  uint8_t* row = to.base + (size_t)token * to.stride;
  if (to.formats & FORMAT_F32 && inside) {
    float* out = (float*)row + at;
    store16(out, make_uint4(as_bits(v[0]), as_bits(v[1]), as_bits(v[2]), as_bits(v[3])));
    store16(out + 4, make_uint4(as_bits(v[4]), as_bits(v[5]), as_bits(v[6]), as_bits(v[7])));
  }
  if (to.formats & (FORMAT_Q8K | FORMAT_Q8_0)) {
    // Magnitudes as bits, which have the same order; NaN is above infinity, so it is not lost.
    uint32_t largest = 0, lowest = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const uint32_t size = as_bits(inside ? v[i] : 0.0f) & 0x7fffffffu;
      largest = size > largest ? size : largest;
      if (inside && -v[i] > 0.0f) lowest = size > lowest ? size : lowest;
    }
    const uint32_t of_32 = group_max<4>(largest);
#pragma unroll
    for (int two = 0; two < 2; two++) {
      const uint32_t format = two ? FORMAT_Q8_0 : FORMAT_Q8K;
      if (!(to.formats & format)) continue;
      float scale, inverse;
      if (two) {
        const float most = as_float(of_32);
        const uint32_t finite = of_32 < 0x7f800000u, bits = half_of(most / 127.0f);
        // Beyond the largest f16, the CPU backend reads infinity as 65536.
        scale = !finite ? as_float(0x7fc00000u) : most / 127.0f >= 65520.0f ? 65536.0f : half_bits(bits);
        inverse = of_32 == 0u ? 0.0f : 127.0f / most;
      } else {
        const uint32_t all = group_max<32>(largest), below = group_max<32>(lowest);
        const float furthest = below == all ? -as_float(below) : as_float(all);
        inverse = furthest == 0.0f ? 0.0f : -127.0f / furthest;
        scale = furthest == 0.0f ? 0.0f : 1.0f / inverse;
      }
      uint32_t bytes[8]; int sum = 0;
#pragma unroll
      for (int i = 0; i < 8; i++) { bytes[i] = nearest(clamp_to((inside ? v[i] : 0.0f) * inverse, -127.0f, 127.0f)); sum += (int)(int8_t)bytes[i]; }
      sum += __shfl_xor_sync(ALL, sum, 1);
      if (!inside) continue;
      uint8_t* q = row + format_offset(to.formats, format, columns);
      store8(q + at, make_uint2(bytes[0] | bytes[1] << 8 | bytes[2] << 16 | bytes[3] << 24, bytes[4] | bytes[5] << 8 | bytes[6] << 16 | bytes[7] << 24));
      if (!(lane & 1u)) *(int16_t*)(q + columns + at / 8u) = (int16_t)sum;
      float* scales = (float*)(q + columns + columns / 8u);
      if (two ? !(lane & 3u) : lane == 0u) scales[two ? at / 32u : chunk] = scale;
    }
  }
#pragma unroll
  for (int two = 0; two < 2; two++) {
    const uint32_t format = two ? FORMAT_BF16 : FORMAT_F16;
    if (!(to.formats & format) || !inside) continue;
    uint32_t h[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      // f16 as converted by products: infinite beyond the largest.
      h[i] = two ? brain_of(v[i]) : fabsf(v[i]) >= 65520.0f ? 0x7c00u | (as_bits(v[i]) >> 16 & 0x8000u) : half_of(v[i]);
    }
    store16(row + format_offset(to.formats, format, columns) + at * 2u, make_uint4(h[0] | h[1] << 16, h[2] | h[3] << 16, h[4] | h[5] << 16, h[6] | h[7] << 16));
  }
}
