// Operations of a group, as tasks on its stream.
#include "group.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <mutex>
#include <utility>

#include "operators.h"
#include "streams.h"

namespace ldt::test_device {
namespace {

using Tensors = std::vector<at::Tensor>;

/// Sends and receives over gloo for the thread of the group's stream, until they are aborted.
class Wire {
 public:
  Wire(c10::intrusive_ptr<c10d::Backend> gloo, std::chrono::milliseconds timeout)
      : gloo_(std::move(gloo)), timeout_(timeout) {}

  int rank() const { return gloo_->getRank(); }
  int size() const { return gloo_->getSize(); }
  void limit(std::chrono::milliseconds timeout) {
    std::lock_guard<std::mutex> lock(mutex_);
    timeout_ = timeout;
  }
  void send(const at::Tensor& tensor, int peer) {
    run([&](Tensors& tensors) { return gloo_->send(tensors, peer, /*tag=*/0); }, tensor);
  }
  void receive(const at::Tensor& tensor, int peer) {
    run([&](Tensors& tensors) { return gloo_->recv(tensors, peer, /*tag=*/0); }, tensor);
  }
  void broadcast(const at::Tensor& tensor, int root) {
    if (rank() != root) return receive(tensor, root);
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != root) send(tensor, peer);
    }
  }
  void fail(const std::string& text) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (error_.empty()) error_ = text;
    if (pending_) pending_->abort();
  }
  void throw_if_failed() const {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK_WITH(DistBackendError, error_.empty(), error_);
  }

 private:
  template <typename Start>
  void run(Start start, const at::Tensor& tensor) {
    Tensors tensors{tensor};
    c10::intrusive_ptr<c10d::Work> work;
    std::chrono::milliseconds timeout;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      TORCH_CHECK_WITH(DistBackendError, error_.empty(), error_);
      work = pending_ = start(tensors);
      timeout = timeout_;
    }
    work->wait(timeout);
    std::lock_guard<std::mutex> lock(mutex_);
    pending_.reset();
  }

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  mutable std::mutex mutex_;
  std::chrono::milliseconds timeout_;
  c10::intrusive_ptr<c10d::Work> pending_;
  std::string error_;
};

class GroupWork final : public c10d::Work {
 public:
  GroupWork(c10d::OpType type, std::shared_ptr<Wire> wire, Tensors tensors, c10::Event end)
      : Work(-1, type),
        wire_(std::move(wire)),
        tensors_(std::move(tensors)),
        end_(std::move(end)) {}

  bool isCompleted() override { return end_.query(); }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    wire_->throw_if_failed();
    end_.block(current_stream(end_.device_index()).handle());
    tensors_.clear();
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return tensors_; }

 private:
  std::shared_ptr<Wire> wire_;
  Tensors tensors_;
  c10::Event end_;
};

class StreamGroup final : public c10d::Backend {
 public:
  StreamGroup(c10::intrusive_ptr<c10d::Backend> gloo, std::chrono::milliseconds timeout,
              bool can_abort)
      : Backend(gloo->getRank(), gloo->getSize()),
        wire_(std::make_shared<Wire>(std::move(gloo), timeout)),
        can_abort_(can_abort) {}

  const std::string getBackendName() const override { return "hccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { wire_->limit(timeout); }
  void abort() override {
    if (can_abort_) wire_->fail("the group was aborted");
  }
  void shutdown() override { abort(); }
  void setSequenceNumberForGroup() override {}

  c10::intrusive_ptr<c10d::Work> send(Tensors& tensors, int peer, int /*tag*/) override {
    return start(c10d::OpType::SEND, tensors,
                 [peer](Wire& wire, const at::Tensor& tensor) { wire.send(tensor, peer); });
  }
  c10::intrusive_ptr<c10d::Work> recv(Tensors& tensors, int peer, int /*tag*/) override {
    return start(c10d::OpType::RECV, tensors,
                 [peer](Wire& wire, const at::Tensor& tensor) { wire.receive(tensor, peer); });
  }
  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors,
                                           const c10d::BroadcastOptions& options) override {
    return start(c10d::OpType::BROADCAST, tensors,
                 [root = static_cast<int>(options.rootRank)](Wire& wire, const at::Tensor& tensor) {
                   wire.broadcast(tensor, root);
                 });
  }
  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors,
                                           const c10d::AllreduceOptions& options) override {
    const c10d::ReduceOp::RedOpType kind = options.reduceOp;
    TORCH_CHECK(kind == c10d::ReduceOp::SUM || kind == c10d::ReduceOp::MAX,
                "allreduce of the test device: expected SUM or MAX, got ", static_cast<int>(kind));
    return start(c10d::OpType::ALLREDUCE, tensors, [kind](Wire& wire, const at::Tensor& tensor) {
      reduce_to_first(wire, tensor, kind);
      wire.broadcast(tensor, 0);
    });
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    const auto device = options.device.value_or(c10::impl::VirtualGuardImpl(kType).getDevice());
    Tensors flag{at::zeros({1}, at::TensorOptions().dtype(at::kByte).device(device))};
    return allreduce(flag, {});
  }

 private:
  // In rank order, so that sums do not depend on timing.
  static void reduce_to_first(Wire& wire, const at::Tensor& tensor,
                              c10d::ReduceOp::RedOpType kind) {
    if (wire.rank() != 0) return wire.send(tensor, 0);
    const auto received = at::empty_like(tensor);
    for (int peer = 1; peer < wire.size(); ++peer) {
      wire.receive(received, peer);
      tensor.copy_(kind == c10d::ReduceOp::SUM ? tensor + received : at::maximum(tensor, received));
    }
  }

  template <typename Move>
  c10::intrusive_ptr<c10d::Work> start(c10d::OpType type, const Tensors& tensors, Move move) {
    wire_->throw_if_failed();
    TORCH_CHECK(
        tensors.size() == 1 && tensors[0].is_contiguous() && tensors[0].device().type() == kType,
        "a group of the test device: expected one contiguous tensor on npu");
    const auto device = tensors[0].device();
    if (!stream_) stream_ = &new_stream(device.index());
    c10::Event begin(kType);
    begin.record(current_stream(device.index()).handle());
    begin.block(stream_->handle());
    stream_->enqueue([wire = wire_, move, memory = on_cpu(tensors[0])] {
      try {
        move(*wire, memory);
      } catch (const std::exception& error) {
        wire->fail(error.what());  // for waiters; operations queued behind end at once
      }
    });
    c10::Event end(kType);
    end.record(stream_->handle());
    return c10::make_intrusive<GroupWork>(type, wire_, tensors, std::move(end));
  }

  const std::shared_ptr<Wire> wire_;
  const bool can_abort_;
  Stream* stream_ = nullptr;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_group(c10::intrusive_ptr<c10d::Backend> gloo,
                                             std::chrono::milliseconds timeout, bool can_abort) {
  return c10::make_intrusive<StreamGroup>(std::move(gloo), timeout, can_abort);
}

}  // namespace ldt::test_device
