// Rebuilds all rows of all microbatches in one launch: several blocks per row, grid-stride threads.
#include <cuda_runtime.h>

#include "metadata/device/cuda/kernels.h"

namespace ldt::metadata {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kElementsPerBlock = 4096;
constexpr int64_t kMaxBlocksPerRow = 1024;

__global__ void rebuild_rows(const RowPlan* plans, RowLists lists, uint8_t* output) {
  const RowPlan row = plans[blockIdx.x];
  const int64_t first = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.y) * blockDim.x;
  for (int64_t index = first; index < row.length; index += stride) {
    store_integer(output + row.output, index, row.bytes, value_at(row, lists, index));
  }
}

}  // namespace
}  // namespace ldt::metadata

extern "C" const char* ldt_metadata_rebuild(const ldt::metadata::RowPlan* plans, int64_t rows,
                                            int64_t longest, ldt::metadata::RowLists lists,
                                            uint8_t* output, void* stream) {
  using namespace ldt::metadata;
  int64_t blocks = (longest + kElementsPerBlock - 1) / kElementsPerBlock;
  blocks = blocks < kMaxBlocksPerRow ? blocks : kMaxBlocksPerRow;
  const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(blocks));
  rebuild_rows<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(plans, lists, output);
  const cudaError_t status = cudaGetLastError();
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}
