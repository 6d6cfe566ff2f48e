// Making a message's tensors contiguous, and cutting them into pieces of bytes.
#include "common/wire_tensors.h"

#include <ATen/MemoryOverlap.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <sstream>

#include "common/error.h"

namespace ldt {
namespace {

// Whether the memory is the values in order: the bits of a conjugated or negated view are not.
bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

// A uint8 tensor over the same memory. Built outside inference mode: an inference tensor must not
// reach a worker thread, where inference mode is off.
at::Tensor byte_view(const at::Tensor& contiguous) {
  c10::InferenceMode off(false);
  auto bytes = at::empty({0}, contiguous.options().dtype(at::kByte).requires_grad(false));
  bytes.set_(contiguous.storage(), contiguous.storage_offset() * contiguous.element_size(),
             {static_cast<int64_t>(contiguous.nbytes())}, {1});
  return bytes;
}

}  // namespace

bool travels(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_quantized() &&
         !tensor.is_nested() && !tensor.key_set().has(c10::DispatchKey::Python);
}

std::string dtype_name(at::ScalarType dtype) {
  if (dtype == at::ScalarType::Undefined) return "undefined";  // torch has no name for it
  return std::string(c10::getDtypeNames(dtype).first);
}

std::string describe(const std::vector<at::Tensor>& tensors) {
  std::ostringstream text;
  const char* separator = "";
  for (const auto& tensor : tensors) {
    text << separator << dtype_name(tensor.scalar_type());
    tensor.is_nested() ? text << "[nested]" : text << tensor.sizes();
    separator = ", ";
  }
  return tensors.empty() ? "no tensors" : text.str();
}

WireTensors::WireTensors(const std::vector<at::Tensor>& tensors, c10::Device device,
                         const Title& title) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& tensor = tensors[i];
    if (!travels(tensor)) {
      throw_lane_error(title, ": tensor ", i, ", ", dtype_name(tensor.scalar_type()),
                       ", cannot travel: expected a plain, dense, strided, unquantized tensor; "
                       "send its parts instead");
    }
    if (tensor.device() != device) {
      throw_lane_error(title, ": tensor ", i, ": expected a tensor on ", device,
                       ", the lane's device, got one on ", tensor.device(),
                       "; move it there first");
    }
    tensors_.push_back(tensor.detach());
    bytes_ += static_cast<int64_t>(tensor.nbytes());
  }
}

WireTensors WireTensors::for_send(const std::vector<at::Tensor>& tensors, c10::Device device,
                                  const Title& title) {
  WireTensors wire(tensors, device, title);
  for (const auto& tensor : wire.tensors_) {
    wire.staged_.push_back(is_plain(tensor) ? tensor
                                            : tensor.resolve_conj().resolve_neg().contiguous());
  }
  return wire;
}

WireTensors WireTensors::for_receive(const std::vector<at::Tensor>& tensors, c10::Device device,
                                     const Title& title) {
  WireTensors wire(tensors, device, title);
  for (size_t i = 0; i < wire.tensors_.size(); ++i) {
    const auto& tensor = wire.tensors_[i];
    if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
      throw_lane_error(title, ": tensor ", i,
                       " overlaps itself (an expanded tensor?) and cannot be received into; ",
                       "receive into a contiguous tensor");
    }
    wire.staged_.push_back(is_plain(tensor) ? tensor : at::empty(tensor.sizes(), tensor.options()));
  }
  return wire;
}

std::vector<at::Tensor> WireTensors::pieces(int64_t chunk_bytes) const {
  std::vector<at::Tensor> pieces;
  for (const auto& tensor : staged_) {
    const auto total = static_cast<int64_t>(tensor.nbytes());
    if (total == 0) continue;
    const auto bytes = byte_view(tensor);
    for (int64_t begin = 0; begin < total; begin += chunk_bytes) {
      pieces.push_back(bytes.narrow(0, begin, std::min(chunk_bytes, total - begin)));
    }
  }
  return pieces;
}

void WireTensors::unstage() {
  // The targets may be inference tensors or leaves that need gradients: write the data, no
  // autograd.
  c10::InferenceMode data_only;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (!tensors_[i].is_same(staged_[i])) tensors_[i].copy_(staged_[i]);
  }
}

void WireTensors::release() {
  tensors_.clear();
  staged_.clear();
}

}  // namespace ldt
