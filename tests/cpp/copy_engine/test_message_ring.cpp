// Two ends of a route that agree, message by message, on how its bytes move.
#include <sstream>
#include <string>
#include <thread>

#include "common/error.h"
#include "copy_engine/message_ring.h"
#include "copy_engine/shared_memory.h"
#include "testing.h"

using ldt::Flag;
using ldt::Ledger;
using ldt::Proposal;
using Course = Ledger::Course;
using Side = Ledger::Side;

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
  Ledger ledger;
  const auto check = [&](uint64_t number, Side first, bool has_memory, Course course) {
    const auto second = first == Side::kSender ? Side::kReceiver : Side::kSender;
    const auto one = ledger.meet(number, first, proposal(8, has_memory, 40 + number));
    const auto other = ledger.meet(number, second, proposal(8, true, 99));
    EXPECT(one.course == course);
    EXPECT(other.course == course);
    EXPECT_EQ(one.bytes_of_other, 0u);
    EXPECT_EQ(other.bytes_of_other, 8u);
    EXPECT_EQ(other.decided.offset, 40 + number);
  };
  check(0, Side::kReceiver, true, Course::kPosted);
  check(1, Side::kSender, true, Course::kOffered);
  check(2, Side::kReceiver, false, Course::kBounced);
  check(3, Side::kSender, false, Course::kBounced);
}

TEST(an_end_that_is_a_whole_ledger_ahead_has_to_wait) {
  Ledger ledger;
  for (uint64_t number = 0; number < Ledger::kEntries; ++number) {
    EXPECT(ledger.meet(number, Side::kSender, proposal(1, false)).course == Course::kBounced);
  }
  const auto ahead = Ledger::kEntries;
  EXPECT(ledger.meet(ahead, Side::kSender, proposal(1, false)).course == Course::kTooFar);
  EXPECT(ledger.meet(0, Side::kReceiver, proposal(1, true)).course == Course::kBounced);
  EXPECT(ledger.meet(ahead, Side::kSender, proposal(1, false)).course == Course::kBounced);
}

TEST(two_processes_never_disagree) {
  // The pages are opened a second time, as another process would.
  ldt::SharedPages pages(sizeof(Ledger));
  auto* const here = new (pages.data()) Ledger;
  const ldt::SharedPages opened(pages.ticket());
  auto* const there = static_cast<Ledger*>(opened.data());
  constexpr uint64_t kMessages = 5 * Ledger::kEntries;
  std::vector<Ledger::Outcome> sent(kMessages), received(kMessages);
  const auto walk = [](Ledger* ledger, Side side, std::vector<Ledger::Outcome>& outcomes) {
    for (uint64_t number = 0; number < outcomes.size(); ++number) {
      const bool has_memory = (number * 7 + static_cast<uint64_t>(side)) % 3 != 0;
      do {
        outcomes[number] = ledger->meet(number, side, proposal(number + 1, has_memory, number));
      } while (outcomes[number].course == Course::kTooFar);
    }
  };
  std::thread sender([&] { walk(there, Side::kSender, sent); });
  walk(here, Side::kReceiver, received);
  sender.join();
  int different = 0;
  for (uint64_t number = 0; number < kMessages; ++number) {
    const bool agree = sent[number].course == received[number].course &&
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

TEST(pages_are_refused_when_they_are_not_there) {
  EXPECT_THROW(ldt::SharedPages("not a ticket"), ldt::LaneError, "four numbers");
  EXPECT_THROW(ldt::SharedPages("1 999999 4096 1"), ldt::LaneError, "/proc/1/fd/999999");
  ldt::SharedPages pages(4096);
  std::istringstream fields(pages.ticket());
  std::string process, number, bytes, id;
  fields >> process >> number >> bytes >> id;
  const auto prefix = process + " " + number;
  EXPECT_THROW(ldt::SharedPages(prefix + " 8192 " + id), ldt::LaneError, "expected 8192 bytes");
  EXPECT_THROW(ldt::SharedPages(prefix + " 4096 1" + id), ldt::LaneError, "of file 1" + id);
}
