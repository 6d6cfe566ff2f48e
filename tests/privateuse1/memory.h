// The test device's memory: that of the host, with poison wherever nobody has a right to look.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>

#include <cstdint>

#include "enqueue.h"

namespace ldt::test_device {

/// Every byte of memory that is new or freed: NaN in any floating type, -1 in any signed one.
constexpr int kPoison = 0xFF;

/// Hands out memory in the order of the current stream, as caching allocators of devices do: what
/// is freed may at once be used again by that stream, after all that it was given before. Here it
/// is poisoned at that point, and then kept for long, so that whoever still reads it on another
/// stream sees wrong data, and whoever still writes it is found out.
c10::Allocator* allocator();

/// What a storage of the device must be. torch_npu keeps a tensor's layout in its own kind of
/// storage and casts every storage to that unasked, so here every other kind is an error: c10's
/// plain one, say, that at::from_blob makes.
class DeviceStorage final : public c10::StorageImpl {
 public:
  using c10::StorageImpl::StorageImpl;
};
c10::intrusive_ptr<c10::StorageImpl> make_storage(c10::StorageImpl::use_byte_size_t,
                                                  c10::SymInt bytes, c10::DataPtr memory,
                                                  c10::Allocator* allocator, bool resizable);
void check_storage(const c10::Storage& storage);

/// Makes the poison wait for what `stream` does now: record_stream.
void note_use(const c10::DataPtr& memory, const c10::Stream& stream);

/// How many freed blocks were written to since they were poisoned. All streams must be idle.
LDT_TEST_EXPORT int64_t writes_after_free();

}  // namespace ldt::test_device
