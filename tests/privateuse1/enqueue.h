// Lets libraries enqueue work on the streams of the test device.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <functional>

#define LDT_TEST_EXPORT __attribute__((visibility("default")))

/// Enqueues `work` on a stream of the test device, which runs it on its thread, in order. Returns
/// at once. `work` may block, which blocks only its stream; the next synchronize() throws what it
/// throws. It must not need the GIL, and its captures are destroyed on that thread. Has C linkage
/// so that it can be looked up by name, although its argument is C++.
extern "C" LDT_TEST_EXPORT void ldt_test_enqueue(c10::DeviceIndex device, c10::StreamId stream,
                                                 std::function<void()> work);
