#include "backends/join.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "backends/build.hpp"
#include "base/mutant.hpp"

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

// Takes the first word off.
std::string next_word(std::string& text) {
  const std::size_t space = std::min(text.find(' '), text.size());
  std::string word = text.substr(0, space);
  text.erase(0, space + 1);
  return word;
}

[[noreturn]] void throw_mixed(const Bringup& b, int r, const std::string& theirs, const std::string& own) {
  const int low = std::min(r, b.rank), high = std::max(r, b.rank);
  const auto of = [&](int rank) { return describe_build(rank == r ? theirs : own); };
  throw Error(Failure{
      .code = ErrorCode::mismatch,
      .text = fmt::format("group \"{}\": rank {} runs {}, rank {} {}; expected the same build of weft "
                          "on all ranks [rank {}]",
                          b.name, low, of(low), high, of(high), b.rank),
      .ranks = {low, high}});
}

}  // namespace

std::vector<int> unset(Store& store, const std::vector<std::string>& keys) {
  const Deadline answer = Deadline::after(kAnswer);
  std::vector<int> absent;
  for (std::size_t i = 0; i < keys.size(); ++i)
    if (!store.try_get(keys[i], answer)) absent.push_back(static_cast<int>(i));
  return absent;
}

void announce(const Bringup& b, std::string_view what, std::string_view card, std::uint64_t layout) {
  // What build it is comes first, whatever other versions write after it.
  const std::string text = fmt::format("{} {} {}", build_word(layout, b.rank), b.size, card);
  for_group(b, [&] { b.store->set(key_of(b, what, b.rank), text, b.deadline); });
}

std::vector<std::string> join(const Bringup& b, std::string_view what, std::string_view card,
                              std::uint64_t layout) {
  if (b.size == 1) return {std::string(card)};
  const auto began = Clock::now();
  announce(b, what, card, layout);
  const std::string build = build_word(layout, b.rank);
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
    const std::string theirs = next_word(text);
    if (theirs != build && !WEFT_MUTANT("mixed_builds_unseen")) throw_mixed(b, r, theirs, build);
    const std::string size = next_word(text);
    if (size != std::to_string(b.size))
      throw Error(Failure{.code = ErrorCode::mismatch,
                          .text = fmt::format("group \"{}\": rank {} says size {}, rank {} says {}", b.name,
                                              r, size, b.rank, b.size),
                          .ranks = {r, b.rank}});
    cards.push_back(text);
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
