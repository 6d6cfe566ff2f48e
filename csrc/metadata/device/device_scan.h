// Facts about rows from kernels.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <vector>

#include "metadata/device/cuda/kernels.h"
#include "metadata/device/fetch.h"
#include "metadata/device/step_tensors.h"
#include "metadata/format/message.h"
#include "metadata/format/row_source.h"
#include "metadata/host/host_rows.h"

namespace ldt::metadata {

/// The alignment of the output and of each tensor's results in it.
constexpr int64_t kOutputAlignment = 16;

/// What a scan does with each tensor, and where the results go.
struct ScanTable {
  std::vector<ScanJob> jobs;   // ascending by first row
  std::vector<size_t> job_of;  // of each tensor; kNoTensor for those on the host or without rows
  std::vector<bool> away;      // which tensors are on the device
  int64_t rows = 0;
  int64_t longest = 0;
  int64_t output_bytes = 0;
};
/// `away`: which of the tensors are on the device.
ScanTable plan_scan(const Content& content, const Tensors& tensors, const std::vector<bool>& away);

/// Reads a scan's output: facts of the scanned rows, elements of the copied tensors, and elements
/// of tensors that were fetched because bits and rules do not express all their rows.
class ScannedRows final : public RowFactsSource {
 public:
  /// `output` is on the host. Fetches tensors that it leaves open. `content` must outlive this
  /// object.
  ScannedRows(const Content& content, const Tensors& tensors, ScanTable table,
              std::shared_ptr<const uint8_t> output);

  MaskFacts mask(size_t tensor, int64_t row) override;
  RuleFacts rule(size_t tensor, int64_t row) override;
  const int64_t* values() override;
  RowBits bits() override;

 private:
  HostRows& host();
  std::vector<const void*> elements_on_host(const Tensors& tensors);
  // Null for a tensor that was not scanned.
  const ScanJob* scan_of(size_t tensor) const;
  const ScanFacts& facts_of(const ScanJob& job, int64_t row) const;
  bool leaves_open(const ScanJob& job, const at::Tensor& tensor) const;
  RowBits planes_of(const ScanJob& job) const;
  void values_from_bits(const ScanJob& job);

  ScanTable table_;
  std::shared_ptr<const uint8_t> output_;
  Fetched fetched_;
  std::vector<const void*> data_;  // of each tensor; null where only facts are known
  const Content& content_;
  std::optional<HostRows> host_;  // created on demand
  std::vector<int64_t> values_;
  size_t tensor_ = 0;  // of the last row
  int64_t row_ = 0;
};

/// Whether this build has kernels for `device`.
bool has_kernels(c10::Device device);

/// Takes one launch and one copy on the device's current stream, and waits for them.
std::unique_ptr<RowFactsSource> scan_with_kernels(const Content& content, const Tensors& tensors,
                                                  c10::Device device);

}  // namespace ldt::metadata
