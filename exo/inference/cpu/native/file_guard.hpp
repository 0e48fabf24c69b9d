// Files that are read through maps: where one is cut short meanwhile, reading on would end the
// process (SIGBUS).
#pragma once

#include <cstdint>

namespace exo {

// From now on a page of the map that its file no longer has is one of zeros. Returns a number for
// the two functions below; -1 where too many are guarded already, and this one is not.
int guard_map(const void* start, int64_t bytes);

// Pages that were found gone so far.
int64_t lost_pages(int guard);

// To be called before the map ends.
void unguard_map(int guard);

}  // namespace exo
