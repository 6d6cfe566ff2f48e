// A lane's process groups, with socket links that carry tensors of a device to some peers.
#pragma once

#include <array>
#include <atomic>

#include "common/event_pool.h"
#include "process_group/socket_group_comm.h"

namespace ldt {

/// Copies between the device and pinned memory, from which a link sends and into which it receives.
/// wait() of a work does that, on the host, piece by piece, in order with the current stream: wait
/// in the order of the calls. Everything else goes to `groups`.
class StagedGroupComm final : public GroupComm {
 public:
  static constexpr int64_t kPieceBytes = int64_t{2} << 20;

  /// Throws LaneError if torch has no pinned memory for the device.
  StagedGroupComm(std::shared_ptr<GroupComm> groups, SocketLinks links, c10::Device device);

  Work send(const at::Tensor& bytes, int peer) override;
  Work receive(const at::Tensor& bytes, int peer) override;
  Work broadcast(const at::Tensor& bytes) override { return groups_->broadcast(bytes); }
  void abort() override;
  bool is_leader() const override { return groups_->is_leader(); }
  bool has_stage() const override { return groups_->has_stage(); }
  int num_peers() const override { return groups_->num_peers(); }
  int own_peer() const override { return groups_->own_peer(); }

 private:
  /// Pinned memory for one piece, and what still uses it.
  struct Slot {
    at::Tensor memory;
    Work transfer;                        // of the link
    std::shared_ptr<const Event> copied;  // to the device
  };

  void send_pieces(SocketLink& link, const at::Tensor& bytes);
  void receive_pieces(SocketLink& link, const at::Tensor& bytes);
  Slot& free_slot();
  void finish(Slot& slot);
  void wait_for(const Event& event) const;

  const std::shared_ptr<GroupComm> groups_;
  const SocketLinks links_;
  const std::shared_ptr<EventPool> events_;
  std::array<Slot, 8> slots_;
  size_t used_ = 0;  // slots taken so far
  std::atomic<bool> aborted_{false};
};

}  // namespace ldt
