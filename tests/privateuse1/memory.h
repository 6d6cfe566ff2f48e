// The memory of the test device: host memory, poisoned while no tensor may read it.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>

#include <cstdint>

#include "enqueue.h"

namespace ldt::test_device {

/// Fills new and freed memory: NaN in every floating type, -1 in every signed one.
constexpr int kPoison = 0xFF;

/// Allocates in the order of the current stream, as caching allocators do: that stream may reuse a
/// freed block at once, behind its earlier work. Here the block is poisoned at that point and kept
/// for long, so that late reads on another stream see wrong data and late writes are detected.
c10::Allocator* allocator();

/// Host memory that copies of the device may read and write later.
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);

/// The storage type of the device. torch_npu keeps a tensor's layout in its own storage type and
/// casts every storage to it unchecked, so here any other type is an error, such as the plain c10
/// storage of at::from_blob.
class DeviceStorage final : public c10::StorageImpl {
 public:
  using c10::StorageImpl::StorageImpl;
};
c10::intrusive_ptr<c10::StorageImpl> make_storage(c10::StorageImpl::use_byte_size_t,
                                                  c10::SymInt bytes, c10::DataPtr memory,
                                                  c10::Allocator* allocator, bool resizable);
void check_storage(const c10::Storage& storage);

/// Delays the poison until `stream` has done its current work: record_stream.
void note_use(const c10::DataPtr& memory, const c10::Stream& stream);

/// The number of freed blocks written to since they were poisoned. All streams must be idle.
LDT_TEST_EXPORT int64_t writes_after_free();

}  // namespace ldt::test_device
