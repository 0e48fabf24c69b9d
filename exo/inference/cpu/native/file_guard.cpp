#include "file_guard.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <mutex>

namespace exo {

namespace {

struct Guarded {
  std::atomic<uintptr_t> start{0}, end{0};  // 0: none
  std::atomic<int64_t> lost{0};
};

constexpr int kMostMaps = 4096;
Guarded guarded[kMostMaps];
std::mutex changes;
struct sigaction before;

void on_bus_error(int number, siginfo_t* info, void* context) {
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  for (Guarded& map : guarded) {
    if (address < map.start.load() || address >= map.end.load()) continue;
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    void* at = reinterpret_cast<void*>(address / page * page);
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    if (mmap(at, page, PROT_READ, flags, -1, 0) == MAP_FAILED) break;
    map.lost++;
    return;  // to read again
  }
  // Of somebody else: what would have been without us.
  if ((before.sa_flags & SA_SIGINFO) != 0 && before.sa_sigaction != nullptr) {
    before.sa_sigaction(number, info, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(number);
  } else {
    signal(SIGBUS, SIG_DFL);  // and it happens again
  }
}

}  // namespace

int guard_map(const void* start, int64_t bytes) {
  const std::lock_guard lock(changes);
  static const bool installed = [] {
    struct sigaction action = {};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    return sigaction(SIGBUS, &action, &before) == 0;
  }();
  if (!installed) return -1;
  for (int i = 0; i < kMostMaps; i++) {
    Guarded& map = guarded[i];
    if (map.end.load() != 0) continue;
    map.lost = 0;
    map.start = reinterpret_cast<uintptr_t>(start);
    map.end = map.start.load() + static_cast<uintptr_t>(bytes);
    return i;
  }
  return -1;
}

int64_t lost_pages(int guard) { return guard < 0 ? 0 : guarded[guard].lost.load(); }

void unguard_map(int guard) {
  const std::lock_guard lock(changes);
  if (guard < 0) return;
  guarded[guard].end = 0;
  guarded[guard].start = 0;
}

}  // namespace exo
