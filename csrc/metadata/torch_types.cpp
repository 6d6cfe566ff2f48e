// The two tables, by name of the type.
#include "metadata/torch_types.h"

#include <array>
#include <string>

#include "common/tensor_info.h"
#include "metadata/format/error.h"
#include "metadata/format/format.h"

namespace ldt::metadata {
namespace {

constexpr auto kTorchTypes = static_cast<size_t>(at::ScalarType::NumOptions);
constexpr uint8_t kUnknown = 0xFF;

struct TypeTables {
  std::array<uint8_t, kTorchTypes> to_wire;
  std::array<at::ScalarType, kDTypes.size()> to_torch;
};

const TypeTables& tables() {
  static const TypeTables made = [] {
    TypeTables tables;
    tables.to_wire.fill(kUnknown);
    tables.to_torch.fill(at::ScalarType::Undefined);
    for (size_t type = 0; type < kTorchTypes; ++type) {
      const auto scalar_type = static_cast<at::ScalarType>(type);
      if (scalar_type == at::ScalarType::Undefined) continue;
      const std::string name = dtype_name(scalar_type);
      for (size_t place = 0; place < kDTypes.size(); ++place) {
        if (kDTypes[place].name != name) continue;
        tables.to_wire[type] = static_cast<uint8_t>(place);
        tables.to_torch[place] = scalar_type;
      }
    }
    return tables;
  }();
  return made;
}

}  // namespace

uint8_t wire_dtype(at::ScalarType dtype) {
  const uint8_t place = tables().to_wire.at(static_cast<size_t>(dtype));
  if (place == kUnknown) {
    fail("expected a data type that the wire format knows, got ", dtype_name(dtype),
         "; convert the tensor");
  }
  return place;
}

at::ScalarType torch_dtype(uint8_t dtype) { return tables().to_torch.at(dtype); }

}  // namespace ldt::metadata
