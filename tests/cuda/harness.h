// Support shared by the kernel tests: memory, launches, bounds, and GGUF's blocks by their specification.
#pragma once
#include "simt/simt_host.h"
#include <sys/mman.h>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
typedef std::vector<float> Floats;
inline std::mt19937_64 rng(1);
inline float uniform(float a, float b) { return std::uniform_real_distribution<float>(a, b)(rng); }
inline Floats numbers(size_t count, float from, float to) { Floats v(count); for (auto& x : v) x = uniform(from, to); return v; }
// f16 by double arithmetic, independent of the shim's.
inline double full(uint16_t b) {
  int e = b >> 10 & 31, m = b & 1023;
  double size = e == 31 ? (m ? NAN : INFINITY) : e ? std::ldexp(1024 + m, e - 25) : std::ldexp(m, -24);
  return b & 0x8000 ? -size : size;
}
// The nearest f16, ties to even.
inline uint16_t half(double v) {
  uint16_t sign = std::signbit(v) ? 0x8000 : 0; v = std::fabs(v);
  if (v >= 65520) return sign | 0x7c00;
  int e; std::frexp(v, &e); e = std::max(e, -13);
  double steps = std::nearbyint(std::ldexp(v, 11 - e));
  if (steps < 1024) return sign | (uint16_t)steps;
  if (steps >= 2048) { steps /= 2; e++; }
  return sign | (uint16_t)((e + 14) << 10 | ((int)steps - 1024));
}

// Device memory. It ends at the end of a page except for alignment; memory that was not passed in counts as uninitialised.
struct Buffer {
  char* base; size_t mapped; char* p; size_t bytes;
  explicit Buffer(size_t n, const void* from = nullptr, bool counted = false) : bytes(n) {
    mapped = (n + 4095) / 4096 * 4096 + 8192;
    base = (char*)mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(base + mapped - 4096, 4096, PROT_NONE);
    p = base + (mapped - 4096 - n) / 256 * 256;
    memset(p, 0xff, n); if (from) memcpy(p, from, n);
    simt_memory_add(p, n, from != nullptr, counted);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { simt_memory_remove(p); munmap(base, mapped); }
  template <class T> T* as() const { return (T*)p; }
  template <class T> std::vector<T> read() const { return std::vector<T>((T*)p, (T*)p + bytes / sizeof(T)); }
};
#define UPLOAD(name, vector) Buffer name((vector).size() * sizeof((vector)[0]), (vector).data())

inline int bad = 0;
inline bool quiet = false;                   // mutants: findings are wanted, bounds are not printed
inline std::vector<std::string> all_findings;
inline void expect(bool ok, const std::string& what, double got = 0, double limit = 0) {
  if (!quiet && (!ok || limit)) printf("  %-4s %s: %.3g (limit %.3g)\n", ok ? "ok" : "BAD", what.c_str(), got, limit);
  bad += !ok;
}
inline void most(double& worst, double v) { if (!(v <= worst)) worst = v; }     // what is not a number counts as worst
template <class... A> bool run(const char* name, unsigned gx, unsigned gy, unsigned gz, unsigned threads, unsigned shared, A... a) {
  const SimtKernel* k = simt_find(name);
  if (!k) { printf("no kernel %s\n", name); exit(2); }
  void* p[] = {(void*)&a...};
  int sizes[] = {(int)sizeof(A)...};
  if (k->sizes != std::vector<int>(sizes, sizes + sizeof...(A))) { printf("parameters of %s\n", name); exit(2); }
  const unsigned grid[3] = {gx, gy, gz}, block[3] = {threads, 1, 1};
  bool ok = simt_launch(*k, grid, block, shared, p);
  for (auto& f : simt_findings()) { if (!quiet) printf("  FOUND %s\n", f.c_str()); all_findings.push_back(f); bad++; }
  return ok;
}
template <class T> bool same(const std::vector<T>& a, const std::vector<T>& b) { return a.size() == b.size() && !memcmp(a.data(), b.data(), a.size() * sizeof(T)); }
// Counts fetches of a launch: sectors of counted memory, and bank conflicts.
inline void counted(const std::string& what, double sectors_least, double ways_most, const std::function<void()>& launch) {
  simt_sectors(); simt_sites(); simt_count(true);
  launch();
  simt_count(false);
  const double sectors = simt_sectors();
  uint64_t requests = 0, conflicts = 0;
  std::vector<SimtSite> sites = simt_sites();
  for (auto& s : sites) { requests += s.requests; conflicts += s.conflicts; }
  const double ways = requests ? 1.0 + (double)conflicts / requests : 1.0;
  if (sectors_least > 0) expect(sectors >= sectors_least, what + ": sectors used", sectors, sectors_least);
  expect(ways <= ways_most, what + ": banks hit by an access", ways, ways_most);
  if (getenv("SIMT_SITES")) for (auto& s : sites) if (s.conflicts) printf("       %-20s %9lu requests %6.2f ways, worst %lu\n", s.where.c_str(), (unsigned long)s.requests, 1.0 + (double)s.conflicts / s.requests, (unsigned long)s.worst);
}
