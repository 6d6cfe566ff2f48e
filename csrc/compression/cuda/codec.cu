// One warp for each block of elements, four per thread; warps stride over the blocks.
#include <cuda_runtime.h>

#include "compression/cuda/kernels.h"

namespace ldt::compression {
namespace {

constexpr int kWarp = 32;
constexpr int kEach = kBlock / kWarp;

template <Element kElement>
struct Access {
  using Type = uint16_t;
};
template <>
struct Access<Element::kFloat32> {
  using Type = uint32_t;
};

template <Element kElement>
__device__ uint32_t load(const void* data, int64_t index) {
  const uint32_t element = static_cast<const typename Access<kElement>::Type*>(data)[index];
  if constexpr (kElement == Element::kBFloat16) return element << 16;
  if constexpr (kElement == Element::kFloat16) return widen_half(element);
  return element;
}

template <Element kElement>
__device__ void store(void* data, int64_t index, uint32_t bits) {
  using Type = typename Access<kElement>::Type;
  uint32_t element = bits;
  if constexpr (kElement == Element::kBFloat16) element = bits >> 16;
  if constexpr (kElement == Element::kFloat16) element = narrow_half(bits);
  static_cast<Type*>(data)[index] = static_cast<Type>(element);
}

__device__ uint32_t largest_of_warp(uint32_t value) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffff, value, distance);
    value = value < other ? other : value;
  }
  return value;
}

__device__ int64_t first_block() {
  return (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
}

__device__ int64_t block_stride() { return static_cast<int64_t>(gridDim.x) * blockDim.x / kWarp; }

template <Element kElement>
__global__ void pack(const void* data, int64_t elements, uint8_t* packed) {
  const int lane = threadIdx.x % kWarp;
  for (int64_t block = first_block(); block * kBlock < elements; block += block_stride()) {
    uint32_t bits[kEach];
    uint32_t largest = 0;
    for (int i = 0; i < kEach; ++i) {
      const int64_t index = block * kBlock + i * kWarp + lane;
      bits[i] = index < elements ? load<kElement>(data, index) : 0;
      const uint32_t magnitude = finite_magnitude(bits[i]);
      largest = largest < magnitude ? magnitude : largest;
    }
    const int exponent = exponent_of(largest_of_warp(largest));
    const Scale scale(-exponent);
    const uint32_t top = largest_code(exponent, kElement);
    for (int i = 0; i < kEach; ++i) {
      const int64_t index = block * kBlock + i * kWarp + lane;
      if (index < elements) packed[index] = static_cast<uint8_t>(encode(bits[i], scale, top));
    }
    if (lane == 0) store_exponent(packed + elements + block * kExponentBytes, exponent);
  }
}

template <Element kElement>
__global__ void unpack(const uint8_t* packed, int64_t elements, void* data) {
  const int lane = threadIdx.x % kWarp;
  for (int64_t block = first_block(); block * kBlock < elements; block += block_stride()) {
    const Scale scale(load_exponent(packed + elements + block * kExponentBytes));
    for (int i = 0; i < kEach; ++i) {
      const int64_t index = block * kBlock + i * kWarp + lane;
      if (index < elements) store<kElement>(data, index, decode(packed[index], scale));
    }
  }
}

}  // namespace
}  // namespace ldt::compression

#ifdef __CUDACC__  // tests include the kernels as C++ and launch them themselves
namespace {

using namespace ldt::compression;

constexpr int kThreads = 256;
constexpr int64_t kMaxGrid = 65535;

unsigned grid_for(int64_t elements) {
  const int64_t grid = (blocks_of(elements) + kThreads / kWarp - 1) / (kThreads / kWarp);
  return static_cast<unsigned>(grid < kMaxGrid ? grid : kMaxGrid);
}

const char* error_of_launch() {
  const cudaError_t status = cudaGetLastError();
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}

}  // namespace

extern "C" const char* ldt_compression_pack(const void* data, ldt::compression::Element element,
                                            int64_t elements, uint8_t* packed, void* stream) {
  if (elements == 0) return nullptr;
  const auto kernel = element == Element::kFloat32    ? pack<Element::kFloat32>
                      : element == Element::kBFloat16 ? pack<Element::kBFloat16>
                                                      : pack<Element::kFloat16>;
  kernel<<<grid_for(elements), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(data, elements,
                                                                                 packed);
  return error_of_launch();
}

extern "C" const char* ldt_compression_unpack(const uint8_t* packed,
                                              ldt::compression::Element element, int64_t elements,
                                              void* data, void* stream) {
  if (elements == 0) return nullptr;
  const auto kernel = element == Element::kFloat32    ? unpack<Element::kFloat32>
                      : element == Element::kBFloat16 ? unpack<Element::kBFloat16>
                                                      : unpack<Element::kFloat16>;
  kernel<<<grid_for(elements), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(packed, elements,
                                                                                 data);
  return error_of_launch();
}
#endif
