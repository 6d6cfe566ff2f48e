// Staging memory, and the copies between its two sides.
#include <cuda_runtime.h>

#include "metadata/device/cuda/kernels.h"

namespace ldt::metadata {
namespace {

const char* text_of(cudaError_t status) {
  if (status == cudaSuccess) return nullptr;
  cudaGetLastError();  // clears it, or the next launch would report it
  return cudaGetErrorString(status);
}

// Allows allocations and event queries while another thread captures a graph.
class OutsideOfCaptures {
 public:
  OutsideOfCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~OutsideOfCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  OutsideOfCaptures(const OutsideOfCaptures&) = delete;
  OutsideOfCaptures& operator=(const OutsideOfCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

void release(Staging& staging) {
  if (staging.host != nullptr) cudaFreeHost(staging.host);
  if (staging.device != nullptr) cudaFree(staging.device);
  if (staging.event != nullptr) cudaEventDestroy(static_cast<cudaEvent_t>(staging.event));
  staging = {};
}

}  // namespace
}  // namespace ldt::metadata

extern "C" const char* ldt_metadata_begin(int device, void* stream) {
  // The CUDA runtime linked here is not torch's: it has its own current device.
  cudaError_t status = cudaSetDevice(device);
  if (status != cudaSuccess) return ldt::metadata::text_of(status);
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  status = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &capturing);
  if (status != cudaSuccess) return ldt::metadata::text_of(status);
  if (capturing == cudaStreamCaptureStatusNone) return nullptr;
  return "a CUDA graph is being captured on the current stream; call it before or after the "
         "capture";
}

extern "C" const char* ldt_metadata_allocate(ldt::metadata::Staging* staging, int64_t bytes) {
  using namespace ldt::metadata;
  const OutsideOfCaptures relaxed;
  const auto size = static_cast<size_t>(bytes);
  void* host = nullptr;
  void* device = nullptr;
  cudaEvent_t event = nullptr;
  cudaError_t status = cudaHostAlloc(&host, size, cudaHostAllocDefault);
  if (status == cudaSuccess) status = cudaMalloc(&device, size);
  if (status == cudaSuccess) status = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  *staging = {static_cast<uint8_t*>(host), static_cast<uint8_t*>(device), event, bytes, false};
  if (status != cudaSuccess) release(*staging);
  return text_of(status);
}

extern "C" bool ldt_metadata_is_done(const ldt::metadata::Staging* staging) {
  const ldt::metadata::OutsideOfCaptures relaxed;
  return ldt::metadata::text_of(cudaEventQuery(static_cast<cudaEvent_t>(staging->event))) ==
         nullptr;
}

extern "C" const char* ldt_metadata_send(const ldt::metadata::Staging* staging, int64_t bytes,
                                         void* stream) {
  return ldt::metadata::text_of(cudaMemcpyAsync(staging->device, staging->host,
                                                static_cast<size_t>(bytes), cudaMemcpyHostToDevice,
                                                static_cast<cudaStream_t>(stream)));
}

extern "C" const char* ldt_metadata_fetch(const ldt::metadata::Staging* staging, int64_t offset,
                                          int64_t bytes, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const cudaError_t status =
      cudaMemcpyAsync(staging->host + offset, staging->device + offset, static_cast<size_t>(bytes),
                      cudaMemcpyDeviceToHost, on);
  return ldt::metadata::text_of(status == cudaSuccess ? cudaStreamSynchronize(on) : status);
}

extern "C" const char* ldt_metadata_mark(const ldt::metadata::Staging* staging, void* stream) {
  return ldt::metadata::text_of(
      cudaEventRecord(static_cast<cudaEvent_t>(staging->event), static_cast<cudaStream_t>(stream)));
}
