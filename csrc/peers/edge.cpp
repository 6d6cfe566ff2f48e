// Making, opening and agreeing.
#include "peers/edge.h"

#include <new>
#include <thread>

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
    : device_(device), pages_(sizeof(Ledger)), ledger_(new (pages_.data()) Ledger) {
  require_peer_device(device_).enlist(device_, pages_.data(), pages_.bytes());
}

SharedLedger::SharedLedger(c10::Device device, const std::string& ticket)
    : device_(device), pages_(ticket), ledger_(static_cast<Ledger*>(pages_.data())) {
  if (pages_.bytes() != sizeof(Ledger)) {
    throw_lane_error("expected a ledger of ", sizeof(Ledger), " bytes from the other end, got ",
                     pages_.bytes(), ": do all ranks run the same version of this package?");
  }
  require_peer_device(device_).enlist(device_, pages_.data(), pages_.bytes());
}

SharedLedger::~SharedLedger() {
  if (auto* driver = peer_device(device_.type())) driver->dismiss(device_, pages_.data());
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
