// One list for all.
#include "copy_engine/deferred_free.h"

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
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      kept_.push_back(std::move(leftover));
    }
    sweep();
  }

  void sweep() {
    std::list<Leftover> unused;  // freed after the lock: that may leave something else
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto one = kept_.begin(); one != kept_.end();) {
      const auto next = std::next(one);
      if (is_unused(*one)) unused.splice(unused.end(), kept_, one);
      one = next;
    }
  }

 private:
  // A device that has failed answers with an error: then nobody knows, and destructors must not
  // throw.
  static bool is_unused(const Leftover& leftover) {
    try {
      return leftover.is_unused();
    } catch (const std::exception&) {
      return false;
    }
  }

  std::mutex mutex_;
  std::list<Leftover> kept_;
};

Leftovers& leftovers() {
  static auto* const made = new Leftovers;
  return *made;
}

}  // namespace

void keep_until(std::function<bool()> is_unused, std::shared_ptr<const void> what) {
  leftovers().add({std::move(is_unused), std::move(what)});
}

void sweep_leftovers() { leftovers().sweep(); }

}  // namespace ldt
