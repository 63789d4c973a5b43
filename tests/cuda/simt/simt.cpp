// Runs a kernel's threads as fibers on one processor, and checks them:
//   - the order of threads between two synchronisations is selectable, which exposes order-dependent results;
//   - the compiler reports every access (-fsanitize=thread; its callbacks are here): out of bounds, misaligned, uninitialised,
//     or unordered with another thread's (a race, by epochs of barriers);
//   - asynchronous copies arrive only when they are waited for;
//   - blocks of a grid are ordered only by fences around atomic additions;
//   - barriers missed by some threads, shuffles of inactive lanes, different source lines for the same barrier;
//   - sectors of 32 bytes fetched by a block, and bank conflicts of a warp in shared memory.
// Not covered: effects of caches, clocks and registers of the hardware, and races between grids.
#include "simt_host.h"
#include "fault.h"
#include <dlfcn.h>
#include <sys/mman.h>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <unordered_map>

struct uint3 { unsigned x, y, z; };
extern char __start_simt_shared[] __attribute__((weak)), __stop_simt_shared[] __attribute__((weak));

namespace {
constexpr size_t STACK = 64 << 10, DYNAMIC_MAX = 96 << 10;
// Sectors cached by a block: 32 KiB, its share of the second-level cache of the smallest device.
constexpr uint64_t SECTORS_KEPT = 1024;
enum State { READY, AT_BARRIER, AT_WARP, DONE };
enum Kind { XOR, DOWN, INDEX, BALLOT, WARP_BARRIER, MMA };
struct Copy { char* to; const char* from; int bytes; void* pc; };
struct Release { uint64_t epoch; unsigned thread; };
typedef std::map<uint64_t, Release> Releases;                        // by block
struct Fiber {
  void* sp; char* stack; State state; uint3 tid; unsigned index;
  int line, kind, operand, depth; unsigned mask, value, result;
  uint32_t a[4], b[2]; int d[4];
  unsigned warp_epoch;
  std::vector<Copy> open; std::vector<std::vector<Copy>> groups;
  bool fenced; Releases seen, acquired;                              // of other blocks, by atomics; with a fence behind them
};
struct Word { uint32_t epoch_w[4], tid_w[4], we_w[4]; uint32_t epoch_r, warps, lanes[32], we[32]; };   // shared memory
// A word of global memory: launch (16 bits), block (20), epoch (18), thread (10). 0: never; 1: by the host.
struct Cell { uint64_t w, r; };
struct Region { char* start; size_t bytes; std::vector<Cell> cells; bool counted; std::vector<uint64_t> byte_block, sector_block, sector_time; };

std::map<std::string, SimtKernel>* kernels;
std::map<char*, Region> regions;
Region* last_region;
std::vector<Fiber> fibers;
Fiber* self;
void* main_sp;
std::vector<char*> stacks;
unsigned ready[32], at_warp[32];                                     // lanes of each warp in these states
uint3 block_index, block_size, grid_size;
unsigned threads, dynamic_bytes;
uint64_t launch = 1, block_number, seed, epoch, block_id, fetched;
std::vector<Word> words;
std::vector<uint32_t> touched;                                       // words of shared memory that this block used
std::vector<std::string> findings;
std::set<std::pair<void*, std::string>> seen;
std::map<void*, SimtSite> sites;
std::map<void*, Releases> releases;                                  // by counter
Releases block_acquired;
const SimtKernel* running;
bool failed, counting;
uint64_t used_bytes, fetched_sectors;
char *image_start, *image_end;
alignas(256) char dynamic_memory[DYNAMIC_MAX];

uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull; x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull; x = (x ^ x >> 27) * 0x94d049bb133111ebull; return x ^ x >> 31;
}

