// Promises of the imitated driver, by its entry points: each case is a process with its own environment.
//   test LIBRARY IMAGES [CASE]      IMAGES: folder with compute_80.ptx, sm_87.cubin, sm_90.cubin
#include "image.h"
#include <csignal>
#include <dlfcn.h>
#include <fstream>
#include <functional>
#include <iterator>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
typedef unsigned long long Address; typedef void* Thing;

static void* library; static std::string images, wrong;
template <class... A> static int cu(const char* name, A... a) {
  auto f = (int (*)(A...))dlsym(library, name);
  if (!f) { printf("  no entry point %s\n", name); _exit(3); }
  return f(a...);
}
static void is(int line, long got, long wanted) { if (got != wanted) { wrong += "line " + std::to_string(line) + ": " + std::to_string(got) + " instead of " + std::to_string(wanted) + "; "; } }
#define IS(got, wanted) is(__LINE__, (long)(got), (long)(wanted))
static std::string file(const std::string& name) { std::ifstream f(images + "/" + name, std::ios::binary); return {std::istreambuf_iterator<char>(f), {}}; }
static int load(const std::string& image) { Thing m = nullptr; return cu("cuModuleLoadData", &m, image.data()); }
static Thing context() { Thing c = nullptr; IS(cu("cuInit", 0u), OK); IS(cu("cuDevicePrimaryCtxRetain", &c, 0), OK); IS(cu("cuCtxSetCurrent", c), OK); return c; }
static Address memory(size_t n) { Address p = 0; IS(cu("cuMemAlloc_v2", &p, n), OK); return p; }
static Thing stream() { Thing t = nullptr; IS(cu("cuStreamCreate", &t, 1u), OK); return t; }
static Thing event() { Thing e = nullptr; IS(cu("cuEventCreate", &e, 0u), OK); return e; }
static Thing kernel(const char* name) { Thing m = nullptr, f = nullptr; IS(cu("cuModuleLoadData", &m, file("sm_87.cubin").data()), OK); IS(cu("cuModuleGetFunction", &f, m, name), OK); return f; }
static char* host(size_t n) { char* p = (char*)mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); IS(cu("cuMemHostRegister_v2", (Thing)p, n, 0u), OK); return p; }
// Converts 32 halves of 1 to a row of bytes, in place: its scale, and 127 each.
static int convert(Thing f, Thing t, Address at, unsigned shared = 0) {
  uint64_t first = 0; uint32_t count = 1, dim = 32, from = 0, to = 1;
  void* p[] = {&at, &first, &count, &dim, &from, &to};
  return cu("cuLaunchKernel", f, 1u, 1u, 1u, 128u, 1u, 1u, shared, t, (void**)p, (void**)nullptr);
}
static void ones(char* p) { for (int i = 0; i < 32; i++) { p[2 * i] = 0; p[2 * i + 1] = 0x3c; } }

