// NCCL's calls in the order of the lane's stream; the leader's broadcasts beside it.
#include "carriers/nccl_carrier.h"

#include "common/error.h"
#include "common/streams.h"

namespace ldt {
namespace {

const NcclLibrary& require_nccl() {
  const auto* library = nccl_library();
  if (library == nullptr) {
    throw_lane_error(
        "NCCL cannot be called: this torch has loaded no libnccl.so.2 (it may be linked into it); "
        "use "
        "the process groups instead");
  }
  return *library;
}

}  // namespace

NcclCarrier::NcclCarrier(std::shared_ptr<Transport> groups, Communicators communicators,
                         c10::Device device, int64_t chunk_bytes)
    : groups_(std::move(groups)),
      communicators_(communicators),
      nccl_(require_nccl()),
      chunk_bytes_(chunk_bytes),
      stage_stream_(new_lane_stream(device)),
      events_(std::make_shared<EventPool>(device)) {
  const bool is_complete = (communicators_.point_to_point != nullptr) == groups_->is_leader() &&
                           (communicators_.stage != nullptr) == groups_->has_stage();
  if (!is_complete) throw_lane_error("expected a communicator for each group of the lane");
}

std::shared_ptr<const End> NcclCarrier::send(const c10::Stream& stream, const WireTensors& wire,
                                             int peer) {
  for (const auto& piece : wire.pieces(chunk_bytes_)) {
    nccl_.check(nccl_.send(piece.const_data_ptr(), piece.nbytes(), NcclLibrary::kBytes, peer,
                           communicators_.point_to_point, native(stream)),
                "ncclSend");
  }
  return nullptr;
}

Ends NcclCarrier::receive(const c10::Stream& stream, const WireTensors& wire,
                          const std::vector<ReceivePool::Claim>& /*claims*/, int peer,
                          bool broadcasts) {
  if (!groups_->is_leader()) {
    for (const auto& piece : wire.pieces(chunk_bytes_)) broadcast(piece, stream);
    return {};
  }
  for (const auto& piece : wire.pieces(chunk_bytes_)) {
    nccl_.check(nccl_.receive(piece.mutable_data_ptr(), piece.nbytes(), NcclLibrary::kBytes, peer,
                              communicators_.point_to_point, native(stream)),
                "ncclRecv");
    if (!broadcasts) continue;
    events_->record(stream)->block(stage_stream_);
    broadcast(piece, stage_stream_);
  }
  if (broadcasts) events_->record(stage_stream_)->block(stream);
  return {};
}

void NcclCarrier::broadcast(const at::Tensor& piece, const c10::Stream& stream) {
  auto* data = piece.mutable_data_ptr();
  nccl_.check(nccl_.broadcast(data, data, piece.nbytes(), NcclLibrary::kBytes,
                              communicators_.stage_root, communicators_.stage, native(stream)),
              "ncclBroadcast in the stage");
}

}  // namespace ldt
