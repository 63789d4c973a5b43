// A CUDA driver for tests: memory, streams, events, graphs and faults are imitated, kernels run in the shim (../simt). Built as
// libcuda.so with the kernels; a program that opens the driver at run time runs on it unmodified. Environment:
//   FAKE_CUDA_DEVICE=orin|hopper|blackwell|turing   attributes; `orin` shares its memory with the host
//   FAKE_CUDA_DRIVER=12060          its version: PTX of a newer one is refused
//   FAKE_CUDA_MEMORY=BYTES          total memory
//   FAKE_CUDA_CONTEXT=BYTES         memory taken by each context
//   FAKE_CUDA_MAPPED_MS=N           additional time of a kernel while 512 KiB to 1 MiB of host memory is registered in one piece
//   FAKE_CUDA_DEVICE_MS=N           the same while device memory of that size is allocated
//   FAKE_CUDA_LARGEST=BYTES|N%      the largest single allocation, absolute or relative to free memory (fragmentation)
//   FAKE_CUDA_ORDER=late|eager|SEED completion of queued work: as late or as early as the program's own waits allow, or random
//   FAKE_CUDA_FAULTS=NAME@N=CODE[!|!!],...   call N of NAME fails with CODE; with `!` every later call fails too until the context
//                                   is gone, with `!!` until the process is. NAME may be `memory` (any allocation) or `kernel` (a run)
//   FAKE_CUDA_WRONG=NAME@N         flips a bit in the output of kernel NAME at the address stored N bytes into its parameters
//   FAKE_CUDA_GRAPH_NODE=BYTES      memory taken by each command of a graph
//   FAKE_CUDA_GRAPHS=cut            a graph omits its last command
//   FAKE_CUDA_BOARD=FOLDER          with `orin`: memory as shown by /proc/meminfo and nvmap, below FOLDER; freed memory first enters a
//                                   pool of up to an eighth of the memory, which only the next allocation can use
//   FAKE_CUDA_LOG=FILE              JSON lines: faults, findings, leftovers of destroyed contexts, and counts at exit
//
// Assumptions about the driver, with sources. [api] CUDA driver API reference 12.6, [guide] CUDA C++ programming guide 12.6,
// [tegra] CUDA for Tegra application note. Where the sources are silent, the imitation chooses the least forgiving behaviour.
//  1 Streams run in order; a stream without CU_STREAM_NON_BLOCKING and the legacy stream wait for each other. [api: stream sync]
//  2 An unrecorded event delays no stream; a wait refers to the record before it, not to later ones. [api: cuStreamWaitEvent]
//  3 No freeing call waits for work in flight: cuMemFree "may" wait [api; kokkos/kokkos#9307], for the others nothing is
//    documented. Work on freed memory breaks the context: CUDA_ERROR_ILLEGAL_ADDRESS. [api: CUresult]
//  4 After a kernel error every call returns it until the context is destroyed. [api: CUresult; in practice for the driver API]
//  5 The host has no mapping of device memory, not even on integrated devices. [tegra: memory management]
//  6 Fresh device memory has arbitrary contents: here NaN. Only the first 64 MiB are filled.
//  7 Registering populates and pins all pages (get_user_pages: linux-nv-oot, nvmap_alloc.c). The device does not see memory
//    mapped there later by the host: detected at unregistration.
//  8 Physical memory is in units of 2 MiB, keeps its contents per handle, and lives until released and mapped nowhere.
//    [api: cuMemRelease] An integrated device reserves no more than 8 GiB of addresses at once. (ggml-org/llama.cpp#29142)
//  9 Machine code runs on its own major version from its own minor on, of Tegra on that device alone. [guide: binary compatibility]
//    PTX needs a driver of its ISA's version (CUDA_ERROR_UNSUPPORTED_PTX_VERSION) and a device of its target or newer (INVALID_PTX).
// 10 A copy from pageable memory has read it when it returns, one to pageable memory has written it; either "may" first wait
//    for the stream, and does here. [api: API sync behaviour]
// 11 While a stream captures, calls that may synchronise or allocate fail and end the capture, of other threads too unless its mode is
//    thread-local or relaxed. [api: cuThreadExchangeStreamCaptureMode] Captures that join streams by events are not imitated.
// 12 A graph launch is ordered after its previous launch. [guide: graphs] Parameters are those of the capture.
// 13 More than 48 KiB of shared memory must be requested per function. [guide: shared memory]
// 14 Every thread has its own current context, initially none: CUDA_ERROR_INVALID_CONTEXT. [api: context management]
// Not imitated: time, and concurrent kernels of two streams.
#include "../simt/simt_host.h"
#include "image.h"
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <fcntl.h>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sys/mman.h>
#include <unistd.h>
typedef int CUresult; typedef unsigned long long CUdeviceptr; typedef uint64_t Handle;

