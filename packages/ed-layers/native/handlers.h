// Common parts of the handlers: the selected level, checks, and loops over XLA's threads.
#pragma once

#include <cstdlib>
#include <cstring>

#include "checks.h"
#include "gemm_args.h"
#include "parallel_for.h"

namespace ffi = xla::ffi;

namespace ed {

// Return the best level of this processor; ED_LAYERS_NATIVE_LEVEL selects a lower one for tests.
const Level& level();

}  // namespace ed
