// Pages of memory that two processes of one host have in common.
#pragma once

#include <cstddef>
#include <string>

namespace ldt {

/// Made by one process and opened by others through what `ticket` says. Nothing of it has a name in
/// the file system, so nothing is left behind, however the processes end.
class SharedMemory {
 public:
  /// Zeroed. Throws LaneError if the system refuses.
  explicit SharedMemory(size_t bytes);
  /// The pages of another process. Throws LaneError, saying what was refused.
  explicit SharedMemory(const std::string& ticket);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  /// Text for a process of the same user on the same host that can see this one.
  const std::string& ticket() const { return ticket_; }
  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  void map(int file);

  std::string ticket_;
  void* data_ = nullptr;
  size_t bytes_ = 0;
  int file_ = -1;  // open as long as others may come; -1 where they were opened
};

/// Equal for two processes only if they run on one host.
std::string host_id();

}  // namespace ldt
