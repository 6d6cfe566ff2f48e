// Trying streams, one after the other: one waits, the others are given something to do.
#include "peers/apart.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include "common/event_pool.h"
#include "common/streams.h"
#include "peers/edge.h"

namespace ldt {
namespace {

using std::chrono::milliseconds;

constexpr int kCandidates = 32;       // as many as torch's pools have
constexpr milliseconds kPatience{5};  // many times what an idle stream takes
constexpr milliseconds kLongestWork{2000};

std::mutex& mutex() {
  static auto* const made = new std::mutex;
  return *made;
}

// Those of all lanes of this process.
std::vector<c10::Stream>& taken() {
  static auto* const made = new std::vector<c10::Stream>;
  return *made;
}

bool ends_within(const std::shared_ptr<const End>& end, milliseconds patience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (!end->is_reached()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return true;
}

std::vector<c10::Stream> others_than_lanes(c10::Device device) {
  const c10::impl::VirtualGuardImpl backend(device.type());
  const auto current = backend.getStream(device);
  const auto usual = backend.getDefaultStream(device);
  return current == usual ? std::vector{usual} : std::vector{usual, current};
}

// Whether a wait on `candidate` holds up none of `others`, which are idle.
bool is_apart(const c10::Stream& candidate, const std::vector<c10::Stream>& others,
              PeerDevice& driver, Ledger& ledger, EventPool& events, uint64_t count) {
  driver.wait_for(candidate, ledger.arrived, count);
  const bool apart = std::all_of(others.begin(), others.end(), [&](const c10::Stream& other) {
    return ends_within(events.record(other), kPatience);
  });
  ledger.arrived.count.store(static_cast<uint32_t>(count));
  return apart;
}

c10::Stream choose(c10::Device device, PeerDevice& driver, const std::vector<c10::Stream>& others) {
  const auto events = std::make_shared<EventPool>(device);
  for (const auto& other : others) ends_within(events->record(other), kLongestWork);
  SharedLedger ledger(device);
  auto candidate = new_lane_stream(device);
  uint64_t count = 0;
  while (++count < kCandidates) {
    // One of theirs may be busy for long: nothing is enqueued on it.
    const bool is_new = std::find(others.begin(), others.end(), candidate) == others.end();
    if (is_new) ledger.note_use(candidate);
    if (is_new && is_apart(candidate, others, driver, *ledger, *events, count)) break;
    candidate = new_lane_stream(device);
  }
  ends_within(events->record(candidate), kLongestWork);  // the ledger goes at once then
  if (count == kCandidates) {
    TORCH_WARN("all streams of ", device, " share a queue with another one that is in use (",
               others.size(),
               " are), so that one transfer that waits may hold up what it waits for: start the "
               "process with CUDA_DEVICE_MAX_CONNECTIONS=32");
  }
  return candidate;
}

}  // namespace

StreamApart::StreamApart(c10::Device device, PeerDevice& driver)
    : stream_(c10::Stream::DEFAULT, device) {
  const std::lock_guard<std::mutex> lock(mutex());
  auto others = others_than_lanes(device);
  std::copy_if(taken().begin(), taken().end(), std::back_inserter(others),
               [&](const c10::Stream& stream) { return stream.device() == device; });
  stream_ = choose(device, driver, others);
  taken().push_back(stream_);
}

StreamApart::~StreamApart() {
  const std::lock_guard<std::mutex> lock(mutex());
  taken().erase(std::find(taken().begin(), taken().end(), stream_));
}

}  // namespace ldt
