#include "memory/tensor_ownership.h"

#include <algorithm>

namespace ldt {
namespace {

bool is_own(const std::optional<at::Tensor>& tensor) {
  if (!tensor.has_value() || !tensor->defined()) return true;
  if (tensor->layout() != at::kStrided || torch_private::has_python_dispatch(*tensor)) return false;
  const auto& storage = tensor->storage();
  return storage.use_count() == 1 && torch_private::is_resizable(storage);
}

}  // namespace

bool is_memory_own(const MaybeTensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), is_own);
}

VersionCounters::VersionCounters(const MaybeTensors& tensors) {
  entries_.reserve(tensors.size());
  for (std::size_t index = 0; index < tensors.size(); ++index) {
    const auto& tensor = tensors[index];
    if (!tensor.has_value() || !tensor->defined()) continue;
    const auto& counter = torch_private::version_counter(*tensor);
    if (counter.enabled()) entries_.push_back({index, counter, counter.current_version()});
  }
}

std::optional<std::size_t> VersionCounters::first_changed() const {
  for (const auto& entry : entries_) {
    if (entry.counter.current_version() != entry.version) return entry.index;
  }
  return std::nullopt;
}

}  // namespace ldt
