// The kernel's results lead to the same bytes as a scan on the host. The kernel runs on
// host threads; a plain loop by the definitions in kernels.h gives the expected output.
#include <ATen/ATen.h>

#include <random>

#include "metadata/codec/byte_writer.h"
#include "metadata/codec/decoder.h"
#include "metadata/codec/encoder.h"
#include "metadata/codec/row_encoder.h"
#include "metadata/device/cuda/scan.cu"
#include "metadata/device/device_scan.h"
#include "metadata/host/host_rows.h"
#include "metadata/host/rebuild.h"
#include "metadata/torch_types.h"
#include "testing.h"

using namespace ldt::metadata;

namespace {

// An empty tensor may have no address, which memcmp must not be given.
bool holds_bytes_of(const at::Tensor& tensor, const void* bytes) {
  return tensor.nbytes() == 0 || std::memcmp(bytes, tensor.const_data_ptr(), tensor.nbytes()) == 0;
}

std::vector<int64_t> row_of(const Elements& elements, int64_t row, int64_t length) {
  std::vector<int64_t> values;
  for (int64_t i = 0; i < length; ++i) {
    values.push_back(
        load_integer(elements.data, row * length + i, elements.bytes, elements.is_signed));
  }
  return values;
}

void mask_output(const std::vector<int64_t>& row, uint32_t* planes, ScanFacts& facts) {
  const auto length = static_cast<int64_t>(row.size());
  int64_t kept = 0;
  bool binary = true;
  bool numbered = true;
  facts = {length, length, 0, 0, 0};
  for (int64_t i = 0; i < length; ++i) {
    const int64_t before = i > 0 ? row[i - 1] : 0;
    if (row[i] != 0) planes[i / 32] |= 1u << (i % 32);
    if (i > 0 && row[i] != before) planes[words_of(length) + i / 32] |= 1u << (i % 32);
    if (row[i] == 0) continue;
    if (++kept == 1) facts.begin = i;
    facts.end = i + 1;
    binary = binary && row[i] == 1;
    numbered = numbered && (before == 0 ? row[i] == 1 : row[i] == before || row[i] == before + 1);
  }
  const bool no_holes = kept == 0 || kept == facts.end - facts.begin;
  facts.flags = (binary ? kBinary : 0) | (binary && no_holes ? kOnes : 0) |
                (numbered && no_holes && kept > 0 ? kNumbered : 0);
}

void rule_output(const std::vector<int64_t>& row, const std::vector<int64_t>& mask,
                 ScanFacts& facts) {
  const auto length = static_cast<int64_t>(row.size());
  facts = {0, 0, 0, kArangeHolds | (mask.empty() ? 0 : kCumsumHolds | kSegmentsHolds), 0};
  const auto zero = std::find(mask.begin(), mask.end(), 0) - mask.begin();
  if (!mask.empty() && zero < length) facts.padding = row[zero];
  int64_t kept = 0;
  int64_t begun = 0;
  for (int64_t i = 0; i < length; ++i) {
    if (row[i] != i) facts.flags &= ~kArangeHolds;
    if (mask.empty()) continue;
    if (mask[i] != 0 && (i == 0 || mask[i] != mask[i - 1])) begun = i;
    if (row[i] != (mask[i] != 0 ? kept : facts.padding)) facts.flags &= ~kCumsumHolds;
    if (row[i] != (mask[i] != 0 ? i - begun : facts.padding)) facts.flags &= ~kSegmentsHolds;
    kept += mask[i] != 0 ? 1 : 0;
  }
}

at::Tensor expected_output(const ScanTable& table) {
  auto output = at::zeros({table.output_bytes}, at::kByte);
  auto* bytes = output.data_ptr<uint8_t>();
  for (int64_t block = 0; block < table.rows; ++block) {
    const auto number =
        last_begun(table.jobs.data(), static_cast<int64_t>(table.jobs.size()), block);
    const ScanJob& job = table.jobs[static_cast<size_t>(number)];
    const int64_t row = block - job.begin;
    const auto values = row_of(job.elements, row, job.length);
    auto& facts = reinterpret_cast<ScanFacts*>(bytes + job.facts)[row];
    if (job.kind == ScanKind::kMask) {
      auto* planes = reinterpret_cast<uint32_t*>(bytes + job.bits);
      mask_output(values, planes + row * 2 * words_of(job.length), facts);
    } else if (job.kind == ScanKind::kRule) {
      std::vector<int64_t> mask;
      if (job.mask.data != nullptr) mask = row_of(job.mask, row % job.mask_rows, job.length);
      rule_output(values, mask, facts);
    } else {
      for (int64_t i = 0; i < job.length; ++i) {
        store_integer(bytes + job.copy, row * job.length + i, job.elements.bytes, values[i]);
      }
    }
  }
  return output;
}

at::Tensor run_kernel(const ScanTable& table) {
  auto output = at::zeros({table.output_bytes}, at::kByte);
  const auto jobs = static_cast<int64_t>(table.jobs.size());
  fake_cuda::launch(table.rows, 96,
                    [&] { scan_rows(table.jobs.data(), jobs, output.data_ptr<uint8_t>()); });
  return output;
}

std::shared_ptr<const uint8_t> memory_of(const at::Tensor& output) {
  return {output.const_data_ptr<uint8_t>(), [output](const uint8_t*) {}};
}

std::mt19937 generator(7);
int64_t random_up_to(int64_t limit) {
  return std::uniform_int_distribution<int64_t>(0, limit)(generator);
}

// A row of one of the forms that masks have.
at::Tensor random_row(int64_t length) {
  auto row = at::zeros({length}, at::kLong);
  const int64_t form = random_up_to(5);
  if (form == 0) return row;
  if (form == 1) return at::randint(0, 2, {length}, at::kLong);
  if (form == 2) return at::randint(-3, 4, {length}, at::kLong);
  const int64_t begin = random_up_to(length);
  const int64_t end = begin + random_up_to(length - begin);
  row.slice(0, begin, end).fill_(1);
  if (form == 3) return row;
  const auto begins = at::randint(0, 8, {length}, at::kLong).eq(0).to(at::kLong);
  return row *
         (1 + begins.slice(0, 0).cumsum(0) - begins.cumsum(0).index({std::min(begin, length - 1)}));
}

at::Tensor random_mask(int64_t batch, int64_t length, at::ScalarType dtype) {
  std::vector<at::Tensor> rows;
  for (int64_t i = 0; i < batch; ++i) rows.push_back(random_row(length));
  return at::stack(rows).to(dtype);
}

at::Tensor random_positions(const at::Tensor& mask) {
  const auto kept = mask.ne(0);
  const auto count = (kept.to(at::kLong).cumsum(-1) - 1).masked_fill(kept.logical_not(), 1);
  switch (random_up_to(3)) {
    case 0: return at::arange(mask.size(1), at::kLong);
    case 1: return at::stack({count, count.div(3, "floor"), count.remainder(3)});
    case 2: return at::randint(0, 9, mask.sizes(), at::kLong);
    default: return count.to(at::kInt);
  }
}

struct Case {
  Content content;
  Tensors tensors;
};

Case random_case() {
  Case made;
  const at::ScalarType types[] = {at::kLong, at::kInt, at::kChar, at::kBool};
  const int64_t count = 1 + random_up_to(3);
  for (int64_t id = 0; id < count; ++id) {
    const auto mask =
        random_mask(1 + random_up_to(2), 1 + random_up_to(100), types[random_up_to(3)]);
    made.content.microbatches.push_back({id, {}, {3 * static_cast<size_t>(id), 3}});
    const at::Tensor tensors[] = {mask, random_positions(mask),
                                  at::randint(0, 50, {random_up_to(2), 3}, at::kLong)};
    const uint8_t names[] = {kAttentionMask, kPositionIds, 3};
    for (int i = 0; i < 3; ++i) {
      at::Tensor tensor = tensors[i].contiguous();
      made.content.form_numbers.push_back(static_cast<uint32_t>(made.content.forms.size()));
      made.content.forms.push_back(
          {names[i], wire_dtype(tensor.scalar_type()), tensor.sizes().vec()});
      made.tensors.push_back(c10::MaybeOwned<at::Tensor>::owned(std::move(tensor)));
    }
  }
  return made;
}

std::vector<uint8_t> bytes_from_host(const Case& made) {
  std::vector<const void*> data;
  for (const auto& tensor : made.tensors) data.push_back(tensor->const_data_ptr());
  HostRows rows(made.content, data);
  return encode(made.content, rows, 1 << 20);
}

}  // namespace