static void images_fit() {
  context();
  const bool orin = std::string(getenv("FAKE_CUDA_DEVICE")) == "orin";
  IS(load(file("compute_80.ptx")), OK); IS(load(file("sm_87.cubin")), orin ? OK : NO_BINARY_FOR_GPU); IS(load(file("sm_90.cubin")), orin ? NO_BINARY_FOR_GPU : OK);
}
static void images_do_not_fit() {
  context();
  IS(load(file("compute_80.ptx")), INVALID_PTX); IS(load(file("sm_87.cubin")), NO_BINARY_FOR_GPU); IS(load("not an image"), INVALID_IMAGE); IS(load(""), INVALID_IMAGE);
}
static void old_driver() { context(); int v = 0; IS(cu("cuDriverGetVersion", &v), OK); IS(v, 12010); IS(load(file("compute_80.ptx")), UNSUPPORTED_PTX_VERSION); }
static void damaged_images() {
  context();
  const std::string ptx = file("compute_80.ptx"), cubin = file("sm_87.cubin");
  IS(load(ptx.substr(0, ptx.size() * 2 / 3)), INVALID_PTX);
  std::string one = ptx; one.replace(one.find("finish_param_0[56]"), 18, "finish_param_0[64]"); IS(load(one), INVALID_IMAGE);
  one = ptx; one.replace(one.find(".entry finish("), 14, ".entry finest("); IS(load(one), INVALID_IMAGE);
  for (size_t at : {size_t(18), cubin.size() / 2}) {
    one = cubin.substr(0, at); Thing m = nullptr;
    char* end = (char*)mmap(nullptr, one.size() / 4096 * 4096 + 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) + one.size() / 4096 * 4096 + 4096;
    mprotect(end, 4096, PROT_NONE); memcpy(end - one.size(), one.data(), one.size());
    IS(cu("cuModuleLoadData", &m, (const char*)(end - one.size())), INVALID_IMAGE);
  }
  IS(cu("cuCtxSynchronize"), OK);
}
static void host_touches_device_memory() { context(); *(volatile char*)memory(100) = 1; }
static void memory_is_limited() {
  context(); Address p = 0; size_t free = 0, total = 0;
  IS(cu("cuMemAlloc_v2", &p, (size_t)0), INVALID_VALUE); IS(cu("cuMemAlloc_v2", &p, (size_t)(5 << 20)), OUT_OF_MEMORY);      // half of what is free
  Address first = memory(4 << 20); IS(cu("cuMemAlloc_v2", &p, (size_t)(4 << 20)), OUT_OF_MEMORY); memory(2 << 20);
  IS(cu("cuMemGetInfo_v2", &free, &total), OK); IS(total, 8 << 20); IS(free, 2 << 20);
  IS(cu("cuMemFree_v2", first), OK); IS(cu("cuMemFree_v2", first), INVALID_VALUE); IS(cu("cuMemGetInfo_v2", &free, &total), OK); IS(free, 6 << 20);
}
static void contents_belong_to_the_handle() {
  context(); const size_t G = 2 << 20; Address space = 0, other = 0; uint64_t h = 0; int properties[8] = {1, 0, 1, 0}, access[3] = {1, 0, 3}; size_t free = 0, total = 0;
  IS(cu("cuMemAddressReserve", &space, 4 * G, (size_t)0, (Address)0, 0ull), OK); IS(cu("cuMemCreate", &h, G, (void*)properties, 0ull), OK);
  IS(cu("cuMemMap", space, G, (size_t)0, h, 0ull), OK); IS(cu("cuMemMap", space, G, (size_t)0, h, 0ull), INVALID_VALUE);
  IS(cu("cuMemsetD8_v2", space, (unsigned char)7, G), INVALID_VALUE);                                // without access
  IS(cu("cuMemSetAccess", space, G, (void*)access, (size_t)1), OK); IS(cu("cuMemsetD8_v2", space, (unsigned char)7, G), OK); IS(cu("cuCtxSynchronize"), OK);
  other = space + 2 * G; IS(cu("cuMemUnmap", space, G), OK); IS(cu("cuMemMap", other, G, (size_t)0, h, 0ull), OK); IS(cu("cuMemSetAccess", other, G, (void*)access, (size_t)1), OK);
  char out[4] = {}; IS(cu("cuMemcpyDtoH_v2", (void*)out, other, (size_t)4), OK); IS(out[3], 7); IS(cu("cuMemcpyDtoH_v2", (void*)out, space, (size_t)4), INVALID_VALUE);
  IS(cu("cuMemRelease", h), OK); IS(cu("cuMemGetInfo_v2", &free, &total), OK); IS(total - free, G);      // mapped still
  IS(cu("cuMemAddressFree", space, 4 * G), INVALID_VALUE); IS(cu("cuMemUnmap", other, G), OK); IS(cu("cuMemGetInfo_v2", &free, &total), OK); IS(free, total);
  IS(cu("cuMemAddressFree", space, 4 * G), OK);
}
// Result of a copy on another stream, with and without the wait for an event.
static void streams_run_late() {
  context(); Thing a = stream(), b = stream(), e = event(); char* p = host(4096); Address d = memory(4096);
  for (bool waits : {true, false}) {
    IS(cu("cuMemsetD8Async", d, (unsigned char)1, (size_t)16, a), OK); IS(cu("cuStreamSynchronize", a), OK);
    IS(cu("cuMemsetD8Async", d, (unsigned char)2, (size_t)16, a), OK); IS(cu("cuEventRecord", e, a), OK);
    if (waits) IS(cu("cuStreamWaitEvent", b, e, 0u), OK);
    p[0] = 0; IS(cu("cuMemcpyDtoHAsync_v2", (void*)p, d, (size_t)16, b), OK); IS(p[0], 0);
    IS(cu("cuStreamSynchronize", b), OK); IS(p[0], waits ? 2 : 1);
    IS(cu("cuCtxSynchronize"), OK);
  }
  // A late copy reads data written before the wait.
  p[0] = 3; IS(cu("cuMemcpyHtoDAsync_v2", d, (const void*)p, (size_t)1, a), OK); p[0] = 4; char out = 0; IS(cu("cuStreamSynchronize", a), OK);
  IS(cu("cuMemcpyDtoH_v2", (void*)&out, d, (size_t)1), OK); IS(out, 4);
  // Polling eventually succeeds.
  IS(cu("cuMemsetD8Async", d, (unsigned char)5, (size_t)1, a), OK); IS(cu("cuEventRecord", e, a), OK); IS(cu("cuEventQuery", e), NOT_READY); IS(cu("cuEventQuery", e), OK);
}
static void legacy_stream_waits() {
  context(); Thing blocking = nullptr, apart = stream(); Address d = memory(16); char out[2];
  IS(cu("cuStreamCreate", &blocking, 0u), OK); IS(cu("cuMemsetD8_v2", d, (unsigned char)0, (size_t)2), OK); IS(cu("cuCtxSynchronize"), OK);
  IS(cu("cuMemsetD8Async", d, (unsigned char)1, (size_t)1, blocking), OK); IS(cu("cuMemsetD8Async", d + 1, (unsigned char)1, (size_t)1, apart), OK);
  IS(cu("cuMemcpyDtoH_v2", (void*)out, d, (size_t)2), OK); IS(out[0], 1); IS(out[1], 0);
}
static void kernels_run() {
  context(); Thing f = kernel("convert"), t = stream(); Address d = memory(64); char* p = host(4096); ones(p);
  IS(cu("cuMemcpyHtoDAsync_v2", d, (const void*)p, (size_t)64, t), OK); IS(convert(f, t, d), OK); IS(cu("cuMemcpyDtoHAsync_v2", (void*)p, d, (size_t)64, t), OK);
  IS(cu("cuStreamSynchronize", t), OK); for (int i = 2; i < 34; i++) IS(p[i], 127);
}
static void memory_freed_too_early() {
  Thing c = context(), f = kernel("convert"), t = stream(); Address d = memory(64); int version = 0;
  IS(convert(f, t, d), OK); IS(cu("cuMemFree_v2", d), OK); IS(cu("cuStreamSynchronize", t), ILLEGAL_ADDRESS);
  IS(cu("cuMemAlloc_v2", &d, (size_t)1), ILLEGAL_ADDRESS); IS(cu("cuStreamQuery", t), ILLEGAL_ADDRESS); IS(cu("cuDriverGetVersion", &version), OK);
  IS(cu("cuDevicePrimaryCtxRelease_v2", 0), OK); IS(cu("cuStreamSynchronize", t), CONTEXT_IS_DESTROYED); IS(cu("cuCtxSetCurrent", c), CONTEXT_IS_DESTROYED);
  context(); kernels_run();
}
static void faults_come_as_planned() {
  context(); Thing t = stream(); Address d = memory(64), p = 0;       // cuMemAlloc_v2@2=2
  IS(cu("cuMemAlloc_v2", &p, (size_t)64), OUT_OF_MEMORY); memory(64);
  IS(convert(kernel("convert"), t, d), OK); IS(cu("cuStreamSynchronize", t), LAUNCH_FAILED); IS(cu("cuMemAlloc_v2", &p, (size_t)64), LAUNCH_FAILED);   // kernel@1=719
  IS(cu("cuDevicePrimaryCtxReset_v2", 0), OK);
  context(); memory(64); IS(cu("cuStreamCreate", &t, 0u), DEVICE_UNAVAILABLE); IS(cu("cuMemAlloc_v2", &p, (size_t)64), DEVICE_UNAVAILABLE);              // cuStreamCreate@2=46!
  IS(cu("cuDevicePrimaryCtxReset_v2", 0), OK); context();
  Thing e = event(); IS(cu("cuEventRecord", e, nullptr), UNKNOWN); IS(cu("cuDevicePrimaryCtxReset_v2", 0), UNKNOWN); IS(cu("cuInit", 0u), UNKNOWN);      // cuEventRecord@1=999!!
}
static void captures_are_replayed() {
  context(); Thing t = stream(), g = nullptr, x = nullptr, f = kernel("convert"), e = event(); Address d = memory(64), p = 0; char* h = host(4096); int mode = 0;
  for (int relaxed : {0, 1, 2}) {
    IS(cu("cuStreamBeginCapture_v2", t, relaxed), OK); IS(cu("cuMemcpyHtoDAsync_v2", d, (const void*)h, (size_t)64, t), OK); IS(convert(f, t, d), OK);
    IS(cu("cuMemcpyDtoHAsync_v2", (void*)h, d, (size_t)64, t), OK);
    if (relaxed < 2) { IS(cu("cuMemAlloc_v2", &p, (size_t)64), STREAM_CAPTURE_UNSUPPORTED); IS(cu("cuStreamEndCapture", t, &g), STREAM_CAPTURE_INVALIDATED); continue; }
    memory(64); IS(cu("cuStreamEndCapture", t, &g), OK);
  }
  IS(cu("cuGraphInstantiateWithFlags", &x, g, 0ull), OK); IS(cu("cuGraphDestroy", g), OK); ones(h); IS(cu("cuStreamSynchronize", t), OK); IS(h[2], 0);
  for (int i = 0; i < 3; i++) { ones(h); IS(cu("cuGraphLaunch", x, t), OK); IS(cu("cuStreamSynchronize", t), OK); IS(h[2], 127); }
  IS(cu("cuStreamBeginCapture_v2", t, 0), OK); IS(cu("cuEventQuery", e), STREAM_CAPTURE_UNSUPPORTED); IS(cu("cuStreamEndCapture", t, &g), STREAM_CAPTURE_INVALIDATED);
  IS(cu("cuStreamBeginCapture_v2", t, 1), OK); mode = 2; IS(cu("cuThreadExchangeStreamCaptureMode", &mode), OK); memory(64); IS(cu("cuStreamEndCapture", t, &g), OK);
  IS(cu("cuGraphExecDestroy", x), OK); IS(cu("cuGraphLaunch", x, t), INVALID_HANDLE);
}
static void use_without_context() {
  Address p = 0; IS(cu("cuMemAlloc_v2", &p, (size_t)1), NOT_INITIALIZED); IS(cu("cuInit", 0u), OK); IS(cu("cuMemAlloc_v2", &p, (size_t)1), INVALID_CONTEXT);
  context(); memory(1); Thing t = stream(); IS(cu("cuStreamDestroy_v2", t), OK); IS(cu("cuStreamSynchronize", t), INVALID_HANDLE);
  int code = 0; std::thread([&] { code = cu("cuMemAlloc_v2", &p, (size_t)1); }).join(); IS(code, INVALID_CONTEXT);
}
static void shared_memory_is_asked_for() {
  context(); Thing f = kernel("attend_256"); int fixed = 0; IS(cu("cuFuncGetAttribute", &fixed, 1, f), OK); IS(fixed > 0, true);
  void* p[] = {calloc(1, 4096)}; auto launch = [&](unsigned shared) { return cu("cuLaunchKernel", f, 1u, 1u, 1u, 128u, 1u, 1u, shared, (Thing)nullptr, (void**)p, (void**)nullptr); };
  IS(launch(49152 - fixed + 1), INVALID_VALUE); IS(cu("cuFuncSetAttribute", f, 8, 166912), INVALID_VALUE); IS(cu("cuFuncSetAttribute", f, 8, 65536), OK); IS(launch(65537), INVALID_VALUE); IS(launch(65536), OK);
}
static void registered_memory_is_discarded() {
  context(); char* p = host(8192); IS(cu("cuMemHostRegister_v2", (Thing)p, (size_t)4096, 0u), HOST_MEMORY_ALREADY_REGISTERED); IS(cu("cuMemHostRegister_v2", (Thing)(p + 1), (size_t)9, 0u), INVALID_VALUE);
  IS(madvise(p, 4096, MADV_DONTNEED), 0); IS(cu("cuMemHostUnregister", (Thing)p), OK); IS(cu("cuMemHostUnregister", (Thing)p), HOST_MEMORY_NOT_REGISTERED); memory(100);
}
static void contexts_take_memory() {
  Thing a = nullptr, b = nullptr; size_t before = 0, after = 0, all = 0; IS(cu("cuInit", 0u), OK);
  IS(cu("cuCtxCreate_v2", &a, 0u, 0), OK); IS(cu("cuMemGetInfo_v2", &before, &all), OK); IS(all - before, 4096);
  IS(cu("cuDevicePrimaryCtxRetain", &b, 0), OK); IS(cu("cuMemGetInfo_v2", &after, &all), OK); IS(all - after, 8192);
  IS(cu("cuCtxCreate_v2", &b, 0u, 0), OUT_OF_MEMORY); IS(cu("cuDevicePrimaryCtxRelease_v2", 0), OK);
  IS(cu("cuMemGetInfo_v2", &after, &all), OK); IS(after, before); IS(cu("cuCtxDestroy_v2", a), OK); IS(cu("cuCtxDestroy_v2", a), INVALID_CONTEXT); IS(cu("cuMemGetInfo_v2", &after, &all), INVALID_CONTEXT);
}

