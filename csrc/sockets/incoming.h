// The messages that a socket link receives: where each frame goes.
#pragma once

#include <ATen/ATen.h>

#include <map>
#include <memory>

#include "sockets/frame.h"
#include "sockets/socket_work.h"

namespace ldt {

/// A message of which a frame has come, or whose receive is posted, or both.
struct IncomingMessage {
  uint64_t size = 0;
  uint64_t received = 0;
  bool arrives = false;  // a frame has come
  at::Tensor target;     // of the posted receive
  at::Tensor early;      // what came before it was posted
  c10::intrusive_ptr<SocketWork> work;

  bool complete() const { return arrives && received == size; }
};

/// Not thread safe: the link's mutex guards it.
class Incoming {
 public:
  explicit Incoming(uint64_t window) : window_(window) {}

  /// Returns how many receives of the lane are posted. Throws LaneError if a message of another
  /// size comes.
  uint64_t post(uint32_t lane, const at::Tensor& target, c10::intrusive_ptr<SocketWork> work);
  /// The message that a frame belongs to, and where its payload goes. Throws LaneError for a frame
  /// that no correct peer sends.
  std::shared_ptr<IncomingMessage> place(const FrameHeader& header, uint8_t*& payload);
  /// The payload of a frame is there. Returns the work of the message if it is complete.
  c10::intrusive_ptr<SocketWork> arrived(const FrameHeader& header,
                                         const std::shared_ptr<IncomingMessage>& message);
  /// The work of a message that was complete before its receive was posted; for use after post().
  c10::intrusive_ptr<SocketWork> take_early(uint32_t lane);
  /// Whether a posted receive has not got all of its message.
  bool is_waiting() const;
  /// Forgets everything and returns the works.
  std::vector<c10::intrusive_ptr<SocketWork>> clear();

 private:
  struct State {
    uint64_t posted = 0;
    std::map<uint64_t, std::shared_ptr<IncomingMessage>> messages;
    uint64_t early_bytes = 0;
  };

  c10::intrusive_ptr<SocketWork> finish(State& state, uint64_t number);

  const uint64_t window_;
  std::map<uint32_t, State> lanes_;
};

}  // namespace ldt
