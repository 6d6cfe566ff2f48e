// The pool of pieces, and the use of one.
#include "metadata/device/staging.h"

#ifdef LDT_CUDA_KERNELS

#include <algorithm>
#include <bit>
#include <mutex>
#include <vector>

#include "common/streams.h"
#include "metadata/format/error.h"

namespace ldt::metadata {
namespace {

constexpr int64_t kSmallestPiece = int64_t{1} << 18;

// Pieces by device. A call takes a piece out, so that threads do not wait for each other. Pieces
// are never freed; sizes are powers of two, so that few are outgrown.
class Pool {
 public:
  // False if no free piece is large enough.
  bool take(int device, int64_t bytes, Staging& taken) {
    const std::lock_guard lock(mutex_);
    auto& pieces = pieces_of(device);
    const auto found = std::find_if(pieces.begin(), pieces.end(), [bytes](const Staging& piece) {
      return piece.bytes >= bytes && (!piece.marked || ldt_metadata_is_done(&piece));
    });
    if (found == pieces.end()) return false;
    taken = *found;
    taken.marked = false;
    pieces.erase(found);
    return true;
  }

  void give_back(int device, const Staging& piece) {
    const std::lock_guard lock(mutex_);
    pieces_of(device).push_back(piece);
  }

 private:
  std::vector<Staging>& pieces_of(int device) {
    const auto index = static_cast<size_t>(device);
    if (index >= pieces_.size()) pieces_.resize(index + 1);
    return pieces_[index];
  }

  std::mutex mutex_;
  std::vector<std::vector<Staging>> pieces_;
};

Pool& pool() {
  static auto* const made = new Pool;  // never destroyed
  return *made;
}

void* current_handle(c10::Device device) { return native_handle(ldt::current_stream(device)); }

}  // namespace

StagedCall::StagedCall(const char* task, c10::Device device, int64_t bytes)
    : task_(task), device_(device), stream_(current_handle(device)) {
  check(ldt_metadata_begin(device.index(), stream_));  // fails in a forked process: before the lock
  if (pool().take(device.index(), bytes, staging_)) return;
  const auto size = std::bit_ceil(static_cast<uint64_t>(std::max(bytes, kSmallestPiece)));
  check(ldt_metadata_allocate(&staging_, static_cast<int64_t>(size)));
}

StagedCall::~StagedCall() {
  if (settled_) pool().give_back(device_.index(), staging_);
}

void StagedCall::check(const char* error) const {
  if (error != nullptr) fail("metadata: ", task_, " on ", device_.str(), " failed: ", error);
}

void StagedCall::send(int64_t bytes) {
  settled_ = false;
  check(ldt_metadata_send(&staging_, bytes, stream_));
}

void StagedCall::fetch(int64_t offset, int64_t bytes) {
  settled_ = false;
  check(ldt_metadata_fetch(&staging_, offset, bytes, stream_));
  settled_ = true;
}

void StagedCall::mark() {
  check(ldt_metadata_mark(&staging_, stream_));
  staging_.marked = true;
  settled_ = true;
}

}  // namespace ldt::metadata

#endif
