// Owners of kernel objects: descriptors, mappings, and nameless memory (memfd) that other processes may map.
// A child made by fork inherits none of the mappings (MADV_DONTFORK), and must not use the memfds.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace weft {

/// A file descriptor that closes itself.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) noexcept : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();
  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

/// A new memfd of `bytes` zeros, with no page allocated yet. Empty, with errno set, if the system refuses.
/// The memfd is sealed: its size does not change any more.
Descriptor make_memfd(const char* name, std::size_t bytes) noexcept;

/// Whether a file is a memfd that nobody can truncate.
bool keeps_its_size(int fd) noexcept;

/// The inode of an open file; 0 if there is none.
std::uint64_t inode_of(int fd) noexcept;

/// Process `pid` of this user holds a file open under the number `descriptor`. Returns a descriptor of this
/// file if it is still the file with inode `inode`. Returns an empty descriptor if the system does not allow
/// it (no /proc, a process that may not be traced), or if it is another file. The process may be stopped.
Descriptor open_file_of(pid_t pid, int descriptor, std::uint64_t inode) noexcept;

/// Raises this process's soft limit of descriptors to `wanted` if it is lower, but not above the hard limit.
/// Returns the new limit, or 0 if the limit stays as it is.
std::size_t raise_descriptor_limit(std::size_t wanted) noexcept;

/// Pages shared with other processes. Only the process that mapped them unmaps them, never a forked child.
class SharedMapping {
 public:
  SharedMapping() = default;
  /// Maps `bytes` of `fd` from its start, or fresh shared pages if fd is -1. Keeps the pages out of forked
  /// children and core dumps. Returns an empty mapping, with errno set, if the system refuses.
  static SharedMapping map(int fd, std::size_t bytes) noexcept;
  SharedMapping(SharedMapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_), process_(other.process_) {}
  SharedMapping& operator=(SharedMapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(process_, other.process_);
    return *this;
  }
  ~SharedMapping();
  std::byte* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }
  explicit operator bool() const noexcept { return data_ != nullptr; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  pid_t process_ = 0;
};

/// Returns how much address space this process may still map (RLIMIT_AS, ulimit -v). Returns the largest
/// number if there is no limit, or if the mapped amount is not known.
std::size_t addresses_left() noexcept;
/// Returns whether a quarter of RLIMIT_AS stays free for the rest of the program after `bytes` more are
/// mapped. Returns true if there is no limit.
bool leaves_addresses(std::size_t bytes) noexcept;

/// Keeps a shared range out of forked children and core dumps, and asks for huge pages if the system offers
/// them.
void mark_shared(void* data, std::size_t bytes) noexcept;

}  // namespace weft
