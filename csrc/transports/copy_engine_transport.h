// Moves payload by the copy engine: into memory of other processes on this host, or over pinned
// host memory to other hosts.
#pragma once

#include <map>

#include "copy_engine/ipc_pool.h"
#include "copy_engine/isolated_stream.h"
#include "copy_engine/link_end.h"
#include "transports/transport.h"

namespace ldt {

/// The ends of a lane's links on this rank. Inside a stage, the ranks form a chain along which
/// a message is forwarded piece by piece while it arrives.
struct CopyEngineLinks {
  std::shared_ptr<IsolatedStream> stream;                  // of the lane
  std::shared_ptr<IpcPool> memory;                         // for the receive pool; null on senders
  std::map<int, std::shared_ptr<SendingEnd>> senders;      // by peer
  std::map<int, std::shared_ptr<ReceivingEnd>> receivers;  // by peer
  std::shared_ptr<ReceivingEnd> from_stage;                // on a member
  std::shared_ptr<SendingEnd> to_stage;                    // null at the end of the chain
};

class CopyEngineTransport final : public Transport {
 public:
  /// `hops`: how often a message is forwarded in the stage. `chunk_bytes`: the largest piece that
  /// is forwarded at once. `timeout`: how long another rank's host may stay a whole ring behind.
  CopyEngineTransport(CopyEngineLinks links, int hops, int64_t chunk_bytes,
                      std::chrono::milliseconds timeout)
      : links_(std::move(links)), hops_(hops), chunk_bytes_(chunk_bytes), timeout_(timeout) {}

  std::shared_ptr<const Event> send(const c10::Stream& stream, const MessageTensors& message,
                                    int peer) override;
  ReceiveEvents receive(const c10::Stream& stream, const MessageTensors& message,
                        const std::vector<ReceivePool::Claim>& claims, int peer,
                        bool broadcasts) override;
  int64_t enqueued() const override;
  void abort() override;
  void release() override;
  int64_t bounced() const override;
  std::string failure() const override;
  c10::Stream stream(c10::Device /*device*/) override { return links_.stream->stream(); }
  ReceivePool::Allocate allocator() override;
  bool has_own_timeout() const override { return false; }

 private:
  void forward(const c10::Stream& stream, const ReceivingEnd::Target& target, ReceivingEnd& from,
               SendingEnd& to);
  template <typename Step>
  void for_each_link(const Step& step) const;

  const CopyEngineLinks links_;
  const int hops_;
  const int64_t chunk_bytes_;
  const std::chrono::milliseconds timeout_;
};

}  // namespace ldt
