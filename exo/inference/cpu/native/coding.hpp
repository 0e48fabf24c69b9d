// How the values of quantized weights are stored.
#pragma once

#include <cstdint>
#include <type_traits>

namespace exo {

inline constexpr int kBlockRows = 16;  // output features interleaved, one lane each
inline constexpr int kUnitCols = 32;   // input features decoded together
inline constexpr int kSuperCols = 256;

// What a stored value stands for: itself, or an entry of a table.
enum class Table : uint8_t { kNone, kIq4, kE2m1, kIq3, kIq3s, kIq2, kIq1 };

// IQ4_NL's values plus 128: kvalues_iq4nl in ggml-common.h.
alignas(16) inline constexpr uint8_t kIq4Values[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                       129, 141, 153, 166, 181, 197, 217, 241};
// E2M1's values, doubled so that they are whole, plus 16: OCP Microscaling Formats, 5.3.3.
alignas(16) inline constexpr uint8_t kE2m1Values[16] = {16, 17, 18, 19, 20, 22, 24, 28,
                                                        16, 15, 14, 13, 12, 10, 8,  4};

inline constexpr int kE2m1Zero = 16;

// What the codebooks of GGUF's IQ formats consist of (iq3xxs_grid and so on in ggml-common.h): one
// of these, or its negative where bit 3 is set; plus 64 (IQ3_XXS, IQ2), plus 16 (IQ3_S). IQ1's are
// -1, 0, 1 with an eighth more, or less, eight times that plus 16.
alignas(16) inline constexpr uint8_t kIq3Values[16] = {68, 76, 84, 92, 100, 108, 116, 126,
                                                       60, 52, 44, 36, 28,  20,  12,  2};
alignas(16) inline constexpr uint8_t kIq3sValues[16] = {17, 19, 21, 23, 25, 27, 29, 31,
                                                        15, 13, 11, 9,  7,  5,  3,  1};
alignas(16) inline constexpr uint8_t kIq2Values[16] = {72, 89, 107, 64, 64, 64, 64, 64,
                                                       56, 39, 21,  64, 64, 64, 64, 64};
alignas(16) inline constexpr uint8_t kIq1Values[16] = {9, 17, 25, 16, 16, 16, 16, 16,
                                                       7, 15, 23, 16, 16, 16, 16, 16};

constexpr const uint8_t* values_of(Table table) {
  switch (table) {
    case Table::kIq4:
      return kIq4Values;
    case Table::kIq3:
      return kIq3Values;
    case Table::kIq3s:
      return kIq3sValues;
    case Table::kIq2:
      return kIq2Values;
    case Table::kIq1:
      return kIq1Values;
    default:
      return kE2m1Values;
  }
}

// How values are stored: a template argument of the kernels. And whether entries of the table are
// looked up by an instruction that takes six bits of a byte and leaves the others.
struct Coding {
  int bits;
  Table table = Table::kNone;
  bool permutes = false;
};

// Not here: every instruction set's file would have the text's functions, compiled for it, and the
// linker might take these.
[[noreturn]] void throw_bits(int bits);

// Calls use with the number of bits as a constant.
template <typename Use>
void with_bits(int bits, const Use& use) {
  switch (bits) {
    case 2:
      return use(std::integral_constant<int, 2>{});
    case 3:
      return use(std::integral_constant<int, 3>{});
    case 4:
      return use(std::integral_constant<int, 4>{});
    case 5:
      return use(std::integral_constant<int, 5>{});
    case 6:
      return use(std::integral_constant<int, 6>{});
    case 8:
      return use(std::integral_constant<int, 8>{});
    default:
      throw_bits(bits);
  }
}

// The same with a coding.
template <typename Use>
void with_coding(Coding coding, const Use& use) {
  switch (coding.table) {
    case Table::kIq4:
      return use(std::integral_constant<Coding, Coding{4, Table::kIq4}>{});
    case Table::kE2m1:
      return use(std::integral_constant<Coding, Coding{4, Table::kE2m1}>{});
    case Table::kIq3:
      return use(std::integral_constant<Coding, Coding{4, Table::kIq3}>{});
    case Table::kIq3s:
      return use(std::integral_constant<Coding, Coding{4, Table::kIq3s}>{});
    case Table::kIq2:
      return use(std::integral_constant<Coding, Coding{4, Table::kIq2}>{});
    case Table::kIq1:
      return use(std::integral_constant<Coding, Coding{4, Table::kIq1}>{});
    case Table::kNone:
      return with_bits(coding.bits, [&](auto bits) {
        use(std::integral_constant<Coding, Coding{bits.value}>{});
      });
  }
}

// Whether there are matrices of a coding in super-blocks, or in groups by themselves: kernels for
// what there is not would only take time to compile.
constexpr bool may_be_super(Coding coding) {
  return coding.table == Table::kNone ? coding.bits != 8 : coding.table != Table::kE2m1;
}
// Of those by themselves: whether groups may have offsets, and 2^which their values' zero is where
// they have none (below 0: there are no such matrices).
constexpr bool may_have_offsets(Coding coding) { return coding.table == Table::kNone; }
constexpr int zero_shift(Coding coding) {
  switch (coding.table) {
    case Table::kIq4:
      return 7;
    case Table::kE2m1:
      return 4;
    case Table::kNone:
      return coding.bits == 4 ? 3 : coding.bits == 5 ? 4 : coding.bits == 8 ? 7 : -1;
    default:
      return -1;
  }
}
static_assert(kE2m1Zero == 1 << zero_shift({4, Table::kE2m1}));

}  // namespace exo
