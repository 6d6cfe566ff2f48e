// Sends, receives and broadcasts of c10d in the order of one stream.
#include "transports/c10d_transport.h"

#include "common/error.h"

namespace ldt {
namespace {

// A wait by the backend's stream, the transfer, and a wait back.
constexpr int64_t kOperationsOfCall = 4;

}  // namespace

std::shared_ptr<const Event> C10dTransport::send(const c10::Stream& /*stream*/,
                                                 const MessageTensors& message, int peer) {
  std::vector<GroupComm::Work> transfers;
  for (const auto& piece : message.pieces(chunk_bytes_)) {
    transfers.push_back(comm_->send(piece, peer));
    enqueued_ += kOperationsOfCall;
  }
  for (const auto& transfer : transfers) transfer->wait();
  return nullptr;
}

// A backend starts a transfer once the current stream reaches it. So this issues the next receive
// before the lane's stream waits for the broadcast of the previous piece, and the two overlap.
ReceiveEvents C10dTransport::receive(const c10::Stream& /*stream*/, const MessageTensors& message,
                                     const std::vector<ReceivePool::Claim>& /*claims*/, int peer,
                                     bool broadcasts) {
  std::vector<GroupComm::Work> broadcast;
  for (const auto& piece : message.pieces(chunk_bytes_)) {
    if (comm_->is_leader()) comm_->receive(piece, peer)->wait();
    if (broadcasts) broadcast.push_back(in_stage([&] { return comm_->broadcast(piece); }));
    enqueued_ += kOperationsOfCall * (broadcasts ? 2 : 1);
  }
  for (const auto& collective : broadcast) collective->wait();
  return {};
}

}  // namespace ldt
