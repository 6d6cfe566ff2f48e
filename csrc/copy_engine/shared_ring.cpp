// Making, opening and agreeing.
#include "copy_engine/shared_ring.h"

#include <algorithm>
#include <new>
#include <thread>

#include "common/event_pool.h"
#include "common/interrupt.h"
#include "copy_engine/deferred_free.h"

namespace ldt {

PeerDevice& require_peer_device(c10::Device device) {
  auto* driver = peer_device(device.type());
  if (driver == nullptr) {
    throw_lane_error("there is no copy engine for devices of type ",
                     c10::DeviceTypeName(device.type(), true));
  }
  const auto reason = driver->unavailable(device);
  if (!reason.empty()) throw_lane_error("the copy engine cannot be used: ", reason);
  return *driver;
}

SharedLedger::SharedLedger(c10::Device device)
    : pages_(std::make_shared<Pages>(device, sizeof(Ledger))),
      ledger_(new (pages_->shared.data()) Ledger) {
  enlist();
}

SharedLedger::SharedLedger(c10::Device device, const std::string& ticket)
    : pages_(std::make_shared<Pages>(device, ticket)),
      ledger_(static_cast<Ledger*>(pages_->shared.data())) {
  if (pages_->shared.bytes() != sizeof(Ledger)) {
    throw_lane_error("expected a ledger of ", sizeof(Ledger), " bytes from the other end, got ",
                     pages_->shared.bytes(),
                     ": do all ranks run the same version of this package?");
  }
  enlist();
}

void SharedLedger::enlist() {
  auto& shared = pages_->shared;
  require_peer_device(pages_->device).enlist(pages_->device, shared.data(), shared.bytes());
  pages_->is_enlisted = true;
}

SharedLedger::Pages::~Pages() {
  auto* driver = is_enlisted ? peer_device(device.type()) : nullptr;
  if (driver != nullptr) driver->dismiss(device, shared.data());
}

void SharedLedger::note_use(const c10::Stream& stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (std::find(users_.begin(), users_.end(), stream) == users_.end()) users_.push_back(stream);
}

std::function<bool()> SharedLedger::enqueued_is_done() {
  const auto events = std::make_shared<EventPool>(pages_->device);
  std::vector<std::shared_ptr<const Event>> ends;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& stream : users_) {
    if (!stream.query()) ends.push_back(events->record(stream));
  }
  return [ends = std::move(ends)] { return all_done(ends); };
}

SharedLedger::~SharedLedger() {
  try {
    keep_until(enqueued_is_done(), pages_);
  } catch (const std::exception&) {  // the device is gone, as at interpreter exit
  }
}

Ledger::Outcome meet_in(const SharedLedger& ledger, uint64_t number, Ledger::Side side,
                        const Proposal& mine, std::chrono::milliseconds patience) {
  auto outcome = ledger->meet(number, side, mine);
  const auto start = std::chrono::steady_clock::now();
  while (outcome.course == Ledger::Course::kTooFar) {
    if (std::chrono::steady_clock::now() - start >= patience) {
      throw_lane_error("the other end has been more than ", Ledger::kEntries,
                       " tensors behind for ", patience.count(), " ms: does it still take part?");
    }
    if (ledger->is_disturbed()) throw_lane_error("one of the two ends has failed");
    check_interrupt();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    outcome = ledger->meet(number, side, mine);
  }
  if (outcome.bytes_of_other != 0 && outcome.bytes_of_other != mine.bytes) {
    throw_lane_error("the two ends differ: here a tensor of ", mine.bytes, " bytes, there one of ",
                     outcome.bytes_of_other, " bytes");
  }
  return outcome;
}

}  // namespace ldt
