// The table of jobs that the scan kernel reads.
#include <algorithm>

#include "metadata/device/device_scan.h"
#include "metadata/host/host_rows.h"

namespace ldt::metadata {
namespace {

class TableMaker {
 public:
  TableMaker(const Content& content, const Tensors& tensors, const std::vector<bool>& away)
      : tensors_(tensors), masks_(masks_to_follow(content)), follower_on_host_(tensors.size()) {
    table_.away = away;
    table_.jobs.reserve(tensors.size());
    table_.job_of.reserve(tensors.size());
    for (size_t tensor = 0; tensor < tensors.size(); ++tensor) {
      const size_t mask = masks_[tensor];
      if (mask != kNoTensor && !away[tensor]) follower_on_host_[mask] = true;
    }
  }

  void add(size_t tensor, const Form& form) {
    const RowShape shape = rows_of(form);
    table_.job_of.push_back(kNoTensor);
    if (!table_.away[tensor] || shape.rows == 0) return;
    ScanJob job{};
    job.kind = kind_of(tensor, form);
    job.is_bool = kDTypes[form.dtype].name == "bool";
    job.begin = table_.rows;
    job.length = shape.length;
    job.elements = elements_of(tensor, form);
    if (job.kind == ScanKind::kRule && masks_[tensor] != kNoTensor) {
      job.mask = table_.jobs[table_.job_of[masks_[tensor]]].elements;
      job.mask_rows = tensors_[masks_[tensor]]->numel() / shape.length;
    }
    place_output(job, shape.rows);
    table_.job_of.back() = table_.jobs.size();
    table_.jobs.push_back(job);
    table_.rows += shape.rows;
    table_.longest = std::max(table_.longest, shape.length);
  }

  ScanTable take() { return std::move(table_); }

 private:
  // A mask and the tensor that follows it are scanned together: both on the device or on the host.
  ScanKind kind_of(size_t tensor, const Form& form) const {
    if (form.name == kAttentionMask) {
      return follower_on_host_[tensor] ? ScanKind::kCopy : ScanKind::kMask;
    }
    const bool mask_on_host = masks_[tensor] != kNoTensor && !table_.away[masks_[tensor]];
    return form.name == kPositionIds && !mask_on_host ? ScanKind::kRule : ScanKind::kCopy;
  }

  Elements elements_of(size_t tensor, const Form& form) const {
    const DType& type = kDTypes[form.dtype];
    return {tensors_[tensor]->const_data_ptr(), type.bytes, type.is_signed};
  }

  void place_output(ScanJob& job, int64_t rows) {
    if (job.kind == ScanKind::kCopy) {
      job.copy = place(rows * job.length * job.elements.bytes);
      return;
    }
    job.facts = place(rows * static_cast<int64_t>(sizeof(ScanFacts)));
    if (job.kind == ScanKind::kMask) {
      job.bits = place(rows * 2 * words_of(job.length) * static_cast<int64_t>(sizeof(uint32_t)));
    }
  }

  int64_t place(int64_t bytes) {
    const int64_t offset = table_.output_bytes;
    table_.output_bytes += (bytes + kOutputAlignment - 1) / kOutputAlignment * kOutputAlignment;
    return offset;
  }

  const Tensors& tensors_;
  std::vector<size_t> masks_;
  std::vector<bool> follower_on_host_;
  ScanTable table_;
};

}  // namespace

ScanTable plan_scan(const Content& content, const Tensors& tensors, const std::vector<bool>& away) {
  TableMaker maker(content, tensors, away);
  for (size_t tensor = 0; tensor < tensors.size(); ++tensor) {
    maker.add(tensor, content.forms[content.form_numbers[tensor]]);
  }
  return maker.take();
}

}  // namespace ldt::metadata
