// Enqueueing messages on the lane's stream.
#include "lanes/stream_lane.h"

#include <c10/core/StreamGuard.h>

#include <thread>

#include "common/timeout.h"
#include "works/stream_work.h"

namespace ldt {
namespace {

constexpr std::chrono::milliseconds kAbortPatience{2000};

c10::Stream new_stream(c10::Device device) {
  // High priority: a transfer that is ready should not queue behind the kernels it is meant to hide
  // behind.
  return c10::impl::VirtualGuardImpl(device.type())
      .getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

void order_after(const Transport::Work& transfer) { transfer->wait(); }

}  // namespace

StreamLane::StreamLane(LaneOptions options, std::shared_ptr<Transport> transport)
    : Lane(std::move(options), std::move(transport)),
      stream_(new_stream(options_.device)),
      events_(std::make_shared<EventPool>(options_.device)) {
  pool_ = std::make_shared<ReceivePool>(options_.device, stream_);
}

StreamLane::~StreamLane() {
  try {
    close(std::chrono::milliseconds(0));
  } catch (const std::exception& error) {  // the device is gone, as at interpreter exit
    TORCH_WARN("lane ", options_.name, ": ", error.what());
  }
}

void StreamLane::wait_for_current_stream() {
  const auto current =
      c10::impl::VirtualGuardImpl(options_.device.type()).getStream(options_.device);
  events_->record(current)->block(stream_);
}

Lane::Work StreamLane::launch_send(const std::vector<at::Tensor>& tensors, int peer,
                                   const std::string& title) {
  retire();
  auto wire = WireTensors::for_send(tensors, options_.device,
                                    title);  // copies, if any, on the current stream
  wait_for_current_stream();
  const c10::StreamGuard on_lane(stream_);
  if (options_.announce) {
    const auto own = Announcement::of(wire.tensors(), wire.bytes(), options_.chunk_bytes);
    const auto theirs = exchange_announcements(own, peer, /*speak_first=*/true);
    if (!own.matches(theirs)) throw_mismatch(title, own, theirs, "the receiver expects");
  }
  std::vector<Transport::Work> transfers;
  for (const auto& piece : wire.pieces(options_.chunk_bytes)) {
    transfers.push_back(transport_->send(piece, peer, Transport::kPayload));
  }
  for (const auto& transfer : transfers) order_after(transfer);
  stats_->sent_bytes += wire.bytes();
  stats_->sent_messages += 1;
  return finish(c10d::OpType::SEND, std::move(wire));
}

Lane::Work StreamLane::launch_receive(const std::vector<at::Tensor>& tensors, int peer,
                                      const std::string& title) {
  retire();
  bool pooled = true;
  for (const auto& tensor : tensors) {
    if (tensor.numel() > 0) pooled = pool_->claim(tensor) && pooled;
  }
  // A tensor of the caller's may still be read by what is queued on the current stream.
  if (!pooled) wait_for_current_stream();
  const c10::StreamGuard on_lane(stream_);
  auto wire = WireTensors::for_receive(tensors, options_.device, title);
  const bool broadcasts = transport_->has_stage();
  const auto own = Announcement::of(wire.tensors(), wire.bytes(), options_.chunk_bytes);
  bool agreed = true;
  if (options_.announce) {
    if (transport_->is_leader()) {
      const auto theirs = exchange_announcements(own, peer, /*speak_first=*/false);
      agreed = !broadcasts || stage_agreement().lead(own, theirs);
      if (!own.matches(theirs)) throw_mismatch(title, own, theirs, "the sender has");
    } else {
      stage_agreement().follow(title, own);
    }
  }
  receive_and_broadcast(wire.pieces(options_.chunk_bytes), peer, broadcasts && agreed);
  if (!agreed) {
    finish(c10d::OpType::RECV, std::move(wire));
    throw_disagreement(title, own);
  }
  wire.unstage();
  if (transport_->is_leader()) {
    stats_->received_bytes += wire.bytes();
    stats_->received_messages += 1;
  }
  if (broadcasts) stats_->broadcast_bytes += wire.bytes();
  // A pooled block is only ever written again in the order of this lane's stream: nothing has to
  // hold it until the device is done, so a host that runs far ahead takes no more memory than one
  // that does not.
  if (pooled) wire.release();
  return finish(c10d::OpType::RECV, std::move(wire));
}

// A backend starts a transfer when the current stream gets there. So the next receive is issued
// before the lane's stream waits for the broadcast of the piece before it: the two run side by
// side.
void StreamLane::receive_and_broadcast(const std::vector<at::Tensor>& pieces, int peer,
                                       bool broadcasts) {
  std::vector<Transport::Work> broadcast;
  for (const auto& piece : pieces) {
    if (transport_->is_leader()) {
      order_after(transport_->receive(piece, peer, Transport::kPayload));
    }
    if (broadcasts) broadcast.push_back(in_stage([&] { return transport_->broadcast(piece); }));
  }
  for (const auto& collective : broadcast) order_after(collective);
}

Announcement StreamLane::exchange_announcements(const Announcement& own, int peer,
                                                bool speak_first) {
  const auto mine = own.encode().to(options_.device);
  const auto theirs = at::empty_like(mine);
  const auto said = speak_first ? Transport::kAnnouncement : Transport::kExpectation;
  const auto heard = speak_first ? Transport::kExpectation : Transport::kAnnouncement;
  const auto speak = [&] { order_after(transport_->send(mine, peer, said)); };
  const auto hear = [&] { order_after(transport_->receive(theirs, peer, heard)); };
  // One communicator may run one transfer at a time: the sender speaks first, the receiver hears
  // first.
  if (speak_first) speak();
  hear();
  if (!speak_first) speak();
  return Announcement::decode(theirs.cpu());
}

StageAgreement StreamLane::stage_agreement() {
  return StageAgreement(*transport_, options_.device, order_after);
}

Lane::Work StreamLane::finish(c10d::OpType type, WireTensors wire) {
  const std::shared_ptr<const c10::Event> end = events_->record(stream_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    in_flight_.push_back({end, std::move(wire)});
  }
  return c10::make_intrusive<StreamWork>(type, end, failure_);
}

bool StreamLane::retire() {
  std::deque<InFlight> done;  // freed after the lock: a tensor's deleter may come back to the lane
  std::lock_guard<std::mutex> lock(mutex_);
  while (!in_flight_.empty() && in_flight_.front().end->query()) {
    done.push_back(std::move(in_flight_.front()));
    in_flight_.pop_front();
  }
  return in_flight_.empty();
}

bool StreamLane::drain(std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (!retire()) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

void StreamLane::abort(const std::string& reason) {
  // A transfer whose peer is gone keeps the device waiting: only the backend can end it.
  if (failure_->set(reason) && !retire()) transport_->abort();
}

void StreamLane::close(std::chrono::milliseconds timeout) {
  if (!drain(checked_timeout(timeout, c10::str("lane ", options_.name)))) {
    abort(c10::str("lane ", options_.name, ": closed with messages still in flight"));
    if (!drain(kAbortPatience)) {
      // The device may still use these tensors, and nothing is left to wait for: never free them.
      std::lock_guard<std::mutex> lock(mutex_);
      new std::deque<InFlight>(std::move(in_flight_));
      in_flight_.clear();
    }
  }
  failure_->set(c10::str("lane ", options_.name, ": is closed"));
}

}  // namespace ldt
