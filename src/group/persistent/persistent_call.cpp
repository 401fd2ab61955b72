#include "weft/group/persistent_call.hpp"

#include <fmt/format.h>

#include "group/group_state.hpp"
#include "group/persistent/prepared_call.hpp"

namespace weft {
namespace {

[[noreturn, gnu::cold, gnu::noinline]] void throw_empty() {
  throw Error(ErrorCode::bad_argument,
              "start: empty PersistentCall: it was made by default or moved from; expected one that "
              "ProcessGroup::make() gave");
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

Op PersistentCall::op() const noexcept { return prepared_ == nullptr ? Op::none : prepared_->op.op; }

}  // namespace weft
