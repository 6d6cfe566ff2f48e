// The worker's queue and the lane's launches.
#include "lanes/host_lane.h"

#include "common/timeout.h"

namespace ldt {

void MessageWorker::push(std::shared_ptr<HostMessage> message) {
  std::lock_guard<std::mutex> lock(queue_->mutex);
  queue_->pending.push_back(std::move(message));
  if (!thread_.joinable()) {
    thread_ = std::thread([queue = queue_] { run(queue); });
  }
  queue_->changed.notify_all();
}

void MessageWorker::run(const std::shared_ptr<Queue>& queue) {
  std::unique_lock<std::mutex> lock(queue->mutex);
  while (true) {
    queue->changed.wait(lock, [&] { return queue->stopping || !queue->pending.empty(); });
    if (queue->pending.empty()) return;
    auto message = queue->pending.front();
    lock.unlock();
    message->finish();
    lock.lock();
    queue->pending.pop_front();
    queue->changed.notify_all();
    lock.unlock();
    message.reset();  // may free tensors: not under the lock
    lock.lock();
  }
}

bool MessageWorker::drain(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(queue_->mutex);
  return queue_->changed.wait_until(lock, deadline, [this] { return queue_->pending.empty(); });
}

void MessageWorker::abort() {
  std::lock_guard<std::mutex> lock(queue_->mutex);
  for (const auto& message : queue_->pending) {
    message->abort();
  }
}

void MessageWorker::stop() {
  {
    std::lock_guard<std::mutex> lock(queue_->mutex);
    queue_->stopping = true;
    queue_->changed.notify_all();
  }
  const bool own_thread = thread_.get_id() == std::this_thread::get_id();
  std::unique_lock<std::mutex> lock(joining_, std::defer_lock);
  if (own_thread && !lock.try_lock()) return;  // another thread is joining this one
  if (!own_thread) lock.lock();
  if (!thread_.joinable()) return;
  if (own_thread) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

HostLane::HostLane(LaneOptions options, std::shared_ptr<GroupComm> comm)
    : Lane(std::move(options), std::move(comm)) {
  pool_ = std::make_shared<ReceivePool>(options_.device, std::nullopt);
  context_ = std::make_shared<HostContext>(HostContext{options_, comm_, stats_, failure_});
}

HostLane::~HostLane() { close(std::chrono::milliseconds(0)); }

Lane::Work HostLane::launch(MessageWorker& worker, std::shared_ptr<HostMessage> message) {
  message->post();
  Work work = message->work();
  worker.push(std::move(message));
  return work;
}

Lane::Work HostLane::launch_send(const std::vector<at::Tensor>& tensors, int peer,
                                 const MessageName& name) {
  auto message = MessageTensors::for_send(tensors, options_.device, name);
  return launch(outgoing_, std::make_shared<SendMessage>(context_, c10d::OpType::SEND,
                                                         std::move(message), peer, name.text()));
}

Lane::Work HostLane::launch_receive(const std::vector<at::Tensor>& tensors, int peer,
                                    const MessageName& name) {
  auto message = MessageTensors::for_receive(tensors, options_.device, name, pool_->block_finder());
  if (comm_->is_leader()) {
    return launch(incoming_,
                  std::make_shared<ReceiveMessage>(context_, c10d::OpType::RECV, std::move(message),
                                                   peer, name.text()));
  }
  return launch(incoming_, std::make_shared<MemberMessage>(context_, c10d::OpType::BROADCAST,
                                                           std::move(message), peer, name.text()));
}

void HostLane::abort(const std::string& reason) {
  failure_->set(reason);
  outgoing_.abort();
  incoming_.abort();
}

void HostLane::close(std::chrono::milliseconds timeout) {
  const auto name = c10::str("lane ", options_.name);
  const auto deadline = std::chrono::steady_clock::now() + checked_timeout(timeout, name);
  if (!outgoing_.drain(deadline) || !incoming_.drain(deadline)) {
    abort(c10::str(name, ": closed with messages still in flight"));
  }
  failure_->set(c10::str(name, ": is closed"));
  outgoing_.stop();
  incoming_.stop();
}

}  // namespace ldt
