// Who else has the memory of tensors, and whether it has been written to since.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace ldt {

using MaybeTensors = std::vector<std::optional<at::Tensor>>;

/// Whether torch has allocated the memory of each, and no other tensor or storage object refers to
/// it. False where this cannot be told: of tensors without strides, and of those that wrap others.
bool is_memory_own(const MaybeTensors& tensors);

/// The version counters of tensors, with what they showed when this was made. Holds no memory of
/// the tensors. Writes by `.data` and by kernels that torch does not know are not counted.
class VersionCounters {
 public:
  /// Passed over is what has no counter: nothing at all, and tensors of inference mode.
  explicit VersionCounters(const MaybeTensors& tensors);

  /// The place of the first tensor that has been written to since.
  std::optional<std::size_t> first_changed() const;

 private:
  struct Entry {
    std::size_t place;
    c10::VariableVersion counter;
    std::uint32_t version;
  };

  std::vector<Entry> entries_;
};

}  // namespace ldt
