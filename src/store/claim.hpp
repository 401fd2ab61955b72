// A rank's place in a job's store. A process takes a place once, by writing a claim to the store.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace weft {

/// The description of a process that has taken a place, as the process has written it to the store. The store
/// may hold any text; parse() accepts only texts of text().
struct Claim {
  pid_t process = 0;
  std::uint64_t started = 0;  ///< start_time_of(process)
  std::string host;           ///< ProcessAddress::host
  std::string machine;        ///< the host's name, to show to users
  int rank = 0;
  int size = 1;  ///< the number of ranks of the process's job
  // The members from here on describe the origin; they are not needed if the job has a name.
  pid_t parent = 0;  ///< the process that started it; 0: not known
  std::uint64_t parent_started = 0;
  std::string batch = "-";  ///< "variable=value" of the batch system's job in which it runs; "-": none
  std::uint64_t nonce = 0;  ///< random, identifies this claim
  bool left = false;        ///< the Context that made the claim is destroyed

  std::string text() const;
  static std::optional<Claim> parse(std::string_view text);
  /// "process 4711 (on node7, rank 1 of 2)".
  std::string shown() const;
  /// Returns whether the process of the claim is known to have ended or left. `own_host`: the host of the
  /// caller. Nothing is known about a process on another host.
  bool is_over(std::string_view own_host) const;
  /// Returns whether both processes are on one host, were started by different processes, and neither of them
  /// started the other.
  bool is_no_sibling_of(const Claim& other) const;
  /// Returns whether both processes run in jobs of one batch system, but not in the same job.
  bool is_of_another_batch(const Claim& other) const;
};

/// Makes a claim of this process, with a new nonce.
Claim make_claim(std::string host, int rank, int size);
/// Adds the process that started this one, and the batch system's job (one word; empty: none).
void add_origin(Claim& claim, const std::string& batch);

/// Returns a claim from a store in the form for error texts, or the beginning of the text if it is no claim.
std::string shown_claim(std::string_view text);

}  // namespace weft
