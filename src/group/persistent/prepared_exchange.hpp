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

  /// make_exchange() for a layer of weft that checks its plans and its fields itself.
  static PersistentExchange make_sound(ProcessGroup& group, const ExchangePlan& plan);

  GroupState* group = nullptr;  ///< alive as long as its users have not ended
  std::shared_ptr<UserNumbers> users;
  const ExchangePlan plan;
  const ExchangeProgram program;
  bool sound = false;  ///< the caller has checked that no memory that is written is read or written twice
  std::string tail;    ///< of texts
  /// Belongs to the group: the group's owner uses and destroys it, and not after the group has ended.
  std::unique_ptr<PlannedExchange> planned{};

  /// The last fields that were checked and were right, and their number.
  struct Known {
    std::vector<ExchangeField> fields{};
    std::uint64_t memory = 0;  // 0: none
  };
  std::array<Known, 4> known{};
  std::size_t next_known = 0;
  std::uint64_t last_memory = 0;

  /// The number of these fields' memory. Throws bad_argument if the fields are wrong.
  std::uint64_t memory_of(std::span<const ExchangeField> fields);
  /// Returns whether a field has bytes in [begin, end) that are sent or received.
  bool touches(const ExchangeField* fields, const std::byte* begin, const std::byte* end) const noexcept;
};

}  // namespace detail

}  // namespace weft
