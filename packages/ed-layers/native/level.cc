// The kernel table of one level. The build compiles this file once for each level with ED_LEVEL,
// ED_LEVEL_NAME and the compiler flags of the level.
#include "pack_lhs.h"
#include "attention_forward.h"
#include "glu.h"
#include "argmax.h"
#include "recurrence.h"
#include "rotary.h"
#include "gemm_transposed.h"
#include "gemv.h"
#include "int8_gemm_transposed.h"

namespace ed {

const Level ED_LEVEL = {
    ED_LEVEL_NAME,
    gemm,
    gemm_transposed,
    int8_gemm,
    apply_glu,
    pack_lhs,
    kLhsInRows,
    get_int8_row_sizes,
    quantize_row,
    gather_packed_rows,
    find_argmax,
    kAttentionKernels,
    apply_rotary,
    run_recurrence,
};

}  // namespace ed
