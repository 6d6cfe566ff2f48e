// What host and stream lanes have in common: checks, titles, counters.
#include "lanes/lane.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "common/timeout.h"
#include "lanes/host_lane.h"
#include "lanes/stream_lane.h"
#include "memory/message_tensors.h"
#include "transports/c10d_transport.h"

namespace ldt {

Lane::Lane(LaneOptions options, std::shared_ptr<GroupComm> comm)
    : options_(std::move(options)),
      comm_(std::move(comm)),
      stats_(std::make_shared<LaneStats>()),
      failure_(std::make_shared<Failure>()) {}

// An error of our own leaves the lane as it was; one of the transport may leave half a message
// under way, and then the two ends are out of step for good.
template <typename Launch>
Lane::Work Lane::guarded(const MessageName& name, Launch launch) {
  try {
    return launch();
  } catch (const StageError&) {
    const auto text = c10::str(name, ": the broadcast inside the stage could not be started: ",
                               text_of(std::current_exception()));
    abort(text);
    throw_lane_error(text);
  } catch (const LaneError&) {
    throw;
  } catch (...) {
    const auto text =
        c10::str(name, ": the backend refused it: ", text_of(std::current_exception()));
    abort(text);
    throw_lane_error(text);
  }
}

Lane::Work Lane::send(const std::vector<at::Tensor>& tensors, int peer, const std::string& label) {
  check_process();
  const MessageName text(label, [&] { return describe_message("send", peer, tensors, label); });
  failure_->throw_if_happened();
  if (!comm_->is_leader()) {
    throw_lane_error(text,
                     ": this rank has no point-to-point group on the lane; only leaders send");
  }
  check_peer(text, peer);
  return guarded(text, [&] { return launch_send(tensors, peer, text); });
}

Lane::Work Lane::receive(const std::vector<at::Tensor>& tensors, int peer,
                         const std::string& label) {
  check_process();
  const MessageName text(label, [&] { return describe_message("receive", peer, tensors, label); });
  failure_->throw_if_happened();
  if (comm_->is_leader()) {
    check_peer(text, peer);
  }
  return guarded(text, [&] { return launch_receive(tensors, peer, text); });
}

std::string Lane::describe_message(const char* verb, int peer,
                                   const std::vector<at::Tensor>& tensors,
                                   const std::string& label) const {
  const auto route = comm_->is_leader() ? name_of(peer) : std::string("the stage's leader");
  const char* preposition = verb[0] == 's' ? " to " : " from ";
  return c10::str("lane ", options_.name, ": ", verb, label.empty() ? "" : " ", label, preposition,
                  route, " of ", describe(tensors));
}

std::string Lane::name_of(int peer) const {
  const auto& ranks = options_.global_ranks;
  const bool known = peer >= 0 && static_cast<size_t>(peer) < ranks.size();
  return known ? c10::str("rank ", ranks[peer]) : c10::str("group rank ", peer);
}

void Lane::check_peer(const MessageName& name, int peer) const {
  if (peer < 0 || peer >= comm_->num_peers() || peer == comm_->own_peer()) {
    throw_lane_error(name, ": expected as peer a group rank from 0 to ", comm_->num_peers() - 1,
                     " other than ", comm_->own_peer(), ", this rank's own");
  }
}

std::shared_ptr<Lane> make_lane(LaneOptions options, std::shared_ptr<GroupComm> comm,
                                std::unique_ptr<Transport> transport) {
  if (options.chunk_bytes < 1) {
    throw_lane_error("lane ", options.name, ": chunk_bytes: expected 1 or more, got ",
                     options.chunk_bytes);
  }
  options.timeout = checked_timeout(options.timeout, c10::str("lane ", options.name));
  if (options.timeout.count() == 0) {
    throw_lane_error("lane ", options.name, ": timeout: expected a positive time, got 0 ms");
  }
  if (options.device.is_cpu()) {
    if (transport) throw_lane_error("lane ", options.name, ": a lane on the CPU has no carrier");
    return std::make_shared<HostLane>(std::move(options), std::move(comm));
  }
  if (!c10::impl::hasDeviceGuardImpl(options.device.type()) || !options.device.has_index()) {
    throw_lane_error("lane ", options.name,
                     ": expected the CPU, or a device with streams and an index such as ",
                     "cuda:0, got ", options.device);
  }
  if (!transport) transport = std::make_unique<C10dTransport>(comm, options.chunk_bytes);
  return std::make_shared<StreamLane>(std::move(options), std::move(comm), std::move(transport));
}

}  // namespace ldt
