// What the handlers share: the level of instructions, the checks, and loops over XLA's threads.
#pragma once

#include <cstdlib>
#include <cstring>

#include "checks.h"
#include "product.h"
#include "threads.h"

namespace ffi = xla::ffi;

namespace ed {

// The best level that this processor has; ED_LAYERS_NATIVE_LEVEL names a lower one, for tests.
const Level& level();

}  // namespace ed
