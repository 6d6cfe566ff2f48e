// A lane's counters. The lane's threads write them; any thread may read them.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace ldt {

struct LaneStats {
  std::atomic<int64_t> sent_bytes{0};
  std::atomic<int64_t> sent_messages{0};
  std::atomic<int64_t> received_bytes{0};
  std::atomic<int64_t> received_messages{0};
  std::atomic<int64_t> broadcast_bytes{0};
  std::atomic<int64_t> wait_nanoseconds{0};  // host time blocked in wait()
};

/// Adds its lifetime to a counter.
class ScopedTimer {
 public:
  explicit ScopedTimer(std::atomic<int64_t>& nanoseconds)
      : nanoseconds_(nanoseconds), start_(std::chrono::steady_clock::now()) {}
  ~ScopedTimer() {
    nanoseconds_ += std::chrono::nanoseconds(std::chrono::steady_clock::now() - start_).count();
  }
  ScopedTimer(const ScopedTimer&) = delete;
  ScopedTimer& operator=(const ScopedTimer&) = delete;

 private:
  std::atomic<int64_t>& nanoseconds_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace ldt
