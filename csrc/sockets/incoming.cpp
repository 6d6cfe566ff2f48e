// Matches frames with posted receives, in order within each lane.
#include "sockets/incoming.h"

#include <algorithm>
#include <cstring>

#include "common/error.h"

namespace ldt {
namespace {

void check_size(uint64_t expected, uint64_t found) {
  if (expected == found) return;
  throw_lane_error("a message of ", found, " bytes came where ", expected,
                   " are expected: both ends must agree on shapes and dtypes");
}

}  // namespace

uint64_t Incoming::post(uint32_t lane, const at::Tensor& target,
                        c10::intrusive_ptr<SocketWork> work) {
  auto& state = lanes_[lane];
  auto& message = state.messages[state.posted];
  if (!message) message = std::make_shared<IncomingMessage>();
  const uint64_t size = target.nbytes();
  if (message->arrives) {
    check_size(size, message->size);
    state.early_bytes -= size;
  }
  message->size = size;
  message->target = target;
  message->work = std::move(work);
  return ++state.posted;
}

std::shared_ptr<IncomingMessage> Incoming::place(const FrameHeader& header, uint8_t*& payload) {
  const bool fits = header.length <= kFrameBytes && header.offset <= header.total &&
                    header.length <= header.total - header.offset;
  if (!fits) throw_lane_error("a frame does not fit its message");
  auto& state = lanes_[header.lane];
  auto& message = state.messages[header.message];
  if (!message) message = std::make_shared<IncomingMessage>();
  if (message->target.defined()) {
    check_size(message->size, header.total);
  } else if (!message->arrives) {
    if (header.message < state.posted) throw_lane_error("a frame of a message that is complete");
    const uint64_t room = window_ - std::min(window_, state.early_bytes);
    if (state.early_bytes > 0 && header.total > room) {
      throw_lane_error("the peer sends more than may come before its receive is posted");
    }
    state.early_bytes += header.total;
    message->size = header.total;
    message->early = at::empty({static_cast<int64_t>(header.total)}, at::kByte);
  } else {
    check_size(message->size, header.total);
  }
  message->arrives = true;
  const auto& memory = message->early.defined() ? message->early : message->target;
  payload = static_cast<uint8_t*>(memory.data_ptr()) + header.offset;
  return message;
}

c10::intrusive_ptr<SocketWork> Incoming::arrived(const FrameHeader& header,
                                                 const std::shared_ptr<IncomingMessage>& message) {
  message->received += header.length;
  return finish(lanes_[header.lane], header.message);
}

c10::intrusive_ptr<SocketWork> Incoming::take_early(uint32_t lane) {
  auto& state = lanes_[lane];
  return finish(state, state.posted - 1);
}

c10::intrusive_ptr<SocketWork> Incoming::finish(State& state, uint64_t number) {
  const auto found = state.messages.find(number);
  if (found == state.messages.end()) return {};
  const auto message = found->second;
  if (!message->complete() || !message->target.defined()) return {};
  if (message->early.defined() && message->size > 0) {
    std::memcpy(message->target.data_ptr(), message->early.data_ptr(), message->size);
  }
  state.messages.erase(found);
  return message->work;
}

bool Incoming::is_waiting() const {
  return std::any_of(lanes_.begin(), lanes_.end(), [](const auto& lane) {
    const auto& messages = lane.second.messages;
    return std::any_of(messages.begin(), messages.end(),
                       [](const auto& message) { return message.second->work.defined(); });
  });
}

std::vector<c10::intrusive_ptr<SocketWork>> Incoming::clear() {
  std::vector<c10::intrusive_ptr<SocketWork>> works;
  for (const auto& [lane, state] : lanes_) {
    for (const auto& [number, message] : state.messages) {
      if (message->work) works.push_back(message->work);
    }
  }
  lanes_.clear();
  return works;
}

}  // namespace ldt