namespace {
struct Queue;
struct Mark { std::shared_ptr<Queue> queue; uint64_t number = 0; bool reached() const; };     // the end of some work of a stream
typedef std::function<int()> Work;
struct Op { Work run; std::vector<Mark> after; };
struct Queue { std::deque<Op> ops; uint64_t pushed = 0, done = 0; bool blocking = true; };
bool Mark::reached() const { return !queue || queue->done >= number; }
typedef std::shared_ptr<Queue> QueueRef;
struct Event { Mark recorded; bool timing; bool captured = false; std::shared_ptr<double> ms; };
struct Capture { bool on = false, invalid = false; int mode = 0; std::thread::id by; std::vector<Work> nodes; };
struct Stream { QueueRef queue; Capture capture; };
struct Graph { std::vector<Work> nodes; };
struct Exec { std::vector<Work> nodes; Mark last; size_t bytes; };
struct Function { const SimtKernel* kernel; Entry entry; unsigned dynamic_max; };
struct Module { std::map<std::string, Function> functions; };
struct Physical { size_t bytes, offset; unsigned maps; bool released; };
struct Mapping { size_t bytes; Handle handle; bool accessible; };
struct Context {
  bool primary; Stream legacy; std::set<Stream*> streams; std::set<Event*> events; std::set<Graph*> graphs; std::set<Exec*> execs;
  std::set<Module*> modules; std::set<Function*> functions;
  std::map<CUdeviceptr, size_t> allocations, pinned, registered, reserved; std::map<CUdeviceptr, Mapping> mapped; std::map<Handle, Physical> physical;
};
struct Device { const char* name; int major, minor; bool integrated; uint64_t memory; int processors, clock_khz, memory_khz, bus_bits, l2, threads, shared_sm, shared_optin; };
const Device DEVICES[] = {
  {"orin", 8, 7, true, 16ull << 30, 8, 918000, 3199000, 128, 4 << 20, 1536, 167936, 166912},
  {"hopper", 9, 0, false, 16ull << 30, 132, 1980000, 2619000, 5120, 50 << 20, 2048, 233472, 232448},
  {"blackwell", 12, 0, false, 16ull << 30, 170, 2407000, 14001000, 512, 96 << 20, 1536, 102400, 101376},
  {"turing", 7, 5, false, 16ull << 30, 40, 1590000, 5001000, 256, 4 << 20, 1024, 65536, 65536},
};
struct Fault { std::string name; uint64_t at; int code; int lasting; };
constexpr size_t GRANULE = 2 << 20, PAGE = 4096, RESERVED_MOST = 8ull << 30, POISONED = 64 << 20, POISONED_OF_MORE = 1 << 20, OPT_IN_ABOVE = 48 << 10;

// Per process, and never destroyed: other threads may still call at exit.
struct State {
  std::recursive_mutex mutex;
  const Device* device = &DEVICES[0]; int driver = 12060; uint64_t total = 0, seed = 0, context_bytes = 0, node_bytes = 0, mapped_ms = 0, device_ms = 0; bool eager = false, late = false, cut = false;
  std::string largest, log, wrong, board; uint64_t pool = 0; size_t wrong_at = 0; std::vector<Fault> faults;
  bool initialised = false; int broken = 0, lost = 0;              // until the context is gone; until the process is
  std::map<std::string, uint64_t> calls; uint64_t executed = 0, waits = 0, event_waits = 0, to_host = 0, turn = 0, used = 0, peak = 0, host_peak = 0; Handle next = 1;
  Context* primary = nullptr; unsigned retained = 0; bool reset = false; std::set<Context*> contexts;
  std::map<uintptr_t, size_t> device_memory; unsigned open = 0; int physical_file = -1; size_t physical_end = 0; char* arena = nullptr; size_t arena_at = 0;
};
State& s = *new State;
thread_local Context* current;
thread_local int capture_mode;                                       // as cuThreadExchangeStreamCaptureMode left it
constexpr size_t ARENA = 1ull << 40;

void write_line(const std::string& line) {
  if (s.log.empty()) return;
  if (FILE* f = fopen(s.log.c_str(), "a")) { fwrite((line + "\n").data(), 1, line.size() + 1, f); fclose(f); }
}
std::string text(const char* format, ...) {
  char out[1024]; va_list a; va_start(a, format); vsnprintf(out, sizeof out, format, a); va_end(a); return out;
}
void finding(const std::string& what) {
  std::string plain; for (char c : what) plain += c == '"' || c == '\\' || (unsigned char)c < ' ' ? '\'' : c;
  fprintf(stderr, "libcuda (imitated): %s\n", plain.c_str());
  write_line(text("{\"event\":\"finding\",\"what\":\"%s\"}", plain.c_str()));
}
std::string left_in(const Context& c) {
  size_t bytes = 0; for (auto& [p, n] : c.allocations) bytes += n;
  for (auto& [h, p] : c.physical) bytes += p.bytes;
  for (Exec* e : c.execs) bytes += e->bytes;
  size_t registered = 0; for (auto& [p, n] : c.registered) registered += n;
  return text("{\"bytes\":%zu,\"registered_bytes\":%zu,\"allocations\":%zu,\"pinned\":%zu,\"registered\":%zu,\"reserved\":%zu,\"mapped\":%zu,\"physical\":%zu,\"streams\":%zu,\"events\":%zu,\"modules\":%zu,\"graphs\":%zu,\"execs\":%zu}",
    bytes, registered, c.allocations.size(), c.pinned.size(), c.registered.size(), c.reserved.size(), c.mapped.size(), c.physical.size(), c.streams.size(),
    c.events.size(), c.modules.size(), c.graphs.size(), c.execs.size());
}
void at_exit() {
  std::string calls; for (auto& [name, count] : s.calls) calls += text("%s\"%s\":%lu", calls.empty() ? "" : ",", name.c_str(), (unsigned long)count);
  write_line(text("{\"event\":\"exit\",\"executed\":%lu,\"waits\":%lu,\"event_waits\":%lu,\"bytes_to_host\":%lu,\"peak_bytes\":%lu,\"contexts_left\":%zu,\"calls\":{",
    (unsigned long)s.executed, (unsigned long)s.waits, (unsigned long)s.event_waits, (unsigned long)s.to_host, (unsigned long)s.peak, s.contexts.size()) + calls + "}}");
  for (Context* c : s.contexts) write_line("{\"event\":\"context_left\",\"left\":" + left_in(*c) + "}");
}
bool read_environment() {
  auto env = [](const char* n) { const char* v = getenv(n); return std::string(v ? v : ""); };
  bool known = env("FAKE_CUDA_DEVICE").empty();
  for (auto& d : DEVICES) if (env("FAKE_CUDA_DEVICE") == d.name) { s.device = &d; known = true; }
  s.total = s.device->memory;
  if (auto v = env("FAKE_CUDA_MEMORY"); !v.empty()) s.total = strtoull(v.c_str(), nullptr, 10);
  s.mapped_ms = strtoull(env("FAKE_CUDA_MAPPED_MS").c_str(), nullptr, 10); s.device_ms = strtoull(env("FAKE_CUDA_DEVICE_MS").c_str(), nullptr, 10);
  if (auto v = env("FAKE_CUDA_CONTEXT"); !v.empty()) s.context_bytes = strtoull(v.c_str(), nullptr, 10);
  s.node_bytes = strtoull(env("FAKE_CUDA_GRAPH_NODE").c_str(), nullptr, 10); s.cut = env("FAKE_CUDA_GRAPHS") == "cut";
  if (auto v = env("FAKE_CUDA_DRIVER"); !v.empty()) s.driver = atoi(v.c_str());
  if (auto v = env("FAKE_CUDA_WRONG"); !v.empty()) { s.wrong = v.substr(0, v.find('@')); s.wrong_at = strtoull(v.c_str() + v.find('@') + 1, nullptr, 10); }
  s.largest = env("FAKE_CUDA_LARGEST"); s.log = env("FAKE_CUDA_LOG"); s.board = env("FAKE_CUDA_BOARD");
  const std::string order = env("FAKE_CUDA_ORDER");
  s.eager = order == "eager"; s.late = order.empty() || order == "late"; s.seed = strtoull(order.c_str(), nullptr, 10);
  for (std::string all = env("FAKE_CUDA_FAULTS"); known && !all.empty();) {
    std::string one = all.substr(0, all.find(',')); all.erase(0, one.size() + 1);
    char name[80]; unsigned long at; int code, end = 0;
    known = sscanf(one.c_str(), "%79[^@]@%lu=%d%n", name, &at, &code, &end) == 3;
    if (known) s.faults.push_back({name, at, code, (int)(one.size() - end)});
  }
  if (!known) { fprintf(stderr, "libcuda (imitated): FAKE_CUDA_DEVICE or FAKE_CUDA_FAULTS is not understood\n"); abort(); }
  atexit(at_exit);
  return true;
}
const bool environment_read = read_environment();
int planned(const char* name) {
  const uint64_t n = ++s.calls[name];
  for (auto& f : s.faults) if (f.name == name && f.at == n) {
    write_line(text("{\"event\":\"fault\",\"name\":\"%s\",\"call\":%lu,\"code\":%d}", name, (unsigned long)n, f.code));
    if (f.lasting == 1) s.broken = f.code;
    if (f.lasting > 1) s.lost = f.code;
    return f.code;
  }
  return OK;
}
int condition() { return s.lost ? s.lost : s.broken; }
void broken_by(int code, const std::string& why) {
  if (s.broken) return;
  s.broken = code; finding(why);
}

// Device memory: addresses accessible only to queued work. Neighbours form one range for the kernel, and addresses are not reused.
void protect(int how) {
  for (auto it = s.device_memory.begin(); it != s.device_memory.end();) {
    uintptr_t start = it->first, end = start + it->second;
    for (++it; it != s.device_memory.end() && it->first == end; ++it) end += it->second;
    mprotect((void*)start, end - start, how);
  }
}
struct Opened {
  Opened() { if (s.open++ == 0) protect(PROT_READ | PROT_WRITE); }
  ~Opened() { if (--s.open == 0) protect(PROT_NONE); }
};
bool on_device(CUdeviceptr p, size_t n) {
  while (n) {
    auto it = s.device_memory.upper_bound(p);
    if (it == s.device_memory.begin()) return false;
    --it; if (p >= it->first + it->second) return false;
    const size_t here = std::min(n, (size_t)(it->first + it->second - p)); p += here; n -= here;
  }
  return true;
}
void add_device_memory(CUdeviceptr p, size_t bytes, size_t wanted) {
  s.device_memory[p] = bytes; simt_memory_add((void*)p, wanted, false);
  if (s.open) mprotect((void*)p, bytes, PROT_READ | PROT_WRITE);
}
void remove_device_memory(CUdeviceptr p, size_t bytes) {
  simt_memory_remove((void*)p); s.device_memory.erase(p);
  mmap((void*)p, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}
// Writes the kernel's view of the board.
void show_board() {
  if (s.board.empty() || !s.device->integrated) return;
  uint64_t registered = 0; for (Context* c : s.contexts) for (auto& [p, n] : c->registered) registered += n;
  const auto put = [](const std::string& name, const std::string& what) {
    if (FILE* f = fopen((s.board + name).c_str(), "w")) { fwrite(what.data(), 1, what.size(), f); fclose(f); }
  };
  const unsigned long long left = (s.total - s.used - s.pool - registered) / 1024, nvmap = s.used, pages = s.pool / PAGE;
  put("/proc/meminfo", text("MemTotal: %llu kB\nMemFree: %llu kB\nMemAvailable: %llu kB\n", (unsigned long long)s.total / 1024, left, left));
  put("/sys/kernel/debug/nvmap/stats/total_memory", text("%llu\n", nvmap));
  put("/sys/kernel/debug/nvmap/pagepool/page_pool_available_pages", text("%llu\n", pages));
}
void hold(uint64_t n) { s.pool -= std::min(s.pool, n); s.used += n; s.peak = std::max(s.peak, s.used); show_board(); }
void give(uint64_t n) { s.used -= n; if (!s.board.empty()) s.pool = std::min(s.pool + n, s.total / 8 / PAGE * PAGE); show_board(); }
int take(size_t n) {
  const int e = planned("memory");
  if (e) return e;
  uint64_t most = ~0ull; const uint64_t left = s.total - s.used;
  if (!s.largest.empty()) { most = strtoull(s.largest.c_str(), nullptr, 10); if (s.largest.back() == '%') most = left * most / 100; }
  if (n > most || n > left) return OUT_OF_MEMORY;
  hold(n);
  return OK;
}
const std::pair<const CUdeviceptr, size_t>* host_range(CUdeviceptr p) {
  for (Context* c : s.contexts) for (auto* m : {&c->pinned, &c->registered}) {
    auto it = m->upper_bound(p);
    if (it != m->begin() && p < std::prev(it)->first + std::prev(it)->second) return &*std::prev(it);
  }
  return nullptr;
}

// Work.
thread_local sigjmp_buf* on_fault; thread_local void* fault_at;
struct sigaction before[2];
void on_signal(int number, siginfo_t* info, void* context) {
  if (on_fault) { fault_at = info->si_addr; siglongjmp(*on_fault, 1); }
  const struct sigaction& old = before[number == SIGBUS];
  if (old.sa_flags & SA_SIGINFO) old.sa_sigaction(number, info, context);
  else { sigaction(number, &old, nullptr); }                          // happens again, without us
}
// Runs accesses to possibly missing memory, which then return ILLEGAL_ADDRESS.
int guarded(const Work& work) {
  struct sigaction mine = {}; mine.sa_sigaction = on_signal; mine.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &mine, &before[0]); sigaction(SIGBUS, &mine, &before[1]);
  sigjmp_buf back; int code = ILLEGAL_ADDRESS;
  on_fault = &back;
  if (!sigsetjmp(back, 1)) code = work();
  on_fault = nullptr;
  sigaction(SIGSEGV, &before[0], nullptr); sigaction(SIGBUS, &before[1], nullptr);
  return code;
}
// The same for queued work: missing memory breaks the context.
int guarded(const std::string& what, const Work& work) {
  fault_at = nullptr;
  const int code = guarded(work);
  if (fault_at) broken_by(code, text("%s uses address %p, where there is no memory", what.c_str(), fault_at));
  return code;
}
bool step(Queue& q) {
  if (q.ops.empty()) return false;
  for (auto& m : q.ops.front().after) if (!m.reached()) return false;
  Op op = std::move(q.ops.front()); q.ops.pop_front();
  if (op.run && !condition()) { const int e = op.run(); if (!s.broken) s.broken = e; }
  q.done++;
  return true;
}
std::vector<QueueRef> queues() {
  std::vector<QueueRef> all;
  for (Context* c : s.contexts) { all.push_back(c->legacy.queue); for (Stream* t : c->streams) all.push_back(t->queue); }
  return all;
}
// Executes the work up to a mark, and of other streams only its dependencies.
void drain(const Mark& until) {
  while (!until.reached()) {
    const std::vector<Mark> first = until.queue->ops.front().after;
    for (auto& m : first) drain(m);
    step(*until.queue);
  }
}
// Counted if there is something to wait for.
int wait(const Mark& until) { if (!until.reached()) { s.waits++; Opened open; drain(until); } return condition(); }
Mark end_of(const Stream& t) { return {t.queue, t.queue->pushed}; }
int wait_all(Context& c) {
  std::vector<Mark> all{end_of(c.legacy)}; for (Stream* t : c.streams) all.push_back(end_of(*t));
  for (auto& m : all) if (!m.reached()) { s.waits++; break; }
  Opened open; for (auto& m : all) drain(m);
  return condition();
}
bool anything() { for (auto& q : queues()) if (!q->ops.empty()) return true; return false; }
uint64_t random_number() { uint64_t x = (s.seed + 1) * 0x9e3779b97f4a7c15ull + ++s.turn * 0xbf58476d1ce4e5b9ull; x ^= x >> 31; x *= 0x94d049bb133111ebull; return x ^ x >> 29; }
void progress() {
  if (s.late || s.open || !anything()) return;
  Opened open; auto all = queues();
  if (s.eager) { for (bool any = true; any;) { any = false; for (auto& q : all) any |= step(*q); } return; }
  for (uint64_t n = random_number() % 16; n; n--) step(*all[random_number() % all.size()]);
}
Stream* legacy() { return &current->legacy; }
// Null if it is not a stream.
Stream* stream_of(Stream* t) { if ((uintptr_t)t <= 2) return legacy(); return current->streams.count(t) ? t : nullptr; }
int push(Stream& t, Work work, std::vector<Mark> after = {}) {
  if (t.capture.on) { t.capture.nodes.push_back(std::move(work)); return OK; }
  if (&t == legacy()) { for (Stream* o : current->streams) if (o->queue->blocking) after.push_back(end_of(*o)); }
  else if (t.queue->blocking) after.push_back(end_of(*legacy()));
  t.queue->ops.push_back({std::move(work), std::move(after)}); t.queue->pushed++;
  progress();
  return condition();
}
// For calls that a capture does not allow.
int unsafe_in_capture() {
  bool refused = false;
  for (Stream* t : current->streams) if (t->capture.on && capture_mode != 2 && (t->capture.mode == 0 || (t->capture.mode == 1 && t->capture.by == std::this_thread::get_id()))) refused = t->capture.invalid = true;
  return refused ? STREAM_CAPTURE_UNSUPPORTED : OK;
}
void destroy(Context* c) {
  write_line("{\"event\":\"context\",\"left\":" + left_in(*c) + "}");
  for (auto& [p, n] : c->allocations) { remove_device_memory(p, (n + PAGE - 1) / PAGE * PAGE); give(n); }
  for (Exec* e : c->execs) give(e->bytes);
  for (auto& [p, m] : c->mapped) if (m.accessible) remove_device_memory(p, m.bytes);
  for (auto& [h, p] : c->physical) { fallocate(s.physical_file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, p.offset, p.bytes); give(p.bytes); }
  for (auto& [p, n] : c->pinned) { simt_memory_remove((void*)p); munmap((void*)p, n); if (s.device->integrated) give(n); }
  for (auto& [p, n] : c->registered) simt_memory_remove((void*)p);
  for (auto& [p, n] : c->reserved) munmap((void*)p, n);
  s.contexts.erase(c); give(s.context_bytes); if (s.contexts.empty()) s.broken = 0;                                  // the value stays: threads may have it as current
}
int with_context() { return !s.initialised ? NOT_INITIALIZED : !current ? INVALID_CONTEXT : !s.contexts.count(current) ? CONTEXT_IS_DESTROYED : OK; }
template <class T> bool is(const std::set<T*>& all, T* one) { return all.count(one) != 0; }
}

