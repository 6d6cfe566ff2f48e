// Launchers of the metadata kernels, and the tables that they read and write. Includes neither
// torch nor CUDA, as both sides of the boundary include it.
#pragma once

#include <cstdint>

#include "metadata/format/rows.h"

namespace ldt::metadata {

enum class ScanKind : uint8_t { kMask, kRule, kCopy };

/// The elements of one tensor on the device.
struct Elements {
  const void* data;
  uint8_t bytes;
  bool is_signed;
};

/// What to do with the rows of one tensor. Offsets in the output are in bytes, of the first row.
struct ScanJob {
  int64_t begin;  // number of the first row in the launch
  int64_t length;
  Elements elements;
  Elements mask;  // kRule: what the rows may follow; no data: nothing
  int64_t mask_rows;
  int64_t facts;  // kMask, kRule: one ScanFacts per row
  int64_t bits;   // kMask: per row two planes of words_of(length) words
  int64_t copy;   // kCopy: the elements as they are
  ScanKind kind;
  bool is_bool;
};

/// The facts of one row, of a mask or of another tensor.
struct ScanFacts {
  int64_t begin;
  int64_t end;
  int64_t padding;
  uint32_t flags;
  uint32_t unused;
};
// Of a mask.
constexpr uint32_t kOnes = 1;
constexpr uint32_t kBinary = 2;
constexpr uint32_t kNumbered = 4;
// Of a row that may follow it.
constexpr uint32_t kArangeHolds = 8;
constexpr uint32_t kCumsumHolds = 16;
constexpr uint32_t kSegmentsHolds = 32;

/// 32-bit words of a plane: one bit per element, lowest first. The first plane has a bit for each
/// element that is not 0, the second for each (but the first) that differs from the one before.
LDT_HOST_DEVICE constexpr int64_t words_of(int64_t length) { return (length + 31) / 32; }

/// A piece of pinned host memory and one of device memory, `bytes` each, and a cudaEvent_t. If it
/// is `marked`, what was last done with the two is done once the event is; otherwise it is done.
struct Staging {
  uint8_t* host;
  uint8_t* device;
  void* event;
  int64_t bytes;
  bool marked;
};

}  // namespace ldt::metadata

// `stream` is a cudaStream_t. Functions that return text return null or CUDA's error message.

// Makes `device` current for this thread. Fails during a graph capture on the stream.
extern "C" const char* ldt_metadata_begin(int device, void* stream);
// Allocates memory and an event that is done.
extern "C" const char* ldt_metadata_allocate(ldt::metadata::Staging* staging, int64_t bytes);
extern "C" bool ldt_metadata_is_done(const ldt::metadata::Staging* staging);
// Copies the first bytes to the device; does not wait.
extern "C" const char* ldt_metadata_send(const ldt::metadata::Staging* staging, int64_t bytes,
                                         void* stream);
// Copies bytes to the host and waits for the stream.
extern "C" const char* ldt_metadata_fetch(const ldt::metadata::Staging* staging, int64_t offset,
                                          int64_t bytes, void* stream);
// Records the event.
extern "C" const char* ldt_metadata_mark(const ldt::metadata::Staging* staging, void* stream);

// Launch the kernels on device memory; do not wait.
extern "C" const char* ldt_metadata_scan(const ldt::metadata::ScanJob* jobs, int64_t job_count,
                                         int64_t rows, int64_t longest, uint8_t* output,
                                         void* stream);
extern "C" const char* ldt_metadata_rebuild(const ldt::metadata::RowPlan* plans, int64_t rows,
                                            int64_t longest, ldt::metadata::RowLists lists,
                                            uint8_t* output, void* stream);
