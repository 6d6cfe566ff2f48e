// Creates, opens and matches.
#include "copy_engine/shared_ring.h"

#include <new>
#include <thread>

#include "common/interrupt.h"

namespace ldt {

SharedRing::SharedRing(c10::Device device)
    : pages_(device, sizeof(MessageRing)), ring_(new (pages_.data()) MessageRing) {}

SharedRing::SharedRing(c10::Device device, const std::string& handle)
    : pages_(device, handle), ring_(static_cast<MessageRing*>(pages_.data())) {
  if (pages_.bytes() != sizeof(MessageRing)) {
    throw_lane_error("expected a message ring of ", sizeof(MessageRing),
                     " bytes from the other end, got ", pages_.bytes(),
                     ": do all ranks run the same version of this package?");
  }
}

MessageRing::Outcome match_message(const SharedRing& ring, uint64_t number, MessageRing::Side side,
                                   const Proposal& mine, std::chrono::milliseconds timeout) {
  auto outcome = ring->match(number, side, mine);
  const auto start = std::chrono::steady_clock::now();
  while (outcome.protocol == MessageRing::Protocol::kTooFar) {
    if (std::chrono::steady_clock::now() - start >= timeout) {
      throw_lane_error("the other end has been more than ", MessageRing::kEntries,
                       " tensors behind for ", timeout.count(), " ms: does it still take part?");
    }
    if (ring->has_failed()) throw_lane_error("one of the two ends has failed");
    check_interrupt();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    outcome = ring->match(number, side, mine);
  }
  if (outcome.bytes_of_other != 0 && outcome.bytes_of_other != mine.bytes) {
    throw_lane_error("the two ends differ: here a tensor of ", mine.bytes, " bytes, there one of ",
                     outcome.bytes_of_other, " bytes");
  }
  return outcome;
}

}  // namespace ldt
