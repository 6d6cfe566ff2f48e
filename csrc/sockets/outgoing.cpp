// Order and flow control.
#include "sockets/outgoing.h"

#include <algorithm>
#include <set>

namespace ldt {

void Outgoing::push(uint32_t lane, const at::Tensor& bytes, c10::intrusive_ptr<SocketWork> work) {
  auto& state = lanes_[lane];
  messages_.push_back(std::make_shared<OutgoingMessage>(
      OutgoingMessage{lane, state.pushed++, bytes, std::move(work)}));
}

void Outgoing::set_posted(uint32_t lane, uint64_t count) {
  auto& state = lanes_[lane];
  state.posted = std::max(state.posted, count);  // connections may deliver them in another order
  while (!state.early.empty() && state.early.begin()->first < state.posted) {
    state.early_bytes -= state.early.begin()->second;
    state.early.erase(state.early.begin());
  }
}

bool Outgoing::may_begin(const OutgoingMessage& message, uint64_t size) const {
  const auto& state = lanes_.at(message.lane);
  return message.number < state.posted || state.early.empty() ||
         state.early_bytes + size <= window_;
}

bool Outgoing::next(OutgoingFrame& frame) {
  if (!announcements_.empty()) {
    const auto [lane, count] = *announcements_.begin();
    announcements_.erase(announcements_.begin());
    frame = {};
    frame.header.kind = FrameHeader::kPosted;
    frame.header.lane = lane;
    frame.header.message = count;
    return true;
  }
  std::set<uint32_t> blocked;
  for (auto found = messages_.begin(); found != messages_.end(); ++found) {
    const auto message = *found;
    const uint64_t size = message->bytes.nbytes();
    if (blocked.contains(message->lane)) continue;
    if (!message->begun && !may_begin(*message, size)) {
      blocked.insert(message->lane);
      continue;
    }
    auto& state = lanes_[message->lane];
    if (!message->begun && message->number >= state.posted) {
      state.early[message->number] = size;
      state.early_bytes += size;
    }
    message->begun = true;
    const uint64_t length = std::min(kFrameBytes, size - message->taken);
    frame.header = {.lane = message->lane,
                    .message = message->number,
                    .total = size,
                    .offset = message->taken,
                    .length = length};
    frame.payload = static_cast<const uint8_t*>(message->bytes.data_ptr()) + message->taken;
    frame.message = message;
    message->taken += length;
    message->in_flight += 1;
    if (message->taken == size) messages_.erase(found);
    return true;
  }
  return false;
}

c10::intrusive_ptr<SocketWork> Outgoing::written(const OutgoingFrame& frame) {
  if (!frame.message) return {};
  auto& message = *frame.message;
  message.in_flight -= 1;
  const bool done = message.taken == message.bytes.nbytes() && message.in_flight == 0;
  return done ? message.work : c10::intrusive_ptr<SocketWork>();
}

std::vector<c10::intrusive_ptr<SocketWork>> Outgoing::clear() {
  std::vector<c10::intrusive_ptr<SocketWork>> works;
  for (const auto& message : messages_) works.push_back(message->work);
  messages_.clear();
  announcements_.clear();
  return works;
}

}  // namespace ldt
