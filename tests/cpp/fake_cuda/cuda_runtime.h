// Just enough of CUDA to run a kernel that is included as C++: a host thread per device thread, one
// block after the other. For tests of what a kernel computes, on machines without a GPU.
#pragma once

#include <atomic>
#include <barrier>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __shared__ static  // one block runs at a time

namespace fake_cuda {

struct Index {
  unsigned x = 0;
};

struct Block {
  explicit Block(unsigned threads) : all(threads) {
    for (unsigned warp = 0; warp < threads / 32; ++warp) {
      warps.push_back(std::make_unique<std::barrier<>>(32));
    }
  }
  std::barrier<> all;
  std::vector<std::unique_ptr<std::barrier<>>> warps;
  std::atomic<unsigned> ballots[32] = {};
  std::atomic<unsigned> values[1024] = {};
};
inline Block* block = nullptr;

}  // namespace fake_cuda

inline thread_local fake_cuda::Index threadIdx;
inline thread_local fake_cuda::Index blockIdx;
inline fake_cuda::Index blockDim;
inline fake_cuda::Index gridDim;

inline void __syncthreads() { fake_cuda::block->all.arrive_and_wait(); }

inline unsigned __ballot_sync(unsigned /*all lanes*/, bool votes) {
  const unsigned warp = threadIdx.x / 32;
  const unsigned lane = threadIdx.x % 32;
  auto& ballot = fake_cuda::block->ballots[warp];
  auto& barrier = *fake_cuda::block->warps[warp];
  if (votes) ballot.fetch_or(1u << lane);
  barrier.arrive_and_wait();
  const unsigned result = ballot.load();
  barrier.arrive_and_wait();
  if (lane == 0) ballot = 0;
  barrier.arrive_and_wait();
  return result;
}

inline unsigned __shfl_xor_sync(unsigned /*all lanes*/, unsigned value, int distance) {
  auto& barrier = *fake_cuda::block->warps[threadIdx.x / 32];
  fake_cuda::block->values[threadIdx.x] = value;
  barrier.arrive_and_wait();
  const unsigned result = fake_cuda::block->values[threadIdx.x ^ static_cast<unsigned>(distance)];
  barrier.arrive_and_wait();
  return result;
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __clz(unsigned bits) { return bits == 0 ? 32 : __builtin_clz(bits); }

template <typename Value>
void atomicMin(Value* place, Value value) {
  std::atomic_ref<Value> shared(*place);
  Value seen = shared.load();
  while (value < seen && !shared.compare_exchange_weak(seen, value)) {
  }
}
template <typename Value>
void atomicMax(Value* place, Value value) {
  std::atomic_ref<Value> shared(*place);
  Value seen = shared.load();
  while (value > seen && !shared.compare_exchange_weak(seen, value)) {
  }
}
template <typename Value>
void atomicAdd(Value* place, Value value) {
  std::atomic_ref<Value>(*place).fetch_add(value);
}
template <typename Value>
void atomicOr(Value* place, Value value) {
  std::atomic_ref<Value>(*place).fetch_or(value);
}

namespace fake_cuda {

/// Runs `kernel` in every thread of every block; `threads` is a multiple of 32.
template <typename Kernel>
void launch(int64_t blocks, unsigned threads, const Kernel& kernel) {
  Block shared(threads);
  block = &shared;
  blockDim.x = threads;
  std::vector<std::thread> running;
  for (unsigned thread = 0; thread < threads; ++thread) {
    running.emplace_back([&kernel, blocks, thread] {
      threadIdx.x = thread;
      for (int64_t number = 0; number < blocks; ++number) {
        blockIdx.x = static_cast<unsigned>(number);
        kernel();
        __syncthreads();
      }
    });
  }
  for (auto& thread : running) thread.join();
}

}  // namespace fake_cuda
