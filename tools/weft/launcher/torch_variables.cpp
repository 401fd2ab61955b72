#include "torch_variables.hpp"

#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>

#include "weft/base/env.hpp"
#include "weft/base/error.hpp"

namespace weft::tools {
namespace {

constexpr std::array kOfRanks = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};

// Returns a socket bound to a free port, and the port. Two sockets with SO_REUSEADDR may have one port as
// long as neither socket listens.
std::pair<int, int> reserve_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) throw_errno("weft run: a socket for MASTER_PORT", errno);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  const int on = 1;
  const bool well = ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
                    ::bind(fd, reinterpret_cast<const sockaddr*>(&address), size) == 0 &&
                    ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  const int error = errno;
  if (well) return {fd, ntohs(address.sin_port)};
  ::close(fd);
  throw_errno("weft run: a port for MASTER_PORT", error);
}

}  // namespace

TorchVariables::TorchVariables(int ranks) : ranks_(ranks) {
  const bool nested = env::get("WEFT_JOB").has_value();
  const auto free = [&](const char* name) { return nested || std::getenv(name) == nullptr; };
  sets_ranks_ = std::all_of(kOfRanks.begin(), kOfRanks.end(), free);
  sets_address_ = free("MASTER_ADDR");
  sets_port_ = free("MASTER_PORT");
  if (!sets_port_) return;
  const auto [fd, port] = reserve_port();
  reserved_ = fd;
  port_ = fmt::to_string(port);
}

TorchVariables::~TorchVariables() {
  if (reserved_ >= 0) ::close(reserved_);
}

std::vector<std::pair<std::string_view, std::string>> TorchVariables::of(int rank) const {
  std::vector<std::pair<std::string_view, std::string>> all;
  if (sets_ranks_) {
    const std::array numbers = {rank, ranks_, rank, ranks_};
    for (std::size_t i = 0; i < kOfRanks.size(); ++i)
      all.emplace_back(kOfRanks[i], fmt::to_string(numbers[i]));
  }
  if (sets_address_) all.emplace_back("MASTER_ADDR", "127.0.0.1");
  if (sets_port_) all.emplace_back("MASTER_PORT", port_);
  return all;
}

}  // namespace weft::tools
