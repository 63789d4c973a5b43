// Rows of the KV cache by their specification, independent of the kernels.
#pragma once
#include "blocks.h"
inline uint32_t cell_group_bytes(int kind, int count) { return kind == 0 ? 2 * count : 2 + (kind == 1 ? count : (count + 1) / 2); }
inline uint32_t cell_row_bytes(int kind, int dim) { uint32_t n = 0; for (int at = 0; at < dim; at += 32) n += cell_group_bytes(kind, std::min(32, dim - at)); return n; }
inline std::vector<uint8_t> store_cells(int kind, const float* x, int dim) {
  std::vector<uint8_t> out;
  for (int at = 0; at < dim; at += 32) {
    const int count = std::min(32, dim - at); const float* g = x + at;
    std::vector<uint8_t> bytes(cell_group_bytes(kind, count));
    auto put = [&](size_t i, uint16_t h) { memcpy(&bytes[i], &h, 2); };
    float least = 0, top = 0;
    for (int i = 0; i < count; i++) { least = std::min(least, g[i]); top = std::max(top, g[i]); }
    if (kind == 0) for (int i = 0; i < count; i++) put(2 * i, half(g[i]));
    else {
      const float scale = kind == 1 ? std::max(top, -least) / 127.0f : (top >= -least ? top : least) / -8.0f;
      put(0, half(scale));
      const float read = (float)full(half(scale)), inverse = read == 0 ? 0 : 1.0f / read;
      const int low = (count + 1) / 2;
      for (int i = 0; i < count; i++) {
        if (kind == 1) bytes[2 + i] = (uint8_t)(int8_t)std::nearbyint(std::min(127.0f, std::max(-127.0f, g[i] * inverse)));
        else { const int q = (int)std::nearbyint(std::min(7.0f, std::max(-8.0f, g[i] * inverse)) + 8.0f); if (i < low) bytes[2 + i] = (uint8_t)q; else bytes[2 + i - low] |= (uint8_t)(q << 4); }
      }
    }
    out.insert(out.end(), bytes.begin(), bytes.end());
  }
  return out;
}
inline double load_cell(int kind, const uint8_t* row, int at, int dim) {
  const uint8_t* g = row + at / 32 * cell_group_bytes(kind, 32); const int i = at % 32, count = std::min(32, dim - at / 32 * 32), low = (count + 1) / 2;
  if (kind == 0) return half_at(row + 2 * at);
  if (kind == 1) return half_at(g) * (int8_t)g[2 + i];
  return half_at(g) * ((i < low ? g[2 + i] & 15 : g[2 + i - low] >> 4) - 8);
}
// Largest difference between stored and read values: half a step, a whole one at the shorter end of q4, plus rounding.
inline double cell_step(int kind, const uint8_t* row, int at, int dim) {
  if (kind == 0) return std::fabs(load_cell(0, row, at, dim)) / 1024 + 1e-6;
  return std::fabs(half_at(row + at / 32 * cell_group_bytes(kind, 32))) * (kind == 1 ? 0.52 : 1.02) + 1e-6;
}