TEST(a_scan_and_the_host_give_the_same_bytes) {
  for (int round = 0; round < 100; ++round) {
    const Case made = random_case();
    std::vector<bool> away(made.tensors.size(), true);
    if (round % 2 == 1) {
      for (size_t i = 0; i < away.size(); ++i) away[i] = random_up_to(1) == 1;
    }
    ScanTable table = plan_scan(made.content, made.tensors, away);
    const auto output = run_kernel(table);
    EXPECT(at::equal(output, expected_output(table)));
    ScannedRows rows(made.content, made.tensors, std::move(table), memory_of(output));
    EXPECT(encode(made.content, rows, 1 << 20) == bytes_from_host(made));
  }
}

TEST(what_the_kernel_computes_is_what_the_host_rebuilds) {
  for (int round = 0; round < 200; ++round) {
    const Case made = random_case();
    const auto message = bytes_from_host(made);
    const Decoded decoded = decode(message.data(), message.size(), 1 << 20);
    std::vector<uint8_t> by_loops(static_cast<size_t>(decoded.bytes));
    std::vector<uint8_t> by_element(static_cast<size_t>(decoded.bytes));
    const RowLists lists = decoded.plans.lists();
    for (const RowPlan& row : decoded.plans.rows) {
      rebuild_row(row, lists, by_loops.data());
      for (int64_t i = 0; i < row.length; ++i) {
        store_integer(by_element.data() + row.output, i, row.bytes, value_at(row, lists, i));
      }
    }
    EXPECT(by_loops == by_element);
    for (size_t tensor = 0; tensor < made.tensors.size(); ++tensor) {
      const at::Tensor& truth = *made.tensors[tensor];
      EXPECT(holds_bytes_of(truth, by_loops.data() + decoded.offsets[tensor]));
    }
  }
}

