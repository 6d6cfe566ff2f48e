// Facts about rows that lie on a device.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <vector>

#include "metadata/device/step_tensors.h"
#include "metadata/format/message.h"
#include "metadata/format/row_source.h"

namespace ldt::metadata {

/// Facts about `tensors`, contiguous, some or all of them on one device, in the order of the
/// content, which must outlive the result. Where there are kernels: one launch for all rows and one
/// copy to the host; if rows need integers (no mask that bits can tell, no rule that holds), one
/// more round of copies brings their tensors. Elsewhere one copy brings all tensors.
/// Throws MetadataError for tensors on several devices.
std::unique_ptr<RowFactsSource> scan_on_device(const Content& content, const Tensors& tensors);

}  // namespace ldt::metadata
