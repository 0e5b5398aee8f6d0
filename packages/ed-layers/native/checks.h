// How a handler checks the buffers of a call. XLA passes dense row-major buffers, so the dtype and
// the sizes of a buffer determine every address that a kernel reads or writes.
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
std::string text_of(const Sizes& sizes) {
  std::ostringstream text;
  const char* before = "[";
  for (int64_t size : sizes) {
    text << before;
    size == kAny ? text << "any" : text << size;
    before = ", ";
  }
  text << (sizes.size() == 0 ? "[]" : "]");
  return text.str();
}

// Collects the first violation of a call.
class Checks {
 public:
  explicit Checks(const char* call) : call_(call) {}

  // Require a condition; `message` says the constraint.
  bool that(bool holds, const char* message) {
    if (!holds) refuse(message);
    return ok();
  }

  // Require the sizes of a buffer.
  template <typename Buffer>
  bool shape(const char* name, const Buffer& buffer, std::initializer_list<int64_t> sizes) {
    auto found = buffer.dimensions();
    bool same = found.size() == sizes.size() &&
                std::equal(sizes.begin(), sizes.end(), found.begin(),
                           [](int64_t a, int64_t b) { return a == kAny || a == b; });
    if (!same)
      refuse(std::string(name) + " has shape " + text_of(found) + ", the call requires " +
             text_of(sizes));
    return ok();
  }

  // Require one of some dtypes.
  bool dtype(const char* name, ffi::DataType found, std::initializer_list<ffi::DataType> known) {
    if (std::find(known.begin(), known.end(), found) == known.end()) {
      std::ostringstream text;
      text << name << " has dtype " << found << ", the call requires";
      const char* before = " ";
      for (ffi::DataType one : known) text << before << one, before = " or ";
      refuse(text.str());
    }
    return ok();
  }

  // Note a violation; the first one is the error of the call.
  void refuse(const std::string& message) {
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
