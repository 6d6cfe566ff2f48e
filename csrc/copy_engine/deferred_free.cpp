// One list per process.
#include "copy_engine/deferred_free.h"

#include <list>
#include <mutex>

namespace ldt {
namespace {

struct DeferredFree {
  std::function<bool()> is_unused;
  std::shared_ptr<const void> what;
};

class DeferredFrees {
 public:
  void add(DeferredFree entry) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      kept_.push_back(std::move(entry));
    }
    sweep();
  }

  void sweep() {
    std::list<DeferredFree> unused;  // freed after the lock: its destructor may defer more
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto one = kept_.begin(); one != kept_.end();) {
      const auto next = std::next(one);
      if (is_unused(*one)) unused.splice(unused.end(), kept_, one);
      one = next;
    }
  }

 private:
  // A failed device answers with an error. Whether the memory is in use is then unknown, and
  // destructors must not throw.
  static bool is_unused(const DeferredFree& entry) {
    try {
      return entry.is_unused();
    } catch (const std::exception&) {
      return false;
    }
  }

  std::mutex mutex_;
  std::list<DeferredFree> kept_;
};

DeferredFrees& deferred_frees() {
  static auto* const made = new DeferredFrees;
  return *made;
}

}  // namespace

void free_when(std::function<bool()> is_unused, std::shared_ptr<const void> what) {
  deferred_frees().add({std::move(is_unused), std::move(what)});
}

void run_deferred_frees() { deferred_frees().sweep(); }

}  // namespace ldt
