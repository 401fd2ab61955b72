#include "store/claim.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <random>
#include <utility>

#include "base/text/plain_streams.hpp"
#include "store/rendezvous_file.hpp"
#include "store/table.hpp"

namespace weft {

std::string Claim::text() const {
  return fmt::format("claim2 {} {} {} {} {} {} {} {} {} {:x} {}", process, started, host, machine, rank, size,
                     parent, parent_started, batch, nonce, left ? "left" : "here");
}

std::optional<Claim> Claim::parse(std::string_view text) {
  TextIn words{std::string(text)};
  std::string version, nonce, state;
  Claim c;
  if (!(words >> version >> c.process >> c.started >> c.host >> c.machine >> c.rank >> c.size >> c.parent >>
        c.parent_started >> c.batch >> std::hex >> c.nonce >> state) ||
      version != "claim2" || (state != "here" && state != "left"))
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

bool Claim::is_no_sibling_of(const Claim& other) const {
  if (parent == 0 || other.parent == 0 || host != other.host) return false;
  if (parent == other.parent && parent_started == other.parent_started) return false;
  return (parent != other.process || parent_started != other.started) &&
         (process != other.parent || started != other.parent_started);
}

bool Claim::is_of_another_batch(const Claim& other) const {
  const std::string_view own = batch, others = other.batch;
  const std::size_t name = own.find('=');
  return name != own.npos && own != others && own.substr(0, name + 1) == others.substr(0, name + 1);
}

void add_origin(Claim& claim, const std::string& batch) {
  // If a process's parent has ended, the process is a child of process 1, which says nothing about its
  // origin.
  claim.parent = ::getppid() > 1 ? ::getppid() : 0;
  claim.parent_started = claim.parent != 0 ? start_time_of(claim.parent).value_or(0) : 0;
  if (!batch.empty()) claim.batch = batch;
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
