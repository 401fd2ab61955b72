#include "backends/gloo/close_on_exec.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <charconv>
#include <cstdio>
#include <cstring>
#include <memory>
#include <set>
#include <string>

namespace weft::gloo_backend {
namespace {

// Returns family, port and host of an address, without the other fields of its struct. Empty if it is no
// Internet address.
std::string ends_at(const sockaddr_storage& address) {
  const auto bytes = [](const auto&... parts) {
    std::string all;
    (all.append(reinterpret_cast<const char*>(&parts), sizeof parts), ...);
    return all;
  };
  if (address.ss_family == AF_INET) {
    const auto& in = reinterpret_cast<const sockaddr_in&>(address);
    return bytes(in.sin_family, in.sin_port, in.sin_addr);
  }
  if (address.ss_family == AF_INET6) {
    const auto& in = reinterpret_cast<const sockaddr_in6&>(address);
    return bytes(in.sin6_family, in.sin6_port, in.sin6_addr);
  }
  return {};
}

template <class Name>
std::string end_of(int fd, const Name& name) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  return name(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0 ? ends_at(address) : std::string();
}

std::vector<int> open_descriptors() {
  std::vector<int> found;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/proc/self/fd"), ::closedir);
  if (folder == nullptr) return found;
  while (const dirent* const entry = ::readdir(folder.get())) {
    int fd = -1;
    const char* const end = entry->d_name + std::strlen(entry->d_name);
    if (std::from_chars(entry->d_name, end, fd).ptr == end && fd != ::dirfd(folder.get()))
      found.push_back(fd);
  }
  return found;
}

// Returns whether a descriptor is an epoll that watches one of `sockets`. The kernel shows a line "tfd: 7
// events: ..." for each watched descriptor.
bool watches(int fd, const std::set<int>& sockets) {
  const std::string path = "/proc/self/fdinfo/" + std::to_string(fd);
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "re"), std::fclose);
  if (file == nullptr) return false;
  char line[256];
  while (std::fgets(line, sizeof line, file.get()) != nullptr) {
    int watched = -1;
    if (std::sscanf(line, "tfd: %d", &watched) == 1 && sockets.count(watched) != 0) return true;
  }
  return false;
}

void mark(int fd) {
  if (const int flags = ::fcntl(fd, F_GETFD); flags >= 0) ::fcntl(fd, F_SETFD, flags | FD_CLOEXEC);
}

}  // namespace

void close_on_exec(std::span<const std::vector<char>> addresses) noexcept try {
  std::set<std::string> ends;
  for (const std::vector<char>& bytes : addresses) {
    sockaddr_storage address{};
    if (bytes.size() < sizeof address) continue;
    std::memcpy(&address, bytes.data(), sizeof address);
    ends.insert(ends_at(address));
  }
  ends.erase("");
  std::set<int> sockets;
  const std::vector<int> all = open_descriptors();
  for (const int fd : all)
    if (ends.count(end_of(fd, ::getsockname)) != 0 || ends.count(end_of(fd, ::getpeername)) != 0) {
      mark(fd);
      sockets.insert(fd);
    }
  for (const int fd : all)
    if (sockets.count(fd) == 0 && watches(fd, sockets)) mark(fd);
} catch (...) {}  // no memory: the descriptors stay as they are

}  // namespace weft::gloo_backend
