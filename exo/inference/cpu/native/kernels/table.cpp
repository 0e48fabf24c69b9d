// Compiled once for each instruction set: EXO_ISA names it, EXO_OPS is the file with its `Ops`.
#include EXO_OPS

#include "attention.hpp"
#include "elementwise.hpp"
#include "linear/bfloat16.hpp"
#include "linear/float.hpp"
#include "linear/int8.hpp"
#include "recurrent.hpp"

namespace exo::EXO_ISA {

extern const KernelTable kTable;
const KernelTable kTable = {
    EXO_ISA_NAME, quantize_rows,
#ifdef EXO_TILES
    split_rows,   kTilesFrom,
#else
    nullptr,      kAllRows,
#endif
    linear_int8,  linear_bfloat16, linear_float,   rms_norm,    layer_norm,   add_scaled,
    gate,         rotate,          store_key,      store_value, attend_chunk, merge,
    normalize,    score_chunk,     multiply_chunk, convolve,    recur,        scan,
    fade,         xielu,
};

}  // namespace exo::EXO_ISA
