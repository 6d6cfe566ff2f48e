// Host memory shared between two processes.
#pragma once

#include <cstddef>
#include <string>

namespace ldt {

/// One process creates it and others open it by its handle. It has no name in the file system, so
/// nothing is left behind however the processes end.
class SharedMemory {
 public:
  /// Creates zeroed memory. Throws LaneError if the system refuses.
  explicit SharedMemory(size_t bytes);
  /// Opens the memory of another process. Throws LaneError that says what was refused.
  explicit SharedMemory(const std::string& handle);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  /// Usable by processes of the same user on the same host that can see this one in /proc.
  const std::string& handle() const { return handle_; }
  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  void map(int file);

  std::string handle_;
  void* data_ = nullptr;
  size_t bytes_ = 0;
  int file_ = -1;  // kept open for others to open; -1 in those
};

/// Equal for two processes only if they run on the same host.
std::string host_id();

}  // namespace ldt
