// What Python gives a lane to carry its payload.
#pragma once

#include <cstdint>
#include <optional>
#include <variant>

#include "transports/copy_engine_transport.h"

namespace ldt {

/// Addresses of NCCL's communicators, which c10d gives away as numbers.
struct NcclCommunicators {
  std::optional<int64_t> point_to_point;
  std::optional<int64_t> stage;
};

/// None: the process groups.
using TransportChoice = std::variant<std::monostate, NcclCommunicators, IpcLinks>;

}  // namespace ldt
