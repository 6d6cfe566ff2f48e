// ldt._C.Lane: arguments in Python's types, the GIL released wherever a lane's threads may need it.
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/timeout.h"
#include "bindings/transports.h"
#include "common/owner_process.h"
#include "lanes/lane.h"
#include "process_group/c10d_group_comm.h"
#include "transports/nccl_transport.h"

namespace py = pybind11;

namespace ldt {
namespace {

// Measured with benchmarks/recv_broadcast.py; see docs/performance.md.
constexpr int64_t kHostChunkBytes = int64_t{4} << 20;
constexpr int64_t kStreamChunkBytes = int64_t{16} << 20;

// Every lane that is alive, so that the interpreter can stop their threads before it goes.
class LiveLanes {
 public:
  void add(const std::shared_ptr<Lane>& lane) {
    std::lock_guard<std::mutex> lock(mutex_);
    lanes_.erase(std::remove_if(lanes_.begin(), lanes_.end(),
                                [](const auto& weak) { return weak.expired(); }),
                 lanes_.end());
    lanes_.push_back(lane);
  }
  void abort(const std::string& reason) {
    std::vector<std::shared_ptr<Lane>> alive;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& weak : lanes_) {
        if (auto lane = weak.lock()) alive.push_back(std::move(lane));
      }
    }
    for (const auto& lane : alive) {
      attempt([&] { lane->abort(reason); });
    }
    for (const auto& lane : alive) {
      attempt([&] { lane->close(std::chrono::milliseconds(0)); });
    }
  }

 private:
  // What one of them throws is no reason to leave out the others.
  template <typename Step>
  static void attempt(const Step& step) noexcept {
    try {
      step();
    } catch (...) {
      TORCH_WARN("a lane could not be stopped: ", text_of(std::current_exception()));
    }
  }

  std::mutex mutex_;
  std::vector<std::weak_ptr<Lane>> lanes_;
};

// Those of this process. Never destroyed: lanes may outlive static destruction.
LiveLanes& live_lanes() {
  static auto* lanes = new LiveLanes;
  static OwnerProcess owner;
  if (!owner.is_current()) {
    lanes = new LiveLanes;
    owner = OwnerProcess();
  }
  return *lanes;
}

C10dGroupComm::Group share(c10d::ProcessGroup* group) {
  if (group == nullptr) return {};
  return C10dGroupComm::Group::unsafe_reclaim_from_nonowning(group);
}

// Which global ranks the group's own ranks are; empty for a group that torch.distributed has no
// record of.
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

std::unique_ptr<Transport> make_transport(const TransportChoice& choice, const LaneOptions& options,
                                          const std::shared_ptr<GroupComm>& groups, int stage_size,
                                          int stage_root) {
  if (const auto* routes = std::get_if<IpcLinks>(&choice)) {
    return std::make_unique<CopyEngineTransport>(*routes, stage_size - 1, options.chunk_bytes,
                                                 options.timeout);
  }
  if (const auto* numbers = std::get_if<NcclCommunicators>(&choice)) {
    const auto pointer = [](const std::optional<int64_t>& number) {
      return reinterpret_cast<void*>(number.value_or(0));
    };
    const NcclTransport::Communicators communicators{pointer(numbers->point_to_point),
                                                     pointer(numbers->stage), stage_root};
    return std::make_unique<NcclTransport>(groups, communicators, options.device,
                                           options.chunk_bytes, require_nccl());
  }
  return nullptr;
}

std::shared_ptr<Lane> new_lane(std::string name, c10d::ProcessGroup* p2p, c10d::ProcessGroup* stage,
                               int stage_root, c10::Device device,
                               std::optional<int64_t> chunk_bytes, Timeout timeout,
                               std::optional<bool> announce, const TransportChoice& transport) {
  auto comm = std::make_shared<C10dGroupComm>(share(p2p), share(stage), stage_root);
  LaneOptions options;
  options.timeout = checked_timeout(timeout.seconds, c10::str("lane ", name));
  options.name = std::move(name);
  options.global_ranks = global_ranks_of(p2p);
  options.device = device.is_cpu() ? c10::Device(at::kCPU) : device;  // "cpu:0" is the CPU
  options.chunk_bytes = chunk_bytes.value_or(device.is_cpu() ? kHostChunkBytes : kStreamChunkBytes);
  options.announce = announce.value_or(device.is_cpu());
  const int stage_size = stage == nullptr ? 1 : stage->getSize();
  auto chosen = make_transport(transport, options, comm, stage_size, stage_root);
  auto made = make_lane(std::move(options), std::move(comm), std::move(chosen));
  // The last owner may be Python's garbage collector, and the destructor joins threads.
  Lane* raw = made.get();
  std::shared_ptr<Lane> lane(raw, [made = std::move(made)](Lane*) mutable {
    if (!made->is_of_this_process()) {
      new std::shared_ptr<Lane>(
          std::move(made));  // left as it is, for ever: its threads are not here
    } else if (PyGILState_Check()) {
      py::gil_scoped_release no_gil;
      made.reset();
    } else {
      made.reset();
    }
  });
  live_lanes().add(lane);
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
           py::arg("timeout") = Timeout{1800}, py::arg("announce") = py::none(),
           py::arg("carrier") = py::none())
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
      "abort_all", [](const std::string& reason) { live_lanes().abort(reason); }, py::arg("reason"),
      py::call_guard<py::gil_scoped_release>());
  py::module_::import("atexit").attr("register")(module.attr("abort_all"),
                                                 "the process is exiting");
}

}  // namespace ldt
