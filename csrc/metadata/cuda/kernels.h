// Launchers of the metadata kernels, and the tables they read and write. No torch, no CUDA header:
// both sides of the boundary include it.
#pragma once

#include <cstdint>

#include "metadata/rows.h"

namespace ldt::metadata {

enum class ScanKind : uint8_t { kMask, kRule, kCopy };

/// How the elements of one tensor lie on the device.
struct Elements {
  const void* data;
  uint8_t bytes;
  bool is_signed;
};

/// What to do with the rows of one tensor. Places in the output are byte offsets of the first row.
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

}  // namespace ldt::metadata

// All memory is the device's. Both launch on `stream` (a cudaStream_t) and return at once: null, or
// what CUDA says is wrong.
extern "C" const char* ldt_metadata_scan(const ldt::metadata::ScanJob* jobs, int64_t job_count,
                                         int64_t rows, int64_t longest, uint8_t* output, int device,
                                         void* stream);
extern "C" const char* ldt_metadata_rebuild(const ldt::metadata::RowPlan* plans, int64_t rows,
                                            int64_t longest, ldt::metadata::RowLists lists,
                                            uint8_t* output, int device, void* stream);
