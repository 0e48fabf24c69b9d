// The same (linear/plain.hpp) from blocks that are decoded once for many rows.
#pragma once

#include <type_traits>

#include "plain.hpp"

namespace exo::EXO_ISA {

// Floats a group has in a panel's scales.
constexpr int64_t panel_scales(bool has_offsets) { return (has_offsets ? 2 : 1) * kBlockRows; }

template <Coding C, bool OFFSETS>
void decode_block(const Matrix& w, int64_t block, const Panel& panel) {
  const uint8_t* start = w.block(block);
  uint8_t* slabs = panel.slabs;
  for (int64_t g = 0; g < w.groups(); g++) {
    const uint8_t* p = start + w.group_at(g);
    for (int u = 0; u < w.group / kUnitCols; u++, p += 64 * C.bits, slabs += 512) {
      decode_unit<C>(p, [&](int slab, Ops::Bytes weights) __attribute__((always_inline)) {
        Ops::store_bytes(slabs + 64 * slab, weights);
      });
    }
    const uint8_t* scales = start + w.scales_at(g);
    const Ops::Float scale = load_scales(scales, w.dtype, 0);
    float* out = panel.scales + panel_scales(OFFSETS) * g;
    Ops::store(out, scale);
    if constexpr (OFFSETS) Ops::store(out + kBlockRows, load_offsets(w, scales, scale));
  }
}

// One group of a tile of R rows: where the first row's columns begin, and what its rows have for
// it: their `sum` with SUMS, their `less` TIMES over where that is not 0.
template <int R, bool SUMS, int TIMES>
struct PanelStep {
  const int8_t* values;
  int64_t group;
  float scale[R];
  float sum[SUMS ? R : 1];
  int32_t less[TIMES != 0 ? R : 1];
};

// What a tile of rows adds up, the parts of its sums one after the other: of each all groups, then
// what is left over of those that are fine. A list, so that all blocks read what they need of all
// rows side by side.
template <int R, bool SUMS, int TIMES>
struct PanelSteps {
  using Step = PanelStep<R, SUMS, TIMES>;
  Step* steps;
  int64_t stride;                // of values
  int64_t ends[2 * kMostParts];  // of a part's groups, and of what is left over

  static size_t bytes(const Matrix& w) {
    return static_cast<size_t>(2 * w.groups()) * sizeof(Step);
  }

  __attribute__((noinline)) PanelSteps(uint8_t* memory, const Matrix& w, const QuantizedRows& x,
                                       int64_t row, const FineGroup* fine)
      : steps(reinterpret_cast<Step*>(memory)), stride(x.stride) {
    const int64_t groups = w.groups(), in_part = groups / w.parts, columns = w.group;
    const QuantizedPart coarse = x.from_row(x.coarse, row), left = x.from_row(x.fine, row);
    Step* step = steps;
    const auto add = [&](const QuantizedPart& part, int64_t g) {
      step->values = part.values + g * columns;
      step->group = g;
      const QuantizedGroup* of = part.groups + g;
      for (int m = 0; m < R; m++, of += groups) {
        step->scale[m] = of->scale;
        if constexpr (SUMS) step->sum[m] = of->sum;
        if constexpr (TIMES != 0) step->less[m] = TIMES * of->less;
      }
      step++;
    };
    for (int64_t g = 0, part = 0; part < w.parts; part++) {
      const int64_t end = g + in_part;
      for (; g < end; g++) add(coarse, g);
      ends[2 * part] = step - steps;
      for (; fine->index < end; fine++) add(left, fine->index);
      ends[2 * part + 1] = step - steps;
    }
  }
};

template <typename Step>
struct RowsOfStep {
  const Step& step;

  EXO_INLINE float scale(int m) const { return step.scale[m]; }
  EXO_INLINE float sum(int m) const { return step.sum[m]; }
  template <int>
  EXO_INLINE int32_t less(int m) const {
    return step.less[m];
  }
  template <int, typename O = Ops>
  EXO_INLINE typename O::Int start(int m) const {
    return O::same_int(step.less[m]);
  }
};

// `UNITS` of a group; 0: `w` says how many.
template <int BITS, int ZERO, int M, int UNITS, typename Step>
EXO_INLINE void add_panel_group(int units, const Panel& panel, const Step& step, int64_t stride,
                                Ops::Float* y) {
  const int8_t* a = step.values;
  const int count = UNITS > 0 ? UNITS : units;
  const uint8_t* slabs = panel.slabs + step.group * count * kUnitCols * kBlockRows;
  SlabSums<BITS, ZERO, M, 1> sums;
  const RowsOfStep<Step> rows{step};
  sums.begin(rows);
  for (int u = 0; u < count; u++, slabs += 512, a += kUnitCols) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
      const Ops::Bytes weights[1] = {Ops::load(slabs + 64 * i)};
      sums.add(i, weights, a + 4 * i, stride);
    }
  }
  const float* scales = panel.scales + panel_scales(ZERO < 0) * step.group;
  const Ops::Float scale = Ops::from_f32(scales);
  Ops::Float offset = Ops::zero_float();
  if constexpr (ZERO < 0) offset = Ops::from_f32(scales + kBlockRows);
  sums.finish_group(0, rows, scale, offset, y);
}

template <int BITS, int ZERO, int M, int UNITS, typename Steps>
EXO_INLINE void add_panel(const Matrix& w, const Panel& panel, const Steps& todo, Ahead ahead,
                          PartSums<M>& sums) {
  const typename Steps::Step* step = todo.steps;
  const int halves = 2 * w.parts, units = w.group / kUnitCols;
  const int64_t stride = todo.stride;
  for (int half = 0; half < halves; half++) {
    const auto* end = todo.steps + todo.ends[half];
    if (step == end) continue;
    Ops::Float y[M];
    for (auto& sum : y) sum = Ops::zero_float();
    for (; step < end; step++) {
      ahead.fetch();
      add_panel_group<BITS, ZERO, M, UNITS>(units, panel, *step, stride, y);
    }
    half % 2 == 0 ? sums.close(y) : sums.join(half / 2, y);
  }
}

// One block for `rows` rows, up to M. Rows past the last are computed from whatever
// the buffer holds and dropped: fewer sizes of tile to compile.
template <int BITS, int ZERO, int M, typename Steps>
void block_from_panel(const Matrix& w, const Panel& panel, const Steps& todo, Ahead ahead,
                      int64_t row, int64_t rows, int64_t block, float* out, int64_t stride) {
  PartSums<M> sums(w.parts, w.parts);
  if (ZERO >= 0 || w.group == kUnitCols) {
    add_panel<BITS, ZERO, M, 1>(w, panel, todo, ahead, sums);
  } else if (w.group == 2 * kUnitCols) {
    add_panel<BITS, ZERO, M, 2>(w, panel, todo, ahead, sums);
  } else {
    add_panel<BITS, ZERO, M, 0>(w, panel, todo, ahead, sums);
  }
  for (int m = 0; m < rows; m++) finish(w, block, sums.total(m), out + (row + m) * stride);
}

}  // namespace exo::EXO_ISA
