// The threads of the streams, and the one table of all streams.
#include "streams.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <thread>
#include <vector>

namespace ldt::test_device {
namespace {

constexpr c10::StreamId kDefault = 0;
constexpr c10::StreamId kPooled = 32;  // ids 1 to 32; new streams have later ones

// The first error of an operation, kept until the host synchronizes.
class AsyncError {
 public:
  void note(const std::string& text) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (text_.empty()) text_ = text;
  }
  void throw_if_any() {
    std::string text;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      text.swap(text_);
    }
    TORCH_CHECK(text.empty(), "an operation on a stream of the test device failed: ", text);
  }

 private:
  std::mutex mutex_;
  std::string text_;
};

// Never destroyed, like everything that stream threads use: they run until the process ends.
AsyncError& async_error() {
  static auto* error = new AsyncError;
  return *error;
}

// A sticky error.
class DeviceFailure {
 public:
  void set(const std::string& text) {
    std::lock_guard<std::mutex> lock(mutex_);
    text_ = text;
  }
  void check() const {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(text_.empty(), text_);
  }

 private:
  mutable std::mutex mutex_;
  std::string text_;
};

DeviceFailure& device_failure() {
  static auto* failure = new DeviceFailure;
  return *failure;
}

class Streams {
 public:
  Stream& at(c10::DeviceIndex device, c10::StreamId id) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& streams = devices_.at(device).streams;
    while (static_cast<c10::StreamId>(streams.size()) <= std::max(id, kPooled)) add(device);
    return *streams.at(id);
  }
  Stream& add_one(c10::DeviceIndex device) {
    at(device, kDefault);
    std::lock_guard<std::mutex> lock(mutex_);
    return add(device);
  }
  c10::StreamId next_pooled(c10::DeviceIndex device) {
    std::lock_guard<std::mutex> lock(mutex_);
    return 1 + devices_.at(device).handed_out++ % kPooled;
  }
  std::vector<Stream*> of(c10::DeviceIndex device) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Stream*> all;
    for (const auto& stream : devices_.at(device).streams) all.push_back(stream.get());
    return all;
  }
  void delay(uint64_t seed, std::chrono::microseconds most) {
    std::lock_guard<std::mutex> lock(mutex_);
    seed_ = seed;
    most_delay_ = most;
    for (auto& device : devices_) {
      for (auto& stream : device.streams) stream->delay(seed, most);
    }
  }

 private:
  struct OfDevice {
    std::vector<std::unique_ptr<Stream>> streams;
    c10::StreamId handed_out = 0;
  };

  Stream& add(c10::DeviceIndex device) {
    auto& streams = devices_.at(device).streams;
    streams.push_back(std::make_unique<Stream>(device, streams.size()));
    streams.back()->delay(seed_, most_delay_);
    return *streams.back();
  }

  std::mutex mutex_;
  std::array<OfDevice, kDevices> devices_;
  uint64_t seed_ = 0;
  std::chrono::microseconds most_delay_{0};
};

Streams& all_streams() {
  static auto* streams = new Streams;
  return *streams;
}

}  // namespace

void Signal::set() {
  std::lock_guard<std::mutex> lock(mutex_);
  set_ = true;
  time_ = std::chrono::steady_clock::now();
  changed_.notify_all();
}

std::chrono::steady_clock::time_point Signal::time() const {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(set_, "an event has no time before its stream got there");
  return time_;
}

void Signal::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return set_; });
}

bool Signal::is_set() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return set_;
}

void Stream::enqueue(std::function<void()> work) {
  check_device();
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return pending_ < kMostPending; });
  push({std::move(work)});
}

void Stream::enqueue_beside(std::function<void()> work) {
  std::lock_guard<std::mutex> lock(mutex_);
  push({std::move(work), /*takes_room=*/false});
}

void Stream::push(Operation operation) {
  if (enqueued_++ == 0) std::thread(&Stream::run, this).detach();
  pending_ += operation.takes_room;
  queue_.push_back(std::move(operation));
  changed_.notify_all();
}

std::shared_ptr<Signal> Stream::record() {
  auto signal = std::make_shared<Signal>();
  enqueue([signal] { signal->set(); });
  return signal;
}

void Stream::wait(std::shared_ptr<Signal> signal) {
  enqueue([signal = std::move(signal)] { signal->wait(); });
}

bool Stream::is_idle() const {
  check_device();
  std::lock_guard<std::mutex> lock(mutex_);
  return done_ == enqueued_;
}

void Stream::synchronize() {
  check_device();
  {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&, last = enqueued_] { return done_ >= last; });
  }
  async_error().throw_if_any();
}

void Stream::delay(uint64_t seed, std::chrono::microseconds most) {
  std::lock_guard<std::mutex> lock(mutex_);
  random_.seed(seed * 1000 + static_cast<uint64_t>(id_));
  most_delay_ = most;
}

c10::Stream Stream::handle() const {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device_), id_);
}

std::chrono::microseconds Stream::next_delay() {
  const auto drawn = random_();
  if (most_delay_.count() == 0 || drawn % 4 != 0) return std::chrono::microseconds(0);
  return std::chrono::microseconds(drawn / 4 % (most_delay_.count() + 1));
}

void Stream::run() {
  at::init_num_threads();  // as on the host, so that sums are equal
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  for (;;) {
    std::function<void()> work;
    std::chrono::microseconds delay;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return !queue_.empty(); });
      work = std::move(queue_.front().work);
      pending_ -= queue_.front().takes_room;
      queue_.pop_front();
      changed_.notify_all();
      delay = next_delay();
    }
    if (delay.count() > 0) std::this_thread::sleep_for(delay);
    try {
      work();
    } catch (const c10::Error& error) {
      async_error().note(error.what_without_backtrace());
    } catch (const std::exception& error) {
      async_error().note(error.what());
    }
    work = nullptr;  // drops what it holds before it is reported done
    std::lock_guard<std::mutex> lock(mutex_);
    ++done_;
    changed_.notify_all();
  }
}

Stream& stream(c10::DeviceIndex device, c10::StreamId id) { return all_streams().at(device, id); }

Stream& stream(const c10::Stream& handle) { return stream(handle.device_index(), handle.id()); }

Stream& current_stream(c10::DeviceIndex device) {
  return stream(c10::impl::VirtualGuardImpl(kType).getStream(c10::Device(kType, device)));
}

Stream& new_stream(c10::DeviceIndex device) { return all_streams().add_one(device); }

Stream& pooled_stream(c10::DeviceIndex device) {
  return stream(device, all_streams().next_pooled(device));
}

void fail_device(const std::string& text) { device_failure().set(text); }

void check_device() { device_failure().check(); }

void delay_all(uint64_t seed, std::chrono::microseconds most) { all_streams().delay(seed, most); }

void synchronize_device(c10::DeviceIndex device) {
  for (auto* each : all_streams().of(device)) each->synchronize();
}

}  // namespace ldt::test_device

void ldt_test_enqueue(c10::DeviceIndex device, c10::StreamId stream, std::function<void()> work) {
  ldt::test_device::stream(device, stream).enqueue(std::move(work));
}
