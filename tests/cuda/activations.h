// Copies of activations by the CPU backend's rule, element by element, independent of the kernels.
#pragma once
#include "harness.h"
enum { FORMAT_F32 = 1, FORMAT_Q8K = 2, FORMAT_Q8_0 = 4, FORMAT_F16 = 8, FORMAT_BF16 = 16 };
struct Copies { uint8_t* base; uint32_t formats, columns, stride, unused; };

struct Quants { std::vector<int> q; std::vector<float> scale; std::vector<int> sums; };       // sums of 16
inline Quants quants(const float* x, int columns, int group) {
  Quants r;
  for (int g = 0; g < columns / group; g++) {
    float furthest = 0;
    for (int i = 0; i < group; i++) { float v = x[g * group + i]; if (std::fabs(v) > std::fabs(furthest) || (v < 0 && -v == furthest)) furthest = v; }
    float inverse, scale;
    if (group == 256) { inverse = furthest == 0 ? 0 : -127.0f / furthest; scale = furthest == 0 ? 0 : 1.0f / inverse; }
    else { const float size = std::fabs(furthest); inverse = size == 0 ? 0 : 127.0f / size; scale = (float)full(half(size / 127.0f)); }
    r.scale.push_back(scale);
    for (int i = 0; i < group; i++) r.q.push_back((int)std::nearbyint(std::min(127.0f, std::max(-127.0f, x[g * group + i] * inverse))));
  }
  for (int i = 0; i < columns; i += 16) { int s = 0; for (int k = 0; k < 16; k++) s += r.q[i + k]; r.sums.push_back(s); }
  return r;
}
inline uint16_t brain(float v) { uint32_t b; memcpy(&b, &v, 4); uint32_t low = b & 0xffff; b >>= 16; if (low > 0x8000 || (low == 0x8000 && b & 1)) b++; return (uint16_t)b; }

// The bytes of one token's copies, their offsets, and the values as read by products.
inline std::vector<uint8_t> copies_of(const float* x, int columns, int formats) {
  std::vector<uint8_t> out;
  auto put = [&](const void* p, size_t n) { out.insert(out.end(), (const uint8_t*)p, (const uint8_t*)p + n); };
  auto pad = [&] { while (out.size() % 16) out.push_back(0xff); };
  if (formats & FORMAT_F32) { put(x, columns * 4); pad(); }
  for (int group : {256, 32}) if (formats & (group == 256 ? FORMAT_Q8K : FORMAT_Q8_0)) {
    Quants q = quants(x, columns, group);
    for (int v : q.q) { int8_t b = (int8_t)v; put(&b, 1); }
    for (int v : q.sums) { int16_t s = (int16_t)v; put(&s, 2); }
    put(q.scale.data(), q.scale.size() * 4); pad();
  }
  if (formats & FORMAT_F16) { for (int i = 0; i < columns; i++) { uint16_t h = half(x[i]); put(&h, 2); } pad(); }
  if (formats & FORMAT_BF16) { for (int i = 0; i < columns; i++) { uint16_t h = brain(x[i]); put(&h, 2); } pad(); }
  return out;
}
// The same for several tokens, in the layout of a kernel.
inline std::vector<uint8_t> all_copies(const Floats& x, int columns, int formats) {
  std::vector<uint8_t> all;
  for (size_t t = 0; t < x.size() / columns; t++) { auto one = copies_of(&x[t * columns], columns, formats); all.insert(all.end(), one.begin(), one.end()); }
  return all;
}
inline uint32_t copies_stride(int columns, int formats) { return (uint32_t)copies_of(Floats(columns, 1.0f).data(), columns, formats).size(); }
// Positions of unexpected bytes; padding does not count.
inline size_t different(const std::vector<uint8_t>& expected, const uint8_t* got) { size_t n = 0; for (size_t i = 0; i < expected.size(); i++) n += expected[i] != 0xff && expected[i] != got[i]; return n; }
