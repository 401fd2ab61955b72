#include "weft/backends/join.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <system_error>
#include <thread>
#include <utility>

#include "backends/build.hpp"
#include "base/mutant.hpp"
#include "base/parse_number.hpp"
#include "store/duration_text.hpp"
#include "store/launcher_notice.hpp"
#include "store/table.hpp"
#include "weft/backends/first_cause.hpp"
#include "weft/base/env.hpp"
#include "weft/base/interrupt.hpp"
#include "weft/base/name_ranks.hpp"

namespace weft {
namespace {

// How long after the deadline the store may take to report which keys exist, or to remove a key; with many
// keys it may take longer.
constexpr Duration kAnswer = std::chrono::milliseconds(500);
constexpr Duration kAnswerEach = std::chrono::milliseconds(4);

// How often a waiting rank reads the first cause. It does so often at first, then more rarely, so that many
// ranks in a long wait do not load the store.
constexpr Duration kFirstLook = std::chrono::milliseconds(50);
constexpr Duration kRareLook = std::chrono::milliseconds(500);

// If the store ends a wait earlier than its deadline by this much, it does not answer at all.
constexpr Duration kEarly = std::chrono::milliseconds(10);

// If the store ends a wait later than its deadline by this much, weft treats it as not answering, and sends
// it only the necessary requests.
constexpr Duration kLate = std::chrono::milliseconds(250);

// Each rank that joins adds 1 to the low bits of a counter, and the group's size to the bits above.
constexpr int kCountBits = 24;

std::string key_of(const GroupInit& b, std::string_view what, std::string_view of) {
  return fmt::format("{}/{}/{}", b.token, what, of);
}
std::string key_of(const GroupInit& b, std::string_view what, int r) {
  return key_of(b, what, std::to_string(r));
}

// The texts of all ranks together may exceed one value of the store (1 MiB). So they are stored in parts of
// this size. The last part is shorter and may be empty.
constexpr std::size_t kPart = std::size_t{1} << 19;

std::string key_of_part(const GroupInit& b, std::string_view what, std::size_t part) {
  return part == 0 ? key_of(b, what, "all") : key_of(b, what, fmt::format("all/{}", part));
}

// Runs f. Puts the name of the group in front of errors of the store.
template <class F>
auto for_group(const GroupInit& b, const F& f) {
  try {
    return f();
  } catch (const Error& e) {
    if (std::string_view(e.what()).starts_with("group ")) throw;
    throw Error(Failure{.code = e.code(),
                        .text = fmt::format("group \"{}\": {} [rank {}]", b.name, e.what(), b.rank),
                        .ranks = {}});
  }
}

// Packs all texts into one value, and unpacks them. Each text is preceded by its length, because it may hold
// any byte.
std::string pack(const std::vector<std::string>& infos) {
  std::string text;
  for (const std::string& info : infos) text += fmt::format("{}:{}", info.size(), info);
  return text;
}
std::vector<std::string> unpack(const GroupInit& b, std::string_view text) {
  std::vector<std::string> infos;
  while (!text.empty()) {
    std::size_t bytes = 0;
    const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), bytes);
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    if (failed != std::errc{} || text.empty() || text[0] != ':' || text.size() - 1 < bytes) break;
    infos.emplace_back(text.substr(1, bytes));
    text.remove_prefix(1 + bytes);
  }
  if (!text.empty() || infos.size() != static_cast<std::size_t>(b.size))
    throw Error(ErrorCode::mismatch,
                fmt::format("group \"{}\": the store does not hold the texts of {} ranks [rank {}]", b.name,
                            b.size, b.rank));
  return infos;
}

[[noreturn]] void throw_mixed(const GroupInit& b, int r, const std::string& theirs, const std::string& own) {
  const int low = std::min(r, b.rank), high = std::max(r, b.rank);
  const auto of = [&](int rank) { return describe_build(rank == r ? theirs : own); };
  throw Error(Failure{
      .code = ErrorCode::mismatch,
      .text = fmt::format("group \"{}\": rank {} runs {}, rank {} {}; expected the same build of weft "
                          "on all ranks [rank {}]",
                          b.name, low, of(low), high, of(high), b.rank),
      .ranks = {low, high}});
}

