#include "memory/tensor_ownership.h"

#include <algorithm>

namespace ldt {
namespace {

bool is_own(const std::optional<at::Tensor>& tensor) {
  if (!tensor.has_value() || !tensor->defined()) return true;
  if (tensor->layout() != at::kStrided || tensor->unsafeGetTensorImpl()->is_python_dispatch())
    return false;
  const auto& storage = tensor->storage();
  return storage.use_count() == 1 && storage.unsafeGetStorageImpl()->resizable();
}

}  // namespace

bool is_memory_own(const MaybeTensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), is_own);
}

VersionCounters::VersionCounters(const MaybeTensors& tensors) {
  entries_.reserve(tensors.size());
  for (std::size_t place = 0; place < tensors.size(); ++place) {
    const auto& tensor = tensors[place];
    if (!tensor.has_value() || !tensor->defined()) continue;
    const auto& counter = tensor->unsafeGetTensorImpl()->version_counter();
    if (counter.enabled()) entries_.push_back({place, counter, counter.current_version()});
  }
}

std::optional<std::size_t> VersionCounters::first_changed() const {
  for (const auto& entry : entries_) {
    if (entry.counter.current_version() != entry.version) return entry.place;
  }
  return std::nullopt;
}

}  // namespace ldt
