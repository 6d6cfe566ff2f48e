// Probes stream after stream: one waits for a flag while the others record events.
#include "copy_engine/isolated_stream.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "common/event_pool.h"
#include "common/streams.h"
#include "copy_engine/shared_ring.h"

namespace ldt {
namespace {

using std::chrono::milliseconds;

constexpr int kCandidates = 32;          // the size of torch's stream pools
constexpr milliseconds kIdleTimeout{5};  // many times what an idle stream needs
constexpr milliseconds kLongestWork{30000};

std::mutex& mutex() {
  static auto* const made = new std::mutex;
  return *made;
}

// The streams of all lanes of this process.
std::vector<c10::Stream>& taken() {
  static auto* const made = new std::vector<c10::Stream>;
  return *made;
}

bool is_done_within(const std::shared_ptr<const Event>& event, milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (!event->is_done()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return true;
}

std::vector<c10::Stream> others_than_lanes(c10::Device device) {
  const auto current = current_stream(device);
  const auto usual = default_stream(device);
  return current == usual ? std::vector{usual} : std::vector{usual, current};
}

// Whether a wait on `candidate` blocks none of `others`, which are idle.
bool is_isolated(const c10::Stream& candidate, const std::vector<c10::Stream>& others,
                 CopyEngine& engine, MessageRing& ring, EventPool& events, uint64_t count) {
  engine.wait_for(candidate, ring.arrived, count);
  const bool apart = std::all_of(others.begin(), others.end(), [&](const c10::Stream& other) {
    return is_done_within(events.record(other), kIdleTimeout);
  });
  ring.arrived.count.store(static_cast<uint32_t>(count));
  return apart;
}

// Those that are idle: which queue a busy stream uses cannot be probed.
std::vector<c10::Stream> idle_of(std::vector<c10::Stream> streams, EventPool& events,
                                 milliseconds timeout) {
  streams.erase(std::remove_if(streams.begin(), streams.end(),
                               [&](const c10::Stream& stream) {
                                 return !is_done_within(events.record(stream), timeout);
                               }),
                streams.end());
  return streams;
}

c10::Stream choose(c10::Device device, CopyEngine& engine, const std::vector<c10::Stream>& lanes) {
  const auto events = std::make_shared<EventPool>(device);
  auto others = idle_of(others_than_lanes(device), *events, kLongestWork);
  const auto idle_lanes = idle_of(lanes, *events, kIdleTimeout);
  others.insert(others.end(), idle_lanes.begin(), idle_lanes.end());
  SharedRing ring(device);
  for (uint64_t count = 1; count <= kCandidates; ++count) {
    const auto candidate = new_lane_stream(device);
    // Another lane's stream may be busy for long: enqueue nothing on it.
    if (std::find(lanes.begin(), lanes.end(), candidate) != lanes.end()) continue;
    ring.note_user(candidate);
    if (is_isolated(candidate, others, engine, *ring, *events, count)) return candidate;
  }
  throw_lane_error(
      "every stream of ", device, " shares a hardware queue with one of ", others.size(),
      " streams in use, and a transfer that waits there would block what it waits for: "
      "start the processes with CUDA_DEVICE_MAX_CONNECTIONS=32");
}

}  // namespace

IsolatedStream::IsolatedStream(c10::Device device) : stream_(c10::Stream::DEFAULT, device) {
  const std::lock_guard<std::mutex> lock(mutex());
  std::vector<c10::Stream> lanes;
  std::copy_if(taken().begin(), taken().end(), std::back_inserter(lanes),
               [&](const c10::Stream& stream) { return stream.device() == device; });
  stream_ = choose(device, require_copy_engine(device), lanes);
  taken().push_back(stream_);
  is_taken_ = true;
}

IsolatedStream::~IsolatedStream() { release(); }

void IsolatedStream::release() {
  const std::lock_guard<std::mutex> lock(mutex());
  if (!std::exchange(is_taken_, false)) return;
  taken().erase(std::find(taken().begin(), taken().end(), stream_));
}

}  // namespace ldt
