// A stand-in for HCCL and NCCL: a process group whose operations run in the order of a stream.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "enqueue.h"

namespace ldt::test_device {

/// Carries tensors of the test device over a gloo group that is this one's alone.
///
/// As those of HCCL and NCCL do, an operation returns at once, runs on a stream of the group that
/// first waits for what is current at the call, one at a time, and matches its counterpart by the
/// order of calls: tags count for nothing. A work's wait() makes the current stream wait, and the
/// work keeps its tensors until then and no longer. Collectives are made of sends and receives,
/// which abort() can end, unless it is to do nothing: HCCL's own is not reached by that of c10d.
LDT_TEST_EXPORT c10::intrusive_ptr<c10d::Backend> make_group(c10::intrusive_ptr<c10d::Backend> gloo,
                                                             std::chrono::milliseconds timeout,
                                                             bool can_abort);

}  // namespace ldt::test_device