TEST(tensors_of_all_widths_are_fetched_in_one_copy) {
  const std::vector<at::Tensor> tensors{at::ones({3}, at::kBool), at::arange(5, at::kLong),
                                        at::arange(7, at::kShort), at::arange(2, at::kInt),
                                        at::zeros({0, 3}, at::kLong)};
  const auto fetched = fetch(tensors);
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(fetched.data[i]) % tensors[i].element_size(), 0u);
    EXPECT(holds_bytes_of(tensors[i], fetched.data[i]));
  }
}

// The sizes of RUNS and RAW, by the integers alone: facts without elements allow no other code.
std::vector<uint8_t> by_integers(const std::vector<int64_t>& row) {
  struct Integers final : RowValues {
    explicit Integers(const int64_t* data) : data(data) {}
    const int64_t* values() override { return data; }
    const int64_t* data;
  } source(row.data());
  ByteWriter out;
  RowEncoder(out).mask({0, 0, false, false, false}, static_cast<int64_t>(row.size()), source);
  return out.bytes();
}

// From `begin` to `end` segments, one starting at each bit of the pattern.
std::vector<int64_t> segments_row(int length, int begin, int end, uint64_t pattern) {
  std::vector<int64_t> row(static_cast<size_t>(length));
  int64_t number = 1;
  for (int i = begin; i < end; ++i) {
    if (i > begin && (pattern >> (i % 64) & 1) != 0) ++number;
    row[static_cast<size_t>(i)] = number;
  }
  return row;
}

void expect_the_shortest_code(const std::vector<int64_t>& row) {
  const auto length = static_cast<int64_t>(row.size());
  Case made;
  made.content.forms.push_back({kAttentionMask, 8, {length}});
  made.content.microbatches.push_back({0, {}, {0, 1}});
  made.content.form_numbers.push_back(0);
  made.tensors.push_back(c10::MaybeOwned<at::Tensor>::owned(at::tensor(row, at::kLong)));
  ScanTable table = plan_scan(made.content, made.tensors, {true});
  const auto output = expected_output(table);
  ScannedRows rows(made.content, made.tensors, std::move(table), memory_of(output));
  EXPECT(encode(made.content, rows, 1 << 20) == bytes_from_host(made));
  ByteWriter out;
  RowEncoder(out).mask(rows.mask(0, 0), length, rows);
  const auto integers = by_integers(row);
  const auto code = static_cast<RowCode>(out.bytes()[0]);
  const bool of_integers = code == RowCode::kRuns || code == RowCode::kRaw;
  EXPECT(of_integers ? out.bytes() == integers : out.size() <= integers.size());
}

TEST(the_code_of_bits_is_the_shortest_of_all) {
  for (unsigned pattern = 0; pattern < 1u << 9; ++pattern) {
    std::vector<int64_t> bits;
    for (int i = 0; i < 9; ++i) bits.push_back(pattern >> i & 1);
    expect_the_shortest_code(bits);
    for (int begin = 0; begin < 9; ++begin) {
      for (int end = begin; end <= 9; ++end) {
        expect_the_shortest_code(segments_row(9, begin, end, pattern));
        if (end < 9) continue;
        expect_the_shortest_code(segments_row(70, begin, 70, pattern * 0x9E3779B97F4A7C15u));
      }
    }
  }
}
