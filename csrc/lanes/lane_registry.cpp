// Adding lanes and stopping them.
#include "lanes/lane_registry.h"

#include <algorithm>

#include "common/error.h"
#include "common/owner_process.h"

namespace ldt {
namespace {

template <typename Step>
void attempt(const Step& step) noexcept {
  try {
    step();
  } catch (...) {
    TORCH_WARN("a lane could not be stopped: ", text_of(std::current_exception()));
  }
}

}  // namespace

LaneRegistry& LaneRegistry::get() {
  static auto* registry = new LaneRegistry;
  static OwnerProcess process;
  if (!process.is_current()) {
    registry = new LaneRegistry;
    process = OwnerProcess();
  }
  return *registry;
}

void LaneRegistry::add(const std::shared_ptr<Lane>& lane) {
  const std::lock_guard<std::mutex> lock(mutex_);
  lanes_.erase(
      std::remove_if(lanes_.begin(), lanes_.end(), [](const auto& weak) { return weak.expired(); }),
      lanes_.end());
  lanes_.push_back(lane);
}

std::vector<std::shared_ptr<Lane>> LaneRegistry::alive() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<Lane>> alive;
  for (const auto& weak : lanes_) {
    if (auto lane = weak.lock()) alive.push_back(std::move(lane));
  }
  return alive;
}

void LaneRegistry::abort_all(const std::string& reason) {
  const auto lanes = alive();
  for (const auto& lane : lanes) {
    attempt([&] { lane->abort(reason); });
  }
  for (const auto& lane : lanes) {
    attempt([&] { lane->close(std::chrono::milliseconds(0)); });
  }
}

}  // namespace ldt
