// Pieces through pinned slots, which copies and transfers use at the same time.
#include "process_group/staged_group_comm.h"

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/event.h"
#include "common/streams.h"

namespace ldt {
namespace {

// Runs in wait().
class StagedWork final : public c10d::Work {
 public:
  StagedWork(c10d::OpType type, std::function<void()> run) : Work(-1, type), run_(std::move(run)) {}
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    run_();
    return true;
  }

 private:
  const std::function<void()> run_;
};

// Made outside inference mode, as worker threads cannot write to inference tensors.
at::Tensor pinned_memory(int64_t bytes, c10::Device device) {
  c10::InferenceMode off(false);
  try {
    return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  } catch (const c10::Error& error) {
    throw_lane_error(
        "host memory for what a lane sends and receives: torch has no pinned memory for ", device,
        ": ", error.what_without_backtrace());
  }
}

std::vector<at::Tensor> pieces_of(const at::Tensor& bytes) {
  return bytes.split(StagedGroupComm::kPieceBytes);
}

}  // namespace

StagedGroupComm::StagedGroupComm(std::shared_ptr<GroupComm> groups, SocketLinks links,
                                 c10::Device device)
    : groups_(std::move(groups)),
      links_(std::move(links)),
      events_(std::make_shared<EventPool>(device)) {
  for (auto& slot : slots_) slot.memory = pinned_memory(kPieceBytes, device);
}

GroupComm::Work StagedGroupComm::send(const at::Tensor& bytes, int peer) {
  const auto link = links_.links.find(peer);
  if (link == links_.links.end()) return groups_->send(bytes, peer);
  return c10::make_intrusive<StagedWork>(
      c10d::OpType::SEND, [this, link = link->second, bytes] { send_pieces(*link, bytes); });
}

GroupComm::Work StagedGroupComm::receive(const at::Tensor& bytes, int peer) {
  const auto link = links_.links.find(peer);
  if (link == links_.links.end()) return groups_->receive(bytes, peer);
  return c10::make_intrusive<StagedWork>(
      c10d::OpType::RECV, [this, link = link->second, bytes] { receive_pieces(*link, bytes); });
}

// The link sends a piece while the next is copied.
void StagedGroupComm::send_pieces(SocketLink& link, const at::Tensor& bytes) {
  const auto stream = current_stream(bytes.device());
  for (const auto& piece : pieces_of(bytes)) {
    auto& slot = free_slot();
    const auto part = slot.memory.narrow(0, 0, piece.numel());
    part.copy_(piece, /*non_blocking=*/true);
    wait_for(*events_->record(stream));
    slot.transfer = link.send(links_.lane, part);
  }
}

// The link fills the slots ahead while a piece is copied.
void StagedGroupComm::receive_pieces(SocketLink& link, const at::Tensor& bytes) {
  const auto stream = current_stream(bytes.device());
  const auto pieces = pieces_of(bytes);
  std::vector<Slot*> posted;
  for (size_t i = 0; i < pieces.size(); ++i) {
    while (posted.size() < std::min(pieces.size(), i + slots_.size() / 2)) {
      auto& slot = free_slot();
      const auto size = pieces[posted.size()].numel();
      slot.transfer = link.receive(links_.lane, slot.memory.narrow(0, 0, size));
      posted.push_back(&slot);
    }
    auto& slot = *posted[i];
    slot.transfer->wait();
    pieces[i].copy_(slot.memory.narrow(0, 0, pieces[i].numel()), /*non_blocking=*/true);
    slot.copied = events_->record(stream);
  }
}

StagedGroupComm::Slot& StagedGroupComm::free_slot() {
  auto& slot = slots_[used_++ % slots_.size()];
  finish(slot);
  return slot;
}

void StagedGroupComm::finish(Slot& slot) {
  if (const auto transfer = std::exchange(slot.transfer, nullptr)) transfer->wait();
  if (const auto copied = std::exchange(slot.copied, nullptr)) wait_for(*copied);
}

void StagedGroupComm::wait_for(const Event& event) const {
  while (!event.is_done()) {
    if (aborted_) throw_lane_error("the lane was aborted");
    std::this_thread::sleep_for(kPollInterval);
  }
}

// A link is aborted as well, which ends its transfers: part of a message cannot be taken back.
void StagedGroupComm::abort() {
  aborted_ = true;
  for (const auto& [peer, link] : links_.links) link->abort("a lane was aborted");
  groups_->abort();
}

}  // namespace ldt
