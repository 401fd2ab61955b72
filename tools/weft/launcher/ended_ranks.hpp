// Notices to the ranks of a job about ranks that have ended, in the job's store. For use by one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "store/launcher_notice.hpp"

namespace weft::tools {

class EndedRanks {
 public:
  /// `port`: the port at which this process serves the job's store.
  EndedRanks(std::uint16_t port, std::string job) : port_(port), job_(std::move(job)) {}

  /// Reports that a rank has ended while others run: ranks that wait for it to join need wait no longer.
  void tell(int rank, const std::string& how) noexcept;
  /// Returns whether there are ended ranks of which it is not known yet whether others miss them.
  bool pending() const { return !pending_.empty(); }
  /// Returns the ended ranks that had never come to the store, once one of the `ranks` ranks of the job has
  /// come. Each rank is returned once.
  std::vector<EndedRank> take_missed(int ranks) noexcept;

 private:
  Store& client();

  const std::uint16_t port_;
  const std::string job_;
  std::shared_ptr<Store> client_;  // null: not needed yet
  std::vector<EndedRank> told_, pending_;
};

}  // namespace weft::tools
