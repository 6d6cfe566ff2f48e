// The host's part of a host link: moves pieces between slots and a socket link.
#pragma once

#include <memory>
#include <string>
#include <thread>

#include "common/owner_process.h"
#include "host_links/staging_ring.h"
#include "sockets/socket_link.h"

namespace ldt {

/// Starts the transfer of each piece once the device is done with its slot, in order, on a thread
/// of its own.
class StagedTransfers {
 public:
  enum class Direction : uint8_t { kSend, kReceive };

  StagedTransfers(std::shared_ptr<StagingRing> ring, std::shared_ptr<SocketLink> link,
                  uint32_t lane, Direction direction);
  ~StagedTransfers();
  StagedTransfers(const StagedTransfers&) = delete;
  StagedTransfers& operator=(const StagedTransfers&) = delete;

  /// Adds the next piece.
  void add(int64_t bytes);
  /// Waits until the transfers of all pieces have been started. The device must be done with them.
  void flush();
  /// Starts nothing more, and fails the link: a transfer under way cannot be taken back.
  void abort();
  /// Why the link failed: see DelayedFailure.
  std::string failure() const;

 private:
  struct State;

  const OwnerProcess process_;
  // Callbacks of the link may outlast this. They do not own the link: its thread cannot end itself.
  const std::shared_ptr<State> state_;
  const std::shared_ptr<SocketLink> link_;
  std::thread thread_;
};

}  // namespace ldt
