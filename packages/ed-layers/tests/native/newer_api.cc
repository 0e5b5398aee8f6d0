// Handlers that claim a newer version of XLA's FFI, for a test of the fallback.
#include "xla/ffi/api/c_api.h"

#undef XLA_FFI_API_MINOR
#define XLA_FFI_API_MINOR 1000

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error nothing() { return ffi::Error::Success(); }

#define ED_HANDLER(name) XLA_FFI_DEFINE_HANDLER_SYMBOL(name, nothing, ffi::Ffi::Bind())

ED_HANDLER(ed_product);
ED_HANDLER(ed_product_of_codes);
ED_HANDLER(ed_attention);
ED_HANDLER(ed_attention_back);
ED_HANDLER(ed_attention_cached);
ED_HANDLER(ed_attention_paged);
ED_HANDLER(ed_put);
ED_HANDLER(ed_rotary);

extern "C" const char* ed_level() { return "base"; }
