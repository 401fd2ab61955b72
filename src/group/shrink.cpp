// How the survivors of a group agree on the members of a new group. They use only the Store, because the
// group has failed, and its transport cannot be used.
//
// They agree in rounds. A round has a roll: one key of the Store, to which each rank adds itself by
// compare_set while the roll is open. A rank closes the roll, also by compare_set, when all ranks that can
// arrive have arrived (the transport knows which of the others are gone), or when it has waited long enough.
// This decides which ranks are members. A late rank finds the roll closed without itself, and throws. Then
// the members make the group. The group is valid only after all members have made it. Each member signs a
// second key, and the last signature makes the group good. If a member cannot make the group, notices the
// death of another member, or has waited too long, it writes that the group is bad. It does not do so if the
// group is good already. So all members see the same result, good or bad. After a bad round the members begin
// the next round, without ranks that do not arrive. A rank may be stopped at any point and continue at any
// later time, because each change compares the key with its present value.
#include "group/shrink.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>

#include "base/parse_number.hpp"
#include "base/text/plain_streams.hpp"
#include "base/waits/suspension.hpp"
#include "group/rank_list.hpp"
#include "store/forwarding_store.hpp"
#include "store/table.hpp"
#include "weft/base/name_ranks.hpp"

namespace weft {
namespace {

using Ranks = std::vector<int>;

// the pause between two reads at first; later it is longer
constexpr Duration kLook = std::chrono::milliseconds(2);
constexpr Duration kLongestLook = std::chrono::milliseconds(25);
constexpr Duration kSlice = std::chrono::milliseconds(50);  // the length of a short wait in the store
constexpr Duration kAnswer = std::chrono::seconds(2), kLongestAnswer = std::chrono::seconds(30);
constexpr int kTries = 3;  // how often the same ranks try

Ranks without(const Ranks& ranks, const Ranks& others) {
  Ranks rest;
  std::copy_if(ranks.begin(), ranks.end(), std::back_inserter(rest),
               [&](int r) { return !holds(others, r); });
  return rest;
}

// "open 0 2 -3" or "closed 0 2": -3 means that rank 3 has failed, so that no rank waits for it.
struct Roll {
  bool closed = false;
  Ranks here{}, resigned{};

  // Returns nothing if `text` is no roll of a group of `size`.
  static std::optional<Roll> parse(const std::string& text, int size) {
    Roll roll;
    if (text.empty()) return roll;  // no rank has written a roll yet
    TextIn in(text);
    std::string word;
    in >> word;
    roll.closed = word == "closed";
    if (!roll.closed && word != "open") return std::nullopt;
    while (in >> word) {
      const bool resigned = word[0] == '-';
      const auto rank = parse_integer<int>(std::string_view(word).substr(resigned ? 1 : 0));
      Ranks& list = resigned ? roll.resigned : roll.here;
      if (!rank || *rank < 0 || *rank >= size || holds(list, *rank)) return std::nullopt;
      list.push_back(*rank);
    }
    return roll;
  }
  std::string text() const {
    std::string out = closed ? "closed" : "open";
    Ranks sorted = here;
    std::sort(sorted.begin(), sorted.end());
    for (const int r : sorted) out += fmt::format(" {}", r);
    for (const int r : resigned) out += fmt::format(" -{}", r);
    return out;
  }
};

// The store for the group while the group is made: a wait ends early if the round is lost.
class RoundStore final : public ForwardingStore {
 public:
  /// `look` throws if there is no reason to wait any more.
  RoundStore(std::shared_ptr<Store> store, std::function<void()> look)
      : ForwardingStore(std::move(store)), look_(std::move(look)) {}
  /// From now on this store only forwards to the store below, because the group may have kept it.
  void over() {
    const std::lock_guard lock(mutex_);
    look_ = nullptr;
  }
  std::string get(std::string_view key, Deadline deadline) override {
    const auto began = Clock::now();
    for (;;) {
      look();
      try {
        return ForwardingStore::get(key, Deadline::after(std::min(kSlice, deadline.left())));
      } catch (const Error& e) {
        if (e.code() != ErrorCode::timeout) throw;
        if (deadline.passed()) throw Error(ErrorCode::timeout, timeout_text(key, Clock::now() - began));
      }
    }
  }

 private:
  void look() {
    const std::lock_guard lock(mutex_);
    if (look_) look_();
  }
  std::mutex mutex_;
  std::function<void()> look_;
};

class Shrinking {
 public:
  Shrinking(GroupState& group, Duration limit)
      : group_(group),
        store_(group.member.store),
        rank_(group.member.rank),
        limit_(limit > Duration::zero() ? limit : group.member.deadline) {}

