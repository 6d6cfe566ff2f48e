// What a sender, a receiving leader and a member do for one message.
#include "lanes/host_message.h"

namespace ldt {

void SendMessage::post() {
  for (const auto& piece : tensors_.pieces(context_->options.chunk_bytes)) {
    transfers_.push_back(started(context_->comm->send(piece, peer_)));
  }
}

void SendMessage::run() {
  for (const auto& transfer : transfers_) wait_for_transfer(transfer);
  context_->stats->sent_bytes += tensors_.bytes();
  context_->stats->sent_messages += 1;
}

void ReceiveMessage::post() {
  pieces_ = tensors_.pieces(context_->options.chunk_bytes);
  for (const auto& piece : pieces_) {
    transfers_.push_back(started(context_->comm->receive(piece, peer_)));
  }
}

void ReceiveMessage::run() {
  const bool broadcasts = context_->comm->has_stage();
  std::vector<GroupComm::Work> broadcast;
  for (size_t i = 0; i < transfers_.size(); ++i) {
    wait_for_transfer(transfers_[i]);
    if (!broadcasts) continue;
    broadcast.push_back(in_stage([&] { return context_->comm->broadcast(pieces_[i]); }));
  }
  for (const auto& collective : broadcast) wait_for_collective(collective);
  tensors_.unstage();
  context_->stats->received_bytes += tensors_.bytes();
  context_->stats->received_messages += 1;
  if (broadcasts) context_->stats->broadcast_bytes += tensors_.bytes();
}

void MemberMessage::post() {
  for (const auto& piece : tensors_.pieces(context_->options.chunk_bytes)) {
    transfers_.push_back(in_stage([&] { return context_->comm->broadcast(piece); }));
  }
}

void MemberMessage::run() {
  for (const auto& collective : transfers_) wait_for_collective(collective);
  tensors_.unstage();
  context_->stats->broadcast_bytes += tensors_.bytes();
}

}  // namespace ldt
