// Finds the copy engine of a device type.
#include "copy_engine/copy_engine.h"

#include <dlfcn.h>

#include "common/error.h"
#include "copy_engine/cuda_copy_engine.h"

namespace ldt {

CopyEngine* find_copy_engine(c10::DeviceType type) {
  if (type == c10::DeviceType::CUDA) return cuda_copy_engine();
  const auto name = "ldt_copy_engine_" + c10::DeviceTypeName(type, /*lower_case=*/true);
  using Factory = CopyEngine* (*)();
  const auto factory = reinterpret_cast<Factory>(dlsym(RTLD_DEFAULT, name.c_str()));
  return factory == nullptr ? nullptr : factory();
}

CopyEngine& require_copy_engine(c10::Device device) {
  auto* engine = find_copy_engine(device.type());
  if (engine == nullptr) {
    throw_lane_error("there is no copy engine for devices of type ",
                     c10::DeviceTypeName(device.type(), true));
  }
  const auto reason = engine->unavailable(device);
  if (!reason.empty()) throw_lane_error("the copy engine cannot be used: ", reason);
  return *engine;
}

}  // namespace ldt
