// Where a unit's lines hold its values, 32 columns of 16 rows, in `bits` each (matrix.hpp).
#pragma once

#include "matrix.hpp"

namespace exo {

inline constexpr int kLine = 64;
inline constexpr int kSlabs = 8;

// Bits [at, at + width) of a value: those from `low` on of a byte of line `line`.
struct Piece {
  int line, low, width, at;
};

// The pieces of a slab's values, the lowest bits first: each piece's place in its byte is at or
// above its place in the value.
struct Pieces {
  int count;
  Piece piece[3];
};

// As many values as fit lie whole in a byte; what these leave over in several lines is one more.
// So it takes few instructions to have a unit of 3, 5 or 6 bits back as bytes, and few shifts,
// which some processors do in the unit that multiplies.
constexpr Pieces pieces_of(int bits, int slab) {
  const auto whole = [bits](int line, int low) {
    return Pieces{1, {{line, low, bits, 0}, {}, {}}};
  };
  switch (bits) {
    case 2:
    case 4:
    case 8:
      return whole(slab * bits / 8, slab * bits % 8);
    case 3:
      if (slab < 6) return whole(slab / 2, slab % 2 * 3);
      if (slab == 6) return {2, {{0, 6, 2, 0}, {1, 6, 1, 2}, {}}};
      return {2, {{2, 6, 2, 0}, {1, 7, 1, 2}, {}}};
    case 5:
      if (slab < 5) return whole(slab, 0);
      if (slab == 5) return {2, {{0, 5, 3, 0}, {1, 6, 2, 3}, {}}};
      if (slab == 6) return {2, {{2, 5, 3, 0}, {3, 6, 2, 3}, {}}};
      return {3, {{4, 5, 3, 0}, {1, 5, 1, 3}, {3, 5, 1, 4}}};
    case 6: {
      const int first = slab / 4 * 3;
      if (slab % 4 < 3) return whole(first + slab % 4, 0);
      return {3, {{first, 6, 2, 0}, {first + 1, 6, 2, 2}, {first + 2, 6, 2, 4}}};
    }
    default:
      throw_bits(bits);
  }
}

}  // namespace exo
