// Socket links over pairs of sockets of one process: order, flow control, early messages, endings.
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "common/error.h"
#include "sockets/socket_link.h"
#include "testing.h"

using namespace std::chrono_literals;
using ldt::LaneError;
using ldt::SocketLink;

namespace {

constexpr uint32_t kLane = 1, kOther = 2;
constexpr uint64_t kWindow = uint64_t{1} << 20;

struct Pair {
  std::shared_ptr<SocketLink> left, right;
};

Pair connected(int count, uint64_t window = kWindow) {
  std::vector<int> lefts, rights;
  for (int i = 0; i < count; ++i) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends)) throw std::runtime_error("socketpair");
    lefts.push_back(ends[0]);
    rights.push_back(ends[1]);
  }
  return {SocketLink::create(lefts, {"left", window}),
          SocketLink::create(rights, {"right", window})};
}

at::Tensor numbers(int64_t seed, int64_t count) {
  return (at::arange(count, at::kLong) * (seed + 1)).view(at::kByte);
}

at::Tensor room(int64_t count) { return at::zeros({8 * count}, at::kByte); }

void wait(const SocketLink::Work& work) { work->wait(20s); }

// Closes both ends side by side, as two processes do.
void close(const Pair& pair) {
  std::thread other([&] { pair.left->close(10s); });
  pair.right->close(10s);
  other.join();
}

}  // namespace

TEST(messages_of_any_size_arrive_in_order_over_any_number_of_connections) {
  for (const int count : {1, 3}) {
    const auto pair = connected(count);
    std::vector<at::Tensor> targets;
    std::vector<SocketLink::Work> works;
    const std::vector<int64_t> sizes{0, 1, 7, 16384, 100000, 3, 0, 50000};
    for (size_t i = 0; i < sizes.size(); ++i) {
      works.push_back(pair.left->send(kLane, numbers(i, sizes[i])));
      works.push_back(pair.right->send(kLane, numbers(i + 50, sizes[i])));
    }
    for (const auto size : sizes) {
      for (const auto& link : {pair.right, pair.left}) {
        targets.push_back(room(size));
        works.push_back(link->receive(kLane, targets.back()));
      }
    }
    for (const auto& work : works) wait(work);
    for (size_t i = 0; i < sizes.size(); ++i) {
      EXPECT(targets[2 * i].equal(numbers(i, sizes[i])));
      EXPECT(targets[2 * i + 1].equal(numbers(i + 50, sizes[i])));
    }
    close(pair);
  }
}

TEST(a_late_receiver_holds_up_no_other_lane) {
  const auto pair = connected(2);
  std::vector<SocketLink::Work> early;
  for (int i = 0; i < 6; ++i)
    early.push_back(pair.left->send(kLane, numbers(i, 1 << 16)));  // 3 MiB
  auto target = room(1 << 18);
  const auto received = pair.right->receive(kOther, target);
  wait(pair.left->send(kOther, numbers(9, 1 << 18)));
  wait(received);
  EXPECT(target.equal(numbers(9, 1 << 18)));
  EXPECT(!early.back()->isCompleted());  // beyond the window
  for (int i = 0; i < 6; ++i) {
    auto late = room(1 << 16);
    wait(pair.right->receive(kLane, late));
    EXPECT(late.equal(numbers(i, 1 << 16)));
  }
  for (const auto& work : early) wait(work);
  close(pair);
}

TEST(a_message_larger_than_the_window_arrives) {
  const auto pair = connected(1, 1000);
  std::vector<SocketLink::Work> works;
  for (int i = 0; i < 3; ++i) works.push_back(pair.left->send(kLane, numbers(i, 5000)));
  for (int i = 0; i < 3; ++i) {
    auto target = room(5000);
    wait(pair.right->receive(kLane, target));
    EXPECT(target.equal(numbers(i, 5000)));
  }
  for (const auto& work : works) wait(work);
  close(pair);
}

