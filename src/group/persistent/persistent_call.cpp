#include "weft/group/persistent_call.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "group/group_state.hpp"
#include "group/persistent/prepared_call.hpp"

namespace weft {
namespace {

[[noreturn, gnu::cold, gnu::noinline]] void throw_empty() {
  throw Error(ErrorCode::bad_argument,
              "start: empty PersistentCall: it was made by default or moved from; expected one that "
              "ProcessGroup::make() gave");
}

[[noreturn, gnu::cold, gnu::noinline]] void throw_of_list(const std::string& text) {
  throw Error(ErrorCode::bad_argument, "start_all: " + text);
}

[[noreturn, gnu::cold, gnu::noinline]] void throw_ended(const detail::PreparedCall& p) {
  throw Error(Failure{.code = ErrorCode::bad_argument,
                      .text = fmt::format("{}: the group of this persistent call has ended: its handle was "
                                          "destroyed, or has left it{}",
                                          name(p.op.op), p.tail),
                      .op = p.op.op,
                      .ranks = {}});
}

}  // namespace

Work PersistentCall::start() {
  if (prepared_ == nullptr) [[unlikely]]
    throw_empty();
  if (prepared_->users->ended()) [[unlikely]]
    throw_ended(*prepared_);
  return prepared_->group->start(prepared_);
}

Work detail::start_all(std::span<PersistentCall* const> calls) {
  std::vector<std::shared_ptr<detail::PreparedCall>> all;
  all.reserve(calls.size());
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const std::shared_ptr<detail::PreparedCall>& p = calls[i]->prepared_;
    if (p == nullptr)
      throw_of_list(
          fmt::format("calls[{}] is an empty PersistentCall; expected one that "
                      "ProcessGroup::make() gave",
                      i));
    if (p->users->ended()) throw_ended(*p);
    if (p->group != calls[0]->prepared_->group)
      throw_of_list(fmt::format("calls[{}] is of another group than calls[0]; expected all of one", i));
    all.push_back(p);
  }
  std::vector<const detail::PreparedCall*> sorted;
  for (const auto& p : all) sorted.push_back(p.get());
  std::sort(sorted.begin(), sorted.end());
  if (const auto twice = std::adjacent_find(sorted.begin(), sorted.end()); twice != sorted.end())
    throw_of_list(fmt::format("a call ({}) is there twice; expected each once", name((*twice)->op.op)));
  if (all.empty()) return {};
  return all[0]->group->start_all(all);
}

Work start_all(std::span<PersistentCall> calls) {
  std::vector<PersistentCall*> all;
  for (PersistentCall& c : calls) all.push_back(&c);
  return detail::start_all(all);
}

Op PersistentCall::op() const noexcept { return prepared_ == nullptr ? Op::none : prepared_->op.op; }

}  // namespace weft
