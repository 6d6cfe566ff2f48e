// The few functions of NCCL that lanes call, from the library that torch has loaded.
#pragma once

#include <cstddef>

namespace ldt {

/// Signatures are those of nccl.h.
struct NcclLibrary {
  using Result = int;  // ncclResult_t; 0 is success
  using Communicator = void*;
  using Stream = void*;
  static constexpr int kBytes = 1;  // ncclUint8

  Result (*send)(const void*, size_t, int type, int peer, Communicator, Stream) = nullptr;
  Result (*receive)(void*, size_t, int type, int peer, Communicator, Stream) = nullptr;
  Result (*broadcast)(const void*, void*, size_t, int type, int root, Communicator,
                      Stream) = nullptr;
  const char* (*get_error_string)(Result) = nullptr;

  /// Throws LaneError with NCCL's text unless `result` is success; `what` names the call.
  void check(Result result, const char* what) const;
};

/// Null where torch has no NCCL or links it statically.
const NcclLibrary* nccl_library();
/// The same, but throws LaneError where there is none.
const NcclLibrary& require_nccl();

}  // namespace ldt
