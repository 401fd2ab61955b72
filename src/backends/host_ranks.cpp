#include "weft/backends/host_ranks.hpp"

#include <fmt/format.h>

#include <charconv>
#include <system_error>

#include "host/peers.hpp"
#include "host/progress_engine.hpp"

namespace weft {
namespace {

// "number address": the number of the rank's doorbell in its process, and the place of that process.
struct Told {
  int doorbell = -1;
  ProcessAddress process;
};

[[noreturn]] void refuse(const GroupInit& b, int rank, ErrorCode code, std::string_view what) {
  throw Error(Failure{.code = code,
                      .text = fmt::format("group \"{}\": rank {}: {} [rank {}]", b.name, rank, what, b.rank),
                      .ranks = {rank}});
}

Told parse(const GroupInit& b, int rank, const std::string& text) {
  Told told;
  const char* const end = text.data() + text.size();
  const auto [rest, failed] = std::from_chars(text.data(), end, told.doorbell);
  if (failed != std::errc{} || rest == end || *rest != ' ')
    refuse(b, rank, ErrorCode::mismatch,
           fmt::format("it gave \"{}\"; expected the address of a rank on its host", text));
  told.process = ProcessAddress::decode(std::string(rest + 1, end));
  return told;
}

}  // namespace

Doorbell own_doorbell(const GroupInit& b) { return progress_of(b.context, b.process_rank).doorbell(); }

std::string HostRanks::address(const GroupInit& b) {
  HostPeers& peers = host_peers_of(b.context);
  return fmt::format("{} {}", peers.doorbell_number(b.process_rank), peers.self().encode());
}

HostRanks::HostRanks(const GroupInit& b, std::span<const std::string> addresses) : self_(b.rank) {
  HostPeers& peers = host_peers_of(b.context);
  for (std::size_t r = 0; r < addresses.size(); ++r) {
    const int rank = static_cast<int>(r);
    Rank& added = ranks_.emplace_back();
    const Told told = parse(b, rank, addresses[r]);
    try {
      added.process = peers.meet(told.process, b.deadline);
    } catch (const Error& e) {
      added.ended = e.code() == ErrorCode::peer_lost;
      // unsupported: the process is on another host, or belongs to another user
      if (added.ended || e.code() == ErrorCode::unsupported) continue;
      refuse(b, rank, e.code(), e.what());
    }
    added.doorbell = added.process->doorbell(told.doorbell);
  }
}

const HostRanks::Rank* HostRanks::find(int rank) const noexcept {
  return static_cast<std::size_t>(rank) < ranks_.size() ? &ranks_[static_cast<std::size_t>(rank)] : nullptr;
}

bool HostRanks::is_here(int rank) const noexcept {
  const Rank* const r = find(rank);
  return r != nullptr && (r->process != nullptr || r->ended);
}

Doorbell HostRanks::doorbell(int rank) const noexcept {
  const Rank* const r = find(rank);
  return r == nullptr ? Doorbell() : r->doorbell;
}

void HostRanks::ring_all() const noexcept {
  for (std::size_t r = 0; r < ranks_.size(); ++r)
    if (static_cast<int>(r) != self_ && ranks_[r].doorbell) ranks_[r].doorbell.ring();
}

bool HostRanks::alive(int rank) const noexcept {
  const Rank* const r = find(rank);
  return r == nullptr || (!r->ended && (r->process == nullptr || r->process->alive()));
}

}  // namespace weft
