// Facts about rows on a device.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <vector>

#include "metadata/device/step_tensors.h"
#include "metadata/format/message.h"
#include "metadata/format/row_source.h"

namespace ldt::metadata {

/// Facts about contiguous `tensors`, in the order of `content`, which must outlive the result. Some
/// or all tensors are on one device. With kernels: one launch for all rows and one copy to the
/// host, and one more round of copies for tensors whose rows need integers (a mask that bits cannot
/// express, or no rule that holds). Without: one copy of all tensors. Throws MetadataError for
/// several devices.
std::unique_ptr<RowFactsSource> scan_on_device(const Content& content, const Tensors& tensors);

}  // namespace ldt::metadata
