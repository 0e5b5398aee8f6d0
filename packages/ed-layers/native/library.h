// What the handlers share: the level of instructions, and how they refuse.
#pragma once

#include <cstdlib>
#include <cstring>

#include "product.h"
#include "threads.h"

namespace ffi = xla::ffi;

namespace ed {

inline ffi::Error wrong(const char* what) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, what);
}

// The best level that this processor has; ED_LAYERS_NATIVE_LEVEL names a lower one, for tests.
const Level& level();

}  // namespace ed
