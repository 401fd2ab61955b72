// Notices that a rank sends to its launcher (`weft run`). A rank sends a notice before it fails because of
// other ranks, so that the launcher names those ranks, even if it notices their ends later. It sends another
// notice if its results may be wrong and no Error can report that. Also the notices that `weft run` sends to
// the ranks. tools/weft/launcher/ is the other side. Any thread.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "weft/store/store.hpp"

namespace weft {

/// "<job> <rank> others failed": a datagram to the abstract socket that WEFT_LAUNCHER names. The other
/// notices are sent in the same way; "step 140" is that of report_step().
inline constexpr std::string_view kOthersFailed = "others failed", kResultsInDoubt = "results in doubt",
                                  kStep = "step ";

/// Reports that this process's group failed because of other ranks. Does nothing if no launcher listens;
/// waits for at most a tenth of a second.
void tell_launcher_that_others_failed() noexcept;
/// Reports that this process has logged a warning about a mistake for which its program gets no Error.
void tell_launcher_that_results_are_in_doubt() noexcept;

/// The key of the job's store that holds the claim of rank `rank`.
inline std::string place_key(int rank) { return "weft/rank/" + std::to_string(rank); }

/// The notices of `weft run` to the ranks: they list the ranks whose processes have ended while others ran,
/// and how each process ended ("exited with code 0"). They are in the job's store, under this key, one line
/// for each rank.
inline constexpr std::string_view kEndedKey = "weft/ended";
struct EndedRank {
  int rank = 0;
  std::string how;
};
// inline, because only the tool uses it
inline std::string encode_ended(const std::vector<EndedRank>& ranks) {
  std::string text;
  for (const EndedRank& r : ranks) text += std::to_string(r.rank) + " " + r.how + "\n";
  return text;
}
/// The reverse of encode_ended(); ignores lines of another form.
std::vector<EndedRank> decode_ended(std::string_view text);

}  // namespace weft
