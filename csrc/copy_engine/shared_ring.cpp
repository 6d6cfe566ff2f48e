// Creates, opens and matches.
#include "copy_engine/shared_ring.h"

#include <algorithm>
#include <new>
#include <thread>

#include "common/event_pool.h"
#include "common/interrupt.h"
#include "copy_engine/deferred_free.h"

namespace ldt {

SharedRing::SharedRing(c10::Device device)
    : pages_(std::make_shared<Pages>(device, sizeof(MessageRing))),
      ring_(new (pages_->shared.data()) MessageRing) {
  register_host();
}

SharedRing::SharedRing(c10::Device device, const std::string& handle)
    : pages_(std::make_shared<Pages>(device, handle)),
      ring_(static_cast<MessageRing*>(pages_->shared.data())) {
  if (pages_->shared.bytes() != sizeof(MessageRing)) {
    throw_lane_error("expected a message ring of ", sizeof(MessageRing),
                     " bytes from the other end, got ", pages_->shared.bytes(),
                     ": do all ranks run the same version of this package?");
  }
  register_host();
}

void SharedRing::register_host() {
  auto& shared = pages_->shared;
  require_copy_engine(pages_->device).register_host(pages_->device, shared.data(), shared.bytes());
  pages_->is_registered = true;
}

SharedRing::Pages::~Pages() {
  auto* engine = is_registered ? find_copy_engine(device.type()) : nullptr;
  if (engine != nullptr) engine->unregister_host(device, shared.data());
}

void SharedRing::note_user(const c10::Stream& stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (std::find(users_.begin(), users_.end(), stream) == users_.end()) users_.push_back(stream);
}

std::function<bool()> SharedRing::enqueued_is_done() {
  const auto events = std::make_shared<EventPool>(pages_->device);
  std::vector<std::shared_ptr<const Event>> pending;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& stream : users_) {
    if (!stream.query()) pending.push_back(events->record(stream));
  }
  return [pending = std::move(pending)] { return all_done(pending); };
}

SharedRing::~SharedRing() {
  try {
    free_when(enqueued_is_done(), pages_);
  } catch (const std::exception&) {  // the device is gone, as at interpreter exit
  }
}

MessageRing::Outcome match_message(const SharedRing& ring, uint64_t number, MessageRing::Side side,
                                   const Proposal& mine, std::chrono::milliseconds timeout) {
  auto outcome = ring->match(number, side, mine);
  const auto start = std::chrono::steady_clock::now();
  while (outcome.protocol == MessageRing::Protocol::kTooFar) {
    if (std::chrono::steady_clock::now() - start >= timeout) {
      throw_lane_error("the other end has been more than ", MessageRing::kEntries,
                       " tensors behind for ", timeout.count(), " ms: does it still take part?");
    }
    if (ring->has_failed()) throw_lane_error("one of the two ends has failed");
    check_interrupt();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    outcome = ring->match(number, side, mine);
  }
  if (outcome.bytes_of_other != 0 && outcome.bytes_of_other != mine.bytes) {
    throw_lane_error("the two ends differ: here a tensor of ", mine.bytes, " bytes, there one of ",
                     outcome.bytes_of_other, " bytes");
  }
  return outcome;
}

}  // namespace ldt
