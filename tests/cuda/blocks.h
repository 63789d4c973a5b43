// GGUF's types by their specification, element by element.
#pragma once
#include "activations.h"
struct TypeInfo { const char* name; int number, block, bytes, format; double sectors; };
// Numbers as in weights.cuh.
inline const TypeInfo TYPES[] = {
  {"F32", 0, 1, 4, FORMAT_F32, 0.95}, {"F16", 1, 1, 2, FORMAT_F16, 0.95}, {"BF16", 2, 1, 2, FORMAT_BF16, 0.95},
  {"Q4_0", 3, 32, 18, FORMAT_Q8_0, 0.95}, {"Q4_1", 4, 32, 20, FORMAT_Q8_0, 0.95}, {"Q5_0", 5, 32, 22, FORMAT_Q8_0, 0.95}, {"Q5_1", 6, 32, 24, FORMAT_Q8_0, 0.95}, {"Q8_0", 7, 32, 34, FORMAT_Q8_0, 0.95},
  {"Q2_K", 8, 256, 84, FORMAT_Q8K, 0.95}, {"Q3_K", 9, 256, 110, FORMAT_Q8K, 0.95}, {"Q4_K", 10, 256, 144, FORMAT_Q8K, 0.95}, {"Q5_K", 11, 256, 176, FORMAT_Q8K, 0.95}, {"Q6_K", 12, 256, 210, FORMAT_Q8K, 0.95},
  {"IQ4_NL", 13, 32, 18, FORMAT_Q8_0, 0.95}, {"IQ4_XS", 14, 256, 136, FORMAT_Q8K, 0.95}, {"MXFP4", 15, 32, 17, FORMAT_Q8_0, 0.95},
};
inline const TypeInfo& type_of(const char* name) { for (auto& t : TYPES) if (!strcmp(t.name, name)) return t; exit(2); }
inline double half_at(const uint8_t* p) { uint16_t h; memcpy(&h, p, 2); return full(h); }
inline const int IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
inline const double E2M1_VALUES[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};
// Element `i` of a block.
inline double element(const TypeInfo& type, const uint8_t* b, int i) {
  const std::string n = type.name;
  if (n == "F32") { float f; memcpy(&f, b, 4); return f; }
  if (n == "F16") return half_at(b);
  if (n == "BF16") { uint32_t w = (uint32_t)b[0] << 16 | (uint32_t)b[1] << 24; float f; memcpy(&f, &w, 4); return f; }
  if (n == "Q8_0") return half_at(b) * (int8_t)b[2 + i];
  if (n == "Q4_0") return half_at(b) * ((i < 16 ? b[2 + i] & 15 : b[2 + i - 16] >> 4) - 8);
  if (n == "Q4_1") return half_at(b) * (i < 16 ? b[4 + i] & 15 : b[4 + i - 16] >> 4) + half_at(b + 2);
  if (n == "Q5_0") { int four = i < 16 ? b[6 + i] & 15 : b[6 + i - 16] >> 4; return half_at(b) * ((four | (b[2 + i / 8] >> i % 8 & 1) << 4) - 16); }
  if (n == "Q5_1") { int four = i < 16 ? b[8 + i] & 15 : b[8 + i - 16] >> 4; return half_at(b) * (four | (b[4 + i / 8] >> i % 8 & 1) << 4) + half_at(b + 2); }
  if (n == "IQ4_NL") return half_at(b) * IQ4_VALUES[i < 16 ? b[2 + i] & 15 : b[2 + i - 16] >> 4];
  if (n == "MXFP4") return ldexp(E2M1_VALUES[i < 16 ? b[1 + i] & 15 : b[1 + i - 16] >> 4], b[0] - 127);
  if (n == "IQ4_XS") {
    int run = i / 32, j = i % 32, scale = (b[4 + run / 2] >> run % 2 * 4 & 15) | (b[2 + run / 4] >> run % 4 * 2 & 3) << 4;
    return half_at(b) * (scale - 32) * IQ4_VALUES[b[8 + run * 16 + j % 16] >> j / 16 * 4 & 15];
  }
  if (n == "Q2_K") { int q = b[16 + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3, s = b[i / 16]; return half_at(b + 80) * (s & 15) * q - half_at(b + 82) * (s >> 4); }
  if (n == "Q3_K") {
    int low = b[32 + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3, third = b[i % 32] >> (i / 32) & 1, k = i / 16;
    int four = k < 8 ? b[96 + k] & 15 : b[96 + k - 8] >> 4, two = b[104 + k % 4] >> (k / 4 * 2) & 3;
    return half_at(b + 108) * ((four | two << 4) - 32) * (low - (third ? 0 : 4));
  }
  if (n == "Q6_K") {
    int h = i / 128, j = i / 32 % 4, l = i % 32, four = b[64 * h + 32 * (j & 1) + l] >> (j / 2 * 4) & 15, two = b[128 + 32 * h + l] >> 2 * j & 3;
    return half_at(b + 208) * (int8_t)b[192 + i / 16] * ((four | two << 4) - 32);
  }
  const uint8_t* s = b + 4; int j = i / 32, scale, least;                    // Q4_K, Q5_K
  if (j < 4) { scale = s[j] & 63; least = s[j + 4] & 63; } else { scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4; least = s[j + 4] >> 4 | (s[j] >> 6) << 4; }
  int at = n == "Q4_K" ? 16 : 48, q = b[at + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15;
  if (n == "Q5_K") q |= (b[16 + i % 32] >> j & 1) << 4;
  return half_at(b) * scale * q - half_at(b + 2) * least;
}
// Random blocks with scales of realistic size; rounded up to 16 bytes at the end.
inline std::vector<uint8_t> random_weights(const TypeInfo& type, size_t elements) {
  const size_t count = elements / type.block;
  std::vector<uint8_t> w((count * type.bytes + 15) / 16 * 16);
  const std::string n = type.name;
  auto put = [&](size_t at, double v) { uint16_t h = half(v); memcpy(&w[at], &h, 2); };
  for (auto& b : w) b = (uint8_t)rng();
  for (size_t i = 0; i < count; i++) {
    const size_t at = i * type.bytes;
    if (n == "F32") { float f = uniform(-1, 1); memcpy(&w[at], &f, 4); }
    else if (n == "F16") put(at, uniform(-1, 1));
    else if (n == "BF16") { uint16_t h = brain(uniform(-1, 1)); memcpy(&w[at], &h, 2); }
    else if (n == "MXFP4") w[at] = (uint8_t)(117 + w[at] % 6);
    else {
      const size_t d = n == "Q2_K" ? 80 : n == "Q3_K" ? 108 : n == "Q6_K" ? 208 : 0;
      put(at + d, uniform(-0.02f, 0.02f));
      if (n == "Q4_1" || n == "Q5_1" || n == "Q2_K" || n == "Q4_K" || n == "Q5_K") put(at + d + 2, uniform(0, 0.02f));
    }
  }
  return w;
}
// Rows as numbers.
inline std::vector<double> widened(const TypeInfo& type, const std::vector<uint8_t>& w, size_t elements) {
  std::vector<double> v(elements);
  for (size_t i = 0; i < elements; i++) v[i] = element(type, &w[i / type.block * type.bytes], (int)(i % type.block));
  return v;
}
// Part of the activations read by a product of this type.
inline std::vector<double> seen(const TypeInfo& type, const float* x, int columns) {
  std::vector<double> v(columns);
  if (type.format == FORMAT_F32) for (int i = 0; i < columns; i++) v[i] = x[i];
  if (type.format == FORMAT_F16) for (int i = 0; i < columns; i++) v[i] = full(half(x[i]));
  if (type.format == FORMAT_BF16) for (int i = 0; i < columns; i++) { uint32_t b = (uint32_t)brain(x[i]) << 16; float f; memcpy(&f, &b, 4); v[i] = f; }
  if (type.format & (FORMAT_Q8K | FORMAT_Q8_0)) { const int group = type.format == FORMAT_Q8K ? 256 : 32; Quants q = quants(x, columns, group); for (int i = 0; i < columns; i++) v[i] = (double)q.q[i] * q.scale[i / group]; }
  return v;
}
