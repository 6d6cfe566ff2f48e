// Facts about rows that lie in host memory.
#pragma once

#include <vector>

#include "metadata/format/message.h"
#include "metadata/format/row_source.h"

namespace ldt::metadata {

constexpr size_t kNoTensor = SIZE_MAX;

/// For each tensor of the content the number of the mask that its rows may follow; kNoTensor for
/// those that follow none. Only position_ids do, and only a mask with rows of their length.
std::vector<size_t> masks_to_follow(const Content& content);

/// Scans contiguous tensors on the host. `content` and the memory of `data`, a pointer for each
/// tensor counted through all microbatches, must outlive it.
class HostRows : public RowFactsSource {
 public:
  HostRows(const Content& content, std::vector<const void*> data);

  MaskFacts mask(size_t tensor, int64_t row) override;
  RuleFacts rule(size_t tensor, int64_t row) override;
  const int64_t* values() override;
  /// Makes values() those of a row without a scan of it.
  void select_row(size_t tensor, int64_t row) { select(tensor, row); }

 private:
  struct Tensor {
    const Form* form;
    RowShape shape;
    const uint8_t* data;
    size_t mask;
  };
  const Tensor& select(size_t tensor, int64_t row);

  std::vector<Tensor> tensors_;
  std::vector<bool> followed_;                       // a tensor may follow this mask
  std::vector<std::vector<Segment>> mask_segments_;  // of the last such mask, row by row
  std::vector<int64_t> values_;
  size_t tensor_ = 0;  // whose row was asked for last
  const uint8_t* row_ = nullptr;
};

}  // namespace ldt::metadata
