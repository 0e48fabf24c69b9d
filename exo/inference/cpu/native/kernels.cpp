#include "kernels.hpp"

#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "isas.hpp"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace exo {

// isas.hpp, which CMake writes, applies a macro to each instruction set that is built.
#define EXO_DECLARE(isa)           \
  namespace isa {                  \
  extern const KernelTable kTable; \
  }
EXO_ISAS(EXO_DECLARE)

namespace {

#if defined(__x86_64__)

struct Registers {
  uint32_t eax, ebx, ecx, edx;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers r;
  asm volatile("cpuid"
               : "=a"(r.eax), "=b"(r.ebx), "=c"(r.ecx), "=d"(r.edx)
               : "a"(leaf), "c"(subleaf));
  return r;
}

// Asked of the processor itself: not every compiler's runtime fills __builtin_cpu_supports.
// Bits: Intel 64 and IA-32 Architectures Software Developer's Manual, CPUID.
bool bit(uint32_t word, int index) { return (word >> index & 1) != 0; }

// Whether the system saves the registers whose bits of XCR0 are in `mask`.
bool system_saves(uint32_t mask) {
  if (!bit(cpuid(1, 0).ecx, 27)) return false;  // XGETBV
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & mask) == mask;
}

Registers extended_features() { return cpuid(0, 0).eax >= 7 ? cpuid(7, 0) : Registers{0, 0, 0, 0}; }

bool has_avx2() {
  const Registers basic = cpuid(1, 0);
  const bool fma_and_f16c = bit(basic.ecx, 12) && bit(basic.ecx, 29);
  return system_saves(0x6) && fma_and_f16c && bit(extended_features().ebx, 5);
}

bool has_avxvnni() { return has_avx2() && extended_features().eax >= 1 && bit(cpuid(7, 1).eax, 4); }

bool has_avx512() {
  const Registers found = extended_features();
  const bool f_dq_bw_vl =
      bit(found.ebx, 16) && bit(found.ebx, 17) && bit(found.ebx, 30) && bit(found.ebx, 31);
  const bool vnni = bit(found.ecx, 11);
  return has_avx2() && system_saves(0xe6) && f_dq_bw_vl && vnni;
}

bool has_vbmi() { return has_avx512() && bit(extended_features().ecx, 1); }

bool has_bfloat16_dots() {
  return has_avx512() && extended_features().eax >= 1 && bit(cpuid(7, 1).eax, 5);
}

// AMX's state is large, so Linux gives it only to a process that asks.
// https://docs.kernel.org/arch/x86/xstate.html
bool has_amx() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  const uint32_t features = extended_features().edx;
  const bool tiles_and_int8 = bit(features, 24) && bit(features, 25);
  return tiles_and_int8 && has_avx512() &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

#elif defined(__aarch64__)

bool has_dot_product() {
#if defined(__linux__)
  return (getauxval(AT_HWCAP) >> 20 & 1) != 0;  // HWCAP_ASIMDDP
#else
  return true;  // every Apple processor that runs this has it
#endif
}

bool has_i8mm() {
#if defined(__linux__)
  return has_dot_product() && (getauxval(AT_HWCAP2) >> 13 & 1) != 0;  // HWCAP2_I8MM
#else
  return false;
#endif
}

#endif

bool is_amd() {
#if defined(__x86_64__)
  const Registers vendor = cpuid(0, 0);  // "AuthenticAMD"
  return vendor.ebx == 0x68747541 && vendor.edx == 0x69746e65 && vendor.ecx == 0x444d4163;
#else
  return false;
#endif
}

#if !defined(__x86_64__)
bool has_bfloat16_dots() { return false; }
bool has_vbmi() { return false; }
#endif

bool always() { return true; }

struct Isa {
  const char* name;
  bool (*runs_here)();
};

// Best first; the last ones are built for tests alone.
const Isa kIsas[] = {
#if defined(__x86_64__)
    {"amx", has_amx},
    {"avx512", has_avx512},
    {"avxvnni", has_avxvnni},
    {"avx2", has_avx2},
#elif defined(__aarch64__)
    {"i8mm", has_i8mm},   {"neon", has_dot_product}, {"armv8", always},
#endif
    {"portable", always},
    {"wide_tiles", always},
#if defined(__x86_64__)
    {"avx512_emulated", has_avx2},
    {"avxvnni_emulated", has_avx2},
#endif
};

Vendor vendor_of(const std::string& name) {
  if (!name.empty() && name != "amd" && name != "intel") {
    throw std::runtime_error("EXO_CPU_VENDOR=" + name + " is unknown; expected amd or intel");
  }
  const bool amd = name.empty() ? is_amd() : name == "amd";
  const bool vbmi = has_vbmi();
  return {amd, amd, amd && has_bfloat16_dots(), !amd && vbmi, vbmi, !name.empty()};
}

// What an environment variable says, or "".
std::string told(const char* variable) {
  const char* found = std::getenv(variable);
  return found == nullptr ? "" : found;
}

struct Candidate {
  const KernelTable* table;
  bool (*runs_here)();
};

// Those that were built, best first.
const std::vector<Candidate>& candidates() {
#define EXO_TABLE(isa) &isa::kTable,
  static const std::vector<Candidate> all = [] {
    std::vector<Candidate> found;
    for (const Isa& isa : kIsas) {
      for (const KernelTable* table : {EXO_ISAS(EXO_TABLE)}) {
        if (std::string(table->name) == isa.name) {
          found.push_back({table, isa.runs_here});
        }
      }
    }
    return found;
  }();
  return all;
}

const KernelTable* choose(const std::string& wanted) {
  std::string known;
  for (const Candidate& candidate : candidates()) {
    if (wanted.empty()) {
      if (candidate.runs_here()) return candidate.table;
      continue;
    }
    known += std::string(known.empty() ? "" : ", ") + candidate.table->name;
    if (wanted == candidate.table->name) {
      if (candidate.runs_here()) return candidate.table;
      throw std::runtime_error("EXO_CPU_ISA=" + wanted +
                               ": this processor does not have these instructions");
    }
  }
  throw std::runtime_error("EXO_CPU_ISA=" + wanted + " is unknown; expected one of " + known);
}

const KernelTable*& chosen() {
  static const KernelTable* table = [] {
    vendor = vendor_of(told("EXO_CPU_VENDOR"));
    return choose(told("EXO_CPU_ISA"));
  }();
  return table;
}

}  // namespace

Vendor vendor = vendor_of("");

int64_t nanoseconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

const KernelTable& kernels() { return *chosen(); }

void choose_kernels(const std::string& name) { chosen() = choose(name); }

void choose_vendor(const std::string& name) { vendor = vendor_of(name); }

std::vector<std::string> runnable_kernels() {
  std::vector<std::string> names;
  for (const Candidate& candidate : candidates()) {
    if (candidate.runs_here()) names.emplace_back(candidate.table->name);
  }
  return names;
}

}  // namespace exo
