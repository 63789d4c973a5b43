// Errors of the driver, and its view of an image: kernels, the sizes of their parameters, and compatible devices.
#pragma once
#include <elf.h>
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

#define ERRORS(E) E(INVALID_VALUE, 1) E(OUT_OF_MEMORY, 2) E(NOT_INITIALIZED, 3) E(DEVICE_UNAVAILABLE, 46) E(NO_DEVICE, 100) E(INVALID_DEVICE, 101) \
  E(INVALID_IMAGE, 200) E(INVALID_CONTEXT, 201) E(NO_BINARY_FOR_GPU, 209) E(ECC_UNCORRECTABLE, 214) E(INVALID_PTX, 218) \
  E(UNSUPPORTED_PTX_VERSION, 222) E(INVALID_HANDLE, 400) E(NOT_FOUND, 500) E(NOT_READY, 600) E(ILLEGAL_ADDRESS, 700) \
  E(LAUNCH_OUT_OF_RESOURCES, 701) E(CONTEXT_IS_DESTROYED, 709) E(HOST_MEMORY_ALREADY_REGISTERED, 712) E(HOST_MEMORY_NOT_REGISTERED, 713) \
  E(LAUNCH_FAILED, 719) E(NOT_SUPPORTED, 801) E(SYSTEM_NOT_READY, 802) E(SYSTEM_DRIVER_MISMATCH, 803) E(STREAM_CAPTURE_UNSUPPORTED, 900) \
  E(STREAM_CAPTURE_INVALIDATED, 901) E(STREAM_CAPTURE_ISOLATION, 905) E(CAPTURED_EVENT, 907) E(STREAM_CAPTURE_WRONG_THREAD, 908) E(UNKNOWN, 999)
enum : int { OK = 0,
#define E(name, code) name = code,
  ERRORS(E)
#undef E
};
inline const char* error_name(int code) {
  switch (code) {
    case OK: return "CUDA_SUCCESS";
#define E(name, code) case code: return "CUDA_ERROR_" #name;
    ERRORS(E)
#undef E
    default: return nullptr;
  }
}

struct Entry { std::vector<int> sizes; unsigned shared = 0, threads_max = 1024; };
struct Target { int architecture; bool tegra; int driver; };
typedef std::map<std::string, Entry> Entries;