struct Case { const char* name; void (*run)(); std::vector<const char*> environment; int signal; };
static const Case CASES[] = {
  {"images fit Orin", images_fit, {"DEVICE=orin"}, 0}, {"images fit Hopper", images_fit, {"DEVICE=hopper"}, 0},
  {"images do not fit an older device", images_do_not_fit, {"DEVICE=turing"}, 0}, {"PTX is newer than the driver", old_driver, {"DRIVER=12010"}, 0},
  {"damaged images", damaged_images, {}, 0}, {"the host touches device memory", host_touches_device_memory, {}, SIGSEGV},
  {"memory is limited", memory_is_limited, {"MEMORY=8388608", "LARGEST=50%"}, 0}, {"contents belong to the handle", contents_belong_to_the_handle, {}, 0},
  {"streams run late", streams_run_late, {"ORDER=late"}, 0}, {"the legacy stream waits", legacy_stream_waits, {}, 0},
  {"kernels run late", kernels_run, {"ORDER=late"}, 0}, {"kernels run eagerly", kernels_run, {"ORDER=eager"}, 0}, {"kernels run at random", kernels_run, {"ORDER=5"}, 0},
  {"memory freed too early", memory_freed_too_early, {}, 0},
  {"faults come as planned", faults_come_as_planned, {"FAULTS=cuMemAlloc_v2@2=2,kernel@1=719,cuStreamCreate@2=46!,cuEventRecord@1=999!!"}, 0},
  {"captures are replayed", captures_are_replayed, {}, 0}, {"use without a context", use_without_context, {}, 0},
  {"shared memory is asked for", shared_memory_is_asked_for, {}, 0}, {"registered memory is discarded", registered_memory_is_discarded, {}, 0},
  {"contexts take memory", contexts_take_memory, {"MEMORY=12000", "CONTEXT=4096"}, 0},
};
int main(int argc, char** argv) {
  if (argc < 3) return 2;
  images = argv[2]; setvbuf(stdout, nullptr, _IOLBF, 0);
  int bad = 0;
  for (auto& c : CASES) {
    if (argc > 3 && strcmp(argv[3], c.name)) continue;
    const pid_t child = fork();
    if (!child) {
      for (auto& e : c.environment) { const std::string all = e; setenv(("FAKE_CUDA_" + all.substr(0, all.find('='))).c_str(), all.substr(all.find('=') + 1).c_str(), 1); }
      library = dlopen(argv[1], RTLD_NOW); if (!library) { printf("  %s\n", dlerror()); _exit(3); }
      c.run();
      if (!wrong.empty()) printf("  %s: %s\n", c.name, wrong.c_str());
      exit(!wrong.empty());
    }
    int status = 0; waitpid(child, &status, 0);
    const bool ok = c.signal ? WIFSIGNALED(status) && WTERMSIG(status) == c.signal : WIFEXITED(status) && !WEXITSTATUS(status);
    printf("%-4s %s\n", ok ? "ok" : "BAD", c.name); bad += !ok;
  }
  printf(bad ? "FAILED: %d\n" : "passed\n", bad);
  return bad != 0;
}
