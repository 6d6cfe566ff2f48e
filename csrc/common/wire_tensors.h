// A message's tensors as the wire sees them: contiguous bytes, kept alive until the transfer is
// done.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "common/title.h"

namespace ldt {

/// "float32": the name that torch has in Python.
std::string dtype_name(at::ScalarType dtype);
/// "float32[4, 8], int64[3]": what a message holds, for checks and error texts.
std::string describe(const std::vector<at::Tensor>& tensors);
/// Whether the tensor's elements are bytes in memory of its own. A wrapper (a fake tensor, a
/// DTensor, the result of a collective that is not waited for) has a null or foreign address.
bool travels(const at::Tensor& tensor);

/// The tensors of one message and the contiguous bytes that travel.
///
/// Holds aliases without a Python object: dropping the last reference to a tensor that has one
/// needs the GIL, and these are dropped by worker threads. Throws LaneError, beginning with
/// `title`, for tensors that cannot travel.
class WireTensors {
 public:
  /// Non-contiguous tensors and conjugated or negated views are copied now, on the current stream;
  /// the copy lives here.
  static WireTensors for_send(const std::vector<at::Tensor>& tensors, c10::Device device,
                              const Title& title);
  /// Such targets get a contiguous staging tensor; `unstage` copies it over.
  static WireTensors for_receive(const std::vector<at::Tensor>& tensors, c10::Device device,
                                 const Title& title);

  /// uint8 views of the contiguous data, at most `chunk_bytes` each, in order. Tensors without
  /// elements have none.
  std::vector<at::Tensor> pieces(int64_t chunk_bytes) const;
  /// After a receive: fills the targets that have a staging tensor.
  void unstage();
  /// Lets go of all memory.
  void release();

  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  /// What travels: the tensors, or in place of one that is not plain its copy.
  const std::vector<at::Tensor>& contiguous() const { return staged_; }
  int64_t bytes() const { return bytes_; }

 private:
  WireTensors(const std::vector<at::Tensor>& tensors, c10::Device device, const Title& title);

  std::vector<at::Tensor> tensors_;  // aliases of what the caller gave
  std::vector<at::Tensor>
      staged_;  // contiguous and plain; the same tensor where tensors_ is that already
  int64_t bytes_ = 0;
};

}  // namespace ldt
