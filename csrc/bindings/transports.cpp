// What a lane's payload moves by: NCCL's communicators, or IPC links to other processes.
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/timeout.h"
#include "common/timeout.h"
#include "copy_engine/receiver.h"
#include "copy_engine/sender.h"
#include "host_links/host_receiver.h"
#include "host_links/host_sender.h"
#include "transports/nccl_library.h"
#include "transports/transport_choice.h"

namespace py = pybind11;

namespace ldt {

void bind_transports(py::module_& module) {
  py::class_<SocketLink, std::shared_ptr<SocketLink>>(module, "SocketLink")
      .def(py::init([](std::vector<int> sockets, std::string name, uint64_t window) {
             return SocketLink::create(std::move(sockets), {std::move(name), window});
           }),
           py::arg("sockets"), py::kw_only(), py::arg("name"),
           py::arg("window") = SocketLinkOptions{}.window)
      .def(
          "close",
          [](SocketLink& link, Timeout timeout) {
            link.close(checked_timeout(timeout.seconds, "a socket link"));
          },
          py::arg("timeout"), py::call_guard<py::gil_scoped_release>())
      .def("abort", &SocketLink::abort, py::arg("reason"),
           py::call_guard<py::gil_scoped_release>());
  py::class_<SocketLinks>(module, "SocketLinks")
      .def(py::init([](std::map<int, std::shared_ptr<SocketLink>> links, uint32_t lane) {
             return SocketLinks{std::move(links), lane};
           }),
           py::kw_only(), py::arg("links"), py::arg("lane"));

  py::class_<NcclCommunicators>(module, "NcclCommunicators")
      .def(py::init([](std::optional<int64_t> p2p, std::optional<int64_t> stage) {
             return NcclCommunicators{p2p, stage};
           }),
           py::kw_only(), py::arg("p2p").none(true), py::arg("stage").none(true));

  module.def("has_nccl", [] { return nccl_library() != nullptr; });

  py::class_<IpcPool, std::shared_ptr<IpcPool>>(module, "IpcPool")
      .def(py::init([](c10::Device device) {
             return std::make_shared<IpcPool>(device, require_copy_engine(device));
           }),
           py::arg("device"));
  py::class_<ReceivingEnd, std::shared_ptr<ReceivingEnd>>(module, "ReceivingEnd");
  py::class_<SendingEnd, std::shared_ptr<SendingEnd>>(module, "SendingEnd");
  py::class_<IpcReceiver, ReceivingEnd, std::shared_ptr<IpcReceiver>>(module, "IpcReceiver")
      .def(py::init<std::shared_ptr<IpcPool>>(), py::arg("memory"))
      .def("offer", &IpcReceiver::offer);
  py::class_<IpcSender, SendingEnd, std::shared_ptr<IpcSender>>(module, "IpcSender")
      .def(py::init<c10::Device, const std::string&, std::shared_ptr<IpcPool>>(), py::arg("device"),
           py::arg("offer"), py::arg("memory") = py::none());
  py::class_<HostReceiver, ReceivingEnd, std::shared_ptr<HostReceiver>>(module, "HostReceiver")
      .def(py::init<c10::Device, std::shared_ptr<SocketLink>, uint32_t>(), py::arg("device"),
           py::arg("link"), py::arg("lane"), py::call_guard<py::gil_scoped_release>());
  py::class_<HostSender, SendingEnd, std::shared_ptr<HostSender>>(module, "HostSender")
      .def(py::init<c10::Device, std::shared_ptr<SocketLink>, uint32_t>(), py::arg("device"),
           py::arg("link"), py::arg("lane"), py::call_guard<py::gil_scoped_release>());
  py::class_<IsolatedStream, std::shared_ptr<IsolatedStream>>(module, "IsolatedStream")
      .def(py::init<c10::Device>(), py::arg("device"));
  py::class_<CopyEngineLinks>(module, "CopyEngineLinks")
      .def(py::init([](std::shared_ptr<IsolatedStream> stream, std::shared_ptr<IpcPool> memory,
                       std::map<int, std::shared_ptr<SendingEnd>> senders,
                       std::map<int, std::shared_ptr<ReceivingEnd>> receivers,
                       std::shared_ptr<ReceivingEnd> from_stage,
                       std::shared_ptr<SendingEnd> to_stage) {
             return CopyEngineLinks{std::move(stream),     std::move(memory),
                                    std::move(senders),    std::move(receivers),
                                    std::move(from_stage), std::move(to_stage)};
           }),
           py::kw_only(), py::arg("stream"), py::arg("memory").none(true), py::arg("senders"),
           py::arg("receivers"), py::arg("from_stage").none(true), py::arg("to_stage").none(true));
}

}  // namespace ldt
