// Rewrites the reports about inner calls, missing ranks and failures in terms of the user's calls.
#include <fmt/format.h>

#include <algorithm>

#include "backends/call_numbers.hpp"
#include "backends/compose/composer.hpp"
#include "weft/backends/op_table.hpp"
#include "weft/base/name_ranks.hpp"

namespace weft {

// Rewrites a text of the inner backend about one of its calls in terms of the user's call: with the user's
// call numbers, and with the user's operation if the text begins with the inner operation.
std::string Composer::users_words(std::string text, Op inner, Op users) const {
  const std::string_view begins = name(inner);
  if (inner != users && users != Op::none && text.starts_with(begins))
    text.replace(0, begins.size(), name(users));
  return renumbered(std::move(text), [&](std::uint64_t number) {
    return number & kUsersCall ? number & ~kUsersCall : users_call(number);
  });
}

// Texts about inner calls, in terms of the user's calls.
std::vector<LastCall> Composer::last_calls() noexcept {
  if (by_messages_) return {};
  std::vector<LastCall> calls = inner_->last_calls();
  const auto users = [&](std::uint64_t number) {
    if (number == kNoCall) return number;
    if ((number & kUsersCall) != 0) return number & ~kUsersCall;
    if (next_inner_ == 0) return number;
    if (number < next_inner_) return users_call(number);
    // a call of a rank that is ahead of this rank
    return users_call(next_inner_ - 1) + (number - next_inner_) + 1;
  };
  for (LastCall& c : calls) {
    c.call = users(c.call);
    c.oldest = users(c.oldest);
  }
  return calls;
}

bool Composer::ask(const OpState& s) noexcept {
  if (!row(s.op).collective) return exchanges(s) ? exchanges_.ask(s) : inner_->ask(s);
  const Composed* c = of(s);
  if (c != nullptr && c->posted == 0) c = unfinished_;
  bool known = true;
  for (int i = 0; c != nullptr && i < c->count; ++i)
    if (!c->done[static_cast<std::size_t>(i)] && !inner_->ask(c->inner[static_cast<std::size_t>(i)]))
      known = false;
  return known;
}

std::vector<int> Composer::missing(const OpState& s, std::string& story) noexcept {
  if (!row(s.op).collective) return exchanges(s) ? exchanges_.missing(s, story) : inner_->missing(s, story);
  const Composed* c = of(s);
  if (c != nullptr && c->posted == 0) c = unfinished_;  // the call waits in the queue
  if (c == nullptr) {
    story = "it was not started";
    return {};
  }
  const std::string before =
      c->user == &s ? "" : fmt::format("it comes after {} [call {}]: ", name(c->user->op), c->user->call);
  std::vector<int> ranks;
  for (int i = 0; i < c->count; ++i) {
    if (c->done[static_cast<std::size_t>(i)]) continue;
    const OpState& inner = c->inner[static_cast<std::size_t>(i)];
    const std::vector<int> these = inner_->missing(inner, story);
    ranks.insert(ranks.end(), these.begin(), these.end());
    if (c->plan == Plan::same) {
      story = before + users_words(story, inner.op, c->user->op);
      return ranks;
    }
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  story = before + (ranks.empty()
                        ? "every rank has arrived"
                        : fmt::format("{} {} not done {} part (by {})", name_ranks(ranks),
                                      ranks.size() == 1 ? "has" : "have", ranks.size() == 1 ? "its" : "their",
                                      traits_.has(Op::all_to_all_v) ? "all_to_all_v" : "messages"));
  return ranks;
}

void Composer::fail(const Failure& why) noexcept {
  try {
    Failure marked = why;
    if (row(why.op).collective && why.call != kNoCall) marked.call |= kUsersCall;
    inner_->fail(marked);
  } catch (...) {  // out of memory
    inner_->fail(why);
  }
}

Failure Composer::failure() const {
  Failure f = inner_->failure();
  if (f.call == kNoCall || static_cast<int>(f.op) >= kOpCount) return f;
  const bool collective = row(f.op).collective;
  if (f.call & kUsersCall) {
    f.call &= ~kUsersCall;
    // a failure that a group reports, or that describes calls of ranks, is already in the user's terms,
    // except for the marks.
    if (collective) {
      f.text = unmarked(std::move(f.text));
      return f;
    }
    const Op users = users_op(f.call);  // the failed call is a message of an exchange
    f.text = users_words(std::move(f.text), f.op, users);
    f.op = users;
  } else if (collective) {
    const std::uint64_t call = users_call(f.call);
    const Op users = users_op(call);
    f.text = users_words(std::move(f.text), f.op, users);
    f.op = users;
    f.call = call;
  }
  return f;
}

}  // namespace weft
