// One list for the process.
#include "peers/graveyard.h"

#include <algorithm>
#include <list>
#include <mutex>

namespace ldt {
namespace {

struct Kept {
  std::vector<std::shared_ptr<const End>> until;
  std::shared_ptr<const void> what;
  bool is_over() const {
    return std::all_of(until.begin(), until.end(),
                       [](const auto& end) { return end->is_reached(); });
  }
};

struct Graveyard {
  std::mutex mutex;
  std::list<Kept> kept;
};

Graveyard& graveyard() {
  static auto* const made = new Graveyard;
  return *made;
}

}  // namespace

void keep_until(std::vector<std::shared_ptr<const End>> until, std::shared_ptr<const void> what) {
  std::list<Kept> over;  // freed after the lock: what is freed may have more to keep
  const std::lock_guard<std::mutex> lock(graveyard().mutex);
  auto& kept = graveyard().kept;
  kept.push_back({std::move(until), std::move(what)});
  for (auto one = kept.begin(); one != kept.end();) {
    const auto next = std::next(one);
    if (one->is_over()) over.splice(over.end(), kept, one);
    one = next;
  }
}

}  // namespace ldt
