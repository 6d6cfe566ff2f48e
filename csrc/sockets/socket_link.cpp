// The thread that moves frames.
#include "sockets/socket_link.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "common/error.h"

namespace ldt {
namespace {

// How much one connection moves before the others have their turn.
constexpr int kReadsPerTurn = 8;
constexpr const char* kOtherEndClosed = ": the other end closed";

std::exception_ptr lane_error(const std::string& text) {
  return std::make_exception_ptr(
      LaneError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text));
}

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

}  // namespace

struct SocketLink::Connection {
  explicit Connection(int descriptor) : descriptor(descriptor) {}
  ~Connection() { ::close(descriptor); }

  const int descriptor;
  uint32_t watched = 0;
  // Writing. `left` counts header and payload of `out`.
  OutgoingFrame out;
  uint64_t left = 0;
  bool write_ended = false;
  // Reading: a header, then its payload.
  FrameHeader in;
  uint64_t got = 0;
  uint8_t* payload = nullptr;
  std::shared_ptr<IncomingMessage> message;
  bool read_ended = false;
};

std::shared_ptr<SocketLink> SocketLink::create(std::vector<int> sockets,
                                               SocketLinkOptions options) {
  return std::shared_ptr<SocketLink>(new SocketLink(std::move(sockets), std::move(options)));
}

SocketLink::SocketLink(std::vector<int> sockets, SocketLinkOptions options)
    : options_(std::move(options)), outgoing_(options_.window), incoming_(options_.window) {
  for (const int socket : sockets) connections_.push_back(std::make_unique<Connection>(socket));
  if (connections_.empty()) throw_lane_error(options_.name, ": expected one socket or more");
  events_ = epoll_create1(EPOLL_CLOEXEC);
  wakeup_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  epoll_event event{.events = EPOLLIN, .data = {.ptr = nullptr}};
  bool ready = events_ >= 0 && wakeup_ >= 0 && !epoll_ctl(events_, EPOLL_CTL_ADD, wakeup_, &event);
  for (const auto& connection : connections_) {
    const int flags = fcntl(connection->descriptor, F_GETFL);
    event = {.events = 0, .data = {.ptr = connection.get()}};
    ready = ready && flags >= 0 && !fcntl(connection->descriptor, F_SETFL, flags | O_NONBLOCK) &&
            !epoll_ctl(events_, EPOLL_CTL_ADD, connection->descriptor, &event);
  }
  if (!ready) throw_lane_error(options_.name, ": ", std::strerror(errno));
  thread_ = std::thread([this] { run(); });
}

SocketLink::~SocketLink() {
  if (process_.is_current()) {
    abort(c10::str(options_.name, ": dropped"));
    thread_.join();
  } else {
    thread_.detach();  // a forked child has no such thread
  }
  ::close(wakeup_);
  ::close(events_);
}

SocketLink::Work SocketLink::issue(c10d::OpType type, uint32_t lane, const at::Tensor& bytes,
                                   SocketWork::Done on_done) {
  process_.check(options_.name);
  auto work = c10::make_intrusive<SocketWork>(
      type,
      [weak = weak_from_this()] {
        if (const auto link = weak.lock()) link->abort("a message was aborted");
      },
      std::move(on_done));
  c10::intrusive_ptr<SocketWork> done;
  bool in_vain = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    failure_.throw_if_happened();
    if (closing_) throw_lane_error(options_.name, ": closed");
    if (type == c10d::OpType::SEND) {
      if (peer_ended_) throw_lane_error(options_.name, kOtherEndClosed);
      outgoing_.push(lane, bytes, work);
    } else {
      const uint64_t posted = incoming_.post(lane, bytes, work);
      if (!peer_ended_) outgoing_.announce_posted(lane, posted);
      done = incoming_.take_early(lane);
      in_vain = peer_ended_ && !done;
    }
  }
  if (done) done->complete(nullptr);
  if (in_vain) fail(c10::str(options_.name, kOtherEndClosed));
  wake();
  return work;
}

