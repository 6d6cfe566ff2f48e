// The streams of the test device: threads that run enqueued work in order, with random delays.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>

#include "enqueue.h"

namespace ldt::test_device {

/// One device per rank of a test: an index other than 0 exposes code that assumes 0.
constexpr c10::DeviceIndex kDevices = 4;
constexpr auto kType = c10::DeviceType::PrivateUse1;

/// A point in a stream that others wait for: one record of an event.
class Signal {
 public:
  void set();
  void wait();
  bool is_set() const;
  /// When it was set.
  std::chrono::steady_clock::time_point time() const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
  std::chrono::steady_clock::time_point time_;
};

/// Everything on a stream, including records and waits of events, is an operation in its queue.
/// Before one in four it sleeps for a random time, which exposes a missing wait. As on CUDA, the
/// queue is finite: a host that enqueues into a full one blocks until there is room.
class LDT_TEST_EXPORT Stream {
 public:
  Stream(c10::DeviceIndex device, c10::StreamId id) : device_(device), id_(id) {}

  static constexpr size_t kMostPending = 1024;  // about what a stream of CUDA holds

  void enqueue(std::function<void()> work);
  /// Does not block. For work that a real device does not have, such as poisoning freed memory.
  void enqueue_beside(std::function<void()> work);
  std::shared_ptr<Signal> record();
  void wait(std::shared_ptr<Signal> signal);
  bool is_idle() const;
  /// Blocks the host until all work enqueued so far is done. Throws an operation's error, once.
  void synchronize();
  /// Draws delays up to `most` from now on, equal for equal seed and id.
  void delay(uint64_t seed, std::chrono::microseconds most);

  c10::StreamId id() const { return id_; }
  c10::Stream handle() const;

 private:
  struct Operation {
    std::function<void()> work;
    bool takes_room = true;
  };

  void run();
  void push(Operation operation);
  std::chrono::microseconds next_delay();

  const c10::DeviceIndex device_;
  const c10::StreamId id_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Operation> queue_;
  size_t pending_ = 0;  // operations that count against the limit
  uint64_t enqueued_ = 0;
  uint64_t done_ = 0;
  std::mt19937_64 random_;
  std::chrono::microseconds most_delay_{0};
};

/// The stream of a handle. Streams live until the process ends.
LDT_TEST_EXPORT Stream& stream(c10::DeviceIndex device, c10::StreamId id);
LDT_TEST_EXPORT Stream& stream(const c10::Stream& handle);
Stream& current_stream(c10::DeviceIndex device);
/// A new stream that is never shared.
Stream& new_stream(c10::DeviceIndex device);
/// One of a small pool, in round robin, as on real devices.
Stream& pooled_stream(c10::DeviceIndex device);

/// From now on every host call on the device throws this, as after a device-side assertion; an
/// empty text ends that. Enqueued work still runs.
LDT_TEST_EXPORT void fail_device(const std::string& text);
LDT_TEST_EXPORT void check_device();

/// For all streams of all devices, also later ones.
LDT_TEST_EXPORT void delay_all(uint64_t seed, std::chrono::microseconds most);
LDT_TEST_EXPORT void synchronize_device(c10::DeviceIndex device);

}  // namespace ldt::test_device
