// Pools device memory that other processes on the host can map.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "common/event_pool.h"
#include "copy_engine/copy_engine.h"

namespace ldt {

/// Allocates from blocks that are exported once and then reused, because memory that another
/// process has mapped must not be freed. Blocks are freed when their last owner is gone (the ends
/// of IPC links and the tensors own them) and the streams they were allocated on have finished.
class IpcPool : public std::enable_shared_from_this<IpcPool> {
 public:
  IpcPool(c10::Device device, CopyEngine& engine);
  ~IpcPool();
  IpcPool(const IpcPool&) = delete;
  IpcPool& operator=(const IpcPool&) = delete;

  /// Bytes of an unused block. Work of its last user may still be enqueued. The block returns when
  /// the tensor dies.
  at::Tensor allocate(int64_t bytes);

  struct Place {
    size_t block = 0;  // stable index
    int64_t offset = 0;
  };
  /// Where `address` lies; empty if it is not memory of this pool.
  std::optional<Place> place_of(const void* address) const;
  /// What another process needs to map the block.
  MessageRing::Block exported(size_t block) const;

  c10::Device device() const { return device_; }

 private:
  struct Block {
    CopyEngine::Memory memory;
    int64_t bytes = 0;
    bool is_in_use = false;
    std::optional<c10::Stream> stream;  // current at allocation
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
