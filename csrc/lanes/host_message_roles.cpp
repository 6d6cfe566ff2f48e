// What a sender, a receiving leader and a member do for one message.
#include "lanes/host_message.h"

namespace ldt {

void SendMessage::announce() {
  post_announcements(GroupComm::kAnnouncement, GroupComm::kExpectation);
}

void SendMessage::agree() {
  const auto mine = announcement(), theirs = exchange_announcements();
  if (!mine.matches(theirs)) throw_mismatch(name_, mine, theirs, "the receiver expects");
}

void SendMessage::start_payload() {
  for (const auto& piece : tensors_.pieces(context_->options.chunk_bytes)) {
    payload_.push_back(started(context_->comm->send(piece, peer_, GroupComm::kPayload)));
  }
}

void SendMessage::finish_payload() {
  for (const auto& transfer : payload_) wait_for_transfer(transfer);
  context_->stats->sent_bytes += tensors_.bytes();
  context_->stats->sent_messages += 1;
}

void ReceiveMessage::announce() {
  post_announcements(GroupComm::kExpectation, GroupComm::kAnnouncement);
}

void ReceiveMessage::agree() {
  const auto mine = announcement(), theirs = exchange_announcements();
  if (context_->comm->has_stage()) stage_agrees_ = stage_agreement().lead(mine, theirs);
  if (!mine.matches(theirs)) throw_mismatch(name_, mine, theirs, "the sender has");
}

void ReceiveMessage::start_payload() {
  pieces_ = tensors_.pieces(context_->options.chunk_bytes);
  for (const auto& piece : pieces_) {
    payload_.push_back(started(context_->comm->receive(piece, peer_, GroupComm::kPayload)));
  }
}

void ReceiveMessage::finish_payload() {
  const bool broadcasts = context_->comm->has_stage() && stage_agrees_;
  std::vector<GroupComm::Work> broadcast;
  for (size_t i = 0; i < payload_.size(); ++i) {
    wait_for_transfer(payload_[i]);
    if (!broadcasts) continue;
    broadcast.push_back(in_stage([&] { return context_->comm->broadcast(pieces_[i]); }));
  }
  for (const auto& collective : broadcast) wait_for_collective(collective);
  // The sender agrees and has sent: receive the payload all the same, so that the lane stays in
  // sync.
  if (!stage_agrees_) throw_disagreement(name_, announcement());
  tensors_.unstage();
  context_->stats->received_bytes += tensors_.bytes();
  context_->stats->received_messages += 1;
  if (broadcasts) context_->stats->broadcast_bytes += tensors_.bytes();
}

void MemberMessage::agree() { stage_agreement().follow(name_, announcement()); }

void MemberMessage::start_payload() {
  for (const auto& piece : tensors_.pieces(context_->options.chunk_bytes)) {
    payload_.push_back(in_stage([&] { return context_->comm->broadcast(piece); }));
  }
}

void MemberMessage::finish_payload() {
  for (const auto& collective : payload_) wait_for_collective(collective);
  tensors_.unstage();
  context_->stats->broadcast_bytes += tensors_.bytes();
}

}  // namespace ldt
