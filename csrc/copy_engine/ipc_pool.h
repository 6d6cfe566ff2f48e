// Memory that lanes receive into and other processes write to.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "common/event_pool.h"
#include "copy_engine/copy_engine.h"

namespace ldt {

/// Blocks that are exported once and then lent out again and again: what another process has mapped
/// must not be freed. They are freed when the last owner has gone, which each end of a route and
/// each tensor is, and what then was enqueued on the stream that was current when they were lent.
class IpcPool : public std::enable_shared_from_this<IpcPool> {
 public:
  IpcPool(c10::Device device, CopyEngine& engine);
  ~IpcPool();
  IpcPool(const IpcPool&) = delete;
  IpcPool& operator=(const IpcPool&) = delete;

  /// Bytes on the device, of a block that nobody has. Its last user's work may still be queued. The
  /// block comes back when the tensor dies.
  at::Tensor allocate(int64_t bytes);

  struct Place {
    size_t block = 0;  // a number that stays
    int64_t offset = 0;
  };
  /// Where `address` lies; empty if it is not memory of this object.
  std::optional<Place> place_of(const void* address) const;
  /// For the other process.
  MessageRing::Block exported(size_t block) const;

  c10::Device device() const { return device_; }

 private:
  struct Block {
    CopyEngine::Memory memory;
    int64_t bytes = 0;
    bool is_in_use = false;
    std::optional<c10::Stream> stream;  // that was current when it was lent
  };

  struct Blocks {
    ~Blocks();

    const c10::Device device;
    CopyEngine& engine;
    std::vector<Block> all;
  };

  void take_back(const void* address) noexcept;

  const c10::Device device_;
  CopyEngine& engine_;
  mutable std::mutex mutex_;
  const std::shared_ptr<Blocks> blocks_;
};

}  // namespace ldt
