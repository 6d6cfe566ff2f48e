// Every live lane of this process, so that their threads can be stopped before the interpreter
// goes.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lanes/lane.h"

namespace ldt {

class LaneRegistry {
 public:
  /// That of this process: a forked child starts with an empty one. Never destroyed, as lanes may
  /// outlive static destruction.
  static LaneRegistry& get();

  void add(const std::shared_ptr<Lane>& lane);
  /// Aborts, then stops every lane. Warns of one that cannot be stopped, and goes on.
  void abort_all(const std::string& reason);

 private:
  std::vector<std::shared_ptr<Lane>> alive();

  std::mutex mutex_;
  std::vector<std::weak_ptr<Lane>> lanes_;
};

}  // namespace ldt
