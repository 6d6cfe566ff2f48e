// Runs any operator with the CPU's kernel, on the thread of the current stream.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <vector>

#include "operators.h"
#include "streams.h"

namespace ldt::test_device {
namespace {

using Values = std::vector<c10::IValue>;
using Convert = std::function<at::Tensor(const at::Tensor&)>;

bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

// Zero-dimensional CPU tensors are accepted by any device and stay on the CPU.
at::Tensor on_meta(const at::Tensor& tensor) {
  if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

// A CPU tensor is copied at once, as its owner may change it before the stream reaches the
// operator.
at::Tensor for_the_stream(const at::Tensor& tensor) {
  if (is_ours(tensor) || !tensor.defined()) return on_cpu(tensor);
  auto copy = tensor.clone();
  keep_wrapped_number(copy, tensor);
  return copy;
}

// The value with its tensors converted and its devices, if any, replaced.
c10::IValue converted(const c10::IValue& value, const Convert& convert, c10::Device device) {
  if (value.isTensor()) return convert(value.toTensor());
  if (value.isDevice()) return device;
  if (value.isTensorList()) {
    c10::List<at::Tensor> tensors;
    for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(convert(tensor));
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      tensors.push_back(tensor ? std::optional(convert(*tensor)) : std::nullopt);
    }
    return tensors;
  }
  return value;
}

Values converted(const Values& values, const Convert& convert, c10::Device device) {
  Values made;
  for (const auto& value : values) made.push_back(converted(value, convert, device));
  return made;
}

std::vector<at::Tensor> tensors_in(const c10::IValue& value) {
  std::vector<at::Tensor> found;
  converted(
      value,
      [&](const at::Tensor& tensor) {
        found.push_back(tensor);
        return tensor;
      },
      c10::Device(at::kCPU));
  return found;
}

bool can_run_later(const c10::OperatorHandle& op) {
  if (op.hasTag(at::Tag::nondeterministic_seeded)) return false;
  const auto& returns = op.schema().returns();
  return std::all_of(returns.begin(), returns.end(), [](const c10::Argument& result) {
    const auto type = result.type();
    const bool is_view = result.alias_info() && !result.alias_info()->isWrite();
    return !is_view && (type->isSubtypeOf(*c10::TensorType::get()) ||
                        type->isSubtypeOf(*c10::ListType::ofTensors()));
  });
}

/// Gives the generator of the device to an operator that takes one and was given none.
void use_generator_of(c10::Device device, const c10::FunctionSchema& schema,
                      torch::jit::Stack& stack) {
  const auto first = stack.size() - schema.arguments().size();
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto optional = schema.arguments()[i].type()->cast<c10::OptionalType>();
    const bool takes =
        optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
    if (takes && stack[first + i].isNone()) stack[first + i] = generators()[device.index()];
  }
}

// An operator runs twice, once on "meta", and some warn about results that torch itself passed in.
class Silence final : public c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

/// Runs the operator on "meta": returns its results, and in `inputs` the shapes of those it writes
/// to. False if "meta" does not support it; for wrong arguments the CPU's kernel raises.
bool infer(const c10::OperatorHandle& op, Values& inputs, torch::jit::Stack& results) {
  Silence silence;
  const c10::WarningUtils::WarningHandlerGuard quiet(&silence);
  results = inputs;
  try {
    op.callBoxed(results);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

void resize_written(const c10::FunctionSchema& schema, const Values& inputs, const Values& metas) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    const auto actual = tensors_in(inputs[i]);
    const auto wanted = tensors_in(metas[i]);
    for (size_t j = 0; j < actual.size(); ++j) {
      if (!is_ours(actual[j]) || actual[j].sizes() == wanted[j].sizes()) continue;
      actual[j].resize_(wanted[j].sizes());
      actual[j].unsafeGetTensorImpl()->set_sizes_and_strides(wanted[j].sizes(),
                                                             wanted[j].strides());
    }
  }
}

/// The argument that a result aliases ("(a!)"); empty for a new tensor.
std::optional<size_t> written_argument(const c10::FunctionSchema& schema, size_t result) {
  const auto* alias = schema.returns()[result].alias_info();
  if (alias == nullptr) return std::nullopt;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* other = schema.arguments()[i].alias_info();
    if (other != nullptr && *other == *alias) return i;
  }
  return std::nullopt;
}

/// The results of an operator, and for each new one the CPU tensor over its memory that the kernel
/// writes to; none for an argument that it writes to.
struct Results {
  Values values;
  std::vector<std::vector<at::Tensor>> targets;
};

Results allocate_results(const c10::FunctionSchema& schema, const Values& inputs,
                         const Values& inferred, c10::Device device) {
  const auto allocate = [&](const at::Tensor& meta) {
    if (!meta.defined()) return meta;
    return at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(device));
  };
  Results results;
  for (size_t i = 0; i < inferred.size(); ++i) {
    const auto written = written_argument(schema, i);
    results.values.push_back(written ? inputs[*written] : converted(inferred[i], allocate, device));
    auto& targets = results.targets.emplace_back();
    if (written) continue;
    for (const auto& made : tensors_in(results.values.back())) targets.push_back(on_cpu(made));
  }
  return results;
}

void copy_results(const c10::IValue& computed, const std::vector<at::Tensor>& targets) {
  const auto sources = tensors_in(computed);
  for (size_t i = 0; i < targets.size(); ++i) {
    if (targets[i].defined() && sources[i].defined()) targets[i].copy_(sources[i]);
  }
}

c10::Device device_of(const Values& inputs) {
  for (const auto& value : inputs) {
    for (const auto& tensor : tensors_in(value)) {
      if (is_ours(tensor)) return tensor.device();
    }
  }
  return c10::Device(at::kCPU);
}

}  // namespace

const std::vector<at::Generator>& generators() {
  static const auto made = [] {
    std::vector<at::Generator> each;
    for (int i = 0; i < kDevices; ++i) each.push_back(at::detail::createCPUGenerator());
    return each;
  }();
  return made;
}

void run_on_stream(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto inputs = torch::jit::last(*stack, schema.arguments().size()).vec();
  const auto device = device_of(inputs);
  auto metas = converted(inputs, on_meta, c10::Device(at::kMeta));
  torch::jit::Stack inferred;
  if (device.is_cpu() || !can_run_later(op) || !infer(op, metas, inferred)) {
    if (!device.is_cpu()) use_generator_of(device, schema, *stack);
    at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
    return;
  }
  const c10::DeviceGuard guard(device);
  resize_written(schema, inputs, metas);
  auto results = allocate_results(schema, inputs, inferred, device);
  current_stream(device.index())
      .enqueue([op, targets = std::move(results.targets),
                arguments = converted(inputs, for_the_stream, c10::Device(at::kCPU))] {
        Silence silence;
        const c10::WarningUtils::WarningHandlerGuard quiet(&silence);
        torch::jit::Stack computed = arguments;
        op.callBoxed(computed);
        for (size_t i = 0; i < targets.size(); ++i) copy_results(computed[i], targets[i]);
      });
  torch::jit::drop(*stack, inputs.size());
  for (auto& result : results.values) torch::jit::push(*stack, std::move(result));
}

}  // namespace ldt::test_device