SocketLink::Work SocketLink::send(uint32_t lane, const at::Tensor& bytes, SocketWork::Done done) {
  return issue(c10d::OpType::SEND, lane, bytes, std::move(done));
}

SocketLink::Work SocketLink::receive(uint32_t lane, const at::Tensor& bytes,
                                     SocketWork::Done done) {
  return issue(c10d::OpType::RECV, lane, bytes, std::move(done));
}

void SocketLink::wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wakeup_, &one, sizeof one);
}

void SocketLink::abort(const std::string& reason) {
  fail(reason);
  wake();
}

void SocketLink::fail(const std::string& reason) {
  std::vector<c10::intrusive_ptr<SocketWork>> works;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ended_ || !failure_.set(reason)) return;
    works = outgoing_.clear();
    for (auto& work : incoming_.clear()) works.push_back(std::move(work));
  }
  for (const auto& work : works) work->complete(lane_error(reason));
}

void SocketLink::close(std::chrono::milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  closing_ = true;
  wake();
  if (ended_changed_.wait_for(lock, timeout, [this] { return ended_; })) return;
  lock.unlock();
  abort(c10::str(options_.name, ": the other end did not close within ", timeout.count(), " ms"));
}

// ---- the thread ---------------------------------------------------------------------------------

bool SocketLink::begin_frame(Connection& connection) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (failure_.happened() || !outgoing_.next(connection.out)) return false;
  connection.left = sizeof(FrameHeader) + connection.out.header.length;
  return true;
}

// Returns whether the connection can take more.
bool SocketLink::write_some(Connection& connection) {
  if (!connection.left && !begin_frame(connection)) return false;
  auto& out = connection.out;
  const uint64_t size = sizeof(FrameHeader) + out.header.length, done = size - connection.left;
  iovec parts[2];
  int count = 0;
  if (done < sizeof(FrameHeader)) {
    parts[count++] = {reinterpret_cast<uint8_t*>(&out.header) + done, sizeof(FrameHeader) - done};
  }
  const uint64_t of_payload = done < sizeof(FrameHeader) ? 0 : done - sizeof(FrameHeader);
  if (of_payload < out.header.length) {
    parts[count++] = {const_cast<uint8_t*>(out.payload) + of_payload,
                      out.header.length - of_payload};
  }
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = count;
  const auto written = sendmsg(connection.descriptor, &message, MSG_NOSIGNAL);
  if (written < 0) {
    if (!would_block()) {
      fail(c10::str(options_.name, ": sending failed: ", std::strerror(errno)));
    }
    return false;
  }
  connection.left -= written;
  if (connection.left) return false;
  c10::intrusive_ptr<SocketWork> work;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    work = outgoing_.written(out);
    out.message.reset();
  }
  if (work) work->complete(nullptr);
  return true;
}

void SocketLink::read_some(Connection& connection) {
  for (int turn = 0; turn < kReadsPerTurn; ++turn) {
    const bool header = connection.got < sizeof(FrameHeader);
    auto* to = header ? reinterpret_cast<uint8_t*>(&connection.in) + connection.got
                      : connection.payload + (connection.got - sizeof(FrameHeader));
    const uint64_t size = sizeof(FrameHeader) + (header ? 0 : connection.in.length);
    if (size > connection.got) {
      const auto got = recv(connection.descriptor, to, size - connection.got, 0);
      if (got == 0) {
        end_reading(connection);
        return;
      }
      if (got < 0) {
        if (!would_block()) {
          fail(c10::str(options_.name, ": receiving failed: ", std::strerror(errno)));
        }
        return;
      }
      connection.got += got;
      if (connection.got < size) continue;
    }
    c10::intrusive_ptr<SocketWork> work;
    try {
      std::lock_guard<std::mutex> lock(mutex_);
      if (failure_.happened()) return;
      if (header) {
        if (!connection.in.is_valid()) throw_lane_error("not a frame of ldt");
        if (connection.in.kind == FrameHeader::kPosted) {
          outgoing_.set_posted(connection.in.lane, connection.in.message);
          connection.got = 0;
        } else {
          connection.message = incoming_.place(connection.in, connection.payload);
          if (connection.in.length) continue;
        }
      }
      if (connection.message) {
        work = incoming_.arrived(connection.in, connection.message);
        connection.message.reset();
        connection.got = 0;
      }
    } catch (...) {
      fail(c10::str(options_.name, ": ", text_of(std::current_exception())));
      return;
    }
    if (work) work->complete(nullptr);
  }
}

