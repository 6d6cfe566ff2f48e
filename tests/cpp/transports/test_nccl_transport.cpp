// NCCL's calls and the abort of their communicator, on the device of tests/privateuse1 with a
// library that calls back.
#include "transports/nccl_transport.h"

#include <condition_variable>
#include <future>
#include <thread>

#include "lanes/lane_factory.h"
#include "process_group/memory_group_comm.h"
#include "streams.h"
#include "testing.h"

using namespace ldt;
using ldt::testing::MemoryGroupComm;
using ldt::testing::MemoryWire;

namespace {

const c10::Device kDevice(c10::DeviceType::PrivateUse1, 0);

// Records what happened, and waits for it.
class Events {
 public:
  void set(const std::string& what) {
    const std::lock_guard<std::mutex> lock(mutex_);
    happened_.push_back(what);
    changed_.notify_all();
  }
  void await(const std::string& what) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return has(what); });
  }
  bool happened(const std::string& what) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return has(what);
  }
  std::string text() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return c10::Join(", ", happened_);
  }

 private:
  bool has(const std::string& what) const {
    return std::find(happened_.begin(), happened_.end(), what) != happened_.end();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> happened_;
};

Events* events = nullptr;
std::function<void(void* stream)> inside_send;

NcclLibrary fake_library() {
  NcclLibrary library;
  library.send = [](const void*, size_t, int, int, void*, void* stream) {
    events->set("send");
    inside_send(stream);
    events->set("sent");
    return 0;
  };
  library.get_error_string = [](int) { return "an error"; };
  return library;
}
const NcclLibrary library = fake_library();

class AbortedGroupComm final : public MemoryGroupComm {
 public:
  AbortedGroupComm() : MemoryGroupComm(std::make_shared<MemoryWire>(), 0, false) {}
  void abort() override { events->set("abort"); }
};

std::unique_ptr<NcclTransport> transport_of(const std::shared_ptr<GroupComm>& comm) {
  int communicator = 0;
  return std::make_unique<NcclTransport>(
      comm, NcclTransport::Communicators{&communicator, nullptr, 0}, kDevice, 1 << 20, library);
}

std::shared_ptr<Lane> new_lane(int timeout = 20'000) {
  LaneOptions options;
  options.name = "test";
  options.device = kDevice;
  options.chunk_bytes = 1 << 20;
  options.timeout = std::chrono::milliseconds(timeout);
  const auto comm = std::make_shared<AbortedGroupComm>();
  return make_lane(options, comm, transport_of(comm));
}

std::string error_of_send(Lane& lane) {
  try {
    lane.send({at::empty({4}, at::TensorOptions().device(kDevice))}, 1, "F0");
    return "";
  } catch (const LaneError& error) {
    return error.what_without_backtrace();
  }
}

}  // namespace

TEST(an_abort_waits_for_the_call_in_flight) {
  Events seen;
  events = &seen;
  inside_send = [&](void*) {
    seen.await("aborting");
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT(!seen.happened("abort"));
  };
  const auto lane = new_lane();
  auto sending = std::async(std::launch::async, [&] { return error_of_send(*lane); });
  seen.await("send");
  seen.set("aborting");
  lane->abort("enough");
  sending.get();
  EXPECT_EQ(error_of_send(*lane), "enough");
  EXPECT_EQ(seen.text().find("send, aborting, sent"), 0u);
}

TEST(a_call_that_stands_still_is_ended_by_the_abort) {
  Events seen;
  events = &seen;
  inside_send = [&](void*) { seen.await("abort"); };
  const auto comm = std::make_shared<AbortedGroupComm>();
  const auto transport = transport_of(comm);
  const auto stream = transport->stream(kDevice);
  const std::string label = "F0";
  const MessageName title(label, [] { return "title"; });
  const auto message = MessageTensors::for_send(
      {at::empty({4}, at::TensorOptions().device(kDevice))}, kDevice, title);
  std::thread sending([&] { transport->send(stream, message, 1); });
  seen.await("send");
  transport->abort();
  sending.join();
  EXPECT_EQ(seen.text(), "send, abort, sent");
}

TEST(no_call_begins_after_that) {
  Events seen;
  events = &seen;
  inside_send = [](void*) {};
  const auto lane = new_lane();
  EXPECT_EQ(error_of_send(*lane), "");
  lane->abort("enough");
  Events later;
  events = &later;
  EXPECT_EQ(error_of_send(*lane), "enough");
  const auto transport = transport_of(std::make_shared<AbortedGroupComm>());
  transport->shutdown();
  const std::string label;
  const MessageName title(label, [] { return "title"; });
  const auto message = MessageTensors::for_send(
      {at::empty({4}, at::TensorOptions().device(kDevice))}, kDevice, title);
  EXPECT_THROW(transport->send(transport->stream(kDevice), message, 1), LaneError,
               "aborted or closed");
  EXPECT_EQ(later.text(), "");
}

TEST(a_lane_that_is_closed_makes_no_more_calls) {
  Events seen;
  events = &seen;
  inside_send = [](void*) {};
  const auto lane = new_lane();
  EXPECT_EQ(error_of_send(*lane), "");
  lane->close(std::chrono::milliseconds(10'000));
  EXPECT(error_of_send(*lane).find("is closed") != std::string::npos);
  EXPECT_EQ(seen.text(), "send, sent");
}

TEST(a_host_that_is_far_ahead_waits_for_its_device_and_not_in_the_driver) {
  Events seen;
  events = &seen;
  bool is_first = true;
  inside_send = [&](void* stream) {
    if (!std::exchange(is_first, false)) return;
    static_cast<test_device::Stream*>(stream)->enqueue([&] { seen.await("go on"); });
  };
  const auto lane = new_lane(/*timeout=*/300);
  int sent = 0;
  std::string error;
  while (sent < 1000 && (error = error_of_send(*lane)).empty()) ++sent;
  EXPECT(error.find("send F0 to group rank 1") != std::string::npos);
  EXPECT(error.find("more than 896 operations in the queue of the device") != std::string::npos);
  EXPECT(sent > 200 && sent < 340);  // of three operations each
  seen.set("go on");
  EXPECT_EQ(error_of_send(*lane), "");
  lane->close(std::chrono::milliseconds(10'000));
}
