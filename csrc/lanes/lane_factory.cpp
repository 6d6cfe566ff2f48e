// Defaults and checks.
#include "lanes/lane_factory.h"

#include "common/timeout.h"
#include "common/torch_private.h"
#include "lanes/host_lane.h"
#include "lanes/stream_lane.h"
#include "process_group/staged_group_comm.h"
#include "transports/c10d_transport.h"
#include "transports/deferred_transport.h"
#include "transports/nccl_transport.h"

namespace ldt {
namespace {

// Measured with benchmarks/recv_broadcast.py; see docs/performance.md.
constexpr int64_t kHostChunkBytes = int64_t{4} << 20;
constexpr int64_t kStreamChunkBytes = int64_t{16} << 20;

std::unique_ptr<Transport> make_transport(const LaneConfig& config, const LaneOptions& options,
                                          const std::shared_ptr<GroupComm>& comm) {
  if (const auto* links = std::get_if<CopyEngineLinks>(&config.transport)) {
    const int hops = config.stage ? config.stage->getSize() - 1 : 0;
    return std::make_unique<CopyEngineTransport>(*links, hops, options.chunk_bytes,
                                                 options.timeout);
  }
  if (const auto* addresses = std::get_if<NcclCommunicators>(&config.transport)) {
    const auto pointer = [](const std::optional<int64_t>& address) {
      return reinterpret_cast<void*>(address.value_or(0));
    };
    const NcclTransport::Communicators communicators{pointer(addresses->point_to_point),
                                                     pointer(addresses->stage), config.stage_root};
    return std::make_unique<NcclTransport>(comm, communicators, options.device, options.chunk_bytes,
                                           require_nccl());
  }
  if (const auto* links = std::get_if<SocketLinks>(&config.transport);
      links && !options.device.is_cpu()) {
    auto staged = std::make_shared<StagedGroupComm>(comm, *links, options.device);
    return std::make_unique<DeferredTransport>(
        std::make_unique<C10dTransport>(std::move(staged), options.chunk_bytes), options.device);
  }
  return nullptr;
}

}  // namespace

std::shared_ptr<Lane> make_lane(LaneConfig config) {
  std::shared_ptr<GroupComm> comm =
      std::make_shared<C10dGroupComm>(config.point_to_point, config.stage, config.stage_root);
  const bool on_cpu = config.device.is_cpu();
  if (const auto* links = std::get_if<SocketLinks>(&config.transport); links && on_cpu) {
    comm = std::make_shared<SocketGroupComm>(std::move(comm), *links);
  }
  LaneOptions options;
  options.name = config.name;
  options.device = on_cpu ? c10::Device(at::kCPU) : config.device;  // "cpu:0" is the CPU
  options.chunk_bytes = config.chunk_bytes.value_or(on_cpu ? kHostChunkBytes : kStreamChunkBytes);
  options.timeout = config.timeout;
  options.global_ranks = std::move(config.global_ranks);
  auto transport = make_transport(config, options, comm);
  return make_lane(std::move(options), std::move(comm), std::move(transport));
}

std::shared_ptr<Lane> make_lane(LaneOptions options, std::shared_ptr<GroupComm> comm,
                                std::unique_ptr<Transport> transport) {
  if (options.chunk_bytes < 1) {
    throw_lane_error("lane ", options.name, ": chunk_bytes: expected 1 or more, got ",
                     options.chunk_bytes);
  }
  options.timeout = checked_timeout(options.timeout, c10::str("lane ", options.name));
  if (options.timeout.count() == 0) {
    throw_lane_error("lane ", options.name, ": timeout: expected a positive time, got 0 ms");
  }
  if (options.device.is_cpu()) {
    if (transport)
      throw_lane_error("lane ", options.name, ": a lane on the CPU takes no transport");
    return std::make_shared<HostLane>(std::move(options), std::move(comm));
  }
  if (!torch_private::has_streams(options.device.type()) || !options.device.has_index()) {
    throw_lane_error("lane ", options.name,
                     ": expected the CPU, or a device with streams and an index such as ",
                     "cuda:0, got ", options.device);
  }
  if (!transport) transport = std::make_unique<C10dTransport>(comm, options.chunk_bytes);
  return std::make_shared<StreamLane>(std::move(options), std::move(comm), std::move(transport));
}

}  // namespace ldt
