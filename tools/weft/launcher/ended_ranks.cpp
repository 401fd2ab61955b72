#include "ended_ranks.hpp"

#include <fmt/format.h>

#include <chrono>
#include <utility>

#include "weft/base/error.hpp"
#include "weft/store/tcp.hpp"

namespace weft::tools {
namespace {

constexpr Duration kStoreLimit = std::chrono::seconds(1);  // for our own store to answer

}  // namespace

Store& EndedRanks::client() {
  if (client_ == nullptr) client_ = make_tcp_store("127.0.0.1", port_, Deadline::after(kStoreLimit));
  return *client_;
}

void EndedRanks::tell(int rank, const std::string& how) noexcept try {
  told_.push_back({rank, how});
  pending_.push_back({rank, how});
  client().set(fmt::format("{}/{}", job_, kEndedKey), encode_ended(told_), Deadline::after(kStoreLimit));
} catch (const std::exception&) {  // they wait until their deadline
}

// A rank that takes its place in the store keeps the key, even when it leaves.
std::vector<EndedRank> EndedRanks::take_missed(int ranks) noexcept try {
  if (pending_.empty()) return {};
  const auto came = [&](int rank) {
    return client()
        .try_get(fmt::format("{}/{}", job_, place_key(rank)), Deadline::after(kStoreLimit))
        .has_value();
  };
  std::vector<EndedRank> absent;
  for (EndedRank& ended : pending_)
    if (!came(ended.rank)) absent.push_back(std::move(ended));
  pending_ = std::move(absent);
  for (int rank = 0; rank < ranks && !pending_.empty(); ++rank)
    if (came(rank)) return std::exchange(pending_, {});
  return {};
} catch (const std::exception&) {  // nothing is said
  return {};
}

}  // namespace weft::tools
