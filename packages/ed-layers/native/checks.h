// Validation of the buffers of a call. XLA passes dense row-major buffers, so dtype and sizes
// determine every address that a kernel reads or writes.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <sstream>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace ed {

namespace ffi = xla::ffi;

// Any size of an axis.
constexpr int64_t kAny = -1;

template <typename Sizes>
std::string format_shape(const Sizes& sizes) {
  std::ostringstream text;
  const char* separator = "[";
  for (int64_t size : sizes) {
    text << separator;
    size == kAny ? text << "any" : text << size;
    separator = ", ";
  }
  text << (sizes.size() == 0 ? "[]" : "]");
  return text.str();
}

// Collects the first violation of a call.
class Checks {
 public:
  explicit Checks(const char* call) : call_(call) {}

  // Require a condition; `message` states the constraint.
  bool require(bool holds, const char* message) {
    if (!holds) reject(message);
    return ok();
  }

  // Require the sizes of a buffer.
  template <typename Buffer>
  bool require_shape(const char* name, const Buffer& buffer, std::initializer_list<int64_t> sizes) {
    auto actual = buffer.dimensions();
    bool same = actual.size() == sizes.size() &&
                std::equal(sizes.begin(), sizes.end(), actual.begin(),
                           [](int64_t a, int64_t b) { return a == kAny || a == b; });
    if (!same)
      reject(std::string(name) + " has shape " + format_shape(actual) + ", the call requires " +
             format_shape(sizes));
    return ok();
  }

  // Require one of some dtypes.
  bool require_dtype(const char* name, ffi::DataType actual,
                     std::initializer_list<ffi::DataType> allowed) {
    if (std::find(allowed.begin(), allowed.end(), actual) == allowed.end()) {
      std::ostringstream text;
      text << name << " has dtype " << actual << ", the call requires";
      const char* separator = " ";
      for (ffi::DataType dtype : allowed) text << separator << dtype, separator = " or ";
      reject(text.str());
    }
    return ok();
  }

  // Record a violation; the first one is the error of the call.
  void reject(const std::string& message) {
    if (ok()) violation_ = std::string(call_) + ": " + message;
  }

  bool ok() const { return violation_.empty(); }

  ffi::Error error() const {
    if (ok()) return ffi::Error::Success();
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, violation_);
  }

 private:
  const char* call_;
  std::string violation_;
};

}  // namespace ed
