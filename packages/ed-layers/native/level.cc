// The functions of one level of instructions. Compiled once for each, with ED_LEVEL and
// ED_LEVEL_NAME and the compiler's flags of that level.
#include "across.h"
#include "attention.h"
#include "gate.h"
#include "largest.h"
#include "recurrence.h"
#include "rotary.h"
#include "rows.h"
#include "stream.h"
#include "whole_rows.h"

namespace ed {

const Level ED_LEVEL = {ED_LEVEL_NAME, columns,       rows,         whole,     gate,
                        across,        kAcrossInRows, whole_sizes,  round_row, take_of_panels,
                        first_largest, attention_of,  rotate,       recur};

}  // namespace ed
