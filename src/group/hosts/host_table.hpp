// Which ranks of a group share a host. Each rank writes its host into the Store when the group is made,
// without waiting; a rank that needs the hosts reads them there, once. Groups made of a group share its
// table. Thread-safe.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "weft/group/process_group.hpp"

namespace weft {

class HostTable {
 public:
  /// Tells the Store where rank `m.rank` is. `token`: the group's.
  HostTable(Context& context, const Membership& m, std::string token);
  /// For each rank the first rank of its host. The first call reads it from the Store, and waits for ranks
  /// that have not begun to make the group. Throws timeout naming the first that does not.
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
