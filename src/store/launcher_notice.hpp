// The notices of a rank to weft run, which started it: before it fails because others did, so that the
// launcher names those, though their ends may be noticed later; and where its results may be wrong although
// no Error could say so. And what weft run tells the ranks. tools/weft/launcher/ is the other side. Any
// thread.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "weft/store/store.hpp"

namespace weft {

/// "<job> <rank> others failed": a datagram to the abstract socket that WEFT_LAUNCHER names. The other one in
/// the same way.
inline constexpr std::string_view kOthersFailed = "others failed", kResultsInDoubt = "results in doubt";

/// This process's group failed because of other ranks. Nothing if no launcher listens; waits for at most a
/// tenth of a second.
void tell_launcher_that_others_failed() noexcept;
/// This process has logged a warning of a mistake for which its program gets no Error.
void tell_launcher_that_results_are_in_doubt() noexcept;

/// The key of the job's store that a rank takes when it comes there, and keeps.
inline std::string place_key(int rank) { return "weft/rank/" + std::to_string(rank); }

/// The notices of weft run to the ranks: those whose process has ended while others ran, and how ("exited
/// with code 0"). In the job's store, under this key, a line each.
inline constexpr std::string_view kEndedKey = "weft/ended";
struct EndedRank {
  int rank = 0;
  std::string how;
};
inline std::string encode_ended(const std::vector<EndedRank>& ranks) {  // inline: the tool alone writes it
  std::string text;
  for (const EndedRank& r : ranks) text += std::to_string(r.rank) + " " + r.how + "\n";
  return text;
}
/// Lines that are none are left out.
std::vector<EndedRank> decode_ended(std::string_view text);

}  // namespace weft
