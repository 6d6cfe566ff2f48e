// Python bindings of the test device.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <thread>

#include "group.h"
#include "memory.h"
#include "operators.h"
#include "streams.h"
#include "thread_copy_engine.h"

namespace py = pybind11;

namespace ldt::test_device {
namespace {

using Microseconds = std::chrono::microseconds;

void sleep(const c10::Stream& handle, int64_t microseconds) {
  ldt_test_enqueue(handle.device_index(), handle.id(),
                   [=] { std::this_thread::sleep_for(Microseconds(microseconds)); });
}

void synchronize_all() {
  for (c10::DeviceIndex device = 0; device < kDevices; ++device) synchronize_device(device);
}

}  // namespace

PYBIND11_MODULE(_test_device, module) {
  py::module_::import("torch.distributed");  // registers the types that this module uses
  module.attr("DEVICES") = static_cast<int>(kDevices);
  module.def(
      "delay_all", [](uint64_t seed, int64_t most) { delay_all(seed, Microseconds(most)); },
      py::arg("seed"), py::arg("most_microseconds"));
  module.def(
      "delay",
      [](const c10::Stream& handle, uint64_t seed, int64_t most) {
        stream(handle).delay(seed, Microseconds(most));
      },
      py::arg("stream"), py::arg("seed"), py::arg("most_microseconds"));
  module.def("sleep", &sleep, py::arg("stream"), py::arg("microseconds"));
  module.def("synchronize_all", &synchronize_all, py::call_guard<py::gil_scoped_release>());
  module.def("fail_device", &fail_device, py::arg("text"));
  module.def("refuse_copy_engine", &refuse_copy_engine, py::arg("why"));
  module.def("generators", &generators);
  module.def("writes_after_free", &writes_after_free);
  module.def("make_group", &make_group, py::arg("gloo"), py::arg("timeout"), py::arg("can_abort"));
}

}  // namespace ldt::test_device
