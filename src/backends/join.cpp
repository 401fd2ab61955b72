#include "backends/join.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace weft {

std::vector<std::string> join(const Bringup& b, std::string_view what, const std::string& card) {
  std::vector<std::string> cards(static_cast<std::size_t>(b.size));
  cards[static_cast<std::size_t>(b.rank)] = card;
  if (b.size == 1) return cards;
  const auto began = Clock::now();
  const auto key = [&](int r) { return fmt::format("{}/{}/{}", b.token, what, r); };
  b.store->set(key(b.rank), fmt::format("{} {}", b.size, card));
  try {
    for (int r = 0; r < b.size; ++r) {
      const std::string text = b.store->get(key(r), b.deadline);
      const std::size_t space = text.find(' ');
      const std::string size = text.substr(0, space);
      if (size != std::to_string(b.size))
        throw Error(Failure{.code = ErrorCode::mismatch,
                            .text = fmt::format("group \"{}\": rank {} says size {}, rank {} says {}", b.name,
                                                r, size, b.rank, b.size),
                            .ranks = {r, b.rank}});
      cards[static_cast<std::size_t>(r)] = text.substr(space + 1);
    }
  } catch (const Error& e) {
    if (e.code() != ErrorCode::timeout) throw;
    std::vector<int> missing;
    for (int r = 0; r < b.size; ++r)
      if (!b.store->try_get(key(r))) missing.push_back(r);
    throw Error(
        Failure{.code = ErrorCode::timeout,
                .text = fmt::format("group \"{}\": rank{} {} did not join within {:.3g} s [rank {}]", b.name,
                                    missing.size() == 1 ? "" : "s", fmt::join(missing, ", "),
                                    std::chrono::duration<double>(Clock::now() - began).count(), b.rank),
                .ranks = missing});
  }
  return cards;
}

}  // namespace weft
