// Scans all rows of all microbatches in one launch: a block per row, a warp per part of it, ballots
// for the bits.
#include <cuda_runtime.h>

#include "metadata/device/cuda/kernels.h"

namespace ldt::metadata {
namespace {

constexpr int kWarpSize = 32;
constexpr int kMaxWarps = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

__device__ int64_t element_of(const Elements& elements, int64_t index) {
  return load_integer(elements.data, index, elements.bytes, elements.is_signed);
}

__device__ Elements row_of(const Elements& elements, int64_t row, int64_t length) {
  Elements result = elements;
  result.data = static_cast<const uint8_t*>(elements.data) + row * length * elements.bytes;
  return result;
}

// The words of a row that this warp scans; the same for all its lanes.
struct Stretch {
  int64_t begin;
  int64_t end;
};

__device__ Stretch stretch_of_warp(int64_t length) {
  const int64_t warps = blockDim.x / kWarpSize;
  const int64_t each = (words_of(length) + warps - 1) / warps;
  const int64_t begin = each * (threadIdx.x / kWarpSize);
  const int64_t end = begin + each;
  return {begin, end < words_of(length) ? end : words_of(length)};
}

struct MaskSums {
  unsigned long long begin;
  unsigned long long end;
  unsigned long long kept;
  unsigned wrong;  // which of kBinary, kNumbered do not hold
};

__device__ void scan_mask_row(const Elements& row, int64_t length, uint32_t* planes,
                              ScanFacts* facts) {
  __shared__ MaskSums sums;
  if (threadIdx.x == 0) sums = {static_cast<unsigned long long>(length), 0, 0, 0};
  __syncthreads();
  const int lane = threadIdx.x % kWarpSize;
  const Stretch stretch = stretch_of_warp(length);
  int64_t begin = length;
  int64_t end = 0;
  int64_t kept = 0;
  unsigned wrong = 0;
  for (int64_t word = stretch.begin; word < stretch.end; ++word) {
    const int64_t index = word * kWarpSize + lane;
    const int64_t value = index < length ? element_of(row, index) : 0;
    const int64_t before = index > 0 && index < length ? element_of(row, index - 1) : 0;
    const unsigned nonzero = __ballot_sync(kAllLanes, value != 0);
    const unsigned changed =
        __ballot_sync(kAllLanes, index > 0 && index < length && value != before);
    if (lane == 0) {
      planes[word] = nonzero;
      planes[words_of(length) + word] = changed;
    }
    kept += __popc(nonzero);
    if (value == 0) continue;
    begin = index < begin ? index : begin;
    end = index + 1;
    const uint64_t step = static_cast<uint64_t>(value) - static_cast<uint64_t>(before);
    if (value != 1) wrong |= kBinary;
    if (before == 0 ? value != 1 : step > 1) wrong |= kNumbered;
  }
  atomicMin(&sums.begin, static_cast<unsigned long long>(begin));
  atomicMax(&sums.end, static_cast<unsigned long long>(end));
  if (lane == 0) atomicAdd(&sums.kept, static_cast<unsigned long long>(kept));
  atomicOr(&sums.wrong, wrong);
  __syncthreads();
  if (threadIdx.x != 0) return;
  const bool no_holes = sums.kept == 0 || sums.kept == sums.end - sums.begin;
  uint32_t flags = (kBinary | kNumbered) & ~sums.wrong;
  if (!no_holes || sums.kept == 0) flags &= ~kNumbered;
  if (no_holes && (flags & kBinary) != 0) flags |= kOnes;
  const auto first = static_cast<int64_t>(sums.begin);  // the length if there is none
  const int64_t past = sums.kept == 0 ? length : static_cast<int64_t>(sums.end);
  *facts = {first, past, 0, flags, 0};
}

// What the elements before a warp's stretch come to, or those of the stretch itself.
struct MaskPrefix {
  int64_t kept;
  int64_t segment;  // where the last segment began; -1: none did
};

// The lanes' view of one word of a mask's row, and the prefix after it.
struct MaskWord {
  bool keeps;
  int64_t kept_before;
  int64_t segment;
};

__device__ MaskWord next_word(const Elements& mask, int64_t length, int64_t word,
                              MaskPrefix& prefix) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t index = word * kWarpSize + lane;
  const int64_t value = index < length ? element_of(mask, index) : 0;
  const int64_t before = index > 0 && index < length ? element_of(mask, index - 1) : 0;
  const unsigned kept = __ballot_sync(kAllLanes, value != 0);
  const unsigned begun = __ballot_sync(kAllLanes, value != 0 && (index == 0 || value != before));
  const unsigned earlier = (1u << lane) - 1;
  const unsigned begun_here = begun & (earlier | 1u << lane);
  MaskWord result;
  result.keeps = value != 0;
  result.kept_before = prefix.kept + __popc(kept & earlier);
  result.segment = begun_here != 0 ? word * kWarpSize + (31 - __clz(begun_here)) : prefix.segment;
  prefix.kept += __popc(kept);
  if (begun != 0) prefix.segment = word * kWarpSize + (31 - __clz(begun));
  return result;
}

// Sums over the stretches of the warps before this one, and the mask's first 0 in `first_zero`.
__device__ MaskPrefix prefix_of_warp(const Elements& mask, int64_t length,
                                     unsigned long long* first_zero) {
  __shared__ MaskPrefix of_warp[kMaxWarps];
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const Stretch stretch = stretch_of_warp(length);
  MaskPrefix sum{0, -1};
  auto zero = static_cast<unsigned long long>(length);
  for (int64_t word = stretch.begin; word < stretch.end; ++word) {
    const int64_t index = word * kWarpSize + lane;
    const MaskWord seen = next_word(mask, length, word, sum);
    if (!seen.keeps && index < length && zero > static_cast<unsigned long long>(index)) {
      zero = static_cast<unsigned long long>(index);
    }
  }
  if (lane == 0) of_warp[warp] = sum;
  atomicMin(first_zero, zero);
  __syncthreads();
  MaskPrefix prefix{0, -1};
  for (int earlier = 0; earlier < warp; ++earlier) {
    prefix.kept += of_warp[earlier].kept;
    if (of_warp[earlier].segment >= 0) prefix.segment = of_warp[earlier].segment;
  }
  return prefix;
}

__device__ void scan_rule_row(const Elements& row, const Elements& mask, int64_t length,
                              ScanFacts* facts) {
  __shared__ unsigned wrong;
  __shared__ unsigned long long first_zero;
  if (threadIdx.x == 0) {
    wrong = 0;
    first_zero = static_cast<unsigned long long>(length);
  }
  __syncthreads();
  const bool masked = mask.data != nullptr;  // the same for the whole block
  MaskPrefix prefix{0, -1};
  int64_t padding = 0;
  if (masked) {
    prefix = prefix_of_warp(mask, length, &first_zero);
    const auto zero = static_cast<int64_t>(first_zero);
    if (zero < length) padding = element_of(row, zero);
  }
  unsigned fails = masked ? 0 : kCumsumHolds | kSegmentsHolds;
  const Stretch stretch = stretch_of_warp(length);
  for (int64_t word = stretch.begin; word < stretch.end; ++word) {
    MaskWord seen{false, 0, 0};
    if (masked) seen = next_word(mask, length, word, prefix);
    const int64_t index = word * kWarpSize + threadIdx.x % kWarpSize;
    if (index >= length) continue;  // the last word only: its ballots are over
    const int64_t value = element_of(row, index);
    if (value != index) fails |= kArangeHolds;
    if (value != (seen.keeps ? seen.kept_before : padding)) fails |= kCumsumHolds;
    if (value != (seen.keeps ? index - seen.segment : padding)) fails |= kSegmentsHolds;
  }
  atomicOr(&wrong, fails);
  __syncthreads();
  if (threadIdx.x != 0) return;
  *facts = {0, 0, padding, (kArangeHolds | kCumsumHolds | kSegmentsHolds) & ~wrong, 0};
}

__device__ void copy_row(const Elements& row, int64_t length, uint8_t* output) {
  for (int64_t index = threadIdx.x; index < length; index += blockDim.x) {
    store_integer(output, index, row.bytes, element_of(row, index));
  }
}

__global__ void scan_rows(const ScanJob* jobs, int64_t job_count, uint8_t* output) {
  const ScanJob job = jobs[last_begun(jobs, job_count, blockIdx.x)];
  const int64_t number = blockIdx.x - job.begin;
  const Elements row = row_of(job.elements, number, job.length);
  auto* facts = reinterpret_cast<ScanFacts*>(output + job.facts) + number;
  switch (job.kind) {
    case ScanKind::kMask: {
      auto* planes = reinterpret_cast<uint32_t*>(output + job.bits);
      return scan_mask_row(row, job.length, planes + number * 2 * words_of(job.length), facts);
    }
    case ScanKind::kRule: {
      Elements mask = job.mask;
      if (mask.data != nullptr) mask = row_of(mask, number % job.mask_rows, job.length);
      return scan_rule_row(row, mask, job.length, facts);
    }
    default: return copy_row(row, job.length, output + job.copy + number * job.length * row.bytes);
  }
}

}  // namespace
}  // namespace ldt::metadata

#ifdef __CUDACC__  // tests include the kernel as C++ and launch it themselves
extern "C" const char* ldt_metadata_scan(const ldt::metadata::ScanJob* jobs, int64_t job_count,
                                         int64_t rows, int64_t longest, uint8_t* output,
                                         void* stream) {
  const unsigned threads = longest > 8192 ? 1024 : 256;
  ldt::metadata::
      scan_rows<<<static_cast<unsigned>(rows), threads, 0, static_cast<cudaStream_t>(stream)>>>(
          jobs, job_count, output);
  const cudaError_t status = cudaGetLastError();
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}
#endif
