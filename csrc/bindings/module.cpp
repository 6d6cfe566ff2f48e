// The table of contents of ldt._C.
#include "bindings/bindings.h"

PYBIND11_MODULE(_C, module) {
  // c10d's own types (ProcessGroup, Work) are registered by torch.distributed.
  pybind11::module_::import("torch.distributed");
  module.doc() = "Compiled core of ldt: lanes, works and metadata.";
  ldt::bind_errors(module);
  ldt::bind_interrupt();
  ldt::bind_transports(module);
  ldt::bind_lanes(module);
  ldt::bind_metadata(module);
  ldt::bind_metadata_pack(module);
  ldt::bind_tensors(module);
  ldt::bind_compression(module);
}
