// A stand-in for HCCL and NCCL: a process group whose operations run in the order of a stream.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "enqueue.h"

namespace ldt::test_device {

/// Sends tensors of the test device over a gloo group of its own.
///
/// As in HCCL and NCCL, an operation returns at once and runs on the group's stream, which first
/// waits for the stream that is current at the call. Operations run one at a time and are matched
/// by the order of calls; tags are ignored. wait() of a work makes the current stream wait; the
/// work keeps its tensors until then. Collectives consist of sends and receives, which abort()
/// ends, unless it is set to do nothing: c10d's abort does not reach HCCL's own.
LDT_TEST_EXPORT c10::intrusive_ptr<c10d::Backend> make_group(c10::intrusive_ptr<c10d::Backend> gloo,
                                                             std::chrono::milliseconds timeout,
                                                             bool can_abort);

}  // namespace ldt::test_device
