// A message's tensors as contiguous bytes, kept alive until the transfer is done.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <vector>

#include "common/message_name.h"
#include "memory/packing.h"

namespace ldt {

/// The tensors of one message, and the contiguous memory that is sent for them.
///
/// Holds aliases without a Python object, because worker threads drop them: dropping the last
/// reference to a tensor with a Python object takes the GIL. Throws LaneError, beginning with
/// `name`, for tensors that cannot be sent.
class MessageTensors {
 public:
  /// Copies packed tensors, non-contiguous tensors and conjugated or negated views now, on the
  /// current stream, and owns the copies.
  static MessageTensors for_send(const std::vector<at::Tensor>& tensors, c10::Device device,
                                 const MessageName& name);
  /// Returns the block, as bytes, in which `members` lie at the packing's offsets; undefined if
  /// there is none.
  using FindBlock =
      std::function<at::Tensor(const std::vector<at::Tensor>& members, const Packing& packing)>;
  /// Gives such targets contiguous staging memory, unless `find_block` finds the packed ones in one
  /// block already; `unstage` copies from the staging memory to the targets.
  static MessageTensors for_receive(const std::vector<at::Tensor>& tensors, c10::Device device,
                                    const MessageName& name, const FindBlock& find_block = nullptr);

  /// A contiguous tensor to send or receive: one of the message's, or a block of several. `first`
  /// is the index in the message of the first tensor that it contains.
  struct Transfer {
    at::Tensor data;
    size_t first;
  };
  const std::vector<Transfer>& transfers() const { return transfers_; }
  /// uint8 views of the transfers, in order, of at most `chunk_bytes` each.
  std::vector<at::Tensor> pieces(int64_t chunk_bytes) const;
  /// After a receive: copies staging memory to its targets.
  void unstage();
  /// Drops the references to the message's own tensors, and keeps the staging memory.
  void release_tensors();
  /// Drops all references.
  void release();

  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  int64_t bytes() const { return bytes_; }

 private:
  MessageTensors(const std::vector<at::Tensor>& tensors, c10::Device device,
                 const MessageName& name);

  std::vector<at::Tensor> members() const;
  void add_transfers(const at::Tensor& block, bool is_in_place);
  at::Tensor stage(const at::Tensor& tensor, at::Tensor memory);

  std::vector<at::Tensor> tensors_;  // aliases of the caller's
  Packing packing_;
  std::vector<Transfer> transfers_;  // none for empty tensors
  std::vector<at::Tensor> staged_;   // contiguous stand-ins for
  std::vector<at::Tensor> originals_;
  int64_t bytes_ = 0;
};

}  // namespace ldt
