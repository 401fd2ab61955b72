// A rank's place in a job's store, which is taken once, and who has taken it.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace weft {

/// A process that has taken a place, as it writes itself into the store. Any text may stand there: parse()
/// lets nothing through that text() did not write.
struct Claim {
  pid_t process = 0;
  std::uint64_t started = 0;  ///< start_time_of(process)
  std::string host;           ///< ProcessAddress::host
  std::string machine;        ///< its name, for people
  int rank = 0;
  int size = 1;  ///< of the job that it belongs to
  // Of a job that has a name there is no need to know these.
  pid_t parent = 0;  ///< the process that started it; 0: not known
  std::uint64_t parent_started = 0;
  std::string batch = "-";  ///< "variable=value" of the batch system's job it runs in; "-": none
  std::uint64_t nonce = 0;  ///< of this one claim
  bool left = false;        ///< the Context that made it is gone

  std::string text() const;
  static std::optional<Claim> parse(std::string_view text);
  /// "process 4711 (on node7, rank 1 of 2)".
  std::string shown() const;
  /// True where its process is known to be gone, or has left: `own_host` is the asking process's. Of a
  /// process on another host nothing is known.
  bool is_over(std::string_view own_host) const;
  /// True where both are of one host, different processes started them, and neither started the other.
  bool is_no_sibling_of(const Claim& other) const;
  /// True where both run in jobs of one batch system, and not in the same.
  bool is_of_another_batch(const Claim& other) const;
};

/// This process's, with a nonce of its own.
Claim make_claim(std::string host, int rank, int size);
/// Writes into it who started this process, and the batch system's job (one word; empty: none).
void add_origin(Claim& claim, const std::string& batch);

/// What a claim in a store says, or the beginning of what else stands there.
std::string shown_claim(std::string_view text);

}  // namespace weft
