#include "group/hosts/host_table.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <unistd.h>

#include <optional>
#include <string_view>
#include <unordered_map>

#include "backends/test_hooks.hpp"
#include "base/parse_number.hpp"
#include "host/peers.hpp"
#include "store/duration_text.hpp"

namespace weft {
namespace {

// All groups of this name share the key, because a rank stays on its host. So a program that makes many
// groups of one name leaves only one key for each rank.
std::string key_of(const Membership& m, int rank) { return fmt::format("weft/{}/host/{}", m.name, rank); }

// Ranks with equal text can share memory (see HostPeers).
std::string host_of(Context& context, const Membership& m) {
  const GroupInit hooked{.context = context,
                         .store = {},
                         .token = {},
                         .name = {},
                         .process_rank = m.process_rank < 0 ? m.rank : m.process_rank,
                         .deadline = Deadline::never()};
  const std::string test_host = test_hooks(hooked).host;
  if (!test_host.empty()) return test_host;
  std::string host = this_host();
  if (is_unknown_host(host))
    host = host_peers_of(context).self().host;  // equal for all threads of this process
  return fmt::format("{}/{}", host, ::geteuid());
}

}  // namespace

HostTable::HostTable(Context& context, const Membership& m, std::string token)
    : store_(m.store), member_(m), token_(std::move(token)) {
  if (m.size > 1) store_->set(key_of(m, m.rank), host_of(context, m), Deadline::after(m.deadline));
}

const std::vector<int>& HostTable::first_on_host() {
  const std::lock_guard lock(mutex_);
  if (first_on_host_.empty()) first_on_host_ = member_.size == 1 ? std::vector<int>{0} : read();
  return first_on_host_;
}

// The first rank that calls this reads the host of each rank, and stores the result for the other ranks,
// which then read one key.
std::vector<int> HostTable::read() const {
  const auto n = static_cast<std::size_t>(member_.size);
  const Deadline deadline = Deadline::after(member_.deadline);
  const std::string key = fmt::format("{}/hosts", token_);
  std::vector<int> first;
  if (const std::optional<std::string> text = store_->try_get(key, deadline)) {
    std::string_view rest = *text;
    while (const auto rank = next_integer<int>(rest, 0, member_.size - 1)) first.push_back(*rank);
    if (first.size() == n) return first;
    first.clear();
  }
  std::unordered_map<std::string, int> known;
  for (int r = 0; r < member_.size; ++r) {
    try {
      first.push_back(known.try_emplace(store_->get(key_of(member_, r), deadline), r).first->second);
    } catch (const Error& e) {
      if (e.code() != ErrorCode::timeout) throw;
      throw Error(Failure{.code = ErrorCode::timeout,
                          .text = fmt::format("hosts: rank {} did not say within {} which host it is on "
                                              "[group \"{}\", rank {}]",
                                              r, shown_seconds(member_.deadline), member_.name, member_.rank),
                          .ranks = {r}});
    }
  }
  store_->set(key, fmt::format("{}", fmt::join(first, " ")), deadline);
  return first;
}

}  // namespace weft
