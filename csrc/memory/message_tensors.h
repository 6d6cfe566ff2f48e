// A message's tensors as the wire sees them: contiguous bytes, kept alive until the transfer is
// done.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <string>
#include <vector>

#include "common/message_name.h"
#include "memory/packing.h"

namespace ldt {

/// "float32": the name that torch has in Python.
std::string dtype_name(at::ScalarType dtype);
/// "float32[4, 8], int64[3]": what a message holds, for checks and error texts.
std::string describe(const std::vector<at::Tensor>& tensors);
/// Whether the tensor's elements are bytes in memory of its own. A wrapper (a fake tensor, a
/// DTensor, the result of a collective that is not waited for) has a null or foreign address.
bool is_sendable(const at::Tensor& tensor);

/// The tensors of one message and the contiguous bytes that travel.
///
/// Holds aliases without a Python object: dropping the last reference to a tensor that has one
/// needs the GIL, and these are dropped by worker threads. Throws LaneError, beginning with
/// `name`, for tensors that cannot travel.
class MessageTensors {
 public:
  /// What Packing puts together is copied now, on the current stream, and so are non-contiguous
  /// tensors and conjugated or negated views; the copies live here.
  static MessageTensors for_send(const std::vector<at::Tensor>& tensors, c10::Device device,
                                 const MessageName& name);
  /// The memory, as bytes, in which `members` lie at the offsets of the packing; undefined if they
  /// do not lie so.
  using FindBlock =
      std::function<at::Tensor(const std::vector<at::Tensor>& members, const Packing& packing)>;
  /// Such targets get contiguous staging memory, unless `find_block` knows that of those that are
  /// packed; `unstage` copies it over.
  static MessageTensors for_receive(const std::vector<at::Tensor>& tensors, c10::Device device,
                                    const MessageName& name, const FindBlock& find_block = nullptr);

  /// A contiguous tensor that travels: one of the message, or more in one block. `first` is the
  /// place in the message of the first that it has.
  struct Transfer {
    at::Tensor data;
    size_t first;
  };
  const std::vector<Transfer>& transfers() const { return transfers_; }
  /// uint8 views of what travels, at most `chunk_bytes` each, in order.
  std::vector<at::Tensor> pieces(int64_t chunk_bytes) const;
  /// After a receive: fills the targets that have staging memory.
  void unstage();
  /// Lets go of all memory.
  void release();

  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  int64_t bytes() const { return bytes_; }

 private:
  MessageTensors(const std::vector<at::Tensor>& tensors, c10::Device device,
                 const MessageName& name);

  std::vector<at::Tensor> members() const;
  void add_transfers(const at::Tensor& block, bool is_in_place);
  at::Tensor stage(const at::Tensor& tensor, at::Tensor memory);

  std::vector<at::Tensor> tensors_;  // aliases of what the caller gave
  Packing packing_;
  std::vector<Transfer> transfers_;  // those with elements
  std::vector<at::Tensor> staged_;   // contiguous and plain, in place of
  std::vector<at::Tensor> originals_;
  int64_t bytes_ = 0;
};

}  // namespace ldt
