// Looks up the driver's functions.
#include "copy_engine/cuda_driver.h"

#include "common/dynamic_library.h"
#include "common/error.h"

namespace ldt {
namespace {

const CudaDriver* load_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return nullptr;
  static CudaDriver driver;
  const bool complete =
      look_up(library, "cuGetErrorString", driver.get_error_string) &&
      look_up(library, "cuDeviceGet", driver.device_get) &&
      look_up(library, "cuDeviceGetAttribute", driver.device_get_attribute) &&
      look_up(library, "cuDevicePrimaryCtxRetain", driver.retain_primary_context) &&
      look_up(library, "cuCtxGetCurrent", driver.get_current_context) &&
      look_up(library, "cuCtxSetCurrent", driver.set_current_context) &&
      look_up(library, "cuMemAlloc_v2", driver.allocate) &&
      look_up(library, "cuMemFree_v2", driver.free) &&
      look_up(library, "cuIpcGetMemHandle", driver.get_ipc_handle) &&
      look_up(library, "cuIpcOpenMemHandle_v2", driver.open_ipc_handle) &&
      look_up(library, "cuIpcCloseMemHandle", driver.close_ipc_handle) &&
      look_up(library, "cuMemHostRegister_v2", driver.register_host) &&
      look_up(library, "cuMemHostUnregister", driver.unregister_host) &&
      look_up(library, "cuMemcpyAsync", driver.copy) &&
      look_up(library, "cuStreamWaitValue32_v2", driver.wait_value32) &&
      look_up(library, "cuStreamWaitValue64_v2", driver.wait_value64) &&
      look_up(library, "cuStreamWriteValue32_v2", driver.write_value32) &&
      look_up(library, "cuStreamWriteValue64_v2", driver.write_value64) &&
      look_up(library, "cuStreamIsCapturing", driver.is_capturing);
  return complete ? &driver : nullptr;
}

}  // namespace

std::string CudaDriver::text_of(Result result) const {
  const char* text = nullptr;
  if (get_error_string(result, &text) != 0 || text == nullptr) text = "an unknown error";
  return c10::str(text, " (CUresult ", result, ")");
}

void CudaDriver::check(Result result, const char* what) const {
  if (result != 0) throw_lane_error("CUDA driver, ", what, ": ", text_of(result));
}

const CudaDriver* cuda_driver() {
  static const CudaDriver* const driver = load_driver();
  return driver;
}

}  // namespace ldt