// The text that a rank wrote with announce(): "build size place info". `place`: this rank was the place-th
// rank to arrive.
struct Announced {
  int place = 0;
  std::string info;
};

// Throws mismatch if the other rank runs another build, or gave another size.
Announced parse(const GroupInit& b, const std::string& build, int r, std::string_view text) {
  const std::string theirs(next_word(text));
  if (theirs != build && !WEFT_MUTANT("mixed_builds_unseen")) throw_mixed(b, r, theirs, build);
  const std::string_view size = next_word(text);
  if (size != std::to_string(b.size))
    throw Error(Failure{.code = ErrorCode::mismatch,
                        .text = fmt::format("group \"{}\": rank {} says size {}, rank {} says {}", b.name, r,
                                            size, b.rank, b.size),
                        .ranks = {r, b.rank}});
  const std::string_view place = next_word(text);
  const auto number = parse_integer<int>(place);
  if (!number || *number < 1)
    throw Error(Failure{.code = ErrorCode::mismatch,
                        .text = fmt::format("group \"{}\": rank {} reports arrival number {}; expected 1 "
                                            "or more [rank {}]",
                                            b.name, r, shown_key(place), b.rank),
                        .ranks = {r}});
  return {*number, std::string(text)};
}

// Throws the mismatch that this rank finds. Called if some rank gave another size, and has set its text or is
// about to set it. Or, with sizes = 0, if some rank has reported a mismatch.
void name_mismatch(const GroupInit& b, std::string_view what, const std::string& build, std::int64_t sizes) {
  constexpr std::int64_t kMost = 4096;  // the number of ranks whose texts are read
  do {
    for (int r = 0; r < std::min(std::max<std::int64_t>(sizes, b.size), kMost); ++r)
      if (auto text = b.store->try_get(key_of(b, what, r), b.deadline)) parse(b, build, r, *text);
    if (sizes > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  } while (sizes > 0 && !b.deadline.passed());
}

// Removes the group's prefix and the rank's suffix: returns "words" for "group "g": words [rank 3]".
std::string words_of(const GroupInit& b, std::string text) {
  const std::string head = fmt::format("group \"{}\": ", b.name), tail = fmt::format(" [rank {}]", b.rank);
  if (text.ends_with(tail)) text.resize(text.size() - tail.size());
  if (text.starts_with(head)) text.erase(0, head.size());
  return text;
}

bool blames_others(const Error& e) noexcept {
  switch (e.code()) {
    case ErrorCode::timeout:
    case ErrorCode::peer_lost:
    case ErrorCode::mismatch: return true;
    case ErrorCode::bad_argument:
    case ErrorCode::layout:
    case ErrorCode::unsupported:
    case ErrorCode::aborted:
    case ErrorCode::system:
    case ErrorCode::corrupt: break;
  }
  return !e.ranks().empty();
}

Error as_told(const GroupInit& b, Failure why) {
  why.text = fmt::format("group \"{}\": {} [rank {}]", b.name, why.text, b.rank);
  return Error(std::move(why));
}

}  // namespace

namespace {

// Returns the Error for an interrupted wait, which reports to the other ranks which rank does not arrive.
Error interruption(const GroupInit& b) {
  return Error(
      Failure{.code = ErrorCode::aborted,
              .text = fmt::format("group \"{}\": rank {} was interrupted while it was made [rank {}]", b.name,
                                  b.rank, b.rank),
              .ranks = {b.rank}});
}

}  // namespace

std::vector<int> unset(Store& store, const std::vector<std::string>& keys) {
  const Deadline answer = Deadline::after(kAnswer);
  std::vector<int> absent;
  for (std::size_t i = 0; i < keys.size(); ++i)
    if (!store.try_get(keys[i], answer)) absent.push_back(static_cast<int>(i));
  return absent;
}

void throw_first_cause(const GroupInit& b) {
  if (b.size == 1 || WEFT_MUTANT("last_cause")) return;
  if (auto why = FirstCause(b.store, b.token).look()) throw as_told(b, std::move(*why));
}

