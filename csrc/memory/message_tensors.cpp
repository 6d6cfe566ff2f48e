// Makes a message's tensors contiguous and cuts them into pieces.
#include "memory/message_tensors.h"

#include <c10/core/InferenceMode.h>
#include <c10/util/strides.h>

#include <algorithm>

#include "common/error.h"
#include "common/tensor_info.h"
#include "common/torch_private.h"

namespace ldt {
namespace {

// Whether the memory holds the values in order; that of a conjugated or negated view does not.
bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

// A uint8 tensor over the same memory. Made outside inference mode, as worker threads cannot use
// inference tensors.
at::Tensor byte_view(const at::Tensor& contiguous) {
  c10::InferenceMode off(false);
  auto bytes = at::empty({0}, contiguous.options().dtype(at::kByte).requires_grad(false));
  bytes.set_(contiguous.storage(), contiguous.storage_offset() * contiguous.element_size(),
             {static_cast<int64_t>(contiguous.nbytes())}, {1});
  return bytes;
}

// Contiguous memory of the tensor's shape: its own, or that of `block` from `offset` on.
at::Tensor memory_like(const at::Tensor& tensor) {
  c10::InferenceMode off(false);
  return at::empty(tensor.sizes(), tensor.options().requires_grad(false));
}

at::Tensor part_like(const at::Tensor& tensor, const at::Tensor& block, int64_t offset) {
  c10::InferenceMode off(false);
  auto part = at::empty({0}, tensor.options().requires_grad(false));
  part.set_(block.storage(), offset / tensor.element_size(), tensor.sizes(),
            c10::contiguous_strides(tensor.sizes()));
  return part;
}

// Zeroes the gaps, so that no stale memory leaves the process.
at::Tensor new_block(const Packing& packing, c10::Device device) {
  c10::InferenceMode off(false);
  const auto options = at::TensorOptions().dtype(at::kByte).device(device);
  return packing.has_gaps ? at::zeros({packing.bytes}, options)
                          : at::empty({packing.bytes}, options);
}

// Copies plain tensors as bytes in one call, which takes few launches on a device.
void copy_all(const std::vector<at::Tensor>& targets, const std::vector<at::Tensor>& sources) {
  // Targets may be inference tensors or leaves that require grad: bypass autograd.
  c10::InferenceMode data_only;
  std::vector<at::Tensor> to, from;
  for (size_t i = 0; i < targets.size(); ++i) {
    if (!is_plain(targets[i]) || !is_plain(sources[i])) {
      targets[i].copy_(sources[i]);
      continue;
    }
    to.push_back(byte_view(targets[i]));
    from.push_back(byte_view(sources[i]));
  }
  if (!to.empty()) torch_private::foreach_copy(to, from);
}

}  // namespace

MessageTensors::MessageTensors(const std::vector<at::Tensor>& tensors, c10::Device device,
                               const MessageName& name) {
  std::vector<int64_t> sizes;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& tensor = tensors[i];
    if (!is_sendable(tensor)) {
      throw_lane_error(name, ": tensor ", i, ", ", dtype_name(tensor.scalar_type()),
                       ", cannot travel: expected a plain, dense, strided, unquantized tensor; "
                       "send its parts instead");
    }
    if (tensor.device() != device) {
      throw_lane_error(name, ": tensor ", i, ": expected a tensor on ", device,
                       ", the lane's device, got one on ", tensor.device(),
                       "; move it there first");
    }
    tensors_.push_back(tensor.detach());
    sizes.push_back(static_cast<int64_t>(tensor.nbytes()));
    bytes_ += sizes.back();
  }
  packing_ = Packing::of(sizes, device);
}

MessageTensors MessageTensors::for_send(const std::vector<at::Tensor>& tensors, c10::Device device,
                                        const MessageName& name) {
  MessageTensors message(tensors, device, name);
  const bool packs = !message.packing_.members.empty();
  message.add_transfers(packs ? new_block(message.packing_, device) : at::Tensor(), false);
  copy_all(message.staged_, message.originals_);
  return message;
}

MessageTensors MessageTensors::for_receive(const std::vector<at::Tensor>& tensors,
                                           c10::Device device, const MessageName& name,
                                           const FindBlock& find_block) {
  MessageTensors message(tensors, device, name);
  for (size_t i = 0; i < message.tensors_.size(); ++i) {
    if (torch_private::overlaps_itself(message.tensors_[i])) {
      throw_lane_error(name, ": tensor ", i,
                       " overlaps itself (an expanded tensor?) and cannot be received into; ",
                       "receive into a contiguous tensor");
    }
  }
  if (message.packing_.members.empty()) {
    message.add_transfers({}, false);
    return message;
  }
  const auto members = message.members();
  const bool are_plain = std::all_of(members.begin(), members.end(), is_plain);
  auto block = are_plain && find_block ? find_block(members, message.packing_) : at::Tensor();
  const bool is_in_place = block.defined();
  message.add_transfers(is_in_place ? block : new_block(message.packing_, device), is_in_place);
  return message;
}

std::vector<at::Tensor> MessageTensors::members() const {
  std::vector<at::Tensor> members;
  for (const auto i : packing_.members) members.push_back(tensors_[i]);
  return members;
}

// The block takes the place of its first member. `is_in_place`: the members already lie in it.
void MessageTensors::add_transfers(const at::Tensor& block, bool is_in_place) {
  size_t member = 0;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const auto& tensor = tensors_[i];
    if (member < packing_.members.size() && packing_.members[member] == i) {
      if (member == 0) transfers_.push_back({block, i});
      if (!is_in_place) stage(tensor, part_like(tensor, block, packing_.offsets[member]));
      ++member;
    } else if (tensor.numel() > 0) {
      transfers_.push_back({is_plain(tensor) ? tensor : stage(tensor, memory_like(tensor)), i});
    }
  }
}

at::Tensor MessageTensors::stage(const at::Tensor& tensor, at::Tensor memory) {
  originals_.push_back(tensor);
  staged_.push_back(memory);
  return memory;
}

std::vector<at::Tensor> MessageTensors::pieces(int64_t chunk_bytes) const {
  std::vector<at::Tensor> pieces;
  for (const auto& transfer : transfers_) {
    const auto total = static_cast<int64_t>(transfer.data.nbytes());
    const auto bytes = byte_view(transfer.data);
    for (int64_t begin = 0; begin < total; begin += chunk_bytes) {
      pieces.push_back(bytes.narrow(0, begin, std::min(chunk_bytes, total - begin)));
    }
  }
  return pieces;
}

void MessageTensors::unstage() { copy_all(originals_, staged_); }

void MessageTensors::release_tensors() {
  tensors_.clear();
  transfers_.clear();
  originals_.clear();
}

void MessageTensors::release() {
  release_tensors();
  staged_.clear();
}

}  // namespace ldt
