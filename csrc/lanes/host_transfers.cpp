// What a sender, a receiving leader and a member do for one message.
#include "lanes/host_message.h"

namespace ldt {

void SendMessage::start_payload() {
  for (const auto& piece : wire_.pieces(context_->options.chunk_bytes)) {
    payload_.push_back(started(context_->transport->send(piece, peer_, Transport::kPayload)));
  }
}

void SendMessage::post() {
  if (context_->options.announce) {
    post_announcements(Transport::kAnnouncement, Transport::kExpectation);
  } else {
    start_payload();
  }
}

void SendMessage::run() {
  if (context_->options.announce) {
    const auto theirs = exchange_announcements();
    if (!own_.matches(theirs)) throw_mismatch(title_, own_, theirs, "the receiver expects");
    start_payload();
  }
  for (const auto& transfer : payload_) {
    wait_for_transfer(transfer);
  }
  payload_.clear();
  context_->stats->sent_bytes += wire_.bytes();
  context_->stats->sent_messages += 1;
}

void ReceiveMessage::start_payload() {
  pieces_ = wire_.pieces(context_->options.chunk_bytes);
  for (const auto& piece : pieces_) {
    payload_.push_back(started(context_->transport->receive(piece, peer_, Transport::kPayload)));
  }
}

void ReceiveMessage::post() {
  if (context_->options.announce) {
    post_announcements(Transport::kExpectation, Transport::kAnnouncement);
  } else {
    start_payload();
  }
}

void ReceiveMessage::run() {
  const bool broadcasts = context_->transport->has_stage();
  bool agreed = true;
  if (context_->options.announce) {
    const auto theirs = exchange_announcements();
    agreed = !broadcasts || stage_agreement().lead(own_, theirs);
    if (!own_.matches(theirs)) throw_mismatch(title_, own_, theirs, "the sender has");
    start_payload();
  }
  std::vector<Transport::Work> broadcast;
  for (size_t i = 0; i < payload_.size(); ++i) {
    wait_for_transfer(payload_[i]);
    if (broadcasts && agreed) broadcast.push_back(context_->transport->broadcast(pieces_[i]));
  }
  for (const auto& collective : broadcast) {
    wait_for_collective(collective);
  }
  payload_.clear();
  pieces_.clear();
  if (!agreed) {
    // The sender was right and has sent: what it sent is received, so that the lane stays in step.
    throw_disagreement(title_, own_);
  }
  wire_.unstage();
  context_->stats->received_bytes += wire_.bytes();
  context_->stats->received_messages += 1;
  if (broadcasts) context_->stats->broadcast_bytes += wire_.bytes();
}

void MemberMessage::start_payload() {
  for (const auto& piece : wire_.pieces(context_->options.chunk_bytes)) {
    payload_.push_back(context_->transport->broadcast(piece));
  }
}

void MemberMessage::post() {
  // With announcements the worker starts everything: the broadcasts of messages may not interleave.
  if (!context_->options.announce) start_payload();
}

void MemberMessage::run() {
  if (context_->options.announce) {
    stage_agreement().follow(title_, own_);
    start_payload();
  }
  for (const auto& collective : payload_) {
    wait_for_collective(collective);
  }
  payload_.clear();
  wire_.unstage();
  context_->stats->broadcast_bytes += wire_.bytes();
}

}  // namespace ldt
