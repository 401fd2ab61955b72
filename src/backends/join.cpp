#include "backends/join.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <chrono>
#include <utility>

namespace weft {
namespace {

// What the store may take to say which keys are there, once the deadline has passed, or to remove one.
constexpr Duration kAnswer = std::chrono::milliseconds(500);

std::string key_of(const Bringup& b, std::string_view what, int r) {
  return fmt::format("{}/{}/{}", b.token, what, r);
}

// Runs f; what the store throws then says which group it was for.
template <class F>
auto for_group(const Bringup& b, const F& f) {
  try {
    return f();
  } catch (const Error& e) {
    throw Error(Failure{.code = e.code(),
                        .text = fmt::format("group \"{}\": {} [rank {}]", b.name, e.what(), b.rank),
                        .ranks = {}});
  }
}

// False: the key was not set by the deadline.
bool came(Store& store, const std::string& key, Deadline deadline, std::string& value) {
  try {
    value = store.get(key, deadline);
    return true;
  } catch (const Error& e) {
    if (e.code() != ErrorCode::timeout) throw;
    return false;
  }
}

}  // namespace

std::vector<int> unset(Store& store, const std::vector<std::string>& keys) {
  const Deadline answer = Deadline::after(kAnswer);
  std::vector<int> absent;
  for (std::size_t i = 0; i < keys.size(); ++i)
    if (!store.try_get(keys[i], answer)) absent.push_back(static_cast<int>(i));
  return absent;
}

void announce(const Bringup& b, std::string_view what, std::string_view card) {
  for_group(b,
            [&] { b.store->set(key_of(b, what, b.rank), fmt::format("{} {}", b.size, card), b.deadline); });
}

std::vector<std::string> join(const Bringup& b, std::string_view what, std::string_view card) {
  if (b.size == 1) return {std::string(card)};
  const auto began = Clock::now();
  announce(b, what, card);
  std::vector<std::string> keys, cards;
  for (int r = 0; r < b.size; ++r) keys.push_back(key_of(b, what, r));
  for (int r = 0; r < b.size; ++r) {
    std::string text;
    if (!for_group(b, [&] { return came(*b.store, keys[static_cast<std::size_t>(r)], b.deadline, text); })) {
      // All that are missing, and this one even where it came a moment ago.
      std::vector<int> absent = for_group(b, [&] { return unset(*b.store, keys); });
      if (absent.empty()) absent.push_back(r);
      throw_absent(b, std::move(absent), std::chrono::duration_cast<Duration>(Clock::now() - began));
    }
    const std::size_t space = text.find(' ');
    const std::string size = text.substr(0, space);
    if (size != std::to_string(b.size))
      throw Error(Failure{.code = ErrorCode::mismatch,
                          .text = fmt::format("group \"{}\": rank {} says size {}, rank {} says {}", b.name,
                                              r, size, b.rank, b.size),
                          .ranks = {r, b.rank}});
    cards.push_back(text.substr(space + 1));
  }
  return cards;
}

void withdraw(const Bringup& b, std::string_view what) noexcept {
  if (b.size == 1) return;
  try {
    b.store->remove(key_of(b, what, b.rank), Deadline::after(kAnswer));
  } catch (const std::exception&) {}  // a few bytes stay behind
}

void throw_absent(const Bringup& b, std::vector<int> ranks, Duration waited) {
  std::string text = fmt::format("group \"{}\": rank{} {} did not join within {:.3g} s [rank {}]", b.name,
                                 ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "),
                                 std::chrono::duration<double>(waited).count(), b.rank);
  throw Error(Failure{.code = ErrorCode::timeout, .text = std::move(text), .ranks = std::move(ranks)});
}

}  // namespace weft
