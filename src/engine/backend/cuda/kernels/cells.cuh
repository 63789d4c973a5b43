// Rows of the KV cache, byte-identical to those of the CPU backend (cpu/cells.rs): groups of 32 elements share a scale.
#pragma once
#include "subset.cuh"

enum CellKind { CELL_F16, CELL_Q8, CELL_Q4 };
#define KV_BLOCK_TOKENS 64u

DEVICE uint32_t cell_group_bytes(uint32_t kind, uint32_t elements) {
  return kind == CELL_F16 ? 2u * elements : 2u + (kind == CELL_Q8 ? elements : (elements + 1u) / 2u);
}
DEVICE uint32_t cell_row_bytes(uint32_t kind, uint32_t dim) {
  const uint32_t rest = dim % 32u;
  return dim / 32u * cell_group_bytes(kind, 32u) + (rest ? cell_group_bytes(kind, rest) : 0u);
}
// Element `at` of a row of `dim`.
DEVICE float read_cell(uint32_t kind, const uint8_t* row, uint32_t at, uint32_t dim) {
  if (kind == CELL_F16) return half_bits(*(const uint16_t*)(row + 2u * at));
  const uint32_t group = at / 32u, i = at % 32u;
  const uint8_t* bytes = row + group * cell_group_bytes(kind, 32u);
  const float scale = half_bits(*(const uint16_t*)bytes);
  if (kind == CELL_Q8) return (float)(int8_t)bytes[2u + i] * scale;
  const uint32_t half = (min(32u, dim - group * 32u) + 1u) / 2u;
  const int four = i < half ? bytes[2u + i] & 15 : bytes[2u + i - half] >> 4;
  return ((float)four - 8.0f) * scale;
}
// Writes a group of `count` elements, one per lane; further lanes pass zero. All lanes call it.
DEVICE void write_cells(uint32_t kind, float v, uint32_t count, uint8_t* group) {
  const uint32_t lane = threadIdx.x & 31u;
  if (kind == CELL_F16) {
    if (lane < count) *(uint16_t*)(group + 2u * lane) = (uint16_t)half_of(v);
    return;
  }
  // Minimum and maximum of the group and zero; NaN is ignored.
  float least = v < 0.0f ? v : 0.0f, most = v > 0.0f ? v : 0.0f;
#pragma unroll
  for (int m = 16; m > 0; m >>= 1) { least = fminf(least, __shfl_xor_sync(ALL, least, m)); most = fmaxf(most, __shfl_xor_sync(ALL, most, m)); }
  const float furthest = most >= -least ? most : least;
  const uint32_t bits = half_of(kind == CELL_Q8 ? fmaxf(most, -least) / 127.0f : furthest / -8.0f);
  const float scale = half_bits(bits), inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
  if (lane == 0u) *(uint16_t*)group = (uint16_t)bits;
  if (kind == CELL_Q8) {
    if (lane < count) group[2u + lane] = (uint8_t)nearest(clamp_to(v * inverse, -127.0f, 127.0f));
    return;
  }
  const uint32_t half = (count + 1u) / 2u, four = nearest(clamp_to(v * inverse, -8.0f, 7.0f) + 8.0f);
  const uint32_t upper = __shfl_sync(ALL, four, (int)((lane + half) & 31u));
  if (lane < half) group[2u + lane] = (uint8_t)((four & 15u) | (lane + half < count ? upper << 4 : 0u));
}