// PTX ISA versions accepted by drivers: PTX ISA, release notes.
inline int isa_of(int driver) {
  const int known[][2] = {{13000, 90}, {12080, 87}, {12060, 85}, {12040, 84}, {12030, 83}, {12020, 82}, {12010, 81}, {12000, 80}, {11080, 78}, {11040, 74}, {0, 70}};
  for (auto& k : known) if (driver >= k[0]) return k[1];
  return 0;
}
inline int read_ptx(const std::string& text, const Target& on, Entries& entries, std::string& why) {
  int major = 0, minor = 0, target = 0;
  if (auto at = text.find("\n.version "); at == text.npos || sscanf(text.c_str() + at, " .version %d.%d", &major, &minor) != 2) { why = "no version"; return INVALID_PTX; }
  if (auto at = text.find("\n.target sm_"); at == text.npos || sscanf(text.c_str() + at, " .target sm_%d", &target) != 1) { why = "no target"; return INVALID_PTX; }
  if (major * 10 + minor > isa_of(on.driver)) { why = "ISA " + std::to_string(major) + "." + std::to_string(minor) + " with driver " + std::to_string(on.driver); return UNSUPPORTED_PTX_VERSION; }
  if (target > on.architecture) { why = "for sm_" + std::to_string(target) + " on sm_" + std::to_string(on.architecture); return INVALID_PTX; }
  if (text.find(".extern .func") != text.npos) { why = "it calls what is not there"; return INVALID_PTX; }
  for (size_t at = 0; (at = text.find(".entry ", at)) != text.npos;) {
    const size_t name = at + 7, open = text.find('(', name), close = text.find("\n)", open), end = text.find("\n}\n", close);
    if (open == text.npos || close == text.npos || end == text.npos) { why = "it is cut"; return INVALID_PTX; }
    Entry& e = entries[text.substr(name, open - name)];
    for (size_t p = open; (p = text.find(".param ", p)) < close; p++) {
      const std::string line = text.substr(p, text.find('\n', p) - p);
      const size_t bracket = line.find('[');                         // .param .u64 x, or .param .align 8 .b8 x[56]
      e.sizes.push_back(bracket != line.npos ? atoi(line.c_str() + bracket + 1) : atoi(line.c_str() + 9) / 8);
    }
    const std::string body = text.substr(close, end - close);
    if (auto p = body.find(".maxntid "); p != body.npos) e.threads_max = atoi(body.c_str() + p + 9);
    for (size_t p = 0; (p = body.find(".shared .align ", p)) != body.npos; p++) {
      const size_t bracket = body.find('[', p);
      if (bracket < body.find('\n', p)) e.shared = (e.shared + 15) / 16 * 16 + atoi(body.c_str() + bracket + 1);
    }
    at = end;
  }
  if (entries.empty()) { why = "no kernel"; return INVALID_PTX; }
  return OK;
}
// ELF as written by NVIDIA's compilers: attributes of a kernel in .nv.info.NAME (format, attribute, size, value), its shared memory in
// .nv.shared.NAME; the architecture in the lowest byte of the flags.
inline int read_cubin(const char* image, const Target& on, Entries& entries, std::string& why) {
  Elf64_Ehdr h; memcpy(&h, image, sizeof h);
  if (h.e_machine != 190 || h.e_shentsize != sizeof(Elf64_Shdr) || !h.e_shnum || h.e_shstrndx >= h.e_shnum) { why = "not machine code of a device"; return INVALID_IMAGE; }
  const int built = h.e_flags & 0xff;
  const bool tegra = built == 87 || built == 72 || built == 53 || built == 62;
  if (tegra || on.tegra ? built != on.architecture : built / 10 != on.architecture / 10 || built > on.architecture) {
    why = "for sm_" + std::to_string(built) + " on sm_" + std::to_string(on.architecture); return NO_BINARY_FOR_GPU;
  }
  std::vector<Elf64_Shdr> sections(h.e_shnum); memcpy(sections.data(), image + h.e_shoff, h.e_shnum * sizeof(Elf64_Shdr));
  const char* names = image + sections[h.e_shstrndx].sh_offset;
  std::map<std::string, unsigned> shared;
  for (auto& section : sections) {
    const std::string name = names + section.sh_name;
    if (name.rfind(".nv.shared.", 0) == 0) shared[name.substr(11)] = section.sh_size;
    if (name.rfind(".nv.info.", 0) != 0) continue;
    Entry& e = entries[name.substr(9)];
    std::map<unsigned, int> sizes;
    for (const char *p = image + section.sh_offset, *end = p + section.sh_size; p + 4 <= end;) {
      const unsigned char format = p[0], attribute = p[1]; uint16_t value; memcpy(&value, p + 2, 2);
      const char* data = p + 4; p = data + (format == 4 ? value : 0);
      if (format < 1 || format > 4 || p > end) { why = "attributes of " + name.substr(9) + " are damaged"; return INVALID_IMAGE; }
      if (format == 4 && attribute == 0x17 && value == 12) { uint32_t w[3]; memcpy(w, data, 12); sizes[w[1] & 0xffff] = w[2] >> 18; }
      if (format == 4 && attribute == 0x05) { uint32_t w[3]; memcpy(w, data, 12); e.threads_max = w[0] * w[1] * w[2]; }
    }
    for (auto& [ordinal, size] : sizes) e.sizes.push_back(size);
  }
  for (auto& [name, bytes] : shared) if (entries.count(name)) entries[name].shared = bytes;
  if (entries.empty()) { why = "no kernel"; return INVALID_IMAGE; }
  return OK;
}
inline int read_image(const char* image, const Target& on, Entries& entries, std::string& why) {
  why = "neither PTX nor machine code";
  if (!image) return INVALID_VALUE;
  if (!memcmp(image, ELFMAG, SELFMAG)) return read_cubin(image, on, entries, why);
  return !memcmp(image, "//", 2) || !memcmp(image, ".version", 8) ? read_ptx(image, on, entries, why) : INVALID_IMAGE;
}
