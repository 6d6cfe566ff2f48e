// A lane's process groups, with socket links to some peers in place of the point-to-point group.
#pragma once

#include <map>
#include <memory>

#include "process_group/group_comm.h"
#include "sockets/socket_link.h"

namespace ldt {

/// The links of a lane, and its number, the same on both ends of each and no other lane's.
struct SocketLinks {
  std::map<int, std::shared_ptr<SocketLink>> links;  // by peer: its rank in the lane's group
  uint32_t lane = 0;
};

/// Passes on what is not between this rank and a linked peer.
class SocketGroupComm final : public GroupComm {
 public:
  SocketGroupComm(std::shared_ptr<GroupComm> groups, SocketLinks links)
      : groups_(std::move(groups)), links_(std::move(links)) {}

  Work send(const at::Tensor& bytes, int peer) override {
    auto* link = link_to(peer);
    return link ? link->send(links_.lane, bytes) : groups_->send(bytes, peer);
  }
  Work receive(const at::Tensor& bytes, int peer) override {
    auto* link = link_to(peer);
    return link ? link->receive(links_.lane, bytes) : groups_->receive(bytes, peer);
  }
  Work broadcast(const at::Tensor& bytes) override { return groups_->broadcast(bytes); }
  void abort() override { groups_->abort(); }
  bool is_leader() const override { return groups_->is_leader(); }
  bool has_stage() const override { return groups_->has_stage(); }
  int num_peers() const override { return groups_->num_peers(); }
  int own_peer() const override { return groups_->own_peer(); }

 private:
  SocketLink* link_to(int peer) const {
    const auto found = links_.links.find(peer);
    return found == links_.links.end() ? nullptr : found->second.get();
  }

  std::shared_ptr<GroupComm> groups_;
  const SocketLinks links_;
};

}  // namespace ldt
