// Feeds mutated messages to the target where there is no libFuzzer: the same ones in every run.
//
//   fuzz_metadata [ROUNDS] [SEED]
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "metadata/codec/encoder.h"
#include "metadata/host/host_rows.h"
#include "metadata_target.h"

using namespace ldt::metadata;

namespace {

using Bytes = std::vector<uint8_t>;
using Generator = std::mt19937_64;

size_t up_to(Generator& generator, size_t limit) {
  return std::uniform_int_distribution<size_t>(0, limit)(generator);
}

// Rows that use every code.
std::vector<int64_t> random_row(Generator& generator, int64_t length) {
  std::vector<int64_t> row(static_cast<size_t>(length));
  const size_t form = up_to(generator, 4);
  const size_t begin = up_to(generator, row.size());
  int64_t number = form == 0 ? 0 : 1;
  for (size_t i = begin; i < row.size(); ++i) {
    if (form == 2) number = static_cast<int64_t>(up_to(generator, 1));
    if (form == 3 && up_to(generator, 5) == 0) ++number;
    if (form == 4) number = static_cast<int64_t>(generator());
    row[i] = number;
  }
  return row;
}

Bytes random_message(Generator& generator) {
  Content content;
  content.call.plan = "plan";
  content.hops = {{HopTensor{10, true, {4, 8}, {}, 1}, HopTensor{8, false, {2, 3}, {1, 0}, {}}},
                  {}};
  std::vector<std::vector<int64_t>> tensors;
  const size_t count = up_to(generator, 3);
  for (size_t id = 0; id < count; ++id) {
    const auto length = static_cast<int64_t>(1 + up_to(generator, 40));
    content.microbatches.push_back({static_cast<int64_t>(id), {id, 1}, {3 * id, 3}});
    content.hop_numbers.push_back(static_cast<uint32_t>(id % 2));
    for (uint8_t name = 0; name < 3; ++name) {
      content.form_numbers.push_back(static_cast<uint32_t>(content.forms.size()));
      content.forms.push_back({name, 8, {length}});
      tensors.push_back(random_row(generator, length));
    }
    // Positions by a rule, most of the time.
    auto& positions = tensors[tensors.size() - 2];
    int64_t kept = 0;
    for (size_t i = 0; i < positions.size() && up_to(generator, 3) != 0; ++i) {
      positions[i] = tensors[tensors.size() - 3][i] != 0 ? kept++ : 1;
    }
  }
  std::vector<const void*> data;
  for (const auto& tensor : tensors) data.push_back(tensor.data());
  HostRows rows(content, data);
  return encode(content, rows, 1 << 14);
}

// Keeps the length in the header right most of the time, so that the decoder reads further.
void mend_length(Bytes& message) {
  constexpr size_t kLength = 6;
  if (message.size() > kLength && message.size() - kLength - 1 < 0x80) {
    message[kLength] = static_cast<uint8_t>(message.size() - kLength - 1);
  } else if (message.size() > kLength + 1) {
    const size_t rest = message.size() - kLength - 2;
    message[kLength] = static_cast<uint8_t>(rest | 0x80);
    message[kLength + 1] = static_cast<uint8_t>(rest >> 7 & 0x7F);
  }
}

void mutate(Bytes& message, Generator& generator) {
  constexpr uint8_t kOdd[] = {0x00, 0x01, 0x7F, 0x80, 0xFF};
  const size_t changes = 1 + up_to(generator, 3);
  for (size_t change = 0; change < changes && !message.empty(); ++change) {
    const size_t at = up_to(generator, message.size() - 1);
    const auto place = message.begin() + static_cast<std::ptrdiff_t>(at);
    switch (up_to(generator, 5)) {
      case 0: message[at] ^= static_cast<uint8_t>(1u << up_to(generator, 7)); break;
      case 1: message[at] = kOdd[up_to(generator, 4)]; break;
      case 2: message.insert(place, kOdd[up_to(generator, 4)]); break;
      case 3: message.erase(place); break;
      case 4: message[at] = static_cast<uint8_t>(up_to(generator, 12)); break;
      default: message.resize(at); break;
    }
  }
  if (up_to(generator, 9) != 0) mend_length(message);
}

}  // namespace

int main(int count, char** arguments) {
  const long rounds = count > 1 ? std::atol(arguments[1]) : 100000;
  Generator generator(count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1);
  for (long round = 0; round < rounds; ++round) {
    Bytes message = random_message(generator);
    if (round % 10 != 0) mutate(message, generator);
    // Allocated with its exact size, so that a sanitizer detects a read past the end.
    const std::vector<uint8_t> exact(message);
    LLVMFuzzerTestOneInput(exact.data(), exact.size());
  }
  std::printf("%ld messages, nothing found\n", rounds);
  return 0;
}
