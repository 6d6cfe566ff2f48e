// Which device has which peer device.
#include "copy_engine/copy_engine.h"

#include <dlfcn.h>

#include "copy_engine/cuda_copy_engine.h"

namespace ldt {

CopyEngine* find_copy_engine(c10::DeviceType type) {
  if (type == c10::DeviceType::CUDA) return cuda_copy_engine();
  const auto name = "ldt_copy_engine_" + c10::DeviceTypeName(type, /*lower_case=*/true);
  using Factory = CopyEngine* (*)();
  const auto factory = reinterpret_cast<Factory>(dlsym(RTLD_DEFAULT, name.c_str()));
  return factory == nullptr ? nullptr : factory();
}

}  // namespace ldt
