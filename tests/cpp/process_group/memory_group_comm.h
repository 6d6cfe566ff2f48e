// A transport between threads of one process: real bytes, rendezvous as in gloo, and a delay per
// transfer.
#pragma once

#include <ATen/core/ivalue_inl.h>

#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <thread>
#include <tuple>

#include "common/error.h"
#include "process_group/group_comm.h"

namespace ldt::testing {

/// Completes when both sides have joined; its wait returns false after an abort, as gloo's does.
class MemoryWork final : public c10d::Work {
 public:
  MemoryWork() : future_(c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get())) {}
  bool wait(std::chrono::milliseconds timeout) override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (waited_) throw std::logic_error("a backend's work was waited for twice");
    waited_ = true;
    const auto over = [this] { return completed_ || aborted_; };
    if (!cv_.wait_for(lock, timeout, over))
      throw std::runtime_error("the memory transport timed out");
    if (exception_) std::rethrow_exception(exception_);
    return !aborted_;
  }
  void abort() override {
    std::lock_guard<std::mutex> lock(mutex_);
    aborted_ = true;
    cv_.notify_all();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  void end(const std::string& error) {
    finish(error.empty() ? nullptr : std::make_exception_ptr(std::runtime_error(error)));
    error.empty() ? future_->markCompleted()
                  : future_->setError(std::make_exception_ptr(std::runtime_error(error)));
  }

 private:
  bool waited_ = false;
  bool aborted_ = false;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

/// State that the threads share: the posted halves of transfers that have not been matched yet.
class MemoryWire {
 public:
  struct Half {
    at::Tensor tensor;
    c10::intrusive_ptr<MemoryWork> work;
  };
  using Key = std::tuple<int, int, int>;  // source, target, kind

  explicit MemoryWire(std::chrono::microseconds delay = {}) : delay_(delay) {}

  GroupComm::Work post(const Key& key, const at::Tensor& tensor, bool sends) {
    auto work = c10::make_intrusive<MemoryWork>();
    std::lock_guard<std::mutex> lock(mutex_);
    ++posted_[std::get<2>(key)];
    auto& [sent, received] = halves_[key];
    (sends ? sent : received).push_back({tensor, work});
    while (!sent.empty() && !received.empty()) {
      meet(sent.front(), received.front());
      sent.pop_front();
      received.pop_front();
    }
    return work;
  }

  /// Returns how many transfers of this kind were started, on both sides together.
  int posted(int kind) {
    std::lock_guard<std::mutex> lock(mutex_);
    return posted_[kind];
  }

 private:
  void meet(const Half& sent, const Half& received) {
    std::this_thread::sleep_for(delay_);
    if (sent.tensor.numel() != received.tensor.numel()) {
      sent.work->end("sizes differ");
      received.work->end("sizes differ");
      return;
    }
    std::memcpy(received.tensor.mutable_data_ptr(), sent.tensor.const_data_ptr(),
                sent.tensor.nbytes());
    sent.work->end("");
    received.work->end("");
  }

  std::chrono::microseconds delay_;
  std::mutex mutex_;
  std::map<Key, std::pair<std::deque<Half>, std::deque<Half>>> halves_;
  std::map<int, int> posted_;
};

/// Rank 0 sends, rank 1 leads the receiving stage, rank 2 (if there is one) is its member.
class MemoryGroupComm : public GroupComm {
 public:
  static constexpr int kTransfer = 0, kBroadcast = 1;

  MemoryGroupComm(std::shared_ptr<MemoryWire> wire, int rank, bool stage)
      : wire_(std::move(wire)), rank_(rank), stage_(stage) {}

  Work send(const at::Tensor& bytes, int peer) override {
    return wire_->post({rank_, peer, kTransfer}, bytes, /*sends=*/true);
  }
  Work receive(const at::Tensor& bytes, int peer) override {
    return wire_->post({peer, rank_, kTransfer}, bytes, /*sends=*/false);
  }
  Work broadcast(const at::Tensor& bytes) override {
    return wire_->post({1, 2, kBroadcast}, bytes, /*sends=*/rank_ == 1);
  }
  void abort() override {}
  bool is_leader() const override { return rank_ < 2; }
  bool has_stage() const override { return stage_; }
  int num_peers() const override { return 2; }
  int own_peer() const override { return is_leader() ? rank_ : -1; }

 private:
  std::shared_ptr<MemoryWire> wire_;
  int rank_;
  bool stage_;
};

}  // namespace ldt::testing
