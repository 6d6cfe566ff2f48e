// The few functions of the CUDA driver that lanes call, looked up in libcuda at run time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace ldt {

/// Signatures are those of cuda.h, in the versions that its macros name (`_v2`). The driver never
/// changes them, so no header is needed.
struct CudaDriver {
  using Result = int;  // CUresult; 0 is success
  using Address = unsigned long long;
  using Context = void*;
  using Stream = void*;
  struct IpcHandle {
    unsigned char bytes[64];
  };

  Result (*get_error_string)(Result, const char**) = nullptr;
  Result (*device_get)(int*, int ordinal) = nullptr;
  Result (*device_get_attribute)(int*, int attribute, int device) = nullptr;
  Result (*retain_primary_context)(Context*, int device) = nullptr;
  Result (*get_current_context)(Context*) = nullptr;
  Result (*set_current_context)(Context) = nullptr;
  Result (*allocate)(Address*, size_t) = nullptr;
  Result (*free)(Address) = nullptr;
  Result (*get_ipc_handle)(IpcHandle*, Address) = nullptr;
  Result (*open_ipc_handle)(Address*, IpcHandle, unsigned flags) = nullptr;
  Result (*close_ipc_handle)(Address) = nullptr;
  Result (*register_host)(void*, size_t, unsigned flags) = nullptr;
  Result (*unregister_host)(void*) = nullptr;
  Result (*copy)(Address target, Address source, size_t, Stream) = nullptr;
  Result (*wait_value32)(Stream, Address, uint32_t, unsigned flags) = nullptr;
  Result (*wait_value64)(Stream, Address, uint64_t, unsigned flags) = nullptr;
  Result (*write_value32)(Stream, Address, uint32_t, unsigned flags) = nullptr;
  Result (*write_value64)(Stream, Address, uint64_t, unsigned flags) = nullptr;
  Result (*is_capturing)(Stream, int* status) = nullptr;

  /// Throws LaneError with the driver's text unless `result` is success; `what` names the call.
  void check(Result result, const char* what) const;
  std::string text_of(Result result) const;
};

/// Null without a driver, or with one that lacks these functions.
const CudaDriver* cuda_driver();

}  // namespace ldt
