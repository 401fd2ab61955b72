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

// Nobody has it now, and the kernel gives it to nobody soon, since it gives ports in turn.
int free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) throw_errno("weft run: a socket for MASTER_PORT", errno);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  const bool well = ::bind(fd, reinterpret_cast<const sockaddr*>(&address), size) == 0 &&
                    ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  const int error = errno;
  ::close(fd);
  if (!well) throw_errno("weft run: a port for MASTER_PORT", error);
  return ntohs(address.sin_port);
}

}  // namespace

TorchVariables::TorchVariables(int ranks) : ranks_(ranks) {
  const bool nested = env::get("WEFT_JOB").has_value();
  const auto free = [&](const char* name) { return nested || std::getenv(name) == nullptr; };
  sets_ranks_ = std::all_of(kOfRanks.begin(), kOfRanks.end(), free);
  sets_address_ = free("MASTER_ADDR");
  sets_port_ = free("MASTER_PORT");
  if (sets_port_) port_ = fmt::to_string(free_port());
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
