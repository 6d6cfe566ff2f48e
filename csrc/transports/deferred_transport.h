// Runs the calls of another transport on a thread, where they may wait for the host.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <thread>

#include "common/delayed_failure.h"
#include "common/event_pool.h"
#include "common/owner_process.h"
#include "transports/deferred_event.h"
#include "transports/transport.h"

namespace ldt {

/// For a transport that works in steps of the host, on devices whose streams cannot wait for a
/// host. Calls run in order, on a stream of their own; each starts after what precedes it on the
/// lane's stream. wait() of a message waits on the host until its call has enqueued everything.
class DeferredTransport final : public Transport {
 public:
  DeferredTransport(std::unique_ptr<Transport> transport, c10::Device device);
  ~DeferredTransport() override;

  std::shared_ptr<const Event> send(const c10::Stream& stream, const MessageTensors& message,
                                    int peer) override;
  ReceiveEvents receive(const c10::Stream& stream, const MessageTensors& message,
                        const std::vector<ReceivePool::Claim>& claims, int peer,
                        bool broadcasts) override;
  int64_t enqueued() const override { return 0; }  // the thread keeps its queue short
  void abort() override;
  std::string failure() const override { return failure_.text(); }
  bool has_own_timeout() const override { return false; }

 private:
  struct Call {
    std::shared_ptr<const Event> ready;
    std::function<void()> run;
    std::shared_ptr<DeferredEvent> done;
    std::shared_ptr<const Event> end = nullptr;  // of what it has enqueued; null: nothing
  };

  std::shared_ptr<const Event> defer(const c10::Stream& stream, std::function<void()> run);
  void work();
  bool take(Call& call);
  void run(Call& call);
  void wait_for_room();
  void fail(Call call, const std::exception_ptr& error);

  const std::unique_ptr<Transport> transport_;
  const c10::Stream stream_;  // of the thread
  const std::shared_ptr<EventPool> events_;
  const OwnerProcess process_;
  DelayedFailure failure_;
  std::deque<std::shared_ptr<const Event>> enqueued_;  // ends of calls; the thread's own

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  // The first may have failed. It is done at the abort: a lane that is known to have failed raises
  // in wait().
  std::deque<Call> calls_;
  std::atomic<bool> stopped_{false};
  bool aborted_ = false;
  std::thread thread_;
};

}  // namespace ldt
