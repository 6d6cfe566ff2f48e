// Makes the lane that fits a device and a transport.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lanes/lane.h"
#include "process_group/c10d_group_comm.h"
#include "transports/transport_choice.h"

namespace ldt {

/// What a caller says of a lane; what is left empty has a default.
struct LaneConfig {
  std::string name;
  C10dGroupComm::Group point_to_point;  // see C10dGroupComm
  C10dGroupComm::Group stage;
  int stage_root = 0;
  std::vector<int> global_ranks;  // see LaneOptions
  c10::Device device = at::kCPU;
  std::optional<int64_t> chunk_bytes;  // 4 MiB on the CPU, else 16 MiB
  std::chrono::milliseconds timeout{};
  TransportChoice transport;
};

/// Throws LaneError for a configuration that makes no sense.
std::shared_ptr<Lane> make_lane(LaneConfig config);

/// The same from parts: a host lane on the CPU, a stream lane on any device that has streams (CUDA,
/// NPU). The payload of a stream lane moves by `transport`, by `comm` where that is null.
std::shared_ptr<Lane> make_lane(LaneOptions options, std::shared_ptr<GroupComm> comm,
                                std::unique_ptr<Transport> transport = nullptr);

}  // namespace ldt
