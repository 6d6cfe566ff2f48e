// The test device's streams: threads that run what was enqueued, in order, and late.
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

/// A device for each rank that a test may want to run: one whose index is not 0 shows code that
/// takes 0 for granted.
constexpr c10::DeviceIndex kDevices = 4;
constexpr auto kType = c10::DeviceType::PrivateUse1;

/// A point in a stream that others wait for: what an event is at one record.
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

/// Everything that a stream does, records and waits of events included, is an operation in its
/// queue. Before one in four it sleeps for a random time: whoever forgot to wait is then too early.
/// As on CUDA the queue is finite: a host that enqueues into a full one blocks until there is room.
class LDT_TEST_EXPORT Stream {
 public:
  Stream(c10::DeviceIndex device, c10::StreamId id) : device_(device), id_(id) {}

  static constexpr size_t kMostPending = 1024;  // about what a stream of CUDA holds

  void enqueue(std::function<void()> work);
  /// Without blocking, for what is no operation of a real device, such as the poison of freed
  /// memory.
  void enqueue_beside(std::function<void()> work);
  std::shared_ptr<Signal> record();
  void wait(std::shared_ptr<Signal> signal);
  bool is_idle() const;
  /// Blocks the host until all that is enqueued now is done. Throws what an operation has thrown,
  /// once.
  void synchronize();
  /// Draws delays up to `most` from now on, the same ones for the same seed and id.
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
  size_t pending_ = 0;  // operations in the queue that take room
  uint64_t enqueued_ = 0;
  uint64_t done_ = 0;
  std::mt19937_64 random_;
  std::chrono::microseconds most_delay_{0};
};

/// The stream behind a handle. They live until the process ends.
LDT_TEST_EXPORT Stream& stream(c10::DeviceIndex device, c10::StreamId id);
LDT_TEST_EXPORT Stream& stream(const c10::Stream& handle);
Stream& current_stream(c10::DeviceIndex device);
/// One that nobody else uses.
Stream& new_stream(c10::DeviceIndex device);
/// One of a few that are handed out in turn, as real devices do.
Stream& pooled_stream(c10::DeviceIndex device);

/// From now on all that is asked of the device by the host throws this, as after an assertion in a
/// kernel; an empty text ends that. What is enqueued runs on.
LDT_TEST_EXPORT void fail_device(const std::string& text);
LDT_TEST_EXPORT void check_device();

/// For all streams, also those to come, of all devices.
LDT_TEST_EXPORT void delay_all(uint64_t seed, std::chrono::microseconds most);
LDT_TEST_EXPORT void synchronize_device(c10::DeviceIndex device);

}  // namespace ldt::test_device
