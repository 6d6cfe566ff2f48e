// Which device has which peer device.
#include "copy_engine/copy_engine.h"

#include <dlfcn.h>

#include "copy_engine/cuda_copy_engine.h"

namespace ldt {

PeerDevice* peer_device(c10::DeviceType type) {
  if (type == c10::DeviceType::CUDA) return cuda_peer_device();
  const auto name = "ldt_peer_device_" + c10::DeviceTypeName(type, /*lower_case=*/true);
  using Factory = PeerDevice* (*)();
  const auto factory = reinterpret_cast<Factory>(dlsym(RTLD_DEFAULT, name.c_str()));
  return factory == nullptr ? nullptr : factory();
}

}  // namespace ldt
