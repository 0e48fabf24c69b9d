#include "kernels.hpp"

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

bool has_avxvnni() {
  return __builtin_cpu_supports("avx2") && cpuid(0, 0).eax >= 7 && cpuid(7, 0).eax >= 1 &&
         (cpuid(7, 1).eax >> 4 & 1) != 0;
}

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         (cpuid(1, 0).ecx >> 29 & 1) != 0;  // F16C
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}

// AMX's state is large, so Linux gives it only to a process that asks.
// https://docs.kernel.org/arch/x86/xstate.html
bool has_amx() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  const uint32_t features = cpuid(0, 0).eax >= 7 ? cpuid(7, 0).edx : 0;
  const bool tiles = (features >> 24 & 1) != 0 && (features >> 25 & 1) != 0;
  return tiles && has_avx512() && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
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

bool always() { return true; }

struct Isa {
  const char* name;
  bool (*runs_here)();
  bool automatic;  // chosen without being asked for
};

// Best first.
const Isa kIsas[] = {
#if defined(__x86_64__)
    {"amx", has_amx, true},       {"amx_emulated", has_avx512, false},
    {"avx512", has_avx512, true}, {"avxvnni", has_avxvnni, true},
    {"avx2", has_avx2, true},
#elif defined(__aarch64__)
    {"i8mm", has_i8mm, true},
    {"neon", has_dot_product, true},
#endif
    {"portable", always, true},
};

struct Choice {
  const KernelTable* table;
  bool (*runs_here)();
  bool automatic;
};

// Those that were built, best first.
const std::vector<Choice>& choices() {
#define EXO_TABLE(isa) &isa::kTable,
  static const std::vector<Choice> all = [] {
    std::vector<Choice> found;
    for (const Isa& isa : kIsas) {
      for (const KernelTable* table : {EXO_ISAS(EXO_TABLE)}) {
        if (std::string(table->name) == isa.name) {
          found.push_back({table, isa.runs_here, isa.automatic});
        }
      }
    }
    return found;
  }();
  return all;
}

const KernelTable* choose(const std::string& wanted) {
  std::string known;
  for (const auto& choice : choices()) {
    if (wanted.empty()) {
      if (choice.automatic && choice.runs_here()) return choice.table;
      continue;
    }
    known += std::string(known.empty() ? "" : ", ") + choice.table->name;
    if (wanted == choice.table->name) {
      if (choice.runs_here()) return choice.table;
      throw std::runtime_error("EXO_CPU_ISA=" + wanted +
                               ": this processor does not have these instructions");
    }
  }
  throw std::runtime_error("EXO_CPU_ISA=" + wanted + " is unknown; expected one of " + known);
}

const KernelTable*& chosen() {
  const char* wanted = std::getenv("EXO_CPU_ISA");
  static const KernelTable* table = choose(wanted == nullptr ? "" : wanted);
  return table;
}

}  // namespace

const KernelTable& kernels() { return *chosen(); }

void choose_kernels(const std::string& name) { chosen() = choose(name); }

std::vector<std::string> runnable_kernels() {
  std::vector<std::string> names;
  for (const auto& choice : choices()) {
    if (choice.runs_here()) names.emplace_back(choice.table->name);
  }
  return names;
}

}  // namespace exo
