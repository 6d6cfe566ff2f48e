// Making, opening and agreeing.
#include "peers/edge.h"

#include <algorithm>
#include <new>
#include <thread>

#include "common/event_pool.h"
#include "peers/graveyard.h"

namespace ldt {
namespace {

class NeverEnd final : public End {
 public:
  bool is_reached() const override { return false; }
  void block(const c10::Stream& /*stream*/) const override {}
};

}  // namespace

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

SharedLedger::SharedLedger(c10::Device device, std::unique_ptr<SharedPages> pages)
    : device_(device), pages_(std::move(pages)), ledger_(static_cast<Ledger*>(pages_->data())) {
  require_peer_device(device_).enlist(device_, pages_->data(), pages_->bytes());
}

SharedLedger::~SharedLedger() {
  if (auto* driver = peer_device(device_.type())) driver->dismiss(device_, pages_->data());
}

std::shared_ptr<SharedLedger> SharedLedger::create(c10::Device device) {
  auto pages = std::make_unique<SharedPages>(sizeof(Ledger));
  new (pages->data()) Ledger;
  return kept_until_unused(new SharedLedger(device, std::move(pages)));
}

std::shared_ptr<SharedLedger> SharedLedger::open(c10::Device device, const std::string& ticket) {
  auto pages = std::make_unique<SharedPages>(ticket);
  if (pages->bytes() != sizeof(Ledger)) {
    throw_lane_error("expected a ledger of ", sizeof(Ledger), " bytes from the other end, got ",
                     pages->bytes(), ": do all ranks run the same version of this package?");
  }
  return kept_until_unused(new SharedLedger(device, std::move(pages)));
}

std::shared_ptr<SharedLedger> SharedLedger::kept_until_unused(SharedLedger* ledger) {
  return std::shared_ptr<SharedLedger>(ledger, [](SharedLedger* left) {
    keep_until(left->ends_of_use(), std::shared_ptr<const SharedLedger>(left));
  });
}

void SharedLedger::note_use(const c10::Stream& stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (std::find(users_.begin(), users_.end(), stream) == users_.end()) users_.push_back(stream);
}

std::vector<std::shared_ptr<const End>> SharedLedger::ends_of_use() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<const End>> ends;
  const auto events = std::make_shared<EventPool>(device_);
  for (const auto& stream : users_) {
    try {
      ends.push_back(events->record(stream));
    } catch (const std::exception&) {  // the device is gone, as at interpreter exit
      ends.push_back(std::make_shared<NeverEnd>());
    }
  }
  return ends;
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
