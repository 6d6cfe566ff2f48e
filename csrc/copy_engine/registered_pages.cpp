// Registers, and frees once nothing is enqueued.
#include "copy_engine/registered_pages.h"

#include <algorithm>

#include "common/event_pool.h"
#include "copy_engine/copy_engine.h"
#include "copy_engine/deferred_free.h"

namespace ldt {

template <typename Source>
RegisteredPages::Pages::Pages(c10::Device device, const Source& source)
    : device(device), shared(source) {
  require_copy_engine(device).register_host(device, shared.data(), shared.bytes());
}

RegisteredPages::Pages::~Pages() {
  find_copy_engine(device.type())->unregister_host(device, shared.data());
}

RegisteredPages::RegisteredPages(c10::Device device, size_t bytes)
    : pages_(std::make_shared<Pages>(device, bytes)) {}

RegisteredPages::RegisteredPages(c10::Device device, const std::string& handle)
    : pages_(std::make_shared<Pages>(device, handle)) {}

void RegisteredPages::note_user(const c10::Stream& stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (std::find(users_.begin(), users_.end(), stream) == users_.end()) users_.push_back(stream);
}

std::function<bool()> RegisteredPages::enqueued_is_done() {
  const auto events = std::make_shared<EventPool>(pages_->device);
  std::vector<std::shared_ptr<const Event>> pending;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& stream : users_) {
    if (!stream.query()) pending.push_back(events->record(stream));
  }
  return [pending = std::move(pending)] { return all_done(pending); };
}

RegisteredPages::~RegisteredPages() {
  try {
    free_when(enqueued_is_done(), pages_);
  } catch (const std::exception&) {  // the device is gone, as at interpreter exit
  }
}

}  // namespace ldt
