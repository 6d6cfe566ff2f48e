// The messages that a socket link has to send, in the order in which they were issued.
#pragma once

#include <ATen/ATen.h>

#include <deque>
#include <map>
#include <memory>

#include "sockets/frame.h"
#include "sockets/socket_work.h"

namespace ldt {

/// A frame on its way, and what it belongs to. `payload` lives as long as `message`.
struct OutgoingFrame {
  FrameHeader header;
  const uint8_t* payload = nullptr;
  std::shared_ptr<struct OutgoingMessage> message;  // null for kPosted
};

struct OutgoingMessage {
  uint32_t lane;
  uint64_t number;
  at::Tensor bytes;
  c10::intrusive_ptr<SocketWork> work;
  uint64_t taken = 0;      // bytes that frames were made of
  uint64_t in_flight = 0;  // frames that are being written
  bool begun = false;
};

/// Not thread safe: the link's mutex guards it.
///
/// A message may begin once its receive is posted, or while the messages of its lane that have
/// begun before theirs were have less than `window` bytes; one may always.
class Outgoing {
 public:
  explicit Outgoing(uint64_t window) : window_(window) {}

  void push(uint32_t lane, const at::Tensor& bytes, c10::intrusive_ptr<SocketWork> work);
  /// The other end has posted `count` receives of the lane.
  void set_posted(uint32_t lane, uint64_t count);
  /// Asks for a frame that tells the other end the same.
  void announce_posted(uint32_t lane, uint64_t count) { announcements_[lane] = count; }

  /// Fills in the next frame of the first message that may be sent. False if there is none.
  bool next(OutgoingFrame& frame);
  /// The frame is in the kernel's hands. Returns the work of the message if it was its last.
  c10::intrusive_ptr<SocketWork> written(const OutgoingFrame& frame);
  bool empty() const { return messages_.empty() && announcements_.empty(); }
  bool has_messages() const { return !messages_.empty(); }
  /// Forgets everything and returns the works.
  std::vector<c10::intrusive_ptr<SocketWork>> clear();

 private:
  struct State {
    uint64_t pushed = 0;
    uint64_t posted = 0;
    std::map<uint64_t, uint64_t> early;  // bytes of messages begun before their receive was posted
    uint64_t early_bytes = 0;
  };

  bool may_begin(const OutgoingMessage& message, uint64_t size) const;

  const uint64_t window_;
  std::deque<std::shared_ptr<OutgoingMessage>> messages_;  // until all their frames are made
  std::map<uint32_t, State> lanes_;
  std::map<uint32_t, uint64_t> announcements_;
};

}  // namespace ldt