Failure reason_of(const GroupInit& b, const Error& own) {
  Failure why{.code = own.code(),
              .text = words_of(b, own.what()),
              .ranks = std::vector<int>(own.ranks().begin(), own.ranks().end())};
  if (!blames_others(own)) {
    why.text = fmt::format("rank {} cannot make it: {}", b.rank, why.text);
    why.ranks = {b.rank};
  }
  return why;
}

Error give_up(const GroupInit& b, const Error& error) {
  const Error own = interrupted() ? interruption(b) : error;
  if (b.size == 1 || WEFT_MUTANT("last_cause")) return own;
  const Failure mine = reason_of(b, own);
  Failure first = FirstCause(b.store, b.token).raise(mine);
  const bool may_be_a_consequence = own.code() == ErrorCode::timeout || own.code() == ErrorCode::peer_lost;
  if (may_be_a_consequence && first.text != mine.text) return as_told(b, std::move(first));
  // An error of the store does not name the group.
  if (!std::string_view(own.what()).starts_with("store: ")) return own;
  return as_told(b, {.code = own.code(),
                     .text = own.what(),
                     .op = own.op(),
                     .call = own.call(),
                     .ranks = std::vector<int>(own.ranks().begin(), own.ranks().end())});
}

namespace {

// Like await(), but also calls look() from time to time.
template <class Look>
std::optional<std::string> await_looking(const GroupInit& b, const std::string& key, const Look& look) {
  if (b.store == nullptr)
    throw Error(ErrorCode::bad_argument,
                fmt::format("group \"{}\": there is no store in which to wait for key \"{}\"", b.name, key));
  for (Duration pause = kFirstLook;; pause = std::min(2 * pause, kRareLook)) {
    const bool last = b.deadline.left() <= pause;
    const Deadline until = last ? b.deadline : Deadline::after(pause);
    try {
      return b.store->get(key, until);
    } catch (const Error& e) {
      if (e.code() != ErrorCode::timeout || until.left() > kEarly) throw;
    }
    if (Clock::now() < until.when() + kLate) {
      throw_first_cause(b);
      look();
    }
    // the rank may have arrived a moment ago
    if (last) return b.store->try_get(key, Deadline::after(kAnswer));
  }
}

// Returns whether this group's ranks are exactly the ranks of the job that the launcher (`weft run`) started,
// one process per rank.
bool is_whole_job(const GroupInit& b) {
  return env::get("WEFT_LAUNCHER") && env::get("WEFT_RANK") == std::to_string(b.rank) &&
         env::get("WEFT_WORLD_SIZE") == std::to_string(b.size);
}

// Throws peer_lost if the launcher (`weft run`) has reported that the process of a rank ended before the rank
// announced itself.
void throw_ended(const GroupInit& b, std::string_view what) {
  if (!is_whole_job(b)) return;
  const Deadline answer = Deadline::after(kAnswer);
  for (const EndedRank& ended : decode_ended(b.store->try_get(kEndedKey, answer).value_or("")))
    if (ended.rank < b.size && !b.store->try_get(key_of(b, what, ended.rank), answer))
      throw Error(Failure{.code = ErrorCode::peer_lost,
                          .text = fmt::format("group \"{}\": rank {} did not join: its process {} [rank {}]",
                                              b.name, ended.rank, ended.how, b.rank),
                          .ranks = {ended.rank}});
}

}  // namespace

std::optional<std::string> await(const GroupInit& b, const std::string& key) {
  return await_looking(b, key, [] {});
}

