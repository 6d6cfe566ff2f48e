// How host lanes end: errors that name a rank, timeouts, aborts, and a clean end at any moment.
#include <random>

#include "lanes/host_lanes.h"
#include "testing.h"

using namespace ldt;
using namespace ldt::testing;
using std::chrono::milliseconds;

namespace {

/// Its stage group refuses every broadcast, like a destroyed one.
class RefusingGroupComm final : public MemoryGroupComm {
 public:
  using MemoryGroupComm::MemoryGroupComm;
  Work broadcast(const at::Tensor&) override { throw std::runtime_error("no such group"); }
};

}  // namespace

TEST(a_broken_broadcast_is_not_blamed_on_the_peer) {
  auto wire = std::make_shared<MemoryWire>();
  auto sender = lane_of(wire, 0, false), leader = lane_of(wire, 1, true),
       member = lane_of(wire, 2, true);
  auto sent = sender->send({at::ones({8})}, 1, "");
  auto led = leader->receive({at::empty({8})}, 0, "F0"),
       received = member->receive({at::empty({9})}, -1, "F0");
  sent->wait(kNoTimeout);
  const std::string failed = ": the broadcast inside the stage failed after ";
  EXPECT_THROW(led->wait(kNoTimeout), LaneError,
               "receive F0 from group rank 0 of float32[8] (32 bytes)" + failed);
  EXPECT_THROW(received->wait(kNoTimeout), LaneError,
               "receive F0 from the stage's leader of float32[9] (36 bytes)" + failed);
  EXPECT_THROW(led->wait(kNoTimeout), LaneError, " s: sizes differ");
}

TEST(a_broadcast_that_cannot_be_started_fails_the_lane) {
  auto wire = std::make_shared<MemoryWire>();
  auto sender = lane_of(wire, 0, false);
  auto leader = make_lane(new_options(), std::make_shared<RefusingGroupComm>(wire, 1, true));
  auto member = make_lane(new_options(), std::make_shared<RefusingGroupComm>(wire, 2, true));
  const std::string refused =
      "from the stage's leader of float32[8]: the broadcast inside the stage could not be started: "
      "no such group";
  EXPECT_THROW(member->receive({at::empty({8})}, -1, ""), LaneError, refused);
  EXPECT_THROW(member->receive({at::empty({9})}, -1, ""), LaneError, refused);
  auto led = leader->receive({at::empty({8})}, 0, "");
  sender->send({at::ones({8})}, 1, "");
  EXPECT_THROW(led->wait(kNoTimeout), LaneError, ": the broadcast inside the stage failed after ");
  EXPECT_THROW(leader->receive({at::empty({8})}, 0, ""), LaneError, " s: no such group");
}

TEST(a_broken_transfer_is_not_blamed_on_the_stage) {
  auto wire = std::make_shared<MemoryWire>();
  auto sender = lane_of(wire, 0, false), leader = lane_of(wire, 1, true);
  auto led = leader->receive({at::empty({8})}, 0, "F0");
  sender->send({at::ones({9})}, 1, "");
  EXPECT_THROW(led->wait(kNoTimeout), LaneError, "(32 bytes) failed after ");
}

TEST(texts_name_the_peer_by_its_global_rank) {
  auto options = new_options();
  options.global_ranks = {10, 12};
  auto lane = make_lane(
      options, std::make_shared<MemoryGroupComm>(std::make_shared<MemoryWire>(), 1, false));
  EXPECT_THROW(lane->receive({at::empty({2}).to_sparse()}, 0, ""), LaneError, " from rank 10 of ");
  EXPECT_THROW(lane->send({at::empty({2}).to_sparse()}, 0, ""), LaneError, " to rank 10 of ");
  EXPECT_THROW(lane->send({at::empty({2})}, 2, ""), LaneError, " to group rank 2 of ");
}

