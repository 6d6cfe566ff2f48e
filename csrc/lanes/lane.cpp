// What host and stream lanes share: checks, names of messages, counters.
#include "lanes/lane.h"

#include "common/tensor_info.h"

namespace ldt {

Lane::Lane(LaneOptions options, std::shared_ptr<GroupComm> comm)
    : options_(std::move(options)),
      comm_(std::move(comm)),
      stats_(std::make_shared<LaneStats>()),
      failure_(std::make_shared<Failure>()) {}

// Our own errors leave the lane as it was. A backend's error may leave half a message in flight, so
// that the two ends are desynchronized for good: it fails the lane.
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
  const auto other = comm_->is_leader() ? name_of(peer) : std::string("the stage's leader");
  const char* preposition = verb[0] == 's' ? " to " : " from ";
  return c10::str("lane ", options_.name, ": ", verb, label.empty() ? "" : " ", label, preposition,
                  other, " of ", describe(tensors));
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

}  // namespace ldt
