// Payload by NCCL, called on the lane's own stream with the communicators of the lane's groups.
#pragma once

#include "carriers/carrier.h"
#include "carriers/nccl_library.h"
#include "common/event_pool.h"
#include "transports/transport.h"

namespace ldt {

/// c10d's calls take several times as long on the host as NCCL's own (docs/performance.md): they
/// record what a watchdog looks at, and move to a stream of theirs and back.
class NcclCarrier final : public Carrier {
 public:
  /// Communicators of the point-to-point and of the stage's group; null where there is no such
  /// group.
  struct Communicators {
    NcclLibrary::Communicator point_to_point = nullptr;
    NcclLibrary::Communicator stage = nullptr;
    int stage_root = 0;
  };

  /// `groups` owns the communicators, and can abort them. Throws LaneError where NCCL cannot be
  /// called.
  NcclCarrier(std::shared_ptr<Transport> groups, Communicators communicators, c10::Device device,
              int64_t chunk_bytes);

  std::shared_ptr<const End> send(const c10::Stream& stream, const WireTensors& wire,
                                  int peer) override;
  Ends receive(const c10::Stream& stream, const WireTensors& wire,
               const std::vector<ReceivePool::Claim>& claims, int peer, bool broadcasts) override;
  void abort() override { groups_->abort(); }
  bool has_own_timeout() const override { return false; }

 private:
  void broadcast(const at::Tensor& piece, const c10::Stream& stream);

  const std::shared_ptr<Transport> groups_;
  const Communicators communicators_;
  const NcclLibrary& nccl_;
  const int64_t chunk_bytes_;
  const c10::Stream stage_stream_;  // the leader's broadcasts run here, beside the next receive
  const std::shared_ptr<EventPool> events_;
};

}  // namespace ldt