  GroupState* run() {
    GroupState::Shrinking& state = group_.shrinking;
    const std::lock_guard one_at_a_time(state.mutex);
    if (state.members.empty())
      for (int r = 0; r < group_.member.size; ++r) state.members.push_back(r);
    if (store_ == nullptr) return make({rank_}, 0, nullptr);  // a group of one
    int tries = 0;
    for (;;) {
      const int round = state.rounds;
      const Ranks members = gather(state.members, round);
      tries = members == state.members ? tries + 1 : 1;
      state.members = members;
      state.rounds = round + 1;
      if (GroupState* made = attempt(members, round, tries)) return made;
      if (tries < kTries) continue;
      resign(state.rounds);
      throw Error(Failure{.code = ErrorCode::timeout,
                          .text = fmt::format("shrink: ranks {} tried {} times and could not make a group{}",
                                              fmt::join(members, ", "), tries, tail()),
                          .ranks = members});
    }
  }

 private:
  std::string key(std::string_view what, int round) const {
    return group_.key(fmt::format("shrink{}/{}", round, what));
  }
  std::string tail() const { return fmt::format(" [group \"{}\", rank {}]", group_.member.name, rank_); }

  // Parses the contents of a key of this agreement. Another program that shares the store may have written
  // this key.
  Roll parse(const std::string& key, const std::string& text) const {
    if (auto roll = Roll::parse(text, group_.member.size)) return std::move(*roll);
    throw Error(Failure{
        .code = ErrorCode::mismatch,
        .text =
            fmt::format("shrink: key {} holds {}; expected \"open\" or \"closed\" and ranks from 0 to {}, "
                        "each once{}",
                        shown_key(key), shown_key(text), group_.member.size - 1, tail()),
        .ranks = {}});
  }

  // Calls a function of the store. If the store is lost, throws an error with a text of its own.
  template <class F>
  auto ask(const F& f) const {
    try {
      return f(*store_);
    } catch (const Error& e) {
      if (e.code() == ErrorCode::bad_argument) throw;
      throw Error(Failure{
          .code = e.code(),
          .text =
              fmt::format("shrink: the store is lost, and without it the remaining ranks cannot agree: {}{}",
                          e.what(), tail()),
          .ranks = {}});
    }
  }
  // A working store answers at once. If a store does not answer, the process that serves it is stopped or
  // cannot be reached.
  Deadline answer() const { return Deadline::after(std::clamp<Duration>(limit_, kAnswer, kLongestAnswer)); }
  std::string read(const std::string& key) const {
    return ask([&](Store& s) { return s.try_get(key, answer()).value_or(""); });
  }
  // Applies `change` to the key until `change` has nothing more to change. Returns the value that the key
  // then holds.
  template <class Change>
  std::string update(const std::string& key, const Change& change) const {
    std::string held = read(key);
    for (;;) {
      const std::string wanted = change(held);
      if (wanted == held) return held;
      std::string now = ask([&](Store& s) { return s.compare_set(key, held, wanted, answer()); });
      if (now == wanted) return now;
      held = std::move(now);
    }
  }

  class Pause {
   public:
    void wait() {
      sleep_noticing(next_);
      next_ = std::min(2 * next_, kLongestLook);
    }

   private:
    Duration next_ = kLook;
  };

  // Agrees on the ranks that take part in a round, and returns them. Throws if this rank is not among them.
  Ranks gather(const Ranks& candidates, int round) const {
    const std::string roll_key = key("roll", round);
    const Deadline deadline = Deadline::after(limit_);
    // The ranks that the first cause names as lost: the others do not wait for them. If such a rank arrives
    // nevertheless, it becomes a member.
    Ranks accused;
    if (const std::optional<Failure> why = group_.failure(); why && why->code == ErrorCode::peer_lost)
      accused = why->ranks;
    std::string held = update(roll_key, [&](const std::string& text) {
      Roll roll = parse(roll_key, text);
      if (roll.closed || holds(roll.here, rank_)) return text;
      roll.here.push_back(rank_);
      roll.resigned = without(roll.resigned, {rank_});  // this rank tries again
      return roll.text();
    });
    for (Pause pause; !parse(roll_key, held).closed; pause.wait()) {
      // read first, because a rank that has signed and then left is no member
      const Ranks gone = group_.gone();
      held = read(roll_key);
      Roll roll = parse(roll_key, held);
      if (roll.closed) break;
      Ranks awaited = without(without(candidates, roll.here), roll.resigned);
      awaited = without(without(awaited, gone), accused);
      if (!awaited.empty() && !deadline.passed()) continue;
      roll.closed = true;
      roll.here = without(roll.here, gone);
      ask([&](Store& s) { return s.compare_set(roll_key, held, roll.text(), answer()); });
      held = read(roll_key);
    }
    const Ranks members = parse(roll_key, held).here;
    if (holds(members, rank_)) {
      const Ranks out = without(candidates, members);
      // A rank that is left out, but alive, may wait in a call of the old group, so the old group must fail.
      if (!out.empty())
        group_.fail(Failure{.code = ErrorCode::peer_lost,
                            .text = fmt::format("shrink: the group continues as {} without {}",
                                                name_ranks(members), name_ranks(out)),
                            .ranks = out});
      return members;
    }
    throw Error(Failure{
        .code = ErrorCode::peer_lost,
        .text = fmt::format("shrink: rank {} is not in the new group, which the others, {}, "
                            "have made without it: it arrived too late, or the others considered it dead{}",
                            rank_, name_ranks(members), tail()),
        .ranks = {rank_}});
  }

