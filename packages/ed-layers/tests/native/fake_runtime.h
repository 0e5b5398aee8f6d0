// A small replacement of XLA's runtime: a thread pool, and calls of handlers with buffers of the
// exact size. A sanitizer then detects every access beyond a buffer.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

// XLA's opaque error.
struct XLA_FFI_Error {
  std::string message;
};

namespace ed {

namespace ffi = xla::ffi;

class Pool {
 public:
  static constexpr int kThreads = 3;

  static Pool& get() {
    static Pool& pool = *new Pool;
    return pool;
  }

  void schedule(XLA_FFI_Task* task, void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.emplace_back(task, data);
    ready_.notify_one();
  }

 private:
  Pool() {
    for (int i = 0; i < kThreads; ++i) std::thread([this] { run_tasks(); }).detach();
  }

  void run_tasks() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      ready_.wait(lock, [this] { return !tasks_.empty(); });
      auto [task, data] = tasks_.front();
      tasks_.pop_front();
      lock.unlock();
      task(data);
    }
  }

  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<std::pair<XLA_FFI_Task*, void*>> tasks_;
};

// The functions of XLA's interface that handlers call.
inline const XLA_FFI_Api* get_api() {
  static XLA_FFI_Api functions = [] {
    XLA_FFI_Api f{};
    f.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    f.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                     XLA_FFI_API_MINOR};
    f.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) {
      return new XLA_FFI_Error{args->message};
    };
    f.XLA_FFI_Error_GetMessage = [](XLA_FFI_Error_GetMessage_Args* args) {
      args->message = args->error->message.c_str();
    };
    f.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* args) { delete args->error; };
    f.XLA_FFI_ThreadPool_Schedule = [](XLA_FFI_ThreadPool_Schedule_Args* args) {
      Pool::get().schedule(args->task, args->data);
      return static_cast<XLA_FFI_Error*>(nullptr);
    };
    f.XLA_FFI_ThreadPool_NumThreads = [](XLA_FFI_ThreadPool_NumThreads_Args* args) {
      *args->num_threads = Pool::kThreads;
      return static_cast<XLA_FFI_Error*>(nullptr);
    };
    return f;
  }();
  return &functions;
}

// An argument or a result.
struct Array {
  Array(ffi::DataType type, std::vector<int64_t> sizes) : dtype(type), dims(std::move(sizes)) {
    allocate();
  }

  void allocate() {
    int64_t count = 1;
    for (int64_t size : dims) count *= size;
    bytes = count * ffi::ByteWidth(dtype);
    data.reset(static_cast<char*>(std::malloc(bytes)), std::free);
    std::memset(data.get(), 0, bytes);
  }

  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data.get());
  }

  ffi::DataType dtype;
  std::vector<int64_t> dims;
  int64_t bytes = 0;
  std::shared_ptr<char> data;
};

// An attribute; XLA sorts attributes by name.
struct Attribute {
  Attribute(const char* name, float x) : name(name), type(XLA_FFI_DataType_F32), real(x) {}
  Attribute(const char* name, bool x) : name(name), type(XLA_FFI_DataType_PRED), flag(x) {}
  Attribute(const char* name, int64_t x) : name(name), type(XLA_FFI_DataType_S64), integer(x) {}
  void* value() {
    if (type == XLA_FFI_DataType_F32) return &real;
    return type == XLA_FFI_DataType_PRED ? static_cast<void*>(&flag) : &integer;
  }

  const char* name;
  XLA_FFI_DataType type;
  float real = 0;
  bool flag = false;
  int64_t integer = 0;
};

using Handler = XLA_FFI_Error* (*)(XLA_FFI_CallFrame*);

struct HandlerCall {
  Handler handler;
  std::vector<Array> arguments, results;
  std::vector<Attribute> attributes;

  // Run the handler; return its error, or "".
  std::string run() {
    auto get_buffers = [](std::vector<Array>& arrays) {
      std::vector<XLA_FFI_Buffer> buffers;
      for (Array& a : arrays)
        buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr,
                           static_cast<XLA_FFI_DataType>(a.dtype), a.data.get(),
                           static_cast<int64_t>(a.dims.size()), a.dims.data()});
      return buffers;
    };
    auto get_pointers = [](auto& list) {
      std::vector<void*> pointers;
      for (auto& item : list) pointers.push_back(&item);
      return pointers;
    };
    auto argument_buffers = get_buffers(arguments), result_buffers = get_buffers(results);
    auto argument_pointers = get_pointers(argument_buffers),
         result_pointers = get_pointers(result_buffers);
    std::vector<XLA_FFI_ArgType> argument_types(arguments.size(), XLA_FFI_ArgType_BUFFER);
    std::vector<XLA_FFI_RetType> result_types(results.size(), XLA_FFI_RetType_BUFFER);
    std::sort(attributes.begin(), attributes.end(), [](const Attribute& a, const Attribute& b) {
      return std::strcmp(a.name, b.name) < 0;
    });
    std::vector<XLA_FFI_AttrType> attribute_types(attributes.size(), XLA_FFI_AttrType_SCALAR);
    std::vector<XLA_FFI_ByteSpan> names;
    std::vector<XLA_FFI_Scalar> scalars;
    for (Attribute& a : attributes) {
      names.push_back({a.name, std::strlen(a.name)});
      scalars.push_back({a.type, a.value()});
    }
    std::vector<XLA_FFI_ByteSpan*> name_pointers;
    for (auto& name : names) name_pointers.push_back(&name);
    auto scalar_pointers = get_pointers(scalars);
    XLA_FFI_CallFrame frame{};
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.api = get_api();
    frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
    frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(arguments.size()),
                  argument_types.data(), argument_pointers.data()};
    frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(results.size()),
                  result_types.data(), result_pointers.data()};
    frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE,
                   nullptr,
                   static_cast<int64_t>(scalars.size()),
                   attribute_types.data(),
                   name_pointers.data(),
                   scalar_pointers.data()};
    std::unique_ptr<XLA_FFI_Error> error(handler(&frame));
    return error ? error->message : "";
  }
};

}  // namespace ed
