// The tests' side of the shim.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>
struct SimtKernel { std::string name; void (*thunk)(void**); std::vector<int> sizes; };
// What was counted of accesses by one line of source: a warp's, with the banks of shared memory that it waited for.
struct SimtSite { std::string where; uint64_t requests, conflicts, worst; };
const SimtKernel* simt_find(const std::string& name);
std::vector<std::string> simt_names();
// Memory that kernels may touch. `initialised`: it has been written. `counted`: sectors that blocks fetch of it are counted.
void simt_memory_add(void* p, size_t bytes, bool initialised, bool counted = false);
void simt_memory_remove(void* p);
void simt_memory_written(void* p, size_t bytes);      // by the host
// Order in which threads and blocks go: 0 forward, 1 backward, others at random by that seed.
void simt_order(uint64_t seed);
// Runs a kernel; false when something was found, see simt_findings.
bool simt_launch(const SimtKernel& kernel, const unsigned (&grid)[3], const unsigned (&block)[3], unsigned shared_bytes, void** parameters);
std::vector<std::string> simt_findings();      // and forgets them
void simt_count(bool on);
// Share of the fetched sectors' bytes that were used of counted memory since the last call; 1 when there was none.
double simt_sectors();
std::vector<SimtSite> simt_sites();            // accesses to shared memory since the last call
