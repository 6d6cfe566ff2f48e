// Compiled against the headers of torch_npu by `make npu-headers`, never run. Checks that the
// methods our lanes call on a c10 stream, event or device guard exist and are not those of the base
// class, which throw.
#include <ATen/ATen.h>
#include <c10/core/impl/InlineEvent.h>
#include <c10/core/impl/InlineStreamGuard.h>
#include <torch_npu/csrc/core/NPUStorageImpl.h>
#include <torch_npu/csrc/core/npu/NPUEvent.h>
#include <torch_npu/csrc/core/npu/NPUHooksInterface.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>
#include <torch_npu/csrc/core/npu/impl/NPUGuardImpl.h>
#include <torch_npu/csrc/distributed/ProcessGroupHCCL.hpp>

#include <type_traits>

#include "lanes/stream_lane.h"
#include "lanes/stream_work.h"
#include "process_group/c10d_group_comm.h"

namespace {

using Guard = c10_npu::impl::NPUGuardImpl;
using Hccl = c10d_npu::ProcessGroupHCCL;

// Whether a method is declared in `Class` itself: a pointer to an inherited one has its base's
// type.
template <typename Class, typename Result, typename Owner, typename... Arguments>
constexpr bool is_own(Result (Owner::*)(Arguments...) const) {
  return std::is_same_v<Owner, Class>;
}
template <typename Class, typename Result, typename Owner, typename... Arguments>
constexpr bool is_own(Result (Owner::*)(Arguments...)) {
  return std::is_same_v<Owner, Class>;
}

static_assert(Guard::static_type == c10::DeviceType::PrivateUse1);
static_assert(std::is_base_of_v<c10::impl::DeviceGuardImplInterface, Guard>);
static_assert(is_own<Guard>(&Guard::getStream));
static_assert(is_own<Guard>(&Guard::exchangeStream));
static_assert(is_own<Guard>(&Guard::getDefaultStream));
static_assert(is_own<Guard>(&Guard::getStreamFromGlobalPool));
static_assert(is_own<Guard>(&Guard::record));
static_assert(is_own<Guard>(&Guard::block));
static_assert(is_own<Guard>(&Guard::queryEvent));
static_assert(is_own<Guard>(&Guard::destroyEvent));
static_assert(is_own<Guard>(&Guard::synchronizeEvent));
static_assert(is_own<Guard>(&Guard::getStreamNativeHandle));
static_assert(std::is_convertible_v<c10_npu::NPUStream, c10::Stream>);
static_assert(std::is_constructible_v<c10_npu::NPUStream, c10::Stream>);

// Storages have their own type, created by the function that c10::make_storage_impl calls.
static_assert(std::is_base_of_v<c10::StorageImpl, torch_npu::NPUStorageImpl>);
[[maybe_unused]] constexpr c10::StorageImplCreateHelper kMakesStorages =
    &torch_npu::make_npu_storage_impl;

// Pinned memory for lanes without a copy engine.
static_assert(
    is_own<c10_npu::NPUHooksInterface>(&c10_npu::NPUHooksInterface::getPinnedMemoryAllocator));

// The calls of C10dGroupComm and connect() on HCCL.
static_assert(std::is_base_of_v<c10d::Backend, Hccl>);
static_assert(is_own<Hccl>(&Hccl::send));
static_assert(is_own<Hccl>(&Hccl::recv));
static_assert(is_own<Hccl>(&Hccl::broadcast));
static_assert(is_own<Hccl>(&Hccl::allreduce));
static_assert(is_own<Hccl>(&Hccl::setTimeout));
// HCCL's own abort takes a reason, so c10d's does nothing there: aborting a lane does not end
// transfers in flight on an NPU. If this fails, remove that limit from docs/gpu_notes.md.
static_assert(!std::is_same_v<decltype(&Hccl::abort), void (Hccl::*)()>);
static_assert(std::is_base_of_v<c10d::Work, Hccl::WorkHCCL>);
static_assert(is_own<Hccl::WorkHCCL>(&Hccl::WorkHCCL::wait));

}  // namespace

// The calls of c10's event and stream guard, on the guard itself instead of through its interface.
template class c10::impl::InlineEvent<Guard>;
template class c10::impl::InlineStreamGuard<Guard>;
