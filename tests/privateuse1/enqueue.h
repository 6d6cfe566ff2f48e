// What a library that is linked with the test device may do to its streams.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <functional>

#define LDT_TEST_EXPORT __attribute__((visibility("default")))

/// Runs `work` on the thread of a stream of the test device, after all that was enqueued there
/// before, and before all that comes after. Returns at once. `work` may block, which holds up its
/// stream and no other; what it throws is thrown by the next synchronize(). It must not need the
/// GIL, and what it captures by value is destroyed on that thread. Of C linkage so that it can be
/// found by name, too; its argument is C++ all the same.
extern "C" LDT_TEST_EXPORT void ldt_test_enqueue(c10::DeviceIndex device, c10::StreamId stream,
                                                 std::function<void()> work);
