#include "host/peers/process_address.hpp"

#include <fmt/format.h>
#include <sys/random.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <type_traits>

#include "base/parse_number.hpp"
#include "base/text/plain_streams.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

constexpr std::string_view kUnknownHost = "unknown-";

// Returns the inode of a namespace of this process as text, or "".
std::string namespace_of(const char* path) {
  std::array<char, 64> target{};
  const ssize_t n = ::readlink(path, target.data(), target.size());
  return n > 0 ? std::string(target.data(), static_cast<std::size_t>(n)) : std::string();
}

}  // namespace

std::string random_socket_name() {
  std::array<unsigned char, 16> bytes{};
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    throw_errno("host peers: no random bytes for the socket's name", errno);
  std::string text = "weft-";
  for (const unsigned char b : bytes) text += fmt::format("{:02x}", b);
  return text;
}

// Processes with equal text can connect to each other's sockets and watch each other's pids. If the system
// does not report these ids, the text is random. So no other process counts as being on this host.
std::string this_host() {
  std::string boot;
  FileIn("/proc/sys/kernel/random/boot_id") >> boot;
  const std::string pids = namespace_of("/proc/self/ns/pid"), network = namespace_of("/proc/self/ns/net");
  if (boot.empty() || pids.empty() || network.empty())
    return std::string(kUnknownHost) + random_socket_name();
  return fmt::format("{}/{}/{}", boot, pids, network);
}

bool is_unknown_host(std::string_view host) noexcept { return host.starts_with(kUnknownHost); }

std::string ProcessAddress::encode() const {
  return fmt::format("weft1 {} {} {} {} {} {}", host, socket, user, pid, block, block_inode);
}

ProcessAddress ProcessAddress::decode(const std::string& text) {
  TextIn words(text);
  std::string version, user, pid, block, inode, rest;
  ProcessAddress a;
  const bool complete =
      static_cast<bool>(words >> version >> a.host >> a.socket >> user >> pid >> block >> inode);
  const auto read = [](auto& number, const std::string& word) {
    const auto is = parse_integer<std::remove_reference_t<decltype(number)>>(word);
    number = is.value_or(0);
    return is.has_value();
  };
  if (!complete || version != "weft1" || words >> rest || !read(a.user, user) || !read(a.pid, pid) ||
      a.pid < 1 || !read(a.block, block) || a.block < -1 || !read(a.block_inode, inode))
    throw Error(
        ErrorCode::mismatch,
        fmt::format("host peers: \"{}\" is not a process address; expected \"weft1 <host> <socket> <user> "
                    "<process> <block> <inode>\", as this version of weft writes it",
                    text));
  return a;
}

}  // namespace weft