TEST(a_callback_may_drop_the_lane) {
  auto wire = std::make_shared<MemoryWire>();
  auto sender = lane_of(wire, 0, false), receiver = lane_of(wire, 1, false);
  auto received = receiver->receive({at::empty({8})}, 0, "");
  std::atomic<bool> dropped{false};
  received->getFuture()->addCallback([&](c10::ivalue::Future&) {
    receiver.reset();
    dropped = true;
  });
  sender->send({at::ones({8})}, 1, "")->wait(kNoTimeout);
  received->wait(kNoTimeout);
  while (!dropped) std::this_thread::yield();
}

TEST(an_abort_ends_every_wait_with_its_reason) {
  auto wire = std::make_shared<MemoryWire>();
  auto leader = lane_of(wire, 1, true), member = lane_of(wire, 2, true);
  auto first = leader->receive({at::empty({8})}, 0, ""),
       second = leader->receive({at::empty({8})}, 0, "");
  auto third = member->receive({at::empty({8})}, -1, "");
  leader->abort("the reason");
  member->abort("another reason");
  EXPECT_THROW(first->wait(kNoTimeout), LaneError, "the reason");
  EXPECT_THROW(second->wait(kNoTimeout), LaneError, "the reason");
  EXPECT_THROW(third->wait(kNoTimeout), LaneError, "another reason");
  EXPECT_THROW(leader->receive({at::empty({8})}, 0, ""), LaneError, "the reason");
}

TEST(no_timeout_is_too_long) {
  auto wire = std::make_shared<MemoryWire>();
  auto receiver = lane_of(wire, 1, false, milliseconds::max());
  auto sender = lane_of(wire, 0, false, milliseconds::max());
  const auto target = at::empty({8});
  auto received = receiver->receive({target}, 0, "");
  std::thread sends([&] {
    std::this_thread::sleep_for(milliseconds(20));
    sender->send({at::ones({8})}, 1, "")->wait(milliseconds::max());
  });
  EXPECT(received->wait(milliseconds::max()));
  sends.join();
  receiver->close(milliseconds::max());
  EXPECT(at::equal(target, at::ones({8})));
}

TEST(negative_timeouts_are_refused) {
  auto wire = std::make_shared<MemoryWire>();
  EXPECT_THROW(lane_of(wire, 1, false, milliseconds(-1)), LaneError,
               "lane test: timeout: expected a time of 0 or more, got -1 ms");
  auto receiver = lane_of(wire, 1, false);
  auto work = receiver->receive({at::empty({8})}, 0, "F0");
  EXPECT_THROW(work->wait(milliseconds(-5)), LaneError, "timeout: expected a time of 0 or more");
  EXPECT_THROW(receiver->close(milliseconds(-5)), LaneError, "got -5 ms");
}

TEST(a_message_that_never_comes_is_named) {
  auto wire = std::make_shared<MemoryWire>();
  auto receiver = lane_of(wire, 1, false, milliseconds(50));
  auto work = receiver->receive({at::empty({8})}, 0, "F0 microbatch 3");
  EXPECT_THROW(work->wait(milliseconds(1)), LaneError, "not done after the 1 ms");
  EXPECT_THROW(work->wait(kNoTimeout), LaneError,
               "receive F0 microbatch 3 from group rank 0 of float32[8] (32 bytes) failed");
}

TEST(a_lane_can_be_dropped_at_any_moment) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    auto wire = std::make_shared<MemoryWire>(std::chrono::microseconds(random() % 20));
    auto sender = lane_of(wire, 0, false), leader = lane_of(wire, 1, true),
         member = lane_of(wire, 2, true);
    std::thread sends([&] {
      for (int i = 0; i < 5; ++i) sender->send({numbers(i, 30)}, 1, "");
      sender.reset();
    });
    for (int i = 0; i < 5; ++i) {
      leader->receive({leader->empty({30}, at::kLong)}, 0, "");
      member->receive({member->empty({30}, at::kLong)}, -1, "");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
    leader.reset();
    member.reset();
    sends.join();
  }
}
