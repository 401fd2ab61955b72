#include "base/memfd.hpp"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>

namespace weft {

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

Descriptor make_memfd(const char* name, std::size_t bytes) noexcept {
  // Growing a file beyond RLIMIT_FSIZE raises a signal that ends the program, so the limit is looked at
  // first.
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && bytes > limit.rlim_cur) {
    errno = EFBIG;
    return {};
  }
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
  // Hardened systems refuse a memfd that could be executed; kernels before 6.3 do not know the flag.
  Descriptor fd(::memfd_create(name, MFD_CLOEXEC | MFD_NOEXEC_SEAL));
  if (!fd && errno == EINVAL) fd = Descriptor(::memfd_create(name, MFD_CLOEXEC));
  if (fd && ::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) return {};
  return fd;
}

SharedMapping SharedMapping::map(int fd, std::size_t bytes) noexcept {
  const int flags = MAP_SHARED | MAP_NORESERVE | (fd < 0 ? MAP_ANONYMOUS : 0);
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  SharedMapping m;
  if (data == MAP_FAILED) return m;
  mark_shared(data, bytes);
  m.data_ = static_cast<std::byte*>(data);
  m.bytes_ = bytes;
  m.process_ = ::getpid();
  return m;
}

SharedMapping::~SharedMapping() {
  if (data_ != nullptr && process_ == ::getpid()) ::munmap(data_, bytes_);
}

void mark_shared(void* data, std::size_t bytes) noexcept {
  ::madvise(data, bytes, MADV_DONTFORK);
  ::madvise(data, bytes, MADV_DONTDUMP);
  ::madvise(data, bytes, MADV_HUGEPAGE);
}

}  // namespace weft
