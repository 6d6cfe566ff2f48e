// Runs the scan and answers the encoder from its output.
#include "metadata/device_scan.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstring>
#include <limits>
#include <utility>

#include "metadata/error.h"
#include "metadata/scan.h"
#include "metadata/tensors.h"

namespace ldt::metadata {
namespace {

bool bit_of(const uint32_t* plane, int64_t index) {
  return (plane[index / 32] >> (index % 32) & 1) != 0;
}

}  // namespace

ScannedRows::ScannedRows(const Content& content, const std::vector<at::Tensor>& tensors,
                         ScanTable table, at::Tensor output)
    : table_(std::move(table)),
      output_(std::move(output)),
      data_(elements_on_host(tensors)),
      host_(content, data_) {}

std::vector<const void*> ScannedRows::elements_on_host(const std::vector<at::Tensor>& tensors) {
  const auto* output = output_.const_data_ptr<uint8_t>();
  std::vector<const void*> data(tensors.size());
  std::vector<size_t> open;
  std::vector<at::Tensor> open_tensors;
  for (size_t tensor = 0; tensor < tensors.size(); ++tensor) {
    if (!table_.away[tensor]) {
      data[tensor] = tensors[tensor].const_data_ptr();
    } else if (const ScanJob* job = scan_of(tensor)) {
      if (!leaves_open(*job, tensors[tensor])) continue;
      open.push_back(tensor);
      open_tensors.push_back(tensors[tensor]);
    } else if (table_.job_of[tensor] != kNoTensor) {
      data[tensor] = output + table_.jobs[table_.job_of[tensor]].copy;
    }
  }
  fetched_ = fetch(open_tensors);
  for (size_t index = 0; index < open.size(); ++index) data[open[index]] = fetched_.data[index];
  return data;
}

const ScanJob* ScannedRows::scan_of(size_t tensor) const {
  const size_t number = table_.job_of[tensor];
  if (number == kNoTensor || table_.jobs[number].kind == ScanKind::kCopy) return nullptr;
  return &table_.jobs[number];
}

const ScanFacts& ScannedRows::facts_of(const ScanJob& job, int64_t row) const {
  return reinterpret_cast<const ScanFacts*>(output_.const_data_ptr<uint8_t>() + job.facts)[row];
}

bool ScannedRows::leaves_open(const ScanJob& job, const at::Tensor& tensor) const {
  const int64_t rows = tensor.numel() / job.length;
  for (int64_t row = 0; row < rows; ++row) {
    if (facts_of(job, row).flags == 0) return true;
  }
  return false;
}

MaskFacts ScannedRows::mask(size_t tensor, int64_t row) {
  tensor_ = tensor;
  row_ = row;
  const ScanJob* job = scan_of(tensor);
  if (job == nullptr) return host_.mask(tensor, row);
  const ScanFacts& facts = facts_of(*job, row);
  return {facts.begin, facts.end, (facts.flags & kOnes) != 0, (facts.flags & kBinary) != 0,
          (facts.flags & kNumbered) != 0};
}

RuleFacts ScannedRows::rule(size_t tensor, int64_t row) {
  tensor_ = tensor;
  row_ = row;
  const ScanJob* job = scan_of(tensor);
  if (job == nullptr) return host_.rule(tensor, row);
  const ScanFacts& facts = facts_of(*job, row);
  return {(facts.flags & kArangeHolds) != 0, (facts.flags & kCumsumHolds) != 0,
          (facts.flags & kSegmentsHolds) != 0, facts.padding};
}

const int64_t* ScannedRows::values() {
  const ScanJob* job = scan_of(tensor_);
  if (job == nullptr) return host_.values();
  if (data_[tensor_] != nullptr) {
    host_.select_row(tensor_, row_);
    return host_.values();
  }
  values_.resize(static_cast<size_t>(job->length));
  values_from_bits(*job);
  return values_.data();
}

// Zeros and ones are the bits themselves; segment numbers rise by one where an element differs.
void ScannedRows::values_from_bits(const ScanJob& job) {
  const auto* planes =
      reinterpret_cast<const uint32_t*>(output_.const_data_ptr<uint8_t>() + job.bits);
  const uint32_t* nonzero = planes + row_ * 2 * words_of(job.length);
  const uint32_t* changed = nonzero + words_of(job.length);
  const ScanFacts& facts = facts_of(job, row_);
  if ((facts.flags & kBinary) != 0) {
    for (int64_t index = 0; index < job.length; ++index) values_[index] = bit_of(nonzero, index);
    return;
  }
  std::fill(values_.begin(), values_.end(), 0);
  int64_t number = 1;
  for (int64_t index = facts.begin; index < facts.end; ++index) {
    if (index > facts.begin && bit_of(changed, index)) ++number;
    values_[index] = number;
  }
}

#ifdef LDT_CUDA_KERNELS
bool has_kernels(c10::Device device) { return device.is_cuda(); }

std::unique_ptr<RowFactsSource> scan_with_kernels(const Content& content,
                                                  const std::vector<at::Tensor>& tensors,
                                                  c10::Device device) {
  std::vector<bool> away;
  for (const at::Tensor& tensor : tensors) away.push_back(!tensor.is_cpu());
  ScanTable table = plan_scan(content, tensors, away);
  const c10::DeviceGuard guard(device);
  at::Tensor output = staging_bytes(table.output_bytes, device);
  if (table.rows > std::numeric_limits<int>::max()) {
    fail("metadata: expected fewer than 2^31 rows on ", device.str(), ", got ", table.rows,
         "; move the tensors to the CPU");
  }
  if (table.rows > 0) {
    const auto job_bytes = static_cast<int64_t>(table.jobs.size() * sizeof(ScanJob));
    at::Tensor jobs = staging_bytes(job_bytes, device);
    std::memcpy(jobs.data_ptr(), table.jobs.data(), static_cast<size_t>(job_bytes));
    jobs = jobs.to(device, /*non_blocking=*/true);
    const auto scanned =
        at::empty({table.output_bytes}, at::TensorOptions(at::kByte).device(device));
    const c10::impl::VirtualGuardImpl backend(device.type());
    const char* error = ldt_metadata_scan(
        static_cast<const ScanJob*>(jobs.const_data_ptr()), static_cast<int64_t>(table.jobs.size()),
        table.rows, table.longest, scanned.data_ptr<uint8_t>(), device.index(),
        backend.getStreamNativeHandle(backend.getStream(device)));
    if (error != nullptr) fail("metadata: the scan on ", device.str(), " failed: ", error);
    output.copy_(scanned);  // waits
  }
  return std::make_unique<ScannedRows>(content, tensors, std::move(table), std::move(output));
}
#else
bool has_kernels(c10::Device /*device*/) { return false; }

std::unique_ptr<RowFactsSource> scan_with_kernels(const Content& /*content*/,
                                                  const std::vector<at::Tensor>& /*tensors*/,
                                                  c10::Device device) {
  fail("ldt was built without CUDA kernels, and was asked to scan masks on ", device.str());
}
#endif

}  // namespace ldt::metadata
