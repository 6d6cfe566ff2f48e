// The worker's queue, and the lane's launches.
#include "lanes/host_lane.h"

namespace ldt {

void ChainWorker::push(std::shared_ptr<HostMessage> message) {
  std::lock_guard<std::mutex> lock(mutex_);
  pending_.push_back(std::move(message));
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { loop(); });
  }
  changed_.notify_all();
}

void ChainWorker::loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !pending_.empty(); });
    if (pending_.empty()) return;
    auto message = pending_.front();
    lock.unlock();
    message->finish();
    lock.lock();
    pending_.pop_front();
    changed_.notify_all();
    lock.unlock();
    message.reset();  // may free tensors: not under the lock
    lock.lock();
  }
}

bool ChainWorker::drain(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_until(lock, deadline, [this] { return pending_.empty(); });
}

void ChainWorker::abort() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& message : pending_) {
    message->abort();
  }
}

void ChainWorker::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) {
    thread_.join();
  }
}

HostLane::HostLane(LaneOptions options, std::shared_ptr<Transport> transport)
    : Lane(std::move(options), std::move(transport)) {
  pool_ = std::make_shared<ReceivePool>(options_.device, std::nullopt);
  context_ = std::make_shared<HostContext>(HostContext{options_, transport_, stats_, failure_});
}

HostLane::~HostLane() { close(std::chrono::milliseconds(0)); }

Lane::Work HostLane::launch(ChainWorker& worker, std::shared_ptr<HostMessage> message) {
  message->post();
  Work work = message->work();
  worker.push(std::move(message));
  return work;
}

Lane::Work HostLane::launch_send(const std::vector<at::Tensor>& tensors, int peer,
                                 const std::string& title) {
  auto wire = WireTensors::for_send(tensors, options_.device, title);
  return launch(outgoing_, std::make_shared<SendMessage>(context_, c10d::OpType::SEND,
                                                         std::move(wire), peer, title));
}

Lane::Work HostLane::launch_receive(const std::vector<at::Tensor>& tensors, int peer,
                                    const std::string& title) {
  auto wire = WireTensors::for_receive(tensors, options_.device, title);
  if (transport_->is_leader()) {
    return launch(incoming_, std::make_shared<ReceiveMessage>(context_, c10d::OpType::RECV,
                                                              std::move(wire), peer, title));
  }
  return launch(incoming_, std::make_shared<MemberMessage>(context_, c10d::OpType::BROADCAST,
                                                           std::move(wire), peer, title));
}

void HostLane::abort(const std::string& reason) {
  failure_->set(reason);
  outgoing_.abort();
  incoming_.abort();
}

void HostLane::close(std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  if (!outgoing_.drain(deadline) || !incoming_.drain(deadline)) {
    abort(c10::str("lane ", options_.name, ": closed with messages still in flight"));
  }
  failure_->set(c10::str("lane ", options_.name, ": is closed"));
  outgoing_.stop();
  incoming_.stop();
}

}  // namespace ldt
