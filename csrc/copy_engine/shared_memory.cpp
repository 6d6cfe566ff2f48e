// Anonymous files that others open through /proc.
#include "copy_engine/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

#include "common/error.h"

namespace ldt {
namespace {

[[noreturn]] void refuse(const char* what) {
  throw_lane_error("memory shared between processes: ", what, ": ", std::strerror(errno));
}

struct stat status_of(int file) {
  struct stat status{};
  if (fstat(file, &status) != 0) refuse("fstat");
  return status;
}

}  // namespace

SharedMemory::SharedMemory(size_t bytes) : bytes_(bytes) {
  file_ = memfd_create("ldt", MFD_CLOEXEC);
  if (file_ < 0) refuse("memfd_create");
  if (ftruncate(file_, static_cast<off_t>(bytes)) != 0) {
    close(file_);
    refuse("ftruncate");
  }
  map(file_);
  handle_ = c10::str(getpid(), " ", file_, " ", bytes, " ", status_of(file_).st_ino);
}

SharedMemory::SharedMemory(const std::string& handle) : handle_(handle) {
  int process = 0;
  int number = 0;
  ino_t id = 0;
  std::istringstream fields(handle);
  if (!(fields >> process >> number >> bytes_ >> id)) {
    throw_lane_error("memory shared between processes: expected a handle of four numbers, got '",
                     handle, "'");
  }
  const auto path = c10::str("/proc/", process, "/fd/", number);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) refuse(path.c_str());
  const auto status = status_of(file);
  // In another container the number may name another process that has such a file, too.
  if (status.st_size != static_cast<off_t>(bytes_) || status.st_ino != id) {
    close(file);
    throw_lane_error("memory shared between processes: expected ", bytes_, " bytes of file ", id,
                     " behind ", path, ", got ", status.st_size, " of ", status.st_ino,
                     ": is it another process there?");
  }
  map(file);
  close(file);
}

void SharedMemory::map(int file) {
  data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (data_ == MAP_FAILED) {
    const int error = errno;
    close(file);
    errno = error;
    refuse("mmap");
  }
}

SharedMemory::~SharedMemory() {
  munmap(data_, bytes_);
  if (file_ >= 0) close(file_);
}

std::string host_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  file >> id;
  return id;
}

}  // namespace ldt
