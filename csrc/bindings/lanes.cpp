// ldt._C.Lane: converts arguments, and releases the GIL wherever a lane's threads may need it.
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/timeout.h"
#include "common/torch_private.h"
#include "lanes/lane_factory.h"
#include "lanes/lane_registry.h"

namespace py = pybind11;

namespace ldt {
namespace {

// The global ranks of the group's ranks; empty for a group that torch.distributed does not know.
std::vector<int> global_ranks_of(c10d::ProcessGroup* group) {
  if (group == nullptr) return {};
  const auto ranks_of = py::module_::import("torch.distributed").attr("get_process_group_ranks");
  try {
    return ranks_of(py::cast(group, py::return_value_policy::reference)).cast<std::vector<int>>();
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_KeyError) && !error.matches(PyExc_ValueError)) throw;
    return {};
  }
}

// The last owner may be Python's garbage collector, and the destructor joins threads. In a forked
// child those threads do not exist: there the lane is left as it is, for good.
void destroy(std::shared_ptr<Lane> lane) {
  if (!lane->is_of_this_process()) {
    new std::shared_ptr<Lane>(std::move(lane));
  } else if (PyGILState_Check()) {
    py::gil_scoped_release no_gil;
    lane.reset();
  } else {
    lane.reset();
  }
}

std::shared_ptr<Lane> new_lane(std::string name, c10d::ProcessGroup* p2p, c10d::ProcessGroup* stage,
                               int stage_root, c10::Device device,
                               std::optional<int64_t> chunk_bytes, Timeout timeout,
                               const TransportChoice& transport) {
  const auto milliseconds = checked_timeout(timeout.seconds, c10::str("lane ", name));
  auto made =
      make_lane({std::move(name), torch_private::share(p2p), torch_private::share(stage),
                 stage_root, global_ranks_of(p2p), device, chunk_bytes, milliseconds, transport});
  Lane* raw = made.get();
  std::shared_ptr<Lane> lane(raw,
                             [made = std::move(made)](Lane*) mutable { destroy(std::move(made)); });
  LaneRegistry::get().add(lane);
  return lane;
}

py::dict stats_of(const Lane& lane) {
  lane.check_process();
  const auto& stats = lane.stats();
  py::dict counts;
  counts["sent_bytes"] = stats.sent_bytes.load();
  counts["sent_messages"] = stats.sent_messages.load();
  counts["received_bytes"] = stats.received_bytes.load();
  counts["received_messages"] = stats.received_messages.load();
  counts["broadcast_bytes"] = stats.broadcast_bytes.load();
  counts["wait_seconds"] = static_cast<double>(stats.wait_nanoseconds.load()) * 1e-9;
  counts["bounced"] = lane.bounced();
  counts["pool_bytes"] = lane.pool_bytes();
  return counts;
}

}  // namespace

void bind_lanes(py::module_& module) {
  py::class_<Lane, std::shared_ptr<Lane>>(module, "Lane")
      .def(py::init(&new_lane), py::arg("name"), py::kw_only(), py::arg("p2p").none(true),
           py::arg("stage").none(true), py::arg("stage_root") = 0,
           py::arg("device") = c10::Device(at::kCPU), py::arg("chunk_bytes") = py::none(),
           py::arg("timeout") = Timeout{1800}, py::arg("transport") = py::none())
      .def("send", &Lane::send, py::arg("tensors"), py::arg("peer"), py::arg("label") = "",
           py::call_guard<py::gil_scoped_release>())
      .def(
          "recv",
          [](Lane& lane, const std::vector<at::Tensor>& tensors, std::optional<int> peer,
             const std::string& label) { return lane.receive(tensors, peer.value_or(-1), label); },
          py::arg("tensors"), py::arg("peer") = py::none(), py::arg("label") = "",
          py::call_guard<py::gil_scoped_release>())
      .def(
          "empty",
          [](Lane& lane, const std::vector<int64_t>& sizes, at::ScalarType dtype) {
            return lane.empty(sizes, dtype);
          },
          py::arg("sizes"), py::arg("dtype"))
      .def("buffers", &Lane::buffers, py::arg("sizes"), py::arg("dtypes"))
      .def(
          "close",
          [](Lane& lane, Timeout timeout) {
            lane.check_process();
            lane.close(checked_timeout(timeout.seconds, c10::str("lane ", lane.options().name)));
          },
          py::arg("timeout") = Timeout{10}, py::call_guard<py::gil_scoped_release>())
      .def(
          "abort",
          [](Lane& lane, const std::string& reason) {
            lane.check_process();
            lane.abort(reason);
          },
          py::arg("reason"), py::call_guard<py::gil_scoped_release>())
      .def(
          "overdue",
          [](Lane& lane) {
            lane.check_process();
            return lane.overdue();
          },
          py::call_guard<py::gil_scoped_release>())
      .def("stats", &stats_of)
      .def_property_readonly("name", [](const Lane& lane) { return lane.options().name; })
      .def_property_readonly("chunk_bytes",
                             [](const Lane& lane) { return lane.options().chunk_bytes; });

  module.def(
      "abort_all", [](const std::string& reason) { LaneRegistry::get().abort_all(reason); },
      py::arg("reason"), py::call_guard<py::gil_scoped_release>());
  py::module_::import("atexit").attr("register")(module.attr("abort_all"),
                                                 "the process is exiting");
}

}  // namespace ldt