  // Notifies the other ranks that they need not wait for this rank in that round.
  void resign(int round) const {
    const std::string roll_key = key("roll", round);
    update(roll_key, [&](const std::string& text) {
      Roll roll = parse(roll_key, text);
      if (roll.closed || holds(roll.resigned, rank_)) return text;
      roll.resigned.push_back(rank_);
      return roll.text();
    });
  }

  // The key "built" of a round: it lists the members that have made the group, or says "bad" if the group
  // cannot be made.
  struct Built {
    std::string key;
    const Ranks& members;
  };
  static bool bad(const std::string& text) { return text == "bad"; }
  bool good(const Built& built, const std::string& text) const {
    return !bad(text) && parse(built.key, text).here.size() == built.members.size();
  }
  // Marks the group as bad. Returns true if this rank has decided the outcome.
  bool spoil(const Built& built) const {
    bool mine = false;
    update(built.key, [&](const std::string& text) {
      mine = !bad(text) && !good(built, text);
      return mine ? "bad" : text;
    });
    return mine;
  }
  bool lost(const Ranks& members) const {
    const Ranks gone = group_.gone();
    return std::any_of(gone.begin(), gone.end(), [&](int r) { return holds(members, r); });
  }

  // Makes the group of `members`. Returns null if the members must agree again.
  GroupState* attempt(const Ranks& members, int round, int tries) const {
    const Built built{key("built", round), members};
    GroupState* const made = make_or_spoil(built, round, tries);
    if (made == nullptr) return nullptr;
    try {
      if (all_have(built)) return made;
    } catch (...) {
      give_up(made);
      throw;
    }
    give_up(made);
    return nullptr;
  }

  // Makes the group on all ranks or on no rank. Returns null if the members must agree again.
  GroupState* make_or_spoil(const Built& built, int round, int tries) const {
    const auto rendezvous_store = std::make_shared<RoundStore>(store_, [&] {
      if (lost(built.members) || bad(read(built.key)))
        throw Error(ErrorCode::peer_lost, "shrink: a rank was lost while the group was made");
    });
    try {
      GroupState* const made = make(built.members, round, rendezvous_store);
      rendezvous_store->over();
      return made;
    } catch (const Error& e) {
      rendezvous_store->over();
      const bool first = spoil(built);
      const bool others = e.code() == ErrorCode::timeout || e.code() == ErrorCode::peer_lost;
      if ((first && !others && !lost(built.members)) || tries >= kTries) {
        resign(round + 1);
        throw;
      }
      return nullptr;
    } catch (...) {
      rendezvous_store->over();
      spoil(built);
      resign(round + 1);
      throw;
    }
  }

  // Signs that this rank has made the group, and waits for the other members to sign.
  bool all_have(const Built& built) const {
    const Deadline deadline = Deadline::after(limit_);
    std::string held = update(built.key, [&](const std::string& text) {
      if (bad(text)) return text;
      Roll roll = parse(built.key, text);
      if (holds(roll.here, rank_)) return text;
      roll.here.push_back(rank_);
      return roll.text();
    });
    for (Pause pause; !good(built, held) && !bad(held); pause.wait()) {
      // Checked first, because a rank that has left may have left after the group became good.
      const bool one_is_gone = lost(built.members);
      held = read(built.key);
      if (good(built, held) || bad(held) || (!one_is_gone && !deadline.passed())) continue;
      spoil(built);
      held = read(built.key);
    }
    return good(built, held);
  }

  static void give_up(GroupState* made) noexcept {
    made->fail(Failure{.code = ErrorCode::aborted, .text = "shrink: given up", .ranks = {}});
    made->release();
  }

  GroupState* make(const Ranks& members, int round, const std::shared_ptr<Store>& rendezvous_store) const {
    Origin origin = group_.origin_of(members);
    origin.name = group_.origin.name;
    origin.shrinks = group_.origin.shrinks + 1;
    if (origin.name.empty()) origin.name = group_.member.name;
    Membership m = group_.member;
    m.process_rank = m.process_rank < 0 ? m.rank : m.process_rank;
    m.rank = static_cast<int>(std::find(members.begin(), members.end(), rank_) - members.begin());
    m.size = static_cast<int>(members.size());
    m.name = fmt::format("{}/shrunk{}", origin.name,
                         origin.shrinks == 1 ? std::string() : std::to_string(origin.shrinks));
    return new GroupState(group_.context, group_.factory, m, key("group", round),
                          group_.ranks_here_of(m.size), std::move(origin), rendezvous_store, limit_);
  }

  GroupState& group_;
  const std::shared_ptr<Store> store_;
  const int rank_;
  const Duration limit_;
};

}  // namespace

GroupState* shrink(GroupState& group, Duration limit) { return Shrinking(group, limit).run(); }

}  // namespace weft
