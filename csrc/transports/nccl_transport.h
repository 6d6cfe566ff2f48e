// Moves payload by NCCL calls on the lane's own stream, with the communicators of the lane's
// groups.
#pragma once

#include "common/call_gate.h"
#include "common/event_pool.h"
#include "process_group/group_comm.h"
#include "transports/nccl_library.h"
#include "transports/transport.h"

namespace ldt {

/// Calls must not race with the abort of their communicators. Call shutdown() before aborting or
/// destroying the groups: it admits no further call and waits for a running one. Only the abort,
/// which NCCL allows concurrently, ends a call that hangs in a connection or in a full device
/// queue, so the wait is short.
///
/// c10d's calls take several times as long on the host as NCCL's (docs/performance.md): they record
/// events for a watchdog, and switch to a stream of their own and back.
class NcclTransport final : public Transport {
 public:
  /// Communicators of the lane's groups; null where there is no such group.
  struct Communicators {
    NcclLibrary::Communicator point_to_point = nullptr;
    NcclLibrary::Communicator stage = nullptr;
    int stage_root = 0;
  };

  /// `comm` owns the communicators and can abort them. Throws LaneError if one is missing.
  NcclTransport(std::shared_ptr<GroupComm> comm, Communicators communicators, c10::Device device,
                int64_t chunk_bytes, const NcclLibrary& nccl);

  std::shared_ptr<const Event> send(const c10::Stream& stream, const MessageTensors& message,
                                    int peer) override;
  ReceiveEvents receive(const c10::Stream& stream, const MessageTensors& message,
                        const std::vector<ReceivePool::Claim>& claims, int peer,
                        bool broadcasts) override;
  int64_t enqueued() const override { return enqueued_; }
  void shutdown() override { gate_.close(kCallTimeout); }
  void abort() override;
  bool has_own_timeout() const override { return false; }

 private:
  static constexpr std::chrono::milliseconds kCallTimeout{2000};

  template <typename Call>
  void call(const char* what, const Call& call);
  void broadcast(const at::Tensor& piece, const c10::Stream& stream);

  const std::shared_ptr<GroupComm> comm_;
  const Communicators communicators_;
  const NcclLibrary& nccl_;
  CallGate gate_;
  const int64_t chunk_bytes_;
  const c10::Stream stage_stream_;  // of the leader's broadcasts, which overlap the next receive
  const std::shared_ptr<EventPool> events_;
  int64_t enqueued_ = 0;
};

}  // namespace ldt
