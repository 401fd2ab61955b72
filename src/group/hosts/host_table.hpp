// Records which ranks of a group share a host. Each rank writes its host into the Store when the group is
// made, without waiting. A rank that needs the hosts reads them from the Store, once. Groups made from a
// group share its table. Thread-safe.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "weft/group/process_group.hpp"

namespace weft {

class HostTable {
 public:
  /// Writes the host of rank `m.rank` to the Store. `token`: the group's token.
  HostTable(Context& context, const Membership& m, std::string token);
  /// For each rank, the first rank on its host. The first call reads the table from the Store, and waits for
  /// ranks that have not begun to make the group. Throws timeout, naming the first rank whose host is
  /// missing.
  const std::vector<int>& first_on_host();

 private:
  std::vector<int> read() const;
  const std::shared_ptr<Store> store_;
  const Membership member_;
  const std::string token_;
  std::mutex mutex_;
  std::vector<int> first_on_host_;  // empty: not read yet
};

}  // namespace weft
