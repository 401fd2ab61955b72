// The reports of a program's ranks and of the process that watches them, in memory that all of them map. The
// words of a killed rank stay there. It is filled with zeros at the beginning.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "program.hpp"
#include "weft/base/clock.hpp"
#include "weft/base/error.hpp"

namespace weft::check {

/// How far a rank has come. In this order.
enum class Phase : int {
  absent,   ///< not started
  running,  ///< makes groups, runs steps
  failed,   ///< a call has failed; quiesces
  settled,  ///< finished or quiesced, its buffers overwritten; waits to learn which ranks are left
  after,    ///< makes a group with the remaining ranks
  reused,   ///< has used that group; waits until the stopped rank has resumed
  done,     ///< everything is compared and given back
};
std::string_view name(Phase phase) noexcept;

inline std::int64_t now_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

template <std::size_t kBytes>
struct Text {
  char text[kBytes];
  void set(std::string_view s) noexcept {
    const std::size_t n = s.size() < kBytes - 1 ? s.size() : kBytes - 1;
    std::memcpy(text, s.data(), n);
    text[n] = '\0';
  }
  bool empty() const noexcept { return text[0] == '\0'; }
  std::string_view view() const noexcept { return text; }
};

/// Written by one rank.
struct RankReport {
  std::atomic<Phase> phase;
  std::atomic<int> pid;
  std::atomic<int> step;                    ///< its place in the program
  std::atomic<bool> struck;                 ///< the fault has happened, or is about to
  std::atomic<std::int64_t> waiting_since;  ///< when the last wait, post or creation began
  // The fields of the first error that the rank saw.
  bool has_error;
  ErrorCode code;
  Op op;
  std::uint64_t call;
  int group;          ///< -1: none yet
  bool in_creation;   ///< of that group
  bool own_deadline;  ///< the group's, not that of a call
  int blamed_count;
  int blamed[kMostRanks];  ///< as the program numbers them
  bool said_quiesced;
  std::int64_t thrown_at;
  std::int64_t
      starved_ns;  ///< how long its thread could run and had no processor, up to its error or its end
  Text<700> text;
  Text<200> untyped;       ///< an exception that was no weft::Error
  std::atomic<bool> made;  ///< the group of all ranks
  bool left;               ///< it left its groups on purpose
  bool quiesced;
  std::int64_t quiesce_ns;
  bool after_made;      ///< a new group of the survivors
  Text<700> complaint;  ///< the first thing that the rank itself found wrong
  bool perhaps_late;    ///< a late rank would explain it, too
};

/// Written by the first rank of each process.
struct ProcessReport {
  std::atomic<bool> warned_of_difference, warned_of_drop;  ///< its log has such a line
  int descriptors_before, descriptors_after;
  int segments_after;  ///< mappings of weft's shared memory
  bool counted;
};

struct SharedReport {
  // Written by the watcher.
  std::atomic<int> port;                 ///< of the store, + 1 to say that there is one
  std::atomic<std::uint32_t> survivors;  ///< bit per rank, and kDecided
  std::atomic<bool> late_over;           ///< the stopped rank has resumed, or has ended
  std::atomic<bool> released;            ///< all ranks are done: the next program may begin
  std::int64_t began, ended;
  std::int64_t died_at;  ///< the struck process, seen by the watcher
  std::int64_t late_ns;  ///< the most by which the watcher itself woke too late: how loaded the machine is
  int statuses[kMostRanks];  ///< of waitpid, by process; -1: ended by the watcher
  int job_status;            ///< of mpirun
  bool ran;
  bool job_ended;     ///< mpirun ended it before the ranks were done
  Text<500> trouble;  ///< the fault that the watcher found
  // Written by the ranks.
  // A bit per rank.
  std::atomic<std::uint32_t> trying,
      tried;                  ///< it gives its memory back, with something of another group in flight; it has
  std::atomic<bool> holding;  ///< a rank holds its part of a window back
  std::atomic<std::uint32_t> tried_holding;  ///< the same, with a window of the same group in flight
  std::atomic<int> child;                    ///< fault fork: 1 the child had the right error, 2 not
  RankReport ranks[kMostRanks];
  ProcessReport processes[kMostRanks];

  static constexpr std::uint32_t kDecided = 1u << 31;
  static constexpr std::uint32_t kPromised = 1u << 30;  ///< a new group of the survivors must work
};

}  // namespace weft::check
