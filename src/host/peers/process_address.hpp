// The address of a process for other processes of its host. Any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace weft {

/// The address that a process publishes, so that others find it. It is encoded as one line of text for the
/// Store.
struct ProcessAddress {
  /// Boot id, pid namespace and network namespace: if they are equal, memory can be shared. The text is
  /// random if the system does not report them (is_unknown_host()).
  std::string host;
  std::string socket;  ///< abstract socket name, without the leading zero byte; random
  std::uint32_t user = 0;
  std::int32_t pid = 0;
  /// the number of the block's descriptor in that process; -1: there is none, or peers cannot open it through
  /// /proc
  std::int32_t block = -1;
  std::uint64_t block_inode = 0;
  std::string encode() const;
  /// Throws mismatch, with the text, if the text is not an address.
  static ProcessAddress decode(const std::string& text);
  friend bool operator==(const ProcessAddress&, const ProcessAddress&) = default;
};

/// Returns whether a ProcessAddress::host is random, because the system did not report the ids.
bool is_unknown_host(std::string_view host) noexcept;
inline constexpr const char* kUnknownHostText =
    "/proc/sys/kernel/random/boot_id or /proc/self/ns cannot be read (is /proc mounted?)";

/// 128 random bits as text: the name of an abstract socket. Throws system if there are no random bits.
std::string random_socket_name();

/// ProcessAddress::host of this process.
std::string this_host();

}  // namespace weft
