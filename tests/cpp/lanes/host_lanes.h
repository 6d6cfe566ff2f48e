// Host lanes over a memory transport, and messages to send.
#pragma once

#include "lanes/lane_factory.h"
#include "process_group/memory_group_comm.h"

namespace ldt::testing {

inline LaneOptions new_options() {
  LaneOptions options;
  options.name = "test";
  options.chunk_bytes = 64;
  options.timeout = std::chrono::milliseconds(20'000);
  return options;
}

inline std::shared_ptr<Lane> lane_of(
    const std::shared_ptr<MemoryWire>& wire, int rank, bool stage,
    std::chrono::milliseconds timeout = std::chrono::milliseconds(20'000)) {
  auto options = new_options();
  options.timeout = timeout;
  return make_lane(options, std::make_shared<MemoryGroupComm>(wire, rank, stage));
}

inline at::Tensor numbers(int64_t seed, int64_t count) {
  return at::arange(count, at::kLong) * (seed + 1);
}

}  // namespace ldt::testing
