// The state of a PersistentExchange: a checked plan, and the transport's form of it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backends/exchange/program.hpp"
#include "group/user_numbers.hpp"
#include "weft/backends/backend.hpp"
#include "weft/group/process_group.hpp"

namespace weft {

class GroupState;

namespace detail {

struct PreparedExchange {
  PreparedExchange(const ExchangePlan& plan_in, int rank) : plan(plan_in), program(plan, rank) {}

  /// Like make_exchange(), for a layer of weft that checks its plans and its fields itself.
  static PersistentExchange make_sound(ProcessGroup& group, const ExchangePlan& plan);

  GroupState* group = nullptr;  ///< exists as long as users->ended() is false
  std::shared_ptr<UserNumbers> users;
  const ExchangePlan plan;
  const ExchangeProgram program;
  bool sound = false;  ///< the caller has checked that written memory is neither read nor written twice
  std::string tail;    ///< the end of error texts
  /// Belongs to the group: only the group's owner uses and destroys it, before the group ends.
  std::unique_ptr<PlannedExchange> planned{};

  /// The fields that were last checked successfully, and the number of their memory.
  struct Known {
    std::vector<ExchangeField> fields{};
    std::uint64_t memory = 0;  // 0: none
  };
  std::array<Known, 4> known{};
  std::size_t next_known = 0;
  std::uint64_t last_memory = 0;

  /// Returns the number of the memory of these fields. Throws bad_argument if the fields are wrong.
  std::uint64_t memory_of(std::span<const ExchangeField> fields);
  /// Returns whether a field has bytes in [begin, end) that are sent or received.
  bool touches(const ExchangeField* fields, const std::byte* begin, const std::byte* end) const noexcept;
};

}  // namespace detail

}  // namespace weft