// The other end has said that nothing follows. Unless this end closes, too, that is a failure once
// it holds for all connections, as on others frames may still be under way, and something is left
// to do: messages that have come may still be received.
void SocketLink::end_reading(Connection& connection) {
  connection.read_ended = true;
  bool all = true, is_writing = false, is_lost;
  for (const auto& other : connections_) {
    all &= other->read_ended;
    is_writing |= other->left && other->out.message;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    peer_ended_ = all;
    const bool is_busy = is_writing || outgoing_.has_messages() || incoming_.is_waiting();
    is_lost = connection.got || (all && !closing_ && is_busy);
  }
  if (is_lost) fail(c10::str(options_.name, kOtherEndClosed));
}

void SocketLink::end_writing() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!closing_ || !outgoing_.empty()) return;
  }
  for (const auto& connection : connections_) {
    if (connection->left) return;
  }
  for (const auto& connection : connections_) {
    if (connection->write_ended) continue;
    shutdown(connection->descriptor, SHUT_WR);
    connection->write_ended = true;
  }
}

// A connection is watched for room while it has not taken all of a frame.
void SocketLink::watch(Connection& connection) {
  if (connection.read_ended && connection.write_ended) {  // epoll would report that without end
    epoll_ctl(events_, EPOLL_CTL_DEL, connection.descriptor, nullptr);
    return;
  }
  const uint32_t wanted =
      (connection.read_ended ? 0u : EPOLLIN) | (connection.left ? EPOLLOUT : 0u);
  if (wanted == connection.watched) return;
  epoll_event event{.events = wanted, .data = {.ptr = &connection}};
  epoll_ctl(events_, EPOLL_CTL_MOD, connection.descriptor, &event);
  connection.watched = wanted;
}

bool SocketLink::has_ended() const {
  for (const auto& connection : connections_) {
    if (!connection->read_ended || !connection->write_ended) return false;
  }
  return true;
}

void SocketLink::take_events() {
  epoll_event events[16];
  const int count = epoll_wait(events_, events, std::size(events), -1);
  for (int i = 0; i < count; ++i) {
    if (auto* connection = static_cast<Connection*>(events[i].data.ptr)) {
      if (events[i].events & ~EPOLLOUT) read_some(*connection);
    } else {
      uint64_t value;
      [[maybe_unused]] const auto got = ::read(wakeup_, &value, sizeof value);
    }
  }
}

void SocketLink::run() {
  for (const auto& connection : connections_) watch(*connection);
  while (!failure_.happened() && !has_ended()) {
    take_events();
    bool more = true;
    while (more && !failure_.happened()) {  // one frame for each connection in turn
      more = false;
      for (const auto& connection : connections_) more |= write_some(*connection);
    }
    end_writing();
    for (const auto& connection : connections_) watch(*connection);
  }
  fail(c10::str(options_.name, ": closed"));  // whatever is left; nothing after an earlier failure
  for (const auto& connection : connections_) {
    if (connection->out.message)
      connection->out.message->work->complete(lane_error(failure_.text()));
    shutdown(connection->descriptor, SHUT_RDWR);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  ended_ = true;
  ended_changed_.notify_all();
}

}  // namespace ldt
