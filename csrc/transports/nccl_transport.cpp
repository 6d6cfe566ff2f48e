// NCCL's calls in the order of the lane's stream; the leader's broadcasts beside it.
#include "transports/nccl_transport.h"

#include "common/error.h"
#include "common/streams.h"

namespace ldt {

NcclTransport::NcclTransport(std::shared_ptr<GroupComm> comm, Communicators communicators,
                             c10::Device device, int64_t chunk_bytes, const NcclLibrary& nccl)
    : comm_(std::move(comm)),
      communicators_(communicators),
      nccl_(nccl),
      chunk_bytes_(chunk_bytes),
      stage_stream_(new_lane_stream(device)),
      events_(std::make_shared<EventPool>(device)) {
  const bool is_complete = (communicators_.point_to_point != nullptr) == comm_->is_leader() &&
                           (communicators_.stage != nullptr) == comm_->has_stage();
  if (!is_complete) throw_lane_error("expected a communicator for each group of the lane");
}

template <typename Call>
void NcclTransport::call(const char* what, const Call& call) {
  const auto inside = gate_.enter();
  nccl_.check(call(), what);
  ++enqueued_;
}

std::shared_ptr<const Event> NcclTransport::send(const c10::Stream& stream,
                                                 const MessageTensors& message, int peer) {
  for (const auto& piece : message.pieces(chunk_bytes_)) {
    call("ncclSend", [&] {
      return nccl_.send(piece.const_data_ptr(), piece.nbytes(), NcclLibrary::kBytes, peer,
                        communicators_.point_to_point, native_handle(stream));
    });
  }
  return nullptr;
}

ReceiveEvents NcclTransport::receive(const c10::Stream& stream, const MessageTensors& message,
                                     const std::vector<ReceivePool::Claim>& /*claims*/, int peer,
                                     bool broadcasts) {
  if (!comm_->is_leader()) {
    for (const auto& piece : message.pieces(chunk_bytes_)) broadcast(piece, stream);
    return {};
  }
  for (const auto& piece : message.pieces(chunk_bytes_)) {
    call("ncclRecv", [&] {
      return nccl_.receive(piece.mutable_data_ptr(), piece.nbytes(), NcclLibrary::kBytes, peer,
                           communicators_.point_to_point, native_handle(stream));
    });
    if (!broadcasts) continue;
    events_->record(stream)->block(stage_stream_);
    enqueued_ += 2;
    broadcast(piece, stage_stream_);
  }
  if (broadcasts) events_->record(stage_stream_)->block(stream);
  return {};
}

void NcclTransport::broadcast(const at::Tensor& piece, const c10::Stream& stream) {
  auto* data = piece.mutable_data_ptr();
  call("ncclBroadcast in the stage", [&] {
    return nccl_.broadcast(data, data, piece.nbytes(), NcclLibrary::kBytes,
                           communicators_.stage_root, communicators_.stage, native_handle(stream));
  });
}

void NcclTransport::abort() {
  shutdown();
  comm_->abort();
}

}  // namespace ldt