#define API(name, ...) extern "C" __attribute__((visibility("default"))) CUresult name(__VA_ARGS__)
#define LOCK std::lock_guard<std::recursive_mutex> guard(s.mutex)
#define TRY(expression) if (int e = (expression)) return e
// For calls on the driver; on a context; and for releasing calls, which release regardless of their result.
#define DRIVER(name) LOCK; TRY(planned(#name)); TRY(s.lost)
#define ENTER(name) LOCK; TRY(planned(#name)); TRY(condition()); TRY(with_context()); progress()
#define RELEASE(name) LOCK; const int planned_code = planned(#name); TRY(with_context())
#define RELEASED return planned_code ? planned_code : condition()
#define STREAM(t) Stream* const t##_of = stream_of(t); if (!t##_of) return INVALID_HANDLE; Stream& t##_stream = *t##_of

API(cuInit, unsigned flags) { DRIVER(cuInit); if (flags) return INVALID_VALUE; s.initialised = true; return OK; }
API(cuDriverGetVersion, int* v) { LOCK; TRY(planned("cuDriverGetVersion")); *v = s.driver; return OK; }
API(cuGetErrorName, int code, const char** out) { *out = error_name(code); return *out ? OK : INVALID_VALUE; }
API(cuGetErrorString, int code, const char** out) { return cuGetErrorName(code, out); }
API(cuDeviceGetCount, int* n) { DRIVER(cuDeviceGetCount); TRY(s.initialised ? OK : NOT_INITIALIZED); *n = 1; return OK; }
API(cuDeviceGet, int* d, int i) { DRIVER(cuDeviceGet); TRY(s.initialised ? OK : NOT_INITIALIZED); if (i) return INVALID_DEVICE; *d = 0; return OK; }
API(cuDeviceGetName, char* out, int n, int) { DRIVER(cuDeviceGetName); snprintf(out, n, "Imitated %s", s.device->name); return OK; }
API(cuDeviceGetUuid_v2, void* u, int) { DRIVER(cuDeviceGetUuid_v2); memset(u, 7, 16); return OK; }
API(cuDeviceGetPCIBusId, char* out, int n, int) { DRIVER(cuDeviceGetPCIBusId); snprintf(out, n, "0000:00:00.0"); return OK; }
API(cuDeviceTotalMem_v2, size_t* n, int) { DRIVER(cuDeviceTotalMem_v2); *n = s.total; return OK; }
API(cuDeviceGetAttribute, int* v, int which, int) {
  DRIVER(cuDeviceGetAttribute);
  const Device& d = *s.device;
  const std::map<int, int> known = {{1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 2147483647}, {6, 65535}, {7, 65535}, {8, 49152}, {9, 65536}, {10, 32}, {12, 65536},
    {13, d.clock_khz}, {16, d.processors}, {17, 0}, {18, d.integrated}, {19, 1}, {20, 0}, {31, 1}, {33, 0}, {34, 0}, {35, 0}, {36, d.memory_khz}, {37, d.bus_bits}, {38, d.l2}, {39, d.threads},
    {40, d.integrated ? 2 : 3}, {41, 1}, {50, 0}, {75, d.major}, {76, d.minor}, {78, 1}, {81, d.shared_sm}, {82, 65536}, {83, 1}, {88, 0}, {89, !d.integrated}, {90, 1},
    {91, !d.integrated}, {95, 1}, {97, d.shared_optin}, {99, 1}, {100, 0}, {101, 0}, {102, 1}, {106, 16}, {111, 1024}, {115, 1}};
  auto it = known.find(which); if (it == known.end()) { finding(text("attribute %d is not imitated", which)); return INVALID_VALUE; }
  *v = it->second; return OK;
}
static Context* make_context(bool primary) {
  if (s.context_bytes > s.total - s.used) return nullptr;
  Context* c = new Context{primary, {std::make_shared<Queue>(), {}}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}};
  s.contexts.insert(c); hold(s.context_bytes); return c;
}
API(cuDevicePrimaryCtxRetain, Context** c, int) {
  DRIVER(cuDevicePrimaryCtxRetain); TRY(s.initialised ? OK : NOT_INITIALIZED);
  if (!s.primary || !s.contexts.count(s.primary)) { s.primary = make_context(true); s.retained = 0; }
  if (!s.primary) return OUT_OF_MEMORY;
  s.retained++; *c = s.primary; return OK;
}
API(cuDevicePrimaryCtxRelease_v2, int) {
  LOCK; const int planned_code = planned("cuDevicePrimaryCtxRelease_v2");
  if (!s.retained) return INVALID_CONTEXT;
  if (--s.retained == 0) destroy(s.primary);
  return planned_code ? planned_code : s.lost;
}
API(cuDevicePrimaryCtxReset_v2, int) { LOCK; const int planned_code = planned("cuDevicePrimaryCtxReset_v2"); if (s.contexts.count(s.primary)) destroy(s.primary); s.retained = 0; return planned_code ? planned_code : s.lost; }
API(cuDevicePrimaryCtxSetFlags_v2, int, unsigned) { DRIVER(cuDevicePrimaryCtxSetFlags_v2); return OK; }
API(cuDevicePrimaryCtxGetState, int, unsigned* flags, int* active) { DRIVER(cuDevicePrimaryCtxGetState); *flags = 0; *active = s.contexts.count(s.primary) != 0; return OK; }
API(cuCtxCreate_v2, Context** c, unsigned, int) {
  DRIVER(cuCtxCreate_v2); TRY(condition()); TRY(s.initialised ? OK : NOT_INITIALIZED);
  if (!(*c = make_context(false))) return OUT_OF_MEMORY;
  current = *c; return OK;
}
API(cuCtxDestroy_v2, Context* c) {
  LOCK; const int planned_code = planned("cuCtxDestroy_v2"); if (!s.contexts.count(c) || c->primary) return INVALID_CONTEXT;
  destroy(c); if (current == c) current = nullptr;
  RELEASED;
}
API(cuCtxSetCurrent, Context* c) { LOCK; TRY(planned("cuCtxSetCurrent")); if (c && !s.contexts.count(c)) return CONTEXT_IS_DESTROYED; current = c; return OK; }
API(cuCtxGetCurrent, Context** c) { LOCK; TRY(planned("cuCtxGetCurrent")); *c = current; return OK; }
API(cuCtxGetDevice, int* d) { ENTER(cuCtxGetDevice); *d = 0; return OK; }
API(cuCtxGetStreamPriorityRange, int* least, int* greatest) { ENTER(cuCtxGetStreamPriorityRange); *least = 0; *greatest = -5; return OK; }
API(cuCtxSynchronize) { ENTER(cuCtxSynchronize); TRY(unsafe_in_capture()); return wait_all(*current); }

