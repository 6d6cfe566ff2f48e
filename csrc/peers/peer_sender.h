// The sending end of an edge: writes into another process's memory.
#pragma once

#include <array>
#include <memory>
#include <string>

#include "peers/edge.h"

namespace ldt {

/// Messages go in the order of begin(); every step is enqueued on the stream that is given.
class PeerSender {
 public:
  /// `offer` is that of the PeerReceiver. Throws LaneError, saying why, if its memory cannot be
  /// used.
  PeerSender(c10::Device device, const std::string& offer);
  ~PeerSender();

  /// The next message, of one tensor.
  void begin(const c10::Stream& stream, int64_t bytes, std::chrono::milliseconds patience);
  /// Its next bytes, from `source`.
  void push(const c10::Stream& stream, const char* source, int64_t bytes);

  /// Ends all waits of this end, for good, and none of the other's any more: what was to be sent
  /// after a failure is not to be used.
  void abort();

 private:
  char* map(uint32_t block);
  void copy_posted(const c10::Stream& stream, const char* source, int64_t bytes);
  void copy_bounced(const c10::Stream& stream, const char* source, int64_t bytes, int64_t filled);

  const c10::Device device_;
  PeerDevice& driver_;
  std::unique_ptr<SharedLedger> ledger_;
  std::array<char*, Ledger::kMaxBlocks> mapped_{};

  uint64_t number_ = 0;   // of the next message
  uint64_t arrived_ = 0;  // what Ledger::arrived was set to
  uint64_t bounced_ = 0;  // slots that were filled

  struct Message {
    char* target = nullptr;  // null: it bounces
    int64_t bytes = 0;
    int64_t grain = 0;
    int64_t done = 0;  // bytes that are sent
  } now_;
};

}  // namespace ldt
