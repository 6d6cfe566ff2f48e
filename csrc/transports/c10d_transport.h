// Moves payload over c10d process groups, on any device with streams.
#pragma once

#include "process_group/group_comm.h"
#include "transports/transport.h"

namespace ldt {

/// Relies on the backend's wait() to order the current stream. Cuts messages into pieces of
/// `chunk_bytes`, equal on all ranks.
class C10dTransport final : public Transport {
 public:
  C10dTransport(std::shared_ptr<GroupComm> comm, int64_t chunk_bytes)
      : comm_(std::move(comm)), chunk_bytes_(chunk_bytes) {}

  std::shared_ptr<const Event> send(const c10::Stream& stream, const MessageTensors& message,
                                    int peer) override;
  ReceiveEvents receive(const c10::Stream& stream, const MessageTensors& message,
                        const std::vector<ReceivePool::Claim>& claims, int peer,
                        bool broadcasts) override;
  int64_t enqueued() const override { return enqueued_; }
  void abort() override { comm_->abort(); }
  bool has_own_timeout() const override { return true; }

 private:
  std::shared_ptr<GroupComm> comm_;
  int64_t chunk_bytes_;
  int64_t enqueued_ = 0;
};

}  // namespace ldt
