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

Ledger::Course meet_in(const std::function<Ledger::Outcome()>& meet, uint64_t bytes,
                       std::chrono::milliseconds patience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  auto outcome = meet();
  while (outcome.course == Ledger::Course::kTooFar) {
    if (std::chrono::steady_clock::now() >= deadline) {
      throw_lane_error("the other end is more than ", Ledger::kEntries, " tensors behind for ",
                       patience.count(), " ms: does it still receive?");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    outcome = meet();
  }
  if (outcome.bytes_of_other != 0 && outcome.bytes_of_other != bytes) {
    throw_lane_error("the two ends differ: here a tensor of ", bytes, " bytes, there one of ",
                     outcome.bytes_of_other, " bytes");
  }
  return outcome.course;
}

}  // namespace ldt
