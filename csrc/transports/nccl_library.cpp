// Looks up NCCL's functions.
#include "transports/nccl_library.h"

#include "common/dynamic_library.h"
#include "common/error.h"

namespace ldt {
namespace {

const NcclLibrary* load_nccl() {
  // Only the library that torch uses: communicators do not work across libraries.
  void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  static NcclLibrary nccl;
  const bool complete = look_up(library, "ncclSend", nccl.send) &&
                        look_up(library, "ncclRecv", nccl.receive) &&
                        look_up(library, "ncclBroadcast", nccl.broadcast) &&
                        look_up(library, "ncclGetErrorString", nccl.get_error_string);
  return complete ? &nccl : nullptr;
}

}  // namespace

void NcclLibrary::check(Result result, const char* what) const {
  if (result != 0) throw_lane_error(what, ": ", get_error_string(result));
}

const NcclLibrary* nccl_library() {
  static const NcclLibrary* const library = load_nccl();
  return library;
}

const NcclLibrary& require_nccl() {
  const auto* library = nccl_library();
  if (library == nullptr) {
    throw_lane_error(
        "NCCL cannot be called: this torch has loaded no libnccl.so.2 (it may be linked into it); "
        "use the process groups instead");
  }
  return *library;
}

}  // namespace ldt
