// Host lanes between threads: order, pieces, lifetimes, and a clean end at any moment.
#include <random>

#include "lanes/lane.h"
#include "memory_transport.h"
#include "testing.h"

using namespace ldt;
using ldt::testing::MemoryTransport;
using ldt::testing::MemoryWire;
using std::chrono::milliseconds;

namespace {

std::shared_ptr<Lane> lane_of(const std::shared_ptr<MemoryWire>& wire, int rank, bool stage,
                              bool announce = false, milliseconds timeout = milliseconds(20'000)) {
  LaneOptions options;
  options.name = "test";
  options.chunk_bytes = 64;
  options.timeout = timeout;
  options.announce = announce;
  return make_lane(options, std::make_shared<MemoryTransport>(wire, rank, stage));
}

at::Tensor numbers(int64_t seed, int64_t count) {
  return at::arange(count, at::kLong) * (seed + 1);
}

}  // namespace

TEST(a_receive_and_its_broadcast_are_one_work) {
  auto wire = std::make_shared<MemoryWire>(std::chrono::microseconds(50));
  auto sender = lane_of(wire, 0, false), leader = lane_of(wire, 1, true),
       member = lane_of(wire, 2, true);
  std::vector<at::Tensor> at_leader, at_member;
  std::vector<Lane::Work> works;
  for (int i = 0; i < 20; ++i) {
    at_leader.push_back(leader->empty({50 + i}, at::kLong));
    at_member.push_back(member->empty({50 + i}, at::kLong));
    works.push_back(leader->receive({at_leader.back()}, 0, ""));
    works.push_back(member->receive({at_member.back()}, -1, ""));
  }
  for (int i = 0; i < 20; ++i) works.push_back(sender->send({numbers(i, 50 + i)}, 1, ""));
  for (const auto& work : works) {
    EXPECT(work->wait(kNoTimeout));
    EXPECT(work->wait(kNoTimeout));
  }
  for (int i = 0; i < 20; ++i) {
    EXPECT(at::equal(at_leader[i], numbers(i, 50 + i)));
    EXPECT(at::equal(at_member[i], numbers(i, 50 + i)));
  }
  EXPECT_EQ(leader->stats().received_messages.load(), 20);
  EXPECT_EQ(leader->stats().broadcast_bytes.load(), leader->stats().received_bytes.load());
}

TEST(one_piece_is_broadcast_while_the_next_is_still_on_its_way) {
  auto wire = std::make_shared<MemoryWire>();
  auto leader = lane_of(wire, 1, true), member = lane_of(wire, 2, true);
  const auto source = numbers(3, 16), at_member = at::zeros({16}, at::kLong);  // two pieces
  auto led = leader->receive({at::empty({16}, at::kLong)}, 0, "");
  auto heard = member->receive({at_member}, -1, "");
  EXPECT_EQ(wire->posted(Transport::kPayload), 2);  // every receive is posted at launch
  MemoryTransport sender(wire, 0, false);
  const auto bytes = source.view(at::kByte);
  sender.send(bytes.narrow(0, 0, 64), 1, Transport::kPayload);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  // The member has started both of its halves, the leader that of the piece that has landed.
  while (wire->posted(MemoryTransport::kBroadcast) < 3 &&
         std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
  EXPECT_EQ(wire->posted(MemoryTransport::kBroadcast), 3);
  EXPECT(!led->isCompleted());
  sender.send(bytes.narrow(0, 64, 64), 1, Transport::kPayload);
  EXPECT(led->wait(kNoTimeout) && heard->wait(kNoTimeout));
  EXPECT(at::equal(at_member, source));
}

TEST(waiting_issues_nothing) {
  auto wire = std::make_shared<MemoryWire>();
  auto sender = lane_of(wire, 0, false), leader = lane_of(wire, 1, true);
  auto member = lane_of(wire, 2, true);
  std::vector<Lane::Work> works{leader->receive({at::empty({8})}, 0, ""),
                                member->receive({at::empty({8})}, -1, ""),
                                sender->send({at::ones({8})}, 1, "")};
  for (const auto& work : works) work->wait(kNoTimeout);
  const int transfers = wire->posted(Transport::kPayload);
  const int broadcasts = wire->posted(MemoryTransport::kBroadcast);
  EXPECT_EQ(transfers, 2);
  EXPECT_EQ(broadcasts, 2);
  std::vector<std::thread> threads;
  for (const auto& work : works) threads.emplace_back([&] { work->wait(kNoTimeout); });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wire->posted(Transport::kPayload), transfers);
  EXPECT_EQ(wire->posted(MemoryTransport::kBroadcast), broadcasts);
}

TEST(a_stage_that_disagrees_is_told_and_the_lane_goes_on) {
  auto wire = std::make_shared<MemoryWire>();
  auto sender = lane_of(wire, 0, false, true), leader = lane_of(wire, 1, true, true);
  auto member = lane_of(wire, 2, true, true);
  auto sent = sender->send({at::ones({8})}, 1, "");
  auto led = leader->receive({at::empty({8})}, 0, ""),
       heard = member->receive({at::empty({9})}, -1, "");
  EXPECT(sent->wait(kNoTimeout));
  EXPECT_THROW(led->wait(kNoTimeout), LaneError, "another rank of this stage");
  EXPECT_THROW(heard->wait(kNoTimeout), LaneError, "here float32[9] (36 bytes), the sender and");
  const auto at_leader = at::empty({8}), at_member = at::empty({8});
  sender->send({at::ones({8})}, 1, "");
  led = leader->receive({at_leader}, 0, "");
  member->receive({at_member}, -1, "")->wait(kNoTimeout);
  led->wait(kNoTimeout);
  EXPECT(at::equal(at_leader, at::ones({8})));
  EXPECT(at::equal(at_member, at::ones({8})));
}

TEST(a_broken_broadcast_is_not_blamed_on_the_peer) {
  auto wire = std::make_shared<MemoryWire>();
  auto sender = lane_of(wire, 0, false), leader = lane_of(wire, 1, true),
       member = lane_of(wire, 2, true);
  auto sent = sender->send({at::ones({8})}, 1, "");
  auto led = leader->receive({at::empty({8})}, 0, "F0"),
       heard = member->receive({at::empty({9})}, -1, "F0");
  sent->wait(kNoTimeout);
  const std::string failed = ": the broadcast inside the stage failed after ";
  EXPECT_THROW(led->wait(kNoTimeout), LaneError,
               "receive F0 from group rank 0 of float32[8] (32 bytes)" + failed);
  EXPECT_THROW(heard->wait(kNoTimeout), LaneError,
               "receive F0 from the stage's leader of float32[9] (36 bytes)" + failed);
  EXPECT_THROW(led->wait(kNoTimeout), LaneError, " s: sizes differ");
}

TEST(a_broken_transfer_is_not_blamed_on_the_stage) {
  auto wire = std::make_shared<MemoryWire>();
  auto sender = lane_of(wire, 0, false), leader = lane_of(wire, 1, true);
  auto led = leader->receive({at::empty({8})}, 0, "F0");
  sender->send({at::ones({9})}, 1, "");
  EXPECT_THROW(led->wait(kNoTimeout), LaneError, "(32 bytes) failed after ");
}

TEST(texts_name_the_peer_by_its_global_rank) {
  LaneOptions options;
  options.name = "test";
  options.chunk_bytes = 64;
  options.timeout = milliseconds(20'000);
  options.global_ranks = {10, 12};
  auto lane = make_lane(
      options, std::make_shared<MemoryTransport>(std::make_shared<MemoryWire>(), 1, false));
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

TEST(crossing_announced_messages_do_not_wait_for_one_another) {
  auto wire = std::make_shared<MemoryWire>();
  auto left = lane_of(wire, 0, false, true), right = lane_of(wire, 1, false, true);
  const auto heard_left = at::empty({7}, at::kLong), heard_right = at::empty({9}, at::kLong);
  std::vector<Lane::Work> works{
      left->send({numbers(1, 9)}, 1, ""), right->send({numbers(2, 7)}, 0, ""),
      left->receive({heard_left}, 1, ""), right->receive({heard_right}, 0, "")};
  for (const auto& work : works) EXPECT(work->wait(kNoTimeout));
  EXPECT(at::equal(heard_left, numbers(2, 7)));
  EXPECT(at::equal(heard_right, numbers(1, 9)));
}

TEST(a_mismatch_is_an_error_on_both_sides_and_the_lane_goes_on) {
  auto wire = std::make_shared<MemoryWire>();
  auto sender = lane_of(wire, 0, false, true), receiver = lane_of(wire, 1, false, true);
  auto sent = sender->send({at::ones({4, 8})}, 1, "");
  auto received = receiver->receive({at::empty({4, 6})}, 0, "");
  EXPECT_THROW(sent->wait(kNoTimeout), LaneError, "the receiver expects float32[4, 6]");
  EXPECT_THROW(received->wait(kNoTimeout), LaneError, "the sender has float32[4, 8]");
  const auto target = at::empty({3});
  sent = sender->send({at::ones({3})}, 1, "");
  receiver->receive({target}, 0, "")->wait(kNoTimeout);
  EXPECT(at::equal(target, at::ones({3})));
}

TEST(non_contiguous_and_empty_tensors_travel) {
  auto wire = std::make_shared<MemoryWire>();
  auto sender = lane_of(wire, 0, false), receiver = lane_of(wire, 1, false);
  const auto source = at::arange(12, at::kFloat).view({3, 4});
  const auto target = at::empty({3, 4}).t(), nothing = at::empty({0, 5});
  auto sent = sender->send({source.t(), at::empty({0, 5})}, 1, "");
  receiver->receive({target, nothing}, 0, "")->wait(kNoTimeout);
  sent->wait(kNoTimeout);
  EXPECT(at::equal(target, source.t()));
}

TEST(memory_is_free_when_the_work_is_done) {
  auto wire = std::make_shared<MemoryWire>();
  auto sender = lane_of(wire, 0, false), receiver = lane_of(wire, 1, false);
  auto tensor = at::ones({8});
  c10::weak_intrusive_ptr<c10::StorageImpl> storage(tensor.storage().getWeakStorageImpl());
  auto sent = sender->send({tensor}, 1, "");
  tensor.reset();
  EXPECT(!storage.expired());
  receiver->receive({at::empty({8})}, 0, "")->wait(kNoTimeout);
  sent->wait(kNoTimeout);
  EXPECT(storage.expired());
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
  auto receiver = lane_of(wire, 1, false, true, milliseconds::max());
  auto sender = lane_of(wire, 0, false, true, milliseconds::max());
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
  EXPECT_THROW(lane_of(wire, 1, false, false, milliseconds(-1)), LaneError,
               "lane test: timeout: expected a time of 0 or more, got -1 ms");
  auto receiver = lane_of(wire, 1, false);
  auto work = receiver->receive({at::empty({8})}, 0, "F0");
  EXPECT_THROW(work->wait(milliseconds(-5)), LaneError, "timeout: expected a time of 0 or more");
  EXPECT_THROW(receiver->close(milliseconds(-5)), LaneError, "got -5 ms");
}

TEST(a_message_that_never_comes_is_named) {
  auto wire = std::make_shared<MemoryWire>();
  auto receiver = lane_of(wire, 1, false, false, milliseconds(50));
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