namespace {

// Called when the deadline has passed. Names the ranks that have not arrived. If all have arrived, it names
// the last rank, which had to combine the texts.
[[noreturn]] void throw_late(const GroupInit& b, std::string_view what, const std::string& build,
                             Clock::time_point began) {
  const Deadline answer = Deadline::after(kAnswer + kAnswerEach * b.size);
  std::vector<int> absent, last;
  for (int r = 0; r < b.size; ++r) {
    const auto text = b.store->try_get(key_of(b, what, r), answer);
    if (!text)
      absent.push_back(r);
    else if (parse(b, build, r, *text).place == b.size)
      last.push_back(r);
  }
  throw_absent(b, absent.empty() ? last : absent, std::chrono::duration_cast<Duration>(Clock::now() - began));
}

// Called on the rank that arrived last. The other ranks have set their texts, or are about to set them. A
// rank that died before that counts as absent.
void put_together(const GroupInit& b, std::string_view what, const std::string& build,
                  Clock::time_point began) {
  std::vector<std::string> all;
  for (int r = 0; r < b.size; ++r) {
    auto text = await(b, key_of(b, what, r));
    if (!text) throw_late(b, what, build, began);
    all.push_back(std::move(*text));
  }
  const std::string text = pack(all);
  // The first part is written last: if the first part exists, all parts exist.
  for (std::size_t part = text.size() / kPart + 1; part-- > 0;)
    b.store->set(key_of_part(b, what, part), std::string_view(text).substr(part * kPart, kPart), b.deadline);
}

// Returns all parts, joined; `first` is the first part.
std::string all_parts(const GroupInit& b, std::string_view what, std::string first) {
  std::string text = std::move(first);
  for (std::size_t part = 1; text.size() == part * kPart; ++part)
    text += b.store->get(key_of_part(b, what, part), b.deadline);
  return text;
}

}  // namespace

void announce(const GroupInit& b, std::string_view what, std::string_view info, std::uint64_t layout) {
  if (b.size == 1) return;  // there is no other rank to notify, and perhaps no store
  const auto began = Clock::now();
  const std::string build = build_word(layout, b.rank);
  for_group(b, [&] {
    const std::int64_t sum =
        b.store->add(key_of(b, what, "count"), (std::int64_t{b.size} << kCountBits) + 1, b.deadline);
    const std::int64_t sizes = sum >> kCountBits, count = sum - (sizes << kCountBits);
    // otherwise texts of the first use would be read as texts of this use
    if (sizes == count * b.size && count > b.size)
      throw Error(
          ErrorCode::bad_argument,
          fmt::format("group \"{}\": the ranks have joined as \"{}\" already; expected another name, or "
                      "withdraw() first [rank {}]",
                      b.name, what, b.rank));
    // The build comes first, so that every version of weft can read it, whatever follows it.
    b.store->set(key_of(b, what, b.rank), fmt::format("{} {} {} {}", build, b.size, count, info), b.deadline);
    if (sizes != count * b.size) name_mismatch(b, what, build, sizes);
    if (count == b.size) put_together(b, what, build, began);
  });
}

std::vector<std::string> join(const GroupInit& b, std::string_view what, std::string_view info,
                              std::uint64_t layout) {
  if (b.size == 1) return {std::string(info)};
  const auto began = Clock::now();
  announce(b, what, info, layout);
  const std::string build = build_word(layout, b.rank);
  return for_group(b, [&] {
    std::optional<std::string> all;
    try {
      all = await_looking(b, key_of(b, what, "all"), [&] { throw_ended(b, what); });
    } catch (const Error& e) {
      if (e.code() == ErrorCode::mismatch) name_mismatch(b, what, build, 0);
      throw;
    }
    if (!all) throw_late(b, what, build, began);
    std::vector<std::string> infos = unpack(b, all_parts(b, what, std::move(*all)));
    for (int r = 0; r < b.size; ++r) {
      std::string& text = infos[static_cast<std::size_t>(r)];
      text = parse(b, build, r, text).info;
    }
    return infos;
  });
}

void withdraw(const GroupInit& b, std::string_view what) noexcept {
  if (b.size == 1) return;
  try {
    const Deadline answer = Deadline::after(kAnswer);
    b.store->remove(key_of(b, what, b.rank), answer);
    if (b.rank != 0) return;
    b.store->remove(key_of(b, what, "count"), answer);
    for (std::size_t part = 0, bytes = kPart; bytes == kPart; ++part) {
      const std::string key = key_of_part(b, what, part);
      bytes = b.store->try_get(key, answer).value_or("").size();
      b.store->remove(key, answer);
    }
  } catch (...) {}  // the text stays in the store
}

void throw_absent(const GroupInit& b, std::vector<int> ranks, Duration waited) {
  std::string text = fmt::format("group \"{}\": {} did not join within {} [rank {}]", b.name,
                                 name_ranks(ranks), shown_seconds(waited), b.rank);
  throw Error(Failure{.code = ErrorCode::timeout, .text = std::move(text), .ranks = std::move(ranks)});
}

}  // namespace weft
