// Small messages in addition to a program's calls.
#pragma once

#include <atomic>
#include <thread>
#include <vector>

#include "program.hpp"
#include "weft/group/process_group.hpp"

namespace weft::check {

/// A thread of this rank that sends or receives small messages, until it is destroyed, the group fails or its
/// time is over.
class Heartbeat {
 public:
  Heartbeat(const Program& p, int rank, ProcessGroup& group, Duration patience)
      : p_(p), group_(group), options_{.deadline = patience, .tag = kHeartbeatTag} {
    const std::vector<int> ranks = p.heartbeat_ranks();
    if (ranks.empty() || (rank != ranks[0] && rank != ranks[1])) return;
    thread_ = std::thread([this, ranks, sends = rank == ranks[0]] {
      try {
        sends ? send(ranks[1]) : receive(ranks[0]);
      } catch (const std::exception&) {}  // the group has failed: the rank's own calls report it
    });
  }
  ~Heartbeat() {
    ending_.store(true);
    if (thread_.joinable()) thread_.join();
  }
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

 private:
  void send(int to) {
    Dice pauses(mix(p_.seed, p_.index));
    const Deadline end = Deadline::after(kLongest);
    for (std::int32_t last = 0; last == 0;) {
      std::this_thread::sleep_for(std::chrono::milliseconds(pauses.between(1, 60)));
      last = ending_.load() || end.passed() ? 1 : 0;
      group_.send(view(&last, 1), to, options_).wait();
    }
  }
  void receive(int from) {
    for (std::int32_t last = 0; last == 0;) group_.recv(view(&last, 1), from, options_).wait();
  }

  static constexpr int kHeartbeatTag = 4242;
  // Far longer than a deadline and a second.
  static constexpr Duration kLongest = std::chrono::seconds(6);
  const Program& p_;
  ProcessGroup& group_;
  const CallOptions options_;
  std::atomic<bool> ending_{false};
  std::thread thread_;
};

}  // namespace weft::check
