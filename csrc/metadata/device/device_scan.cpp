// Runs the scan and reads its output.
#include "metadata/device/device_scan.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "metadata/codec/stretches.h"
#include "metadata/device/staging.h"
#include "metadata/device/step_tensors.h"
#include "metadata/format/error.h"
#include "metadata/host/scan.h"

namespace ldt::metadata {
namespace {

// A bool is 0 or 1; rows of other bytes go to the host, which rejects them.
bool tells_all(const ScanJob& job, const ScanFacts& facts) {
  return job.is_bool && job.kind == ScanKind::kMask ? (facts.flags & kBinary) != 0
                                                    : facts.flags != 0;
}

}  // namespace

ScannedRows::ScannedRows(const Content& content, const Tensors& tensors, ScanTable table,
                         std::shared_ptr<const uint8_t> output)
    : table_(std::move(table)),
      output_(std::move(output)),
      data_(elements_on_host(tensors)),
      content_(content) {}

HostRows& ScannedRows::host() {
  if (!host_) host_.emplace(content_, data_);
  return *host_;
}

std::vector<const void*> ScannedRows::elements_on_host(const Tensors& tensors) {
  const auto* output = output_.get();
  std::vector<const void*> data(tensors.size());
  std::vector<size_t> open;
  std::vector<at::Tensor> open_tensors;
  for (size_t tensor = 0; tensor < tensors.size(); ++tensor) {
    if (!table_.away[tensor]) {
      data[tensor] = tensors[tensor]->const_data_ptr();
    } else if (const ScanJob* job = scan_of(tensor)) {
      if (!leaves_open(*job, *tensors[tensor])) continue;
      open.push_back(tensor);
      open_tensors.push_back(*tensors[tensor]);
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
  return reinterpret_cast<const ScanFacts*>(output_.get() + job.facts)[row];
}

bool ScannedRows::leaves_open(const ScanJob& job, const at::Tensor& tensor) const {
  const int64_t rows = tensor.numel() / job.length;
  for (int64_t row = 0; row < rows; ++row) {
    if (!tells_all(job, facts_of(job, row))) return true;
  }
  return false;
}

MaskFacts ScannedRows::mask(size_t tensor, int64_t row) {
  tensor_ = tensor;
  row_ = row;
  const ScanJob* job = scan_of(tensor);
  if (job == nullptr) return host().mask(tensor, row);
  const ScanFacts& facts = facts_of(*job, row);
  return {facts.begin, facts.end, (facts.flags & kOnes) != 0, (facts.flags & kBinary) != 0,
          (facts.flags & kNumbered) != 0};
}

RuleFacts ScannedRows::rule(size_t tensor, int64_t row) {
  tensor_ = tensor;
  row_ = row;
  const ScanJob* job = scan_of(tensor);
  if (job == nullptr) return host().rule(tensor, row);
  const ScanFacts& facts = facts_of(*job, row);
  return {(facts.flags & kArangeHolds) != 0, (facts.flags & kCumsumHolds) != 0,
          (facts.flags & kSegmentsHolds) != 0, facts.padding};
}

const int64_t* ScannedRows::values() {
  const ScanJob* job = scan_of(tensor_);
  if (job == nullptr) return host().values();
  if (data_[tensor_] != nullptr) {
    host().select_row(tensor_, row_);
    return host().values();
  }
  values_.resize(static_cast<size_t>(job->length));
  values_from_bits(*job);
  return values_.data();
}

RowBits ScannedRows::bits() {
  const ScanJob* job = scan_of(tensor_);
  if (job == nullptr || job->kind != ScanKind::kMask) return {};
  return tells_all(*job, facts_of(*job, row_)) ? planes_of(*job) : RowBits{};
}

RowBits ScannedRows::planes_of(const ScanJob& job) const {
  const auto* planes = reinterpret_cast<const uint32_t*>(output_.get() + job.bits);
  const uint32_t* nonzero = planes + row_ * 2 * words_of(job.length);
  return {nonzero, nonzero + words_of(job.length)};
}

void ScannedRows::values_from_bits(const ScanJob& job) {
  const bool numbered = (facts_of(job, row_).flags & kNumbered) != 0;
  BitStretches stretches(planes_of(job), job.length, numbered);
  for (int64_t index = 0; index < job.length;) {
    const EqualStretch stretch = stretches.next(index);
    std::fill(values_.begin() + index, values_.begin() + stretch.end, stretch.value);
    index = stretch.end;
  }
}

#ifdef LDT_CUDA_KERNELS
bool has_kernels(c10::Device device) { return device.is_cuda(); }

std::unique_ptr<RowFactsSource> scan_with_kernels(const Content& content, const Tensors& tensors,
                                                  c10::Device device) {
  std::vector<bool> away;
  away.reserve(tensors.size());
  for (const auto& tensor : tensors) away.push_back(!tensor->is_cpu());
  ScanTable table = plan_scan(content, tensors, away);
  if (table.rows > std::numeric_limits<int>::max()) {
    fail("metadata: expected fewer than 2^31 rows on ", device.str(), ", got ", table.rows,
         "; move the tensors to the CPU");
  }
  std::shared_ptr<const uint8_t> output;
  if (table.rows > 0) {
    const c10::DeviceGuard guard(device);
    const auto job_bytes = static_cast<int64_t>(table.jobs.size() * sizeof(ScanJob));
    const int64_t offset = (job_bytes + kOutputAlignment - 1) / kOutputAlignment * kOutputAlignment;
    const auto call = std::make_shared<StagedCall>("the scan", device, offset + table.output_bytes);
    std::memcpy(call->host(), table.jobs.data(), static_cast<size_t>(job_bytes));
    call->send(job_bytes);
    call->check(ldt_metadata_scan(reinterpret_cast<const ScanJob*>(call->device()),
                                  static_cast<int64_t>(table.jobs.size()), table.rows,
                                  table.longest, call->device() + offset, call->stream()));
    call->fetch(offset, table.output_bytes);
    output = {call, call->host() + offset};  // the call's memory is its own until it is read
  }
  return std::make_unique<ScannedRows>(content, tensors, std::move(table), std::move(output));
}
#else
bool has_kernels(c10::Device /*device*/) { return false; }

std::unique_ptr<RowFactsSource> scan_with_kernels(const Content& /*content*/,
                                                  const Tensors& /*tensors*/, c10::Device device) {
  fail("ldt was built without CUDA kernels, and was asked to scan masks on ", device.str());
}
#endif

}  // namespace ldt::metadata
