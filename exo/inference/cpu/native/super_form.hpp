// The headers of super-blocks (matrix.hpp).
#pragma once

#include <cstdint>
#include <cstring>

#include "coding.hpp"

namespace exo {

// How a super-block says its groups' scales and offsets, which its coding tells:
//   kCodes: int8 code; no offset, values stand for q - zero;
//   kSixBits: both in 6 bits each, see SixBits;
//   kNibbles: both in one byte, the scale's below.
enum class SuperKind : uint8_t { kCodes, kSixBits, kNibbles };

struct SuperForm {
  SuperKind kind;
  int group;
  int zero;
  float unit = 1.f;

  constexpr bool has_offsets() const { return kind != SuperKind::kCodes; }
  // Of the header, in bytes: where its codes begin, and all of it, whole lines, so that units are
  // aligned.
  constexpr int codes_at() const { return has_offsets() ? 64 : 32; }
  constexpr int bytes() const {
    const int codes = kind == SuperKind::kSixBits ? 3 * 64 : kSuperCols / group * kBlockRows;
    return (codes_at() + codes + 63) / 64 * 64;
  }
};

// 8 groups' codes of 6 bits, of scales and of offsets, in three words a row, the first words of 16
// rows being one line: so that few instructions have them out again. Group g's scale is the lower
// bits of byte g % 4 of word g / 4; the offsets of groups 2p and 2p + 1 are bits 4p and 16 + 4p of
// the last word and four above, and the upper bits of bytes p % 2 and p % 2 + 2 of word p / 2.
struct SixBits {
  static constexpr int kScale = 0x3f, kLow = 0x000f000f, kHigh = 0x00300030;
  static constexpr int low_shift(int pair) { return 4 * pair; }
  static constexpr int high_shift(int pair) { return 2 + pair % 2 * 8; }
  static constexpr int line(int group) { return group / 4 * 64; }  // of the scale
  static constexpr int kLowLine = 2 * 64;

  static void put(uint8_t* lines, int row, const uint8_t* scales, const uint8_t* offsets) {
    uint32_t words[3] = {};
    for (int g = 0; g < 8; g++) {
      const int pair = g / 2, half = g % 2 * 16;
      words[g / 4] |= static_cast<uint32_t>(scales[g]) << g % 4 * 8;
      words[pair / 2] |= static_cast<uint32_t>(offsets[g] >> 4) << (4 + high_shift(pair) + half);
      words[2] |= static_cast<uint32_t>(offsets[g] & 15) << (low_shift(pair) + half);
    }
    for (int i = 0; i < 3; i++) std::memcpy(lines + 64 * i + 4 * row, words + i, 4);
  }
  static int scale(const uint8_t* lines, int row, int group) {
    return lines[line(group) + 4 * row + group % 4] & kScale;
  }
  static int offset(const uint8_t* lines, int row, int group) {
    const int pair = group / 2, half = group % 2 * 16;
    const auto word = [&](int at) {
      uint32_t value;
      std::memcpy(&value, lines + at + 4 * row, 4);
      return value;
    };
    const uint32_t low = word(kLowLine) >> low_shift(pair) & kLow;
    const uint32_t high = word(pair / 2 * 64) >> high_shift(pair) & kHigh;
    return static_cast<int>((low | high) >> half & 0x3f);
  }
};

constexpr SuperForm super_form(Coding coding) {
  switch (coding.table) {
    case Table::kIq4:
      return {SuperKind::kCodes, 32, 128};
    case Table::kIq3:
      return {SuperKind::kCodes, 32, 64, 0.25f};
    case Table::kIq3s:
      return {SuperKind::kCodes, 32, 16};
    case Table::kIq2:
      return {SuperKind::kCodes, 16, 64, 0.125f};
    case Table::kIq1:
      return {SuperKind::kCodes, 16, 16, 0.125f};
    default:
      break;
  }
  switch (coding.bits) {
    case 2:
      return {SuperKind::kNibbles, 16, 0};
    case 3:
      return {SuperKind::kCodes, 16, 4};
    case 6:
      return {SuperKind::kCodes, 16, 32};
    default:
      return {SuperKind::kSixBits, 32, 0};
  }
}

}  // namespace exo
