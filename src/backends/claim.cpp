#include "backends/claim.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <random>
#include <sstream>
#include <utility>

#include "backends/meeting_file.hpp"
#include "backends/store_table.hpp"

namespace weft {

std::string Claim::text() const {
  return fmt::format("claim1 {} {} {} {} {} {} {:x} {}", process, started, host, machine, rank, size, nonce,
                     left ? "left" : "here");
}

std::optional<Claim> Claim::parse(std::string_view text) {
  std::istringstream words{std::string(text)};
  std::string version, nonce, state;
  Claim c;
  if (!(words >> version >> c.process >> c.started >> c.host >> c.machine >> c.rank >> c.size >> std::hex >>
        c.nonce >> state) ||
      version != "claim1" || (state != "here" && state != "left"))
    return std::nullopt;
  c.left = state == "left";
  return c.text() == text ? std::optional(std::move(c)) : std::nullopt;
}

std::string Claim::shown() const {
  return fmt::format("process {} (on {}, rank {} of {})", process, machine, rank, size);
}

bool Claim::is_over(std::string_view own_host) const {
  return left || (host == own_host && start_time_of(process) != started);
}

Claim make_claim(std::string host, int rank, int size) {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0 || name[0] == '\0') name = {'?'};
  std::random_device random;
  return {.process = ::getpid(),
          .started = start_time_of(::getpid()).value_or(0),
          .host = std::move(host),
          .machine = name.data(),
          .rank = rank,
          .size = size,
          .nonce = (std::uint64_t{random()} << 32) | random()};
}

std::string shown_claim(std::string_view text) {
  const auto claim = Claim::parse(text);
  return claim ? claim->shown() : shown_key(text);
}

}  // namespace weft
