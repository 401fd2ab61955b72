// Says whether the losses of one training on several meshes differ by rounding or by a fault.
//
// A training amplifies rounding: if a gradient is as small as rounding, AdamW turns its sign into a whole
// step. So from some step on no tolerance tells rounding from a fault. A control run measures how far
// rounding leads: the reference mesh again, with a learning rate that is kControlRate times as high. A mesh
// passes if each of its losses is within the tolerance, or at most kTimesControl times as far from the
// reference as the control has been up to that step.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace weft::tools {

inline constexpr double kControlRate = 1 + 1e-8, kTimesControl = 10;

using Losses = std::vector<double>;  ///< of each step

/// |loss - reference| / |reference| at each step; infinity where one of them is no number. Both have as many
/// steps.
std::vector<double> differences(const Losses& reference, const Losses& losses);

/// The steps at which a run ends on its first mesh, and on its second; 0: it does not run there.
struct RunEnds {
  std::int64_t first = 0, second = 0;
};
/// A run of `steps` steps over two meshes changes them in the middle of the `compared` steps, also if it is
/// to end earlier. If `compared` is below 2, it runs on the second mesh alone.
RunEnds ends_of_run(std::int64_t steps, std::int64_t compared);

struct ParityVerdict {
  bool passed = false;
  double worst = 0;  ///< of all differences from the reference
  /// The mesh and the step that are furthest from the reference, compared with what is allowed there; of
  /// those beyond the tolerance if there are any.
  std::size_t mesh = 0;
  std::int64_t step = 0;
  double difference = 0;  ///< there
  double of_control = 0;  ///< the furthest that the control has been up to that step
};

/// `losses`: of each mesh; the first mesh is the reference. `control`: null if there was no control run.
ParityVerdict verdict_of(std::span<const Losses> losses, const Losses* control, double tolerance);

/// The verdict in a sentence. `names`: of the meshes.
std::string sentence(const ParityVerdict& verdict, std::span<const std::string> names,
                     const Losses& reference, const Losses* control, double tolerance);

}  // namespace weft::tools
