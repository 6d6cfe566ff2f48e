// The property that must hold for any bytes. Built for libFuzzer, and for mutate.cpp.
#include "metadata_target.h"

#include <cstdlib>
#include <vector>

#include "metadata/codec/decoder.h"
#include "metadata/codec/encoder.h"
#include "metadata/format/error.h"
#include "metadata/host/host_rows.h"
#include "metadata/host/rebuild.h"

using namespace ldt::metadata;

namespace {

constexpr int64_t kMaxElements = 1 << 14;

void require(bool holds) {
  if (!holds) std::abort();
}

std::vector<uint8_t> rebuild(const Decoded& decoded) {
  std::vector<uint8_t> buffer(static_cast<size_t>(decoded.bytes));
  const RowLists lists = decoded.plans.lists();
  for (const RowPlan& row : decoded.plans.rows) {
    rebuild_row(row, lists, buffer.data());
    for (int64_t index = 0; index < row.length; ++index) {
      const DType& type = kDTypes[row.dtype];
      require(load_integer(buffer.data() + row.output, index, type.bytes, type.is_signed) ==
              value_at(row, lists, index));
    }
  }
  return buffer;
}

}  // namespace

// No allocation may be large: the result is proportional to the message's size and to
// kMaxElements.
extern "C" const char* __asan_default_options() {
  return "max_allocation_size_mb=64:allocator_may_return_null=0:quarantine_size_mb=16";
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Decoded decoded;
  try {
    decoded = decode(data, size, kMaxElements);
  } catch (const MetadataError&) {
    return 0;
  }
  const std::vector<uint8_t> buffer = rebuild(decoded);
  std::vector<const void*> elements;
  for (const int64_t offset : decoded.offsets) elements.push_back(buffer.data() + offset);
  HostRows rows(decoded.content, elements);
  const std::vector<uint8_t> message = encode(decoded.content, rows, kMaxElements);
  require(message.size() <= size);  // what the encoder writes is the shortest form
  const Decoded again = decode(message.data(), message.size(), kMaxElements);
  require(rebuild(again) == buffer && again.content.forms == decoded.content.forms &&
          again.content.hops == decoded.content.hops);
  return 0;
}
