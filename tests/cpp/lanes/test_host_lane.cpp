// Host lanes between threads: order, pieces, lifetimes.
#include "lanes/host_lanes.h"
#include "testing.h"

using namespace ldt;
using namespace ldt::testing;
using std::chrono::milliseconds;

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
  auto received = member->receive({at_member}, -1, "");
  EXPECT_EQ(wire->posted(MemoryGroupComm::kTransfer), 2);  // every receive is posted at launch
  MemoryGroupComm sender(wire, 0, false);
  const auto bytes = source.view(at::kByte);
  sender.send(bytes.narrow(0, 0, 64), 1);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  // The member has started both of its pieces, the leader the one that has arrived.
  while (wire->posted(MemoryGroupComm::kBroadcast) < 3 &&
         std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
  EXPECT_EQ(wire->posted(MemoryGroupComm::kBroadcast), 3);
  EXPECT(!led->isCompleted());
  sender.send(bytes.narrow(0, 64, 64), 1);
  EXPECT(led->wait(kNoTimeout) && received->wait(kNoTimeout));
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
  const int transfers = wire->posted(MemoryGroupComm::kTransfer);
  const int broadcasts = wire->posted(MemoryGroupComm::kBroadcast);
  EXPECT_EQ(transfers, 2);
  EXPECT_EQ(broadcasts, 2);
  std::vector<std::thread> threads;
  for (const auto& work : works) threads.emplace_back([&] { work->wait(kNoTimeout); });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wire->posted(MemoryGroupComm::kTransfer), transfers);
  EXPECT_EQ(wire->posted(MemoryGroupComm::kBroadcast), broadcasts);
}

TEST(crossing_messages_do_not_wait_for_one_another) {
  auto wire = std::make_shared<MemoryWire>();
  auto left = lane_of(wire, 0, false), right = lane_of(wire, 1, false);
  const auto from_left = at::empty({7}, at::kLong), from_right = at::empty({9}, at::kLong);
  std::vector<Lane::Work> works{
      left->send({numbers(1, 9)}, 1, ""), right->send({numbers(2, 7)}, 0, ""),
      left->receive({from_left}, 1, ""), right->receive({from_right}, 0, "")};
  for (const auto& work : works) EXPECT(work->wait(kNoTimeout));
  EXPECT(at::equal(from_left, numbers(2, 7)));
  EXPECT(at::equal(from_right, numbers(1, 9)));
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
