// Two ends agree, message by message, on how the bytes move.
#include <sstream>
#include <string>
#include <thread>

#include "common/error.h"
#include "copy_engine/message_ring.h"
#include "copy_engine/shared_memory.h"
#include "testing.h"

using ldt::Flag;
using ldt::MessageRing;
using ldt::Proposal;
using Protocol = MessageRing::Protocol;
using Side = MessageRing::Side;

namespace {

Proposal proposal(uint64_t bytes, bool has_memory, uint64_t offset = 0) {
  Proposal made;
  made.bytes = bytes;
  made.has_memory = has_memory;
  made.offset = offset;
  return made;
}

}  // namespace

TEST(who_comes_first_decides) {
  MessageRing ring;
  const auto check = [&](uint64_t number, Side first, bool has_memory, Protocol protocol) {
    const auto second = first == Side::kSender ? Side::kReceiver : Side::kSender;
    const auto one = ring.match(number, first, proposal(8, has_memory, 40 + number));
    const auto other = ring.match(number, second, proposal(8, true, 99));
    EXPECT(one.protocol == protocol);
    EXPECT(other.protocol == protocol);
    EXPECT_EQ(one.bytes_of_other, 0u);
    EXPECT_EQ(other.bytes_of_other, 8u);
    EXPECT_EQ(other.decided.offset, 40 + number);
  };
  check(0, Side::kReceiver, true, Protocol::kPosted);
  check(1, Side::kSender, true, Protocol::kOffered);
  check(2, Side::kReceiver, false, Protocol::kBounced);
  check(3, Side::kSender, false, Protocol::kBounced);
}

TEST(an_end_that_is_a_whole_ring_ahead_has_to_wait) {
  MessageRing ring;
  for (uint64_t number = 0; number < MessageRing::kEntries; ++number) {
    EXPECT(ring.match(number, Side::kSender, proposal(1, false)).protocol == Protocol::kBounced);
  }
  const auto ahead = MessageRing::kEntries;
  EXPECT(ring.match(ahead, Side::kSender, proposal(1, false)).protocol == Protocol::kTooFar);
  EXPECT(ring.match(0, Side::kReceiver, proposal(1, true)).protocol == Protocol::kBounced);
  EXPECT(ring.match(ahead, Side::kSender, proposal(1, false)).protocol == Protocol::kBounced);
}

TEST(two_processes_never_disagree) {
  // The pages are opened a second time, as another process would.
  ldt::SharedMemory pages(sizeof(MessageRing));
  auto* const here = new (pages.data()) MessageRing;
  const ldt::SharedMemory opened(pages.handle());
  auto* const there = static_cast<MessageRing*>(opened.data());
  constexpr uint64_t kMessages = 5 * MessageRing::kEntries;
  std::vector<MessageRing::Outcome> sent(kMessages), received(kMessages);
  const auto walk = [](MessageRing* ring, Side side, std::vector<MessageRing::Outcome>& outcomes) {
    for (uint64_t number = 0; number < outcomes.size(); ++number) {
      const bool has_memory = (number * 7 + static_cast<uint64_t>(side)) % 3 != 0;
      do {
        outcomes[number] = ring->match(number, side, proposal(number + 1, has_memory, number));
      } while (outcomes[number].protocol == Protocol::kTooFar);
    }
  };
  std::thread sender([&] { walk(there, Side::kSender, sent); });
  walk(here, Side::kReceiver, received);
  sender.join();
  int different = 0;
  for (uint64_t number = 0; number < kMessages; ++number) {
    const bool agree = sent[number].protocol == received[number].protocol &&
                       sent[number].decided.offset == number &&
                       received[number].decided.offset == number;
    different += agree ? 0 : 1;
  }
  EXPECT_EQ(different, 0);
}

TEST(a_failure_ends_the_waits_of_one_end_and_none_of_the_other) {
  Flag flag;
  EXPECT(flag.has_reached(0));
  EXPECT(!flag.has_reached(1));
  flag.count = 5;
  EXPECT(flag.has_reached(5));
  EXPECT(!flag.has_reached(6));
  flag.hold();
  EXPECT(!flag.has_reached(5));
  EXPECT(!flag.has_reached(0));
  EXPECT(flag.has_counted(5));  // for the end that writes it
  flag.release();
  flag.hold();  // too late
  EXPECT(flag.has_reached(1000000));
}

TEST(counts_go_on_after_the_lower_half_went_around) {
  Flag flag;
  flag.count = 3;
  flag.upper = 1;
  const auto around = uint64_t{1} << 32;
  EXPECT(flag.has_reached(around + 3));
  EXPECT(!flag.has_reached(around + 4));
  EXPECT(flag.has_counted(around + 3));
  EXPECT(!flag.has_counted(around + 4));
  EXPECT(flag.has_counted(around - 2));
}

TEST(counts_of_the_host_go_around_too) {
  Flag flag;
  const auto around = uint64_t{1} << 32;
  for (const uint64_t reached : {uint64_t{7}, around - 1, around + 2, 2 * around, 3 * around - 1}) {
    flag.count_to(reached);
    EXPECT(flag.has_reached(reached));
    EXPECT(!flag.has_reached(reached + 1));
  }
  flag.release();
  flag.count_to(3 * around);
  EXPECT(flag.has_reached(4 * around));
}

TEST(pages_are_refused_when_they_are_not_there) {
  EXPECT_THROW(ldt::SharedMemory("not a handle"), ldt::LaneError, "four numbers");
  EXPECT_THROW(ldt::SharedMemory("1 999999 4096 1"), ldt::LaneError, "/proc/1/fd/999999");
  ldt::SharedMemory pages(4096);
  std::istringstream fields(pages.handle());
  std::string process, number, bytes, id;
  fields >> process >> number >> bytes >> id;
  const auto prefix = process + " " + number;
  EXPECT_THROW(ldt::SharedMemory(prefix + " 8192 " + id), ldt::LaneError, "expected 8192 bytes");
  EXPECT_THROW(ldt::SharedMemory(prefix + " 4096 1" + id), ldt::LaneError, "of file 1" + id);
}
