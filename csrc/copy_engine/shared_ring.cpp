// Making, opening and agreeing.
#include "copy_engine/shared_ring.h"

#include <algorithm>
#include <new>
#include <thread>

#include "common/event_pool.h"
#include "common/interrupt.h"
#include "copy_engine/deferred_free.h"

namespace ldt {

CopyEngine& require_copy_engine(c10::Device device) {
  auto* engine = find_copy_engine(device.type());
  if (engine == nullptr) {
    throw_lane_error("there is no copy engine for devices of type ",
                     c10::DeviceTypeName(device.type(), true));
  }
  const auto reason = engine->unavailable(device);
  if (!reason.empty()) throw_lane_error("the copy engine cannot be used: ", reason);
  return *engine;
}

SharedRing::SharedRing(c10::Device device)
    : pages_(std::make_shared<Pages>(device, sizeof(MessageRing))),
      ring_(new (pages_->shared.data()) MessageRing) {
  register_host();
}

SharedRing::SharedRing(c10::Device device, const std::string& ticket)
    : pages_(std::make_shared<Pages>(device, ticket)),
      ring_(static_cast<MessageRing*>(pages_->shared.data())) {
  if (pages_->shared.bytes() != sizeof(MessageRing)) {
    throw_lane_error("expected a ledger of ", sizeof(MessageRing),
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
  std::vector<std::shared_ptr<const Event>> ends;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& stream : users_) {
    if (!stream.query()) ends.push_back(events->record(stream));
  }
  return [ends = std::move(ends)] { return all_done(ends); };
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
    if (ring->is_overridden()) throw_lane_error("one of the two ends has failed");
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
