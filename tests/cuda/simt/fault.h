// Planted faults, by name (FNV-1a).
#pragma once
#include <cstdint>
constexpr uint32_t simt_fault_number(const char* name) { uint32_t n = 2166136261u; for (; *name; name++) n = (n ^ (uint8_t)*name) * 16777619u; return n; }