std::string where(void* pc) {
  static std::map<void*, std::string> known;
  auto it = known.find(pc);
  if (it != known.end()) return it->second;
  Dl_info info; char line[512];
  if (!dladdr(pc, &info) || !info.dli_fname) return "?";
  snprintf(line, sizeof line, "addr2line -i -e %s %#zx", info.dli_fname, (size_t)((char*)pc - (char*)info.dli_fbase) - 1);
  std::string out = "?";
  if (FILE* f = popen(line, "r")) {
    // The innermost line outside the shim.
    while (fgets(line, sizeof line, f)) {
      std::string one = line;
      one = one.substr(0, one.find_first_of("\n "));
      if (size_t s = one.rfind('/'); s != std::string::npos) one = one.substr(s + 1);
      if (out == "?" || out.rfind("simt.h", 0) == 0) out = one;
    }
    pclose(f);
  }
  return known[pc] = out;
}
[[noreturn]] void leave();
void report(const std::string& what, void* pc, bool fatal) {
  if (seen.insert({pc, what.substr(0, 12)}).second) {
    std::string at = pc ? " at " + where(pc) : "";
    char thread[96]; snprintf(thread, sizeof thread, " (block %u,%u,%u thread %u)", block_index.x, block_index.y, block_index.z, self ? self->index : 0);
    findings.push_back(running->name + at + ": " + what + thread);
  }
  failed = true;
  if (fatal) leave();
}
}

extern "C" void simt_switch(void** save, void* load);
#if defined(__x86_64__)
asm(R"(.text
.globl simt_switch
simt_switch: push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
 mov %rsp, (%rdi); mov %rsi, %rsp
 pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp; ret)");