static void* map_host(size_t n) { return mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0); }
static size_t pages(size_t n) { return (n + PAGE - 1) / PAGE * PAGE; }
static bool take_from(std::map<CUdeviceptr, size_t>& m, CUdeviceptr p, size_t& n) { auto it = m.find(p); if (it == m.end()) return false; n = it->second; m.erase(it); return true; }
API(cuMemGetInfo_v2, size_t* f, size_t* t) { ENTER(cuMemGetInfo_v2); *t = s.total; *f = s.total - s.used; return OK; }
API(cuMemAlloc_v2, CUdeviceptr* p, size_t n) {
  ENTER(cuMemAlloc_v2); if (!n) return INVALID_VALUE;
  TRY(unsafe_in_capture()); TRY(take(n));
  if (!s.arena) s.arena = (char*)mmap(nullptr, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  char* const at = s.arena + s.arena_at; s.arena_at += pages(n);
  if (s.arena_at > ARENA) { finding("out of addresses"); return OUT_OF_MEMORY; }
  mprotect(at, pages(n), PROT_READ | PROT_WRITE); memset(at, 0xff, n > POISONED ? POISONED_OF_MORE : n); mprotect(at, pages(n), PROT_NONE);
  *p = (CUdeviceptr)at; current->allocations[*p] = n; add_device_memory(*p, pages(n), n);
  return OK;
}
API(cuMemFree_v2, CUdeviceptr p) {
  RELEASE(cuMemFree_v2); size_t n;
  if (!take_from(current->allocations, p, n)) return INVALID_VALUE;
  if (!s.late && !s.eager && random_number() % 2) wait_all(*current);      // it may, and the program may not count on it
  give(n); remove_device_memory(p, pages(n)); RELEASED;
}
API(cuMemHostAlloc, void** p, size_t n, unsigned) {
  ENTER(cuMemHostAlloc); if (!n) return INVALID_VALUE;
  TRY(unsafe_in_capture()); if (s.device->integrated) TRY(take(n));
  *p = map_host(pages(n)); madvise(*p, pages(n), MADV_POPULATE_WRITE); current->pinned[(CUdeviceptr)*p] = n; simt_memory_add(*p, n, true); return OK;
}
API(cuMemFreeHost, void* p) {
  RELEASE(cuMemFreeHost); size_t n;
  if (!take_from(current->pinned, (CUdeviceptr)p, n)) return INVALID_VALUE;
  if (s.device->integrated) give(n);
  simt_memory_remove(p); munmap(p, pages(n)); RELEASED;
}
API(cuMemHostRegister_v2, void* p, size_t n, unsigned) {
  ENTER(cuMemHostRegister_v2); const uintptr_t at = (uintptr_t)p;
  if (!n || at % PAGE || (s.device->integrated && n >= s.total)) return INVALID_VALUE;
  TRY(unsafe_in_capture());
  for (auto& [start, length] : current->registered) if (start < at + n && at < start + length) return HOST_MEMORY_ALREADY_REGISTERED;
  if (madvise(p, pages(n), MADV_POPULATE_WRITE)) return INVALID_VALUE;      // pages that are not there, or not writable
  current->registered[at] = n; simt_memory_add(p, n, true); show_board(); return OK;
}
API(cuMemHostUnregister, void* p) {
  RELEASE(cuMemHostUnregister); size_t n;
  if (!take_from(current->registered, (CUdeviceptr)p, n)) return HOST_MEMORY_NOT_REGISTERED;
  std::vector<unsigned char> resident(pages(n) / PAGE);
  if (mincore(p, pages(n), resident.data())) finding("registered memory was unmapped");
  else if (std::count(resident.begin(), resident.end(), 0)) finding("registered memory was discarded, or mapped again");
  simt_memory_remove(p); show_board(); RELEASED;
}
API(cuMemHostGetDevicePointer_v2, CUdeviceptr* d, void* p, unsigned) { ENTER(cuMemHostGetDevicePointer_v2); if (!host_range((CUdeviceptr)p)) return INVALID_VALUE; *d = (CUdeviceptr)p; return OK; }

struct Location { int type, id; }; struct Properties { int type, handle_types; Location location; };     // the beginning of CUmemAllocationProp
API(cuMemGetAllocationGranularity, size_t* g, const Properties*, int) { DRIVER(cuMemGetAllocationGranularity); *g = GRANULE; return OK; }
API(cuMemAddressReserve, CUdeviceptr* p, size_t n, size_t, CUdeviceptr, unsigned long long) {
  ENTER(cuMemAddressReserve); if (!n || n % GRANULE) return INVALID_VALUE;
  if (s.device->integrated && n > RESERVED_MOST) return OUT_OF_MEMORY;
  char* const base = (char*)mmap(nullptr, n + GRANULE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *p = ((CUdeviceptr)base + GRANULE - 1) / GRANULE * GRANULE;
  if (*p != (CUdeviceptr)base) munmap(base, *p - (CUdeviceptr)base);
  munmap((void*)(*p + n), (CUdeviceptr)base + GRANULE - *p);
  current->reserved[*p] = n; return OK;
}
API(cuMemAddressFree, CUdeviceptr p, size_t n) {
  RELEASE(cuMemAddressFree); auto it = current->reserved.find(p);
  if (it == current->reserved.end() || it->second != n) return INVALID_VALUE;
  for (auto& [at, m] : current->mapped) if (at >= p && at < p + n) return INVALID_VALUE;
  munmap((void*)p, n); current->reserved.erase(it); RELEASED;
}
API(cuMemCreate, Handle* h, size_t n, const Properties* wanted, unsigned long long) {
  ENTER(cuMemCreate); if (!n || n % GRANULE || !wanted || wanted->type != 1 || wanted->location.type != 1 || wanted->location.id) return INVALID_VALUE;
  TRY(unsafe_in_capture()); TRY(take(n));
  if (s.physical_file < 0) s.physical_file = memfd_create("device", MFD_CLOEXEC);
  const size_t offset = s.physical_end; s.physical_end += n;
  if (s.physical_file < 0 || ftruncate(s.physical_file, s.physical_end)) { finding("no file for device memory"); return OUT_OF_MEMORY; }
  if (void* at = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_SHARED, s.physical_file, offset); at != MAP_FAILED) { memset(at, 0xff, n > POISONED ? POISONED_OF_MORE : n); munmap(at, n); }
  *h = s.next++; current->physical[*h] = {n, offset, 0, false}; return OK;
}
static void forget_if_unused(Handle h) {
  auto it = current->physical.find(h); if (it == current->physical.end() || it->second.maps || !it->second.released) return;
  fallocate(s.physical_file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, it->second.offset, it->second.bytes); give(it->second.bytes); current->physical.erase(it);
}
API(cuMemRelease, Handle h) {
  RELEASE(cuMemRelease); auto it = current->physical.find(h);
  if (it == current->physical.end() || it->second.released) return INVALID_VALUE;
  it->second.released = true; forget_if_unused(h); RELEASED;
}
API(cuMemMap, CUdeviceptr p, size_t n, size_t offset, Handle h, unsigned long long) {
  ENTER(cuMemMap); auto it = current->physical.find(h); auto in = current->reserved.upper_bound(p);
  if (it == current->physical.end() || it->second.released || n != it->second.bytes || offset || p % GRANULE) return INVALID_VALUE;
  if (in == current->reserved.begin() || p + n > std::prev(in)->first + std::prev(in)->second) return INVALID_VALUE;
  for (auto& [at, m] : current->mapped) if (at < p + n && p < at + m.bytes) return INVALID_VALUE;
  it->second.maps++; current->mapped[p] = {n, h, false}; return OK;
}
API(cuMemSetAccess, CUdeviceptr p, size_t n, const void*, size_t) {
  ENTER(cuMemSetAccess);
  for (CUdeviceptr at = p; at < p + n;) { auto it = current->mapped.find(at); if (it == current->mapped.end()) return INVALID_VALUE; at += it->second.bytes; }
  for (CUdeviceptr at = p; at < p + n;) {
    Mapping& m = current->mapped[at];
    if (!m.accessible && mmap((void*)at, m.bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, s.physical_file, current->physical[m.handle].offset) == MAP_FAILED) return OUT_OF_MEMORY;
    if (!m.accessible) add_device_memory(at, m.bytes, m.bytes);
    m.accessible = true; at += m.bytes;
  }
  return OK;
}
API(cuMemUnmap, CUdeviceptr p, size_t n) {
  RELEASE(cuMemUnmap);
  for (CUdeviceptr at = p; at < p + n;) { auto it = current->mapped.find(at); if (it == current->mapped.end() || at + it->second.bytes > p + n) return INVALID_VALUE; at += it->second.bytes; }
  for (CUdeviceptr at = p; at < p + n;) {
    const Mapping m = current->mapped[at]; if (m.accessible) remove_device_memory(at, m.bytes);
    current->mapped.erase(at); current->physical[m.handle].maps--; forget_if_unused(m.handle); at += m.bytes;
  }
  RELEASED;
}

// Copies and fills; the memory must exist both when they are queued and when they are executed.
static int copy(Stream* t, CUdeviceptr to, CUdeviceptr from, size_t n, bool to_device, bool from_device) {
  STREAM(t);
  auto usable = [](CUdeviceptr p, size_t n) { return on_device(p, n) || host_range(p); };
  if ((to_device && !usable(to, n)) || (from_device && !usable(from, n))) return INVALID_VALUE;
  if (!to_device) s.to_host += n;
  std::shared_ptr<std::vector<char>> held;
  if (!from_device && !host_range(from) && !t_stream.capture.on) {
    TRY(wait(end_of(t_stream)));
    held = std::make_shared<std::vector<char>>((char*)from, (char*)from + n);
  }
  TRY(push(t_stream, [=] { return guarded("a copy", [=] { memcpy((void*)to, held ? held->data() : (void*)from, n); simt_memory_written((void*)to, n); return OK; }); }));
  return !to_device && !host_range(to) && !t_stream.capture.on ? wait(end_of(t_stream)) : OK;
}
static int fill(Stream* t, CUdeviceptr p, uint32_t v, size_t size, size_t n) {
  STREAM(t); if (!on_device(p, n * size) && !host_range(p)) return INVALID_VALUE;
  return push(t_stream, [=] { return guarded("a fill", [=] { for (size_t i = 0; i < n * size; i += size) memcpy((char*)p + i, &v, size); simt_memory_written((void*)p, n * size); return OK; }); });
}
API(cuMemcpyHtoDAsync_v2, CUdeviceptr to, const void* from, size_t n, Stream* t) { ENTER(cuMemcpyHtoDAsync_v2); return copy(t, to, (CUdeviceptr)from, n, true, false); }
API(cuMemcpyDtoHAsync_v2, void* to, CUdeviceptr from, size_t n, Stream* t) { ENTER(cuMemcpyDtoHAsync_v2); return copy(t, (CUdeviceptr)to, from, n, false, true); }
API(cuMemcpyDtoDAsync_v2, CUdeviceptr to, CUdeviceptr from, size_t n, Stream* t) { ENTER(cuMemcpyDtoDAsync_v2); return copy(t, to, from, n, true, true); }
API(cuMemcpyHtoD_v2, CUdeviceptr to, const void* from, size_t n) { ENTER(cuMemcpyHtoD_v2); TRY(unsafe_in_capture()); TRY(copy(nullptr, to, (CUdeviceptr)from, n, true, false)); return wait(end_of(*legacy())); }
API(cuMemcpyDtoH_v2, void* to, CUdeviceptr from, size_t n) { ENTER(cuMemcpyDtoH_v2); TRY(unsafe_in_capture()); TRY(copy(nullptr, (CUdeviceptr)to, from, n, false, true)); return wait(end_of(*legacy())); }
API(cuMemcpyDtoD_v2, CUdeviceptr to, CUdeviceptr from, size_t n) { ENTER(cuMemcpyDtoD_v2); TRY(unsafe_in_capture()); return copy(nullptr, to, from, n, true, true); }
API(cuMemsetD8Async, CUdeviceptr p, unsigned char v, size_t n, Stream* t) { ENTER(cuMemsetD8Async); return fill(t, p, v, 1, n); }
API(cuMemsetD32Async, CUdeviceptr p, unsigned v, size_t n, Stream* t) { ENTER(cuMemsetD32Async); return fill(t, p, v, 4, n); }
API(cuMemsetD8_v2, CUdeviceptr p, unsigned char v, size_t n) { ENTER(cuMemsetD8_v2); TRY(unsafe_in_capture()); return fill(nullptr, p, v, 1, n); }
API(cuMemsetD32_v2, CUdeviceptr p, unsigned v, size_t n) { ENTER(cuMemsetD32_v2); TRY(unsafe_in_capture()); return fill(nullptr, p, v, 4, n); }

static int make_stream(Stream** t, unsigned flags) { if (flags > 1) return INVALID_VALUE; *t = new Stream{std::make_shared<Queue>(), {}}; (*t)->queue->blocking = flags == 0; current->streams.insert(*t); return OK; }
API(cuStreamCreate, Stream** t, unsigned flags) { ENTER(cuStreamCreate); return make_stream(t, flags); }
API(cuStreamCreateWithPriority, Stream** t, unsigned flags, int) { ENTER(cuStreamCreateWithPriority); return make_stream(t, flags); }
// Its work is executed anyway.
API(cuStreamDestroy_v2, Stream* t) {
  RELEASE(cuStreamDestroy_v2); if (!is(current->streams, t)) return INVALID_HANDLE;
  { Opened open; drain(end_of(*t)); }
  current->streams.erase(t); delete t; RELEASED;
}
API(cuStreamSynchronize, Stream* t) { ENTER(cuStreamSynchronize); STREAM(t); if (t_stream.capture.on) { t_stream.capture.invalid = true; return STREAM_CAPTURE_UNSUPPORTED; } return wait(end_of(t_stream)); }
// Repeated polling eventually succeeds, even in order `late`.
API(cuStreamQuery, Stream* t) {
  ENTER(cuStreamQuery); STREAM(t); if (t_stream.capture.on) { t_stream.capture.invalid = true; return STREAM_CAPTURE_UNSUPPORTED; }
  if (end_of(t_stream).reached()) return condition();
  { Opened open; step(*t_stream.queue); }
  TRY(condition()); return end_of(t_stream).reached() ? OK : NOT_READY;
}
API(cuStreamWaitEvent, Stream* t, Event* e, unsigned) {
  ENTER(cuStreamWaitEvent); STREAM(t); if (!is(current->events, e)) return INVALID_HANDLE;
  if (t_stream.capture.on) return e->captured ? OK : STREAM_CAPTURE_ISOLATION;
  if (e->captured) { finding("a stream joins the capture of another one, which is not imitated"); return STREAM_CAPTURE_UNSUPPORTED; }
  return push(t_stream, nullptr, {e->recorded});
}
API(cuEventCreate, Event** e, unsigned flags) { ENTER(cuEventCreate); *e = new Event{{}, !(flags & 2), false, std::make_shared<double>(0)}; current->events.insert(*e); return OK; }
API(cuEventDestroy_v2, Event* e) { RELEASE(cuEventDestroy_v2); if (!current->events.erase(e)) return INVALID_HANDLE; delete e; RELEASED; }
API(cuEventRecord, Event* e, Stream* t) {
  ENTER(cuEventRecord); STREAM(t); if (!is(current->events, e)) return INVALID_HANDLE;
  if ((e->captured = t_stream.capture.on)) return OK;
  e->ms = std::make_shared<double>(0);
  const int code = push(t_stream, [ms = e->ms] { timespec now; clock_gettime(CLOCK_MONOTONIC, &now); *ms = now.tv_sec * 1e3 + now.tv_nsec / 1e6; return OK; });
  e->recorded = end_of(t_stream); return code;
}
API(cuEventQuery, Event* e) {
  ENTER(cuEventQuery); if (!is(current->events, e)) return INVALID_HANDLE;
  if (e->captured) return CAPTURED_EVENT;
  TRY(unsafe_in_capture());
  if (!e->recorded.reached()) { Opened open; if (!step(*e->recorded.queue)) for (auto& q : queues()) step(*q); }
  TRY(condition()); return e->recorded.reached() ? OK : NOT_READY;
}
API(cuEventSynchronize, Event* e) { ENTER(cuEventSynchronize); if (!is(current->events, e)) return INVALID_HANDLE; if (e->captured) return CAPTURED_EVENT; TRY(unsafe_in_capture()); s.event_waits += !e->recorded.reached(); return wait(e->recorded); }
static int elapsed(float* ms, Event* a, Event* b) {
  if (!is(current->events, a) || !is(current->events, b) || !a->timing || !b->timing || !a->recorded.queue || !b->recorded.queue) return INVALID_HANDLE;
  if (!a->recorded.reached() || !b->recorded.reached()) return NOT_READY;
  *ms = (float)(*b->ms - *a->ms); return OK;
}
API(cuEventElapsedTime, float* ms, Event* a, Event* b) { ENTER(cuEventElapsedTime); return elapsed(ms, a, b); }
API(cuEventElapsedTime_v2, float* ms, Event* a, Event* b) { ENTER(cuEventElapsedTime_v2); return elapsed(ms, a, b); }

static int load(Module** out, const void* image) {
  TRY(unsafe_in_capture());
  std::map<std::string, Entry> entries; std::string why;
  const Target on{s.device->major * 10 + s.device->minor, s.device->integrated, s.driver};
  int code = guarded([&] { return read_image((const char*)image, on, entries, why); });
  if (code == ILLEGAL_ADDRESS) code = INVALID_IMAGE;                  // it ends before what it tells of
  if (code) { fprintf(stderr, "libcuda (imitated): image refused: %s\n", why.c_str()); return code; }
  auto made = std::make_unique<Module>();
  for (auto& [name, entry] : entries) {
    const SimtKernel* k = simt_find(name);
    if (!k || k->sizes != entry.sizes) { finding(name + ": the image has other parameters than the kernel that was compiled here"); return INVALID_IMAGE; }
    made->functions[name] = {k, entry, (unsigned)OPT_IN_ABOVE - entry.shared};
  }
  for (auto& name : simt_names()) if (!entries.count(name)) { finding(name + ": not in the image"); return INVALID_IMAGE; }
  for (auto& [name, f] : made->functions) current->functions.insert(&f);
  current->modules.insert(*out = made.release()); return OK;
}
API(cuModuleLoadData, Module** m, const void* image) { ENTER(cuModuleLoadData); return load(m, image); }
API(cuModuleLoadDataEx, Module** m, const void* image, unsigned, int*, void**) { ENTER(cuModuleLoadDataEx); return load(m, image); }
API(cuModuleUnload, Module* m) { RELEASE(cuModuleUnload); if (!is(current->modules, m)) return INVALID_HANDLE; for (auto& [n, f] : m->functions) current->functions.erase(&f); current->modules.erase(m); delete m; RELEASED; }
API(cuModuleGetFunction, Function** f, Module* m, const char* n) { ENTER(cuModuleGetFunction); if (!is(current->modules, m)) return INVALID_HANDLE; auto it = m->functions.find(n); if (it == m->functions.end()) return NOT_FOUND; *f = &it->second; return OK; }
API(cuFuncGetAttribute, int* v, int which, Function* f) {
  ENTER(cuFuncGetAttribute); if (!is(current->functions, f)) return INVALID_HANDLE;
  if (which == 0) *v = f->entry.threads_max; else if (which == 1) *v = f->entry.shared; else if (which == 8) *v = f->dynamic_max;
  else { finding(text("attribute %d of functions is not imitated", which)); return INVALID_VALUE; }
  return OK;
}
API(cuFuncSetAttribute, Function* f, int which, int v) {
  ENTER(cuFuncSetAttribute); if (!is(current->functions, f)) return INVALID_HANDLE;
  if (which == 9) return OK;                                          // preferred carve-out
  if (which != 8 || v < 0 || v + f->entry.shared > (unsigned)s.device->shared_optin) return INVALID_VALUE;
  f->dynamic_max = v; return OK;
}
API(cuLaunchKernel, Function* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, Stream* t, void** params, void** extra) {
  ENTER(cuLaunchKernel); STREAM(t); if (!is(current->functions, f)) return INVALID_HANDLE;
  if (!params || extra || !gx || !gy || !gz || !bx || !by || !bz || gx > 2147483647u || gy > 65535 || gz > 65535) return INVALID_VALUE;
  if ((uint64_t)bx * by * bz > f->entry.threads_max || shared > f->dynamic_max) return INVALID_VALUE;
  auto held = std::make_shared<std::vector<std::vector<char>>>();
  for (size_t i = 0; i < f->kernel->sizes.size(); i++) held->emplace_back((char*)params[i], (char*)params[i] + f->kernel->sizes[i]);
  return push(t_stream, [=, kernel = f->kernel]() -> int {
    TRY(planned("kernel")); s.executed++;
    auto has_piece = [](const std::map<CUdeviceptr, size_t>& m) { return std::any_of(m.begin(), m.end(), [](auto& e) { return e.second >= 512 << 10 && e.second <= 1 << 20; }); };
    uint64_t more_ms = 0; for (Context* c : s.contexts) more_ms += (s.mapped_ms && has_piece(c->registered) ? s.mapped_ms : 0) + (s.device_ms && has_piece(c->allocations) ? s.device_ms : 0);
    if (more_ms) usleep(1000 * more_ms);
    return guarded(kernel->name, [&]() -> int {
      std::vector<void*> p; for (auto& v : *held) p.push_back(v.data());
      const unsigned grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
      int code = simt_launch(*kernel, grid, block, shared, p.data()) ? OK : LAUNCH_FAILED;
      if (kernel->name == s.wrong && !p.empty()) { CUdeviceptr out; memcpy(&out, (*held)[0].data() + s.wrong_at, 8); *(uint32_t*)out ^= 1; }
      for (auto& what : simt_findings()) { finding(what); if (what.find("outside of memory") != what.npos) code = ILLEGAL_ADDRESS; }
      return code;
    });
  });
}

API(cuThreadExchangeStreamCaptureMode, int* mode) { LOCK; std::swap(capture_mode, *mode); return OK; }
API(cuStreamBeginCapture_v2, Stream* t, int mode) {
  ENTER(cuStreamBeginCapture_v2); STREAM(t); if (&t_stream == legacy()) return STREAM_CAPTURE_UNSUPPORTED;
  if (t_stream.capture.on) return INVALID_VALUE;
  t_stream.capture = {true, false, mode, std::this_thread::get_id(), {}}; return OK;
}
API(cuStreamIsCapturing, Stream* t, int* state) { ENTER(cuStreamIsCapturing); STREAM(t); *state = !t_stream.capture.on ? 0 : t_stream.capture.invalid ? 2 : 1; return OK; }
API(cuStreamEndCapture, Stream* t, Graph** g) {
  ENTER(cuStreamEndCapture); STREAM(t); Capture& c = t_stream.capture; *g = nullptr;
  if (!c.on) return INVALID_VALUE;
  c.on = false; if (c.invalid) return STREAM_CAPTURE_INVALIDATED;
  if (c.mode != 2 && c.by != std::this_thread::get_id()) return STREAM_CAPTURE_WRONG_THREAD;
  current->graphs.insert(*g = new Graph{std::move(c.nodes)}); return OK;
}
API(cuGraphInstantiateWithFlags, Exec** e, Graph* g, unsigned long long) { ENTER(cuGraphInstantiateWithFlags); if (!is(current->graphs, g)) return INVALID_HANDLE; const size_t n = g->nodes.size() * s.node_bytes; TRY(take(n)); current->execs.insert(*e = new Exec{g->nodes, {}, n}); return OK; }
API(cuGraphUpload, Exec* e, Stream* t) { ENTER(cuGraphUpload); return stream_of(t) && is(current->execs, e) ? OK : INVALID_HANDLE; }
API(cuGraphLaunch, Exec* e, Stream* t) {
  ENTER(cuGraphLaunch); STREAM(t); if (!is(current->execs, e)) return INVALID_HANDLE;
  if (t_stream.capture.on) { finding("a graph is launched into a capture, which is not imitated"); return STREAM_CAPTURE_UNSUPPORTED; }
  const std::vector<Mark> after{e->last};
  TRY(push(t_stream, nullptr, after));
  const std::vector<Work>& nodes = e->nodes;
  for (size_t i = 0; i + s.cut < nodes.size(); i++) TRY(push(t_stream, nodes[i]));
  e->last = end_of(t_stream); return OK;
}
API(cuGraphExecDestroy, Exec* e) { RELEASE(cuGraphExecDestroy); if (!current->execs.erase(e)) return INVALID_HANDLE; give(e->bytes); delete e; RELEASED; }
API(cuGraphDestroy, Graph* g) { RELEASE(cuGraphDestroy); if (!current->graphs.erase(g)) return INVALID_HANDLE; delete g; RELEASED; }
