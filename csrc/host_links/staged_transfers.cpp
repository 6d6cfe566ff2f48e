// Waits for the device by polling its flag, for the link by callbacks.
#include "host_links/staged_transfers.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <set>

#include "common/delayed_failure.h"
#include "common/error.h"
#include "common/event.h"

namespace ldt {

struct StagedTransfers::State : std::enable_shared_from_this<State> {
  State(std::shared_ptr<StagingRing> ring, uint32_t lane, Direction direction)
      : ring(std::move(ring)), lane(lane), direction(direction) {}

  void run(SocketLink& link);
  bool wait_for_piece(int64_t& bytes);
  bool wait_for_slot(uint64_t piece);
  void start(SocketLink& link, uint64_t piece, int64_t bytes);
  void finish(uint64_t piece, const std::exception_ptr& error);
  void fail(const std::string& text);

  const std::shared_ptr<StagingRing> ring;
  const uint32_t lane;
  const Direction direction;
  std::atomic<bool> stopped{false};
  DelayedFailure failure;

  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  std::deque<int64_t> pieces;       // bytes of those that the thread has not taken
  uint64_t pending = 0;             // pieces that are not started
  uint64_t in_order = 0;            // all pieces before this one are done
  std::set<uint64_t> out_of_order;  // done, but not one before: connections overtake each other
};

StagedTransfers::StagedTransfers(std::shared_ptr<StagingRing> ring,
                                 std::shared_ptr<SocketLink> link, uint32_t lane,
                                 Direction direction)
    : state_(std::make_shared<State>(std::move(ring), lane, direction)),
      link_(std::move(link)),
      thread_([state = state_, link = link_] { state->run(*link); }) {}

StagedTransfers::~StagedTransfers() {
  if (!process_.is_current()) {
    thread_.detach();  // a forked child has no such thread
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stopped = true;
  }
  state_->changed.notify_all();
  thread_.join();
}

void StagedTransfers::add(int64_t bytes) {
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->pieces.push_back(bytes);
    ++state_->pending;
  }
  state_->changed.notify_all();
}

void StagedTransfers::flush() {
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->changed.wait(lock, [this] { return state_->stopped || state_->pending == 0; });
}

void StagedTransfers::abort() {
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stopped = true;
  }
  state_->changed.notify_all();
  link_->abort("a lane was aborted");
}

std::string StagedTransfers::failure() const { return state_->failure.text(); }

void StagedTransfers::State::run(SocketLink& link) {
  int64_t bytes = 0;
  for (uint64_t piece = 0; wait_for_piece(bytes) && wait_for_slot(piece); ++piece) {
    start(link, piece, bytes);
    const std::lock_guard<std::mutex> lock(mutex);
    --pending;
    changed.notify_all();
  }
}

bool StagedTransfers::State::wait_for_piece(int64_t& bytes) {
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [this] { return stopped || !pieces.empty(); });
  if (stopped) return false;
  bytes = pieces.front();
  pieces.pop_front();
  return true;
}

// A sender's slot is full once the device has filled it, a receiver's free once the device has
// emptied it of the piece before.
bool StagedTransfers::State::wait_for_slot(uint64_t piece) {
  const uint64_t needed = direction == Direction::kSend ? piece + 1
                          : piece < StagingRing::kSlots ? 0
                                                        : piece + 1 - StagingRing::kSlots;
  while (!stopped) {
    if (ring->by_device().has_counted(needed)) return true;
    std::this_thread::sleep_for(kPollInterval);
  }
  return false;
}

void StagedTransfers::State::start(SocketLink& link, uint64_t piece, int64_t bytes) {
  auto done = [self = shared_from_this(), piece](const std::exception_ptr& error) {
    self->finish(piece, error);
  };
  try {
    const auto memory = ring->bytes_of(piece, bytes);
    if (direction == Direction::kSend) {
      link.send(lane, memory, std::move(done));
    } else {
      link.receive(lane, memory, std::move(done));
    }
  } catch (const std::exception&) {
    fail(text_of(std::current_exception()));
  }
}

// Runs on the link's thread, or in start().
void StagedTransfers::State::finish(uint64_t piece, const std::exception_ptr& error) {
  if (error) return fail(text_of(error));
  const std::lock_guard<std::mutex> lock(mutex);
  out_of_order.insert(piece);
  while (out_of_order.erase(in_order) > 0) ++in_order;
  ring->by_link().count_to(in_order);
}

void StagedTransfers::State::fail(const std::string& text) {
  failure.set(text);
  const std::lock_guard<std::mutex> lock(mutex);
  stopped = true;
  changed.notify_all();
}

}  // namespace ldt
