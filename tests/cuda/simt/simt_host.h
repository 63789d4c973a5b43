// Interface of the shim for tests.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>
struct SimtKernel { std::string name; void (*thunk)(void**); std::vector<int> sizes; };
// Counts of accesses by one source line: per warp, with bank conflicts of shared memory.
struct SimtSite { std::string where; uint64_t requests, conflicts, worst; };
const SimtKernel* simt_find(const std::string& name);
std::vector<std::string> simt_names();
// Memory accessible to kernels. `initialised`: it has been written. `counted`: sectors fetched from it by blocks are counted.
void simt_memory_add(void* p, size_t bytes, bool initialised, bool counted = false);
void simt_memory_remove(void* p);
void simt_memory_written(void* p, size_t bytes);      // by the host
// Order of threads and blocks: 0 forward, 1 backward, otherwise random with that seed.
void simt_order(uint64_t seed);
// Runs a kernel; false if there are findings, see simt_findings.
bool simt_launch(const SimtKernel& kernel, const unsigned (&grid)[3], const unsigned (&block)[3], unsigned shared_bytes, void** parameters);
std::vector<std::string> simt_findings();      // and forgets them
void simt_count(bool on);
// Used share of the fetched sectors' bytes in counted memory since the last call; 1 without fetches.
double simt_sectors();
std::vector<SimtSite> simt_sites();            // accesses to shared memory since the last call
