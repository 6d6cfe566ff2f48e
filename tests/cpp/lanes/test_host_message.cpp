// A host message by itself, without a lane.
#include "lanes/host_message.h"

#include "common/timeout.h"
#include "process_group/memory_group_comm.h"
#include "testing.h"

using namespace ldt;
using ldt::testing::MemoryWork;

namespace {

std::shared_ptr<HostContext> new_context() {
  auto context = std::make_shared<HostContext>();
  context->options.timeout = std::chrono::milliseconds(100);
  context->stats = std::make_shared<LaneStats>();
  context->failure = std::make_shared<Failure>();
  return context;
}

const std::string kLabel;
const MessageName kName(kLabel, [] { return std::string("probe"); });

/// Starts nothing by itself: the test does.
class Probe final : public HostMessage {
 public:
  explicit Probe(std::shared_ptr<const HostContext> context)
      : HostMessage(std::move(context), c10d::OpType::SEND,
                    MessageTensors::for_send({at::ones({2})}, at::kCPU, kName), 0, kName.text()) {}
  using HostMessage::started;
  using HostMessage::wait_for_transfer;
  void post() override {}

 private:
  void run() override {}
};

}  // namespace

TEST(a_transfer_that_starts_after_the_failure_is_aborted) {
  const auto context = new_context();
  Probe probe(context);
  context->failure->set("the reason");
  probe.abort();  // before the transfer is known
  const auto late = probe.started(c10::make_intrusive<MemoryWork>());
  EXPECT_THROW(probe.wait_for_transfer(late), LaneError, "the reason");
}

TEST(a_transfer_that_starts_in_a_sound_lane_is_not_aborted) {
  Probe probe(new_context());
  const auto transfer = probe.started(c10::make_intrusive<MemoryWork>());
  EXPECT_THROW(probe.wait_for_transfer(transfer), std::runtime_error, "timed out");
}

TEST(timeouts_are_checked_and_cut) {
  using std::chrono::milliseconds;
  EXPECT(checked_timeout(1e18, "it") == kLongestTimeout);
  EXPECT(checked_timeout(HUGE_VAL, "it") == kLongestTimeout);
  EXPECT(checked_timeout(milliseconds::max(), "it") == kLongestTimeout);
  EXPECT(checked_timeout(1e-9, "it") == milliseconds(1));
  EXPECT(checked_timeout(0.25, "it") == milliseconds(250));
  EXPECT(checked_timeout(0.0, "it") == milliseconds(0));
  EXPECT(std::chrono::steady_clock::now() + kLongestTimeout > std::chrono::steady_clock::now());
  EXPECT(std::chrono::system_clock::now() + kLongestTimeout > std::chrono::system_clock::now());
  EXPECT_THROW(checked_timeout(std::nan(""), "it"), LaneError, "it: timeout: expected a time");
  EXPECT_THROW(checked_timeout(-1.5, "it"), LaneError, "got -1.5 s");
  EXPECT_THROW(checked_timeout(-HUGE_VAL, "it"), LaneError, "got -inf s");
}
