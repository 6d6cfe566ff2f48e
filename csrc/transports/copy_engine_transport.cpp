// Receives and forwards in the order of the lane's stream.
#include "transports/copy_engine_transport.h"

#include "transports/piece_size.h"

namespace ldt {
namespace {

template <typename Link>
Link& link_for(const std::map<int, std::shared_ptr<Link>>& links, int peer, const char* direction) {
  const auto found = links.find(peer);
  if (found == links.end()) {
    throw_lane_error("this lane has no IPC link ", direction, " group rank ", peer,
                     "; links are made when the lane is connected");
  }
  return *found->second;
}

}  // namespace

std::shared_ptr<const Event> CopyEngineTransport::send(const c10::Stream& stream,
                                                       const MessageTensors& message, int peer) {
  auto& to = link_for(links_.senders, peer, "to");
  for (const auto& [data, first] : message.transfers()) {
    const auto bytes = static_cast<int64_t>(data.nbytes());
    to.begin(stream, {static_cast<const char*>(data.const_data_ptr()), bytes, bytes}, timeout_);
    to.push(stream, bytes);
  }
  return to.sent();
}

ReceiveEvents CopyEngineTransport::receive(const c10::Stream& stream, const MessageTensors& message,
                                           const std::vector<ReceivePool::Claim>& claims, int peer,
                                           bool broadcasts) {
  auto& from = links_.from_stage ? *links_.from_stage : link_for(links_.receivers, peer, "from");
  auto* const to = broadcasts ? links_.to_stage.get() : nullptr;
  std::shared_ptr<const Event> arrival;
  bool one_sided = to == nullptr;
  for (const auto& [data, first] : message.transfers()) {
    const ReceivingEnd::Target target{
        static_cast<char*>(data.mutable_data_ptr()), static_cast<int64_t>(data.nbytes()),
        claims[first] != ReceivePool::Claim::kForeign, claims[first] == ReceivePool::Claim::kFree};
    if (to != nullptr) {
      forward(stream, target, from, *to);
      continue;
    }
    from.begin(stream, target, target.bytes, timeout_);
    const auto event = from.arrival();
    if (event) {
      arrival = event;  // after those of earlier tensors
    } else {
      from.await(stream, target.bytes);
      one_sided = false;
    }
  }
  if (one_sided) return {arrival, nullptr};
  if (arrival) arrival->block(stream);
  return {nullptr, to == nullptr ? nullptr : to->taken()};
}

void CopyEngineTransport::forward(const c10::Stream& stream, const ReceivingEnd::Target& target,
                                  ReceivingEnd& from, SendingEnd& to) {
  const auto piece = piece_bytes(target.bytes, hops_, chunk_bytes_);
  from.begin(stream, target, piece, timeout_);
  // A block of the pool is not written to again before the events that receive() returns.
  to.begin(stream, {target.address, target.bytes, piece, target.may_post}, timeout_);
  for (int64_t done = 0; done < target.bytes; done += piece) {
    from.await(stream, piece);
    to.push(stream, piece);
  }
}

int64_t CopyEngineTransport::bounced() const {
  int64_t count = links_.from_stage ? links_.from_stage->bounced() : 0;
  for (const auto& [peer, link] : links_.receivers) count += link->bounced();
  return count;
}

std::string CopyEngineTransport::failure() const {
  std::string first;
  for_each_link([&](const auto& link) {
    if (first.empty()) first = link.failure();
  });
  return first;
}

int64_t CopyEngineTransport::enqueued() const {
  int64_t count = 0;
  for_each_link([&](const auto& link) { count += link.enqueued(); });
  return count;
}

// Holds every flag before releasing any, so that no stream forwards data that has not arrived.
void CopyEngineTransport::abort() {
  for_each_link([](auto& link) { link.hold(); });
  for_each_link([](auto& link) { link.release(); });
}

void CopyEngineTransport::release() {
  for_each_link([](auto& link) { link.flush(); });
  links_.stream->release();
}

template <typename Step>
void CopyEngineTransport::for_each_link(const Step& step) const {
  for (const auto& [peer, link] : links_.senders) step(*link);
  for (const auto& [peer, link] : links_.receivers) step(*link);
  if (links_.from_stage) step(*links_.from_stage);
  if (links_.to_stage) step(*links_.to_stage);
}

ReceivePool::Allocate CopyEngineTransport::allocator() {
  if (!links_.memory) return nullptr;
  return [memory = links_.memory](int64_t bytes) { return memory->allocate(bytes); };
}

}  // namespace ldt