static void* first_sp(char* top, void (*f)()) { void** s = (void**)((uintptr_t)top & ~15ul) - 1; *s = nullptr; *--s = (void*)f; for (int i = 0; i < 6; i++) *--s = nullptr; return s; }
#elif defined(__aarch64__)
asm(R"(.text
.globl simt_switch
simt_switch: sub sp, sp, #160
 stp x19, x20, [sp]; stp x21, x22, [sp, #16]; stp x23, x24, [sp, #32]; stp x25, x26, [sp, #48]; stp x27, x28, [sp, #64]; stp x29, x30, [sp, #80]
 stp d8, d9, [sp, #96]; stp d10, d11, [sp, #112]; stp d12, d13, [sp, #128]; stp d14, d15, [sp, #144]
 mov x9, sp; str x9, [x0]; mov sp, x1
 ldp x19, x20, [sp]; ldp x21, x22, [sp, #16]; ldp x23, x24, [sp, #32]; ldp x25, x26, [sp, #48]; ldp x27, x28, [sp, #64]; ldp x29, x30, [sp, #80]
 ldp d8, d9, [sp, #96]; ldp d10, d11, [sp, #112]; ldp d12, d13, [sp, #128]; ldp d14, d15, [sp, #144]
 add sp, sp, #160; ret)");
static void* first_sp(char* top, void (*f)()) { char* s = (char*)((uintptr_t)top & ~15ul) - 160; memset(s, 0, 160); *(void**)(s + 88) = (void*)f; return s; }
#endif

namespace {
[[noreturn]] void leave() { self->state = DONE; simt_switch(&self->sp, main_sp); abort(); }
void** current_parameters;
void enter() {
  running->thunk(current_parameters);
  if (!self->open.empty() || !self->groups.empty()) report("a thread ends before its asynchronous copies have arrived", nullptr, false);
  leave();
}
void pause() { simt_switch(&self->sp, main_sp); }

// PTX ISA, mma.m16n8k32 and m16n8k16 with 8-bit types: matrix elements in the registers of a lane.
int a_row(int lane, int i) { return lane / 4 + (i / 4 % 2) * 8; }       // byte i % 4 of register i / 4
int a_col(int lane, int i) { return lane % 4 * 4 + i % 4 + (i / 8) * 16; }
int b_row(int lane, int i) { return lane % 4 * 4 + i % 4 + (i / 4) * 16; }
int b_col(int lane, int) { return lane / 4; }
int c_row(int lane, int i) { return lane / 4 + (i / 2) * 8; }
int c_col(int lane, int i) { return lane % 4 * 2 + i % 2; }

// Once all participating lanes of a warp have arrived: computes the result of each.
void warp_step(unsigned base) {
  Fiber* lanes = &fibers[base];
  unsigned count = std::min(32u, threads - base);
  if (!at_warp[base / 32]) return;
  Fiber* one = &lanes[__builtin_ctz(at_warp[base / 32])];
  if (one->mask & ready[base / 32]) return;                          // each of them leads here again
  for (unsigned i = 0; i < count; i++) {
    bool wanted = one->mask >> i & 1;
    if (wanted && lanes[i].state == DONE) { self = one; report("line " + std::to_string(one->line) + ": lane " + std::to_string(i) + " of the mask has left", nullptr, false); }
    if (wanted && lanes[i].state != AT_WARP && lanes[i].state != DONE) return;
    if (wanted && lanes[i].state == AT_WARP && (lanes[i].line != one->line || lanes[i].kind != one->kind || lanes[i].mask != one->mask)) {
      self = one; report("lanes meet in different lines, " + std::to_string(one->line) + " and " + std::to_string(lanes[i].line), nullptr, false);
    }
  }
  if (one->kind == MMA) {
    int depth = one->depth;
    if (one->mask != 0xffffffffu || count < 32) { self = one; report("mma without all lanes", nullptr, false); }
    int8_t A[16][32] = {}, B[32][8] = {}; int C[16][8];
    for (int l = 0; l < 32; l++) {
      for (int i = 0; i < depth / 2; i++) A[a_row(l, i)][a_col(l, i)] = (int8_t)(lanes[l].a[i / 4] >> 8 * (i % 4));
      for (int i = 0; i < depth / 4; i++) B[b_row(l, i)][b_col(l, i)] = (int8_t)(lanes[l].b[i / 4] >> 8 * (i % 4));
      for (int i = 0; i < 4; i++) C[c_row(l, i)][c_col(l, i)] = lanes[l].d[i];
    }
    for (int r = 0; r < 16; r++) for (int k = 0; k < depth; k++) for (int c = 0; c < 8; c++) C[r][c] += A[r][k] * B[k][c];
    for (int l = 0; l < 32; l++) for (int i = 0; i < 4; i++) lanes[l].d[i] = C[c_row(l, i)][c_col(l, i)];
  }
  unsigned votes = 0;
  for (unsigned i = 0; i < count; i++) if (one->mask >> i & 1 && lanes[i].value) votes |= 1u << i;
  for (unsigned i = 0; i < count; i++) {
    Fiber& f = lanes[i];
    if (!(one->mask >> i & 1) || f.state != AT_WARP) continue;
    unsigned from = f.kind == XOR ? i ^ f.operand : f.kind == DOWN ? i + f.operand : f.kind == INDEX ? f.operand & 31 : i;
    if (f.kind <= INDEX && from < 32 && !(one->mask >> from & 1)) {
      self = &f; report("line " + std::to_string(f.line) + ": lane " + std::to_string(i) + " reads lane " + std::to_string(from) + ", which is not in the mask", nullptr, false);
    }
    f.result = f.kind == BALLOT ? votes : from < count ? lanes[from].value : f.value;
  }
  for (unsigned i = 0; i < count; i++) if (one->mask >> i & 1 && lanes[i].state == AT_WARP) {
    if (lanes[i].kind == WARP_BARRIER) lanes[i].warp_epoch++;     // only __syncwarp orders memory
    lanes[i].state = READY; ready[base / 32] |= 1u << i; at_warp[base / 32] &= ~(1u << i);
  }
}

struct SiteInfo { void* pc; int size; };
// By site and warp, and by the number of the warp's visit: lane and address.
std::unordered_map<uint64_t, std::unordered_map<uint32_t, std::vector<std::pair<unsigned, uint32_t>>>> requests;
std::unordered_map<uint64_t, uint32_t> occurrences;               // by site and thread
std::unordered_map<void*, uint32_t> site_numbers;
std::vector<SiteInfo> site_infos;

void count_banks(void* pc, uint32_t address, int size) {
  auto [it, fresh] = site_numbers.try_emplace(pc, (uint32_t)site_infos.size());
  if (fresh) site_infos.push_back({pc, size});
  uint32_t nth = occurrences[(uint64_t)it->second << 32 | self->index]++;
  requests[(uint64_t)it->second << 32 | self->index / 32][nth].push_back({self->index % 32, address});
}
void count_end() {
  for (auto& [key, by_nth] : requests) {
    const SiteInfo& info = site_infos[key >> 32];
    SimtSite& site = sites[info.pc];
    for (auto& [nth, accesses] : by_nth) {
      std::set<std::pair<unsigned, uint32_t>> in_bank[32];
      for (auto& [lane, address] : accesses)
        // 8- and 16-byte accesses are processed by half and quarter warps.
        for (int b = 0; b < info.size; b += 4) in_bank[(address + b) / 4 % 32].insert({lane / (32 / std::max(1, info.size / 4)), (address + b) / 4});
      uint64_t worst = 1;
      for (auto& bank : in_bank) {
        uint64_t phases[5] = {};
        for (auto& [phase, word] : bank) worst = std::max(worst, ++phases[phase]);
      }
      site.requests++; site.conflicts += worst - 1; site.worst = std::max(site.worst, worst);
    }
  }
  requests.clear(); occurrences.clear();
}

// Loads and stores are separate: stored data goes to memory again.
void count_sectors(Region& r, char* address, int size, bool write) {
  const size_t at = address - r.start, bytes = write ? r.bytes : 0, sectors = write ? r.bytes / 32 + 2 : 0;
  for (size_t b = bytes + at; b < bytes + at + size; b++) if (r.byte_block[b] != block_id) { r.byte_block[b] = block_id; used_bytes++; }
  for (size_t s = sectors + at / 32; s <= sectors + (at + size - 1) / 32; s++) {
    if (r.sector_block[s] != block_id || fetched - r.sector_time[s] > SECTORS_KEPT) { fetched_sectors++; fetched++; }
    r.sector_block[s] = block_id; r.sector_time[s] = fetched;
  }
}

void check_shared(uint32_t first, int size, bool write, void* pc) {
  unsigned warp = self->index / 32, lane = self->index % 32;
  if (counting) count_banks(pc, first, size);
  for (uint32_t at = first; at < first + size; at++) {
    Word& w = words[at / 4];
    unsigned byte = at % 4;
    if (!w.epoch_r && !w.epoch_w[0] && !w.epoch_w[1] && !w.epoch_w[2] && !w.epoch_w[3]) touched.push_back(at / 4);
    bool mine = w.tid_w[byte] == self->index, now = w.epoch_w[byte] == epoch;
    bool ordered = !now || mine || (w.tid_w[byte] / 32 == warp && w.we_w[byte] < self->warp_epoch);
    if (w.epoch_w[byte] == 0 && !write) report("load of shared memory that was never written", pc, false);
    if (!ordered) report(std::string("race in shared memory: ") + (write ? "store" : "load") + " after a store of thread " + std::to_string(w.tid_w[byte]) + " with no barrier between", pc, false);
    if (write) {
      if (w.epoch_r == epoch) for (unsigned other = 0; other < 32; other++) if (w.warps >> other & 1) {
        unsigned lanes = other == warp ? (w.we[other] >= self->warp_epoch ? w.lanes[other] & ~(1u << lane) : 0) : w.lanes[other];
        if (lanes) { report("race in shared memory: store after a load of thread " + std::to_string(other * 32 + __builtin_ctz(lanes)) + " with no barrier between", pc, false); break; }
      }
      w.epoch_w[byte] = (uint32_t)epoch; w.tid_w[byte] = self->index; w.we_w[byte] = self->warp_epoch;
    } else {
      if (w.epoch_r != epoch) { w.epoch_r = (uint32_t)epoch; w.warps = 0; }
      if (!(w.warps >> warp & 1)) { w.warps |= 1u << warp; w.lanes[warp] = 0; w.we[warp] = self->warp_epoch; }
      if (w.we[warp] < self->warp_epoch) { w.we[warp] = self->warp_epoch; w.lanes[warp] = 0; }
      w.lanes[warp] |= 1u << lane;
    }
  }
}

// Whether the access recorded in `cell` happened before this thread's next access.
bool ordered(uint64_t cell) {
  if (cell >> 48 != (launch & 0xffff)) return true;
  uint64_t block = cell >> 28 & 0xfffff, when = cell >> 10 & 0x3ffff, thread = cell & 1023;
  if (block == (block_number & 0xfffff)) return thread == self->index || when != (epoch & 0x3ffff);
  for (const Releases* from : {&self->acquired, &block_acquired}) {
    auto it = from->find(block);
    if (it != from->end() && (when < it->second.epoch || thread == it->second.thread)) return true;
  }
  return false;
}

void check(void* p, int size, bool write, void* pc) {
  if (!self) return;
  char* address = (char*)p;
  if (address >= self->stack && address < self->stack + STACK) return;
  if ((uintptr_t)address % size) report(std::string("misaligned ") + (write ? "store" : "load") + " of " + std::to_string(size) + " bytes, address modulo 256 is " + std::to_string((uintptr_t)address % 256), pc, true);
  uint32_t fixed = (uint32_t)(__stop_simt_shared - __start_simt_shared);
  if (address >= __start_simt_shared && address < __stop_simt_shared) return check_shared((uint32_t)(address - __start_simt_shared), size, write, pc);
  if (address >= dynamic_memory && address < dynamic_memory + DYNAMIC_MAX) {
    if (address + size > dynamic_memory + dynamic_bytes) report("access behind the " + std::to_string(dynamic_bytes) + " bytes of dynamic shared memory", pc, true);
    return check_shared((uint32_t)(address - dynamic_memory) + (fixed + 255) / 256 * 256, size, write, pc);
  }
  Region* r = last_region;
  if (!r || address < r->start || address >= r->start + r->bytes) {
    auto it = regions.upper_bound(address);
    r = it == regions.begin() ? nullptr : &(--it)->second;
  }
  if (!r || address + size > r->start + r->bytes || address < r->start) {
    if (!write && address >= image_start && address < image_end) return;     // constants
    report(std::string(write ? "store" : "load") + " of " + std::to_string(size) + " bytes outside of memory" +
      (r ? ", " + std::to_string(address - r->start - (ptrdiff_t)r->bytes) + " bytes behind an allocation of " + std::to_string(r->bytes) : ""), pc, true);
  }
  last_region = r;
  if (counting && r->counted) count_sectors(*r, address, size, write);
  uint64_t me = (launch & 0xffff) << 48 | (block_number & 0xfffff) << 28 | (epoch & 0x3ffff) << 10 | self->index;
  for (size_t c = (address - r->start) / 4; c <= (size_t)(address + size - 1 - r->start) / 4; c++) {
    Cell& cell = r->cells[c];
    if (!write && cell.w == 0) report("load of memory that was never written", pc, false);
    // Bytes of one word may belong to several threads, so words are checked only if the access covers all of one.
    if (size >= 4 && !ordered(cell.w)) report(write ? "race in global memory: two threads store" : "race in global memory: load of what another thread stores", pc, false);
    if (size >= 4 && write && !ordered(cell.r)) report("race in global memory: store to what another thread loads", pc, false);
    if (write) { cell.w = me; self->fenced = false; } else if (ordered(cell.r)) cell.r = me;
  }
}
}

extern "C" {
#define PC __builtin_return_address(0)
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
#define ACCESS(n) void __tsan_read##n(void* p) { check(p, n, false, PC); } void __tsan_write##n(void* p) { check(p, n, true, PC); }
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16)
// The compiler exploits alignments below the size: on the device such an access would be split.
#define LOOSE(n) void __tsan_unaligned_read##n(void* p) { for (int i = 0; i < n; i += 4) check((char*)p + i, std::min(4, n), false, PC); } \
  void __tsan_unaligned_write##n(void* p) { for (int i = 0; i < n; i += 4) check((char*)p + i, std::min(4, n), true, PC); }
LOOSE(2) LOOSE(4) LOOSE(8) LOOSE(16)
void __tsan_read_range(void* p, unsigned long n) { for (unsigned long i = 0; i + 4 <= n; i += 4) check((char*)p + i, 4, false, PC); }
void __tsan_write_range(void* p, unsigned long n) { for (unsigned long i = 0; i + 4 <= n; i += 4) check((char*)p + i, 4, true, PC); }
void* __tsan_memcpy(void* to, const void* from, unsigned long n) { __tsan_read_range((void*)from, n); __tsan_write_range(to, n); return memcpy(to, from, n); }
void* __tsan_memset(void* to, int v, unsigned long n) { __tsan_write_range(to, n); return memset(to, v, n); }

uint3 simt_thread() { return self->tid; }
uint3 simt_block() { return block_index; }
uint3 simt_block_dim() { return block_size; }
uint3 simt_grid_dim() { return grid_size; }
void* simt_dynamic_shared() { return dynamic_memory; }
void simt_barrier(int line) { self->line = line; self->state = AT_BARRIER; pause(); }
void simt_warp_barrier(unsigned mask, int line) { self->mask = mask; self->line = line; self->kind = WARP_BARRIER; self->value = 0; self->state = AT_WARP; pause(); }
unsigned simt_shuffle(unsigned mask, unsigned value, int kind, int operand, int line) {
  self->mask = mask; self->value = value; self->kind = kind; self->operand = operand; self->line = line; self->state = AT_WARP; pause(); return self->result;
}
void simt_mma(int* d, const uint32_t* a, const uint32_t* b, int depth, int line) {
  memcpy(self->d, d, 16); memcpy(self->a, a, depth / 2); memcpy(self->b, b, depth / 4);
  self->mask = 0xffffffffu; self->kind = MMA; self->depth = depth; self->line = line; self->state = AT_WARP; pause(); memcpy(d, self->d, 16);
}
bool simt_watching = false;
static void vector_access(const void* p, int bytes, bool write, void* pc) {
  if (simt_watching) check((void*)p, bytes, write, pc);
  else if ((uintptr_t)p % bytes) report("misaligned vector access", pc, true);
}
void simt_vector(const void* p, int bytes, int write, void* data) {
  vector_access(p, bytes, write, PC);
  if (write) memcpy((void*)p, data, bytes); else memcpy(data, p, bytes);
}
void simt_copy_async(void* to, const void* from, int bytes) {
  vector_access(from, bytes, false, PC);
  vector_access(to, bytes, true, PC);                                // it may arrive at once
  memset(to, 0xff, bytes);
  self->open.push_back({(char*)to, (const char*)from, bytes, PC});
}
void simt_copies_commit() { self->groups.push_back(std::move(self->open)); self->open.clear(); }
void simt_copies_wait(int left) {
  while ((int)self->groups.size() > left) {
    for (const Copy& copy : self->groups.front()) { vector_access(copy.to, copy.bytes, true, copy.pc); memcpy(copy.to, copy.from, copy.bytes); }
    self->groups.erase(self->groups.begin());
  }
}
unsigned simt_atomic(uint32_t* p, uint32_t v, int kind) {
  if ((uintptr_t)p % 4) report("misaligned atomic", PC, true);
  if (simt_watching) {
    auto it = regions.upper_bound((char*)p);
    if (it == regions.begin() || (char*)p + 4 > (--it)->second.start + it->second.bytes) report("atomic outside of memory", PC, true);
    Cell& cell = it->second.cells[((char*)p - it->second.start) / 4];
    if (cell.w == 0) report("atomic on memory that was never written", PC, false);
    Releases& here = releases[p];
    for (auto& [block, release] : here) self->seen[block] = release;
    if (self->fenced) here[block_number & 0xfffff] = {epoch & 0x3ffff, self->index};
    for (auto& [block, release] : self->acquired) here.insert({block, release});
  }
  uint32_t before = *p;
  *p = kind == 0 ? before + v : before | v;
  return before;
}
uint32_t simt_fault() {
  static const char* const name = getenv("SIMT_FAULT");
  static const uint32_t number = name ? simt_fault_number(name) : 0u;
  return number;
}
void simt_fence() { self->fenced = true; for (auto& [block, release] : self->seen) self->acquired[block] = release; }
void simt_register(const char* name, void (*thunk)(void**), const int* sizes, int count) {
  if (!kernels) kernels = new std::map<std::string, SimtKernel>;
  (*kernels)[name] = {name, thunk, std::vector<int>(sizes, sizes + count)};
}
}

const SimtKernel* simt_find(const std::string& name) { if (!kernels) return nullptr; auto it = kernels->find(name); return it == kernels->end() ? nullptr : &it->second; }
std::vector<std::string> simt_names() { std::vector<std::string> all; if (kernels) for (auto& k : *kernels) all.push_back(k.first); return all; }
void simt_memory_add(void* p, size_t bytes, bool initialised, bool counted) {
  Region r{(char*)p, bytes, {}, counted, {}, {}, {}};
  if (simt_watching) r.cells.assign((bytes + 3) / 4, Cell{initialised ? 1ull : 0ull, 0});
  if (counted) { r.byte_block.assign(2 * bytes, 0); r.sector_block.assign(2 * (bytes / 32 + 2), 0); r.sector_time.assign(2 * (bytes / 32 + 2), 0); }
  regions[(char*)p] = std::move(r);
  last_region = nullptr;
}
void simt_memory_remove(void* p) { regions.erase((char*)p); last_region = nullptr; }
void simt_memory_written(void* p, size_t bytes) {
  auto it = regions.upper_bound((char*)p);
  if (it == regions.begin()) return;
  Region& r = std::prev(it)->second;
  const size_t first = ((char*)p - r.start) / 4, end = std::min(r.cells.size(), ((char*)p - r.start + bytes + 3) / 4);
  for (size_t i = first; i < end; i++) r.cells[i] = {1, 0};
}
void simt_order(uint64_t s) { seed = s; }
void simt_count(bool on) { counting = on; }
std::vector<std::string> simt_findings() { seen.clear(); return std::move(findings); }
double simt_sectors() {
  double share = fetched_sectors ? (double)used_bytes / (32.0 * fetched_sectors) : 1.0;
  used_bytes = fetched_sectors = 0;
  return share;
}
std::vector<SimtSite> simt_sites() {
  std::vector<SimtSite> all;
  for (auto& [pc, s] : sites) { all.push_back(s); all.back().where = where(pc); }
  sites.clear(); site_numbers.clear(); site_infos.clear();
  return all;
}

static void run_block(void** parameters) {
  unsigned left = threads;
  epoch = 1; block_id++; fetched = 0;
  block_acquired.clear();
  uint32_t fixed = (uint32_t)(__stop_simt_shared - __start_simt_shared), begin = (fixed + 255) / 256 * 256;
  if (simt_watching) {
    words.resize((begin + DYNAMIC_MAX) / 4 + 1);
    for (uint32_t w : touched) {                                    // not a number, wherever it is read
      memset(&words[w], 0, sizeof(Word));
      memset(w * 4 < begin ? __start_simt_shared + w * 4 : dynamic_memory + w * 4 - begin, 0xff, 4);
    }
    touched.clear();
  }
  for (unsigned i = 0; i < threads; i++) {
    Fiber& f = fibers[i];
    f.index = i; f.tid = {i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y};
    // At different offsets within their pages: the first-level cache has few places for lines at the same offset.
    f.stack = stacks[i]; f.sp = first_sp(f.stack + STACK - i % 16 * 256, enter); f.state = READY; f.warp_epoch = 1; f.fenced = false;
    f.open.clear(); f.groups.clear(); f.seen.clear(); f.acquired.clear();
  }
  for (unsigned w = 0; w * 32 < threads; w++) { ready[w] = threads - w * 32 < 32 ? (1u << threads % 32) - 1 : ~0u; at_warp[w] = 0; }
  current_parameters = parameters;
  static std::vector<unsigned> order;
  order.resize(threads);
  uint64_t turn = 0;
  for (unsigned i = 0; i < threads; i++) order[i] = seed == 1 ? threads - 1 - i : i;
  while (left) {
    unsigned ran = 0;
    if (seed > 1) for (unsigned i = 0; i < threads; i++) order[i] = i;
    if (seed > 1) for (unsigned i = threads; i > 1; i--) std::swap(order[i - 1], order[mix(seed ^ block_number << 20 ^ ++turn << 40) % i]);
    for (unsigned i : order) {
      if (!(ready[i / 32] >> i % 32 & 1)) continue;
      self = &fibers[i]; simt_switch(&main_sp, self->sp); ran++;
      ready[i / 32] &= ~(1u << i % 32);
      if (fibers[i].state == AT_WARP) at_warp[i / 32] |= 1u << i % 32;
      if (fibers[i].state == DONE) left--;
      warp_step(i / 32 * 32);
    }
    if (ran || !left) continue;
    unsigned waiting = 0; int line = 0; bool different = false;
    for (auto& f : fibers) if (f.state == AT_BARRIER) { different |= waiting && f.line != line; line = f.line; waiting++; }
    if (waiting == left) {
      self = &fibers[0];
      if (different) report("threads wait at different barriers, one of them in line " + std::to_string(line), nullptr, false);
      if (left < threads) report("barrier in line " + std::to_string(line) + " that " + std::to_string(threads - left) + " threads have passed by leaving", nullptr, false);
      for (auto& f : fibers) if (f.state == AT_BARRIER) { f.state = READY; ready[f.index / 32] |= 1u << f.index % 32; for (auto& [block, release] : f.acquired) block_acquired[block] = release; }
      epoch++;
    } else {
      self = &fibers[0];
      for (auto& f : fibers) if (f.state == AT_WARP || f.state == AT_BARRIER) { self = &f; break; }
      report("hangs: " + std::to_string(waiting) + " threads wait at a barrier, others for lanes in line " + std::to_string(self->line), nullptr, false);
      break;
    }
  }
  self = nullptr;
  if (counting) count_end();
}

bool simt_launch(const SimtKernel& kernel, const unsigned (&grid)[3], const unsigned (&block)[3], unsigned shared_bytes, void** parameters) {
  running = &kernel; failed = false; launch++; releases.clear();
  if ((launch & 0xffff) == 0) launch++;
  threads = block[0] * block[1] * block[2];
  block_size = {block[0], block[1], block[2]}; grid_size = {grid[0], grid[1], grid[2]}; dynamic_bytes = shared_bytes;
  if (threads == 0 || threads > 1024 || !grid[0] || !grid[1] || !grid[2] || grid[1] > 65535 || grid[2] > 65535 || shared_bytes > DYNAMIC_MAX) {
    report("a grid that no device takes", nullptr, false); return false;
  }
  Dl_info info;
  if (!image_start && dladdr((void*)kernel.thunk, &info)) { image_start = (char*)info.dli_fbase; image_end = image_start + (64 << 20); }
  fibers.resize(threads);
  while (stacks.size() < threads) {
    char* s = (char*)mmap(nullptr, STACK + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    mprotect(s, 4096, PROT_NONE); stacks.push_back(s + 4096);
  }
  memset(__start_simt_shared, 0xff, __stop_simt_shared - __start_simt_shared);
  memset(dynamic_memory, 0xff, shared_bytes);
  uint64_t blocks = (uint64_t)grid[0] * grid[1] * grid[2];
  for (uint64_t i = 0; i < blocks && !failed; i++) {
    block_number = seed == 0 ? i : blocks - 1 - i;                  // at random: threads alone
    block_index = {(unsigned)(block_number % grid[0]), (unsigned)(block_number / grid[0] % grid[1]), (unsigned)(block_number / grid[0] / grid[1])};
    run_block(parameters);
  }
  return !failed;
}
