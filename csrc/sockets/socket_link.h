// The TCP connections between two processes, shared by all their lanes.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "common/failure.h"
#include "common/owner_process.h"
#include "sockets/incoming.h"
#include "sockets/outgoing.h"

namespace ldt {

struct SocketLinkOptions {
  std::string name;                      // of the link, in error texts: "the connections to rank 1"
  uint64_t window = uint64_t{16} << 20;  // see Outgoing
};

/// Sends messages in the order in which send() is called, over whichever connection takes the next
/// frame. A lane whose receiver is late holds up no other. One thread of its own does all I/O.
///
/// Any thread may call. The last owner must not be a forked child.
class SocketLink : public std::enable_shared_from_this<SocketLink> {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;

  /// Takes over connected, stream-oriented sockets, in the order of the other end's.
  static std::shared_ptr<SocketLink> create(std::vector<int> sockets, SocketLinkOptions options);
  ~SocketLink();
  SocketLink(const SocketLink&) = delete;

  /// `bytes` is contiguous host memory; it is kept until the work is done. `done`: see SocketWork.
  Work send(uint32_t lane, const at::Tensor& bytes, SocketWork::Done done = nullptr);
  Work receive(uint32_t lane, const at::Tensor& bytes, SocketWork::Done done = nullptr);

  /// Sends what is pending, tells the other end that nothing follows, and waits until it has said
  /// so, too. Fails what is left at the deadline. Idempotent.
  void close(std::chrono::milliseconds timeout);
  /// Fails everything pending and everything later with `reason`. Returns at once.
  void abort(const std::string& reason);

 private:
  struct Connection;

  SocketLink(std::vector<int> sockets, SocketLinkOptions options);
  Work issue(c10d::OpType type, uint32_t lane, const at::Tensor& bytes, SocketWork::Done done);
  void wake();
  void run();
  void fail(const std::string& reason);
  void take_events();
  bool write_some(Connection& connection);
  bool begin_frame(Connection& connection);
  void read_some(Connection& connection);
  void end_reading(Connection& connection);
  void end_writing();
  void watch(Connection& connection);
  bool has_ended() const;

  const SocketLinkOptions options_;
  const OwnerProcess process_;
  std::vector<std::unique_ptr<Connection>> connections_;
  int events_ = -1;  // epoll
  int wakeup_ = -1;  // eventfd

  std::mutex mutex_;  // guards what follows
  std::condition_variable ended_changed_;
  Outgoing outgoing_;
  Incoming incoming_;
  Failure failure_;
  bool closing_ = false;
  bool peer_ended_ = false;  // nothing more comes
  bool ended_ = false;       // the thread does no more I/O
  std::thread thread_;
};

}  // namespace ldt