TEST(what_is_pending_is_sent_before_a_link_closes) {
  const auto pair = connected(2);
  auto target = room(1 << 20);
  const auto received = pair.right->receive(kLane, target);
  const auto sent = pair.left->send(kLane, numbers(1, 1 << 20));
  std::thread other([&] { pair.left->close(10s); });
  wait(received);
  EXPECT(target.equal(numbers(1, 1 << 20)));
  pair.right->close(10s);
  other.join();
  wait(sent);
  EXPECT_THROW(pair.left->send(kLane, room(1)), LaneError, "closed");
}

TEST(what_came_before_the_other_end_closed_can_be_received) {
  const auto pair = connected(2);
  wait(pair.right->send(kLane, numbers(1, 1000)));
  std::thread other([&] { pair.right->close(10s); });
  std::this_thread::sleep_for(100ms);  // until this end has read that nothing follows
  const auto target = room(1000);
  wait(pair.left->receive(kLane, target));
  EXPECT(target.equal(numbers(1, 1000)));
  const auto late = pair.left->receive(kLane, room(1));
  EXPECT_THROW(wait(late), LaneError, "left: the other end closed");
  EXPECT_THROW(pair.left->send(kLane, room(1)), LaneError, "left: the other end closed");
  other.join();
}

TEST(a_size_that_differs_fails_both_ends) {
  const auto pair = connected(1);
  const auto received = pair.right->receive(kLane, room(4));
  const auto sent = pair.left->send(kLane, numbers(1, 6));
  EXPECT_THROW(wait(received), LaneError, "a message of 48 bytes came where 32 are expected");
  EXPECT_THROW(wait(pair.left->receive(kLane, room(1))), LaneError, "left: ");
}

TEST(an_end_that_goes_fails_what_waits_for_it) {
  auto pair = connected(2);
  const auto received = pair.left->receive(kLane, room(4));
  pair.right.reset();
  EXPECT_THROW(wait(received), LaneError, "left: ");
  EXPECT_THROW(pair.left->send(kLane, room(1)), LaneError, "left: ");
}

TEST(an_abort_ends_all_waits) {
  const auto pair = connected(1);
  const auto received = pair.left->receive(kLane, room(4));
  std::vector<SocketLink::Work> sent;
  for (int i = 0; i < 4; ++i) sent.push_back(pair.left->send(kOther, numbers(i, 1 << 17)));
  received->abort();
  EXPECT_THROW(wait(received), LaneError, "aborted");
  EXPECT_THROW(wait(sent.back()), LaneError, "aborted");
}

TEST(a_wait_ends_after_its_timeout) {
  const auto pair = connected(1);
  const auto received = pair.left->receive(kLane, room(4));
  EXPECT_THROW(received->wait(20ms), LaneError, "not done after 20 ms");
  wait(pair.right->send(kLane, numbers(1, 4)));
  wait(received);
  close(pair);
}

TEST(bytes_that_are_no_frame_fail_the_link) {
  int ends[2];
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  const auto link = SocketLink::create({ends[0]}, {"link", kWindow});
  const auto received = link->receive(kLane, room(4));
  const std::string text(200, 'x');
  EXPECT_EQ(write(ends[1], text.data(), text.size()), 200);
  EXPECT_THROW(wait(received), LaneError, "not a frame of ldt");
  ::close(ends[1]);
}

TEST(a_work_that_two_threads_complete_calls_back_once) {
  const auto error = std::make_exception_ptr(std::runtime_error("it failed"));
  for (int round = 0; round < 2000; ++round) {
    std::atomic<int> calls{0}, ready{0};
    const auto work = c10::make_intrusive<ldt::SocketWork>(
        c10d::OpType::SEND, [] {}, [&](const std::exception_ptr&) { ++calls; });
    const auto complete = [&] {
      ++ready;
      while (ready < 2) {
      }
      work->complete(error);
    };
    std::thread other(complete);
    complete();
    other.join();
    EXPECT_EQ(calls.load(), 1);
  }
}
