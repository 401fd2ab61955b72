#include "weft/group/persistent_exchange.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "group/group_state.hpp"
#include "group/persistent/prepared_exchange.hpp"

namespace weft {

namespace detail {

std::uint64_t PreparedExchange::memory_of(std::span<const ExchangeField> fields) {
  const auto wrong = [&](const std::string& text) {
    throw Error(Failure{.code = ErrorCode::bad_argument,
                        .text = fmt::format("{}: {}{}", plan.name, text, tail),
                        .op = Op::exchange,
                        .ranks = {}});
  };
  if (fields.size() != plan.fields.size())
    wrong(
        fmt::format("there are {} fields; expected {}, as the plan has", fields.size(), plan.fields.size()));
  for (const Known& k : known)
    if (k.memory != 0 && std::ranges::equal(k.fields, fields, [](const auto& a, const auto& b) {
          return a.in == b.in && a.out == b.out;
        }))
      return k.memory;
  if (!sound) check_exchange_memory(plan, program, fields.data(), tail);
  Known& k = known[next_known];
  k.memory = 0;
  k.fields.assign(fields.begin(), fields.end());
  k.memory = ++last_memory;
  next_known = (next_known + 1) % known.size();
  return k.memory;
}

bool PreparedExchange::touches(const ExchangeField* fields, const std::byte* begin,
                               const std::byte* end) const noexcept {
  const auto meets = [&](const void* data, const ExchangeProgram::Span& s) {
    const auto* const at = static_cast<const std::byte*>(data);
    return s.low != s.high && at + s.low < end && begin < at + s.high;
  };
  for (std::size_t f = 0; f < plan.fields.size(); ++f)
    if (meets(fields[f].in, program.sent[f]) || meets(fields[f].out, program.written[f])) return true;
  return false;
}

PersistentExchange PreparedExchange::make_sound(ProcessGroup& group, const ExchangePlan& plan) {
  return PersistentExchange(Access::state(group).prepare_exchange(plan, true));
}

}  // namespace detail

Work PersistentExchange::start(std::span<const ExchangeField> fields, const CallOptions& options) {
  if (prepared_ == nullptr) [[unlikely]]
    throw Error(ErrorCode::bad_argument,
                "start: empty PersistentExchange: it was made by default or moved from; expected one that "
                "ProcessGroup::make_exchange() gave");
  if (prepared_->users->ended()) [[unlikely]]
    throw Error(Failure{.code = ErrorCode::bad_argument,
                        .text = fmt::format("{}: the group of this exchange has ended: its handle was "
                                            "destroyed, or has left it{}",
                                            prepared_->plan.name, prepared_->tail),
                        .op = Op::exchange,
                        .ranks = {}});
  return prepared_->group->start_exchange(*prepared_, fields, options);
}

}  // namespace weft
