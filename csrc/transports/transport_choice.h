// Which transport moves a lane's payload.
#pragma once

#include <cstdint>
#include <optional>
#include <variant>

#include "process_group/socket_group_comm.h"
#include "transports/copy_engine_transport.h"

namespace ldt {

/// NCCL, by the addresses of the communicators of the lane's groups, which c10d gives as numbers;
/// empty where there is no such group.
struct NcclCommunicators {
  std::optional<int64_t> point_to_point;
  std::optional<int64_t> stage;
};

/// The default: the process groups. Socket links carry host memory: on a device in steps of the
/// host, see DeferredTransport.
using TransportChoice =
    std::variant<std::monostate, NcclCommunicators, CopyEngineLinks, SocketLinks>;

}  // namespace ldt
