// Each fork increments the generation in the child.
#include "common/owner_process.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>

#include "common/error.h"

namespace ldt {
namespace {

std::atomic<int> generation{0};
[[maybe_unused]] const int counting = pthread_atfork(nullptr, nullptr, [] { ++generation; });

}  // namespace

OwnerProcess::OwnerProcess() : generation_(generation), pid_(getpid()) {}

bool OwnerProcess::is_current() const { return generation_ == generation; }

void OwnerProcess::refuse(const std::string& what) const {
  throw_lane_error(what, ": it belongs to process ", pid_, ", this is process ", getpid(),
                   ", a forked child: use it where it was made");
}

}  // namespace ldt
