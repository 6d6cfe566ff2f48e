// One list for all.
#include "peers/leftovers.h"

#include <list>
#include <mutex>

namespace ldt {
namespace {

struct Leftover {
  std::function<bool()> is_unused;
  std::shared_ptr<const void> what;
};

class Leftovers {
 public:
  void add(Leftover leftover) {
    std::list<Leftover> unused;  // freed after the lock: that may leave something else
    const std::lock_guard<std::mutex> lock(mutex_);
    kept_.push_back(std::move(leftover));
    for (auto one = kept_.begin(); one != kept_.end();) {
      const auto next = std::next(one);
      if (one->is_unused()) unused.splice(unused.end(), kept_, one);
      one = next;
    }
  }

 private:
  std::mutex mutex_;
  std::list<Leftover> kept_;
};

}  // namespace

void keep_until(std::function<bool()> is_unused, std::shared_ptr<const void> what) {
  static auto* const leftovers = new Leftovers;
  leftovers->add({std::move(is_unused), std::move(what)});
}

}  // namespace ldt
