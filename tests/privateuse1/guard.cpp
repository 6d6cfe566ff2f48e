// The device interface that torch uses: current device and stream, events, accelerator hooks.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"
#include "operators.h"
#include "streams.h"

namespace ldt::test_device {
namespace {

// Per host thread, as on every device.
thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId current_streams[kDevices] = {};

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  TORCH_CHECK(device < kDevices, "npu:", static_cast<int>(device), ": expected an index below ",
              static_cast<int>(kDevices));
  const auto before = current_device;
  if (device >= 0) current_device = device;
  return before;
}

c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device;
}

/// The last record of a c10::Event.
struct Event {
  std::shared_ptr<Signal> signal;
};

std::shared_ptr<Signal> signal_of(void* event) {
  return event == nullptr ? nullptr : static_cast<Event*>(event)->signal;
}

struct GuardImpl final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kType, exchange_device(device.index())};
  }
  c10::Device getDevice() const override { return {kType, current_device}; }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < kDevices) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override {
    const auto index = index_of(device);
    return c10::Stream(c10::Stream::UNSAFE, {kType, index}, current_streams[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, {kType, index_of(device)});
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high*/) const override {
    return pooled_stream(index_of(device)).handle();
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return new_stream(index_of(device)).handle();
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const auto before = getStream(next.device());
    current_streams[next.device_index()] = next.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream handle) const override { return &stream(handle); }
  bool queryStream(const c10::Stream& handle) const override { return stream(handle).is_idle(); }
  void synchronizeStream(const c10::Stream& handle) const override { stream(handle).synchronize(); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(device < 0 ? current_device : device);
  }

  void record(void** event, const c10::Stream& handle, const c10::DeviceIndex /*device*/,
              const c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) *event = new Event;
    static_cast<Event*>(*event)->signal = stream(handle).record();
  }
  void block(void* event, const c10::Stream& handle) const override {
    if (auto signal = signal_of(event)) stream(handle).wait(std::move(signal));
  }
  bool queryEvent(void* event) const override {
    check_device();
    const auto signal = signal_of(event);
    return !signal || signal->is_set();
  }
  void synchronizeEvent(void* event) const override {
    check_device();
    if (const auto signal = signal_of(event)) signal->wait();
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex /*device*/) const override {
    const std::chrono::duration<double, std::milli> elapsed =
        signal_of(second)->time() - signal_of(first)->time();
    return elapsed.count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& user) const override {
    note_use(memory, user);
  }
};

struct Hooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
  c10::Device getDeviceFromPtr(void* /*data*/) const override { return {kType, current_device}; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

const bool registered = [] {
  c10::SetAllocator(kType, allocator());
  c10::SetStorageImplCreate(kType, &make_storage);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl)

}  // namespace ldt::test_device
