// Schedules of pipeline-parallel training as tables: for each rank the list of its actions. Values and pure
// functions; any thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "weft/base/cxx20.hpp"

namespace weft {

/// One action of one rank, for one stage and one micro-batch. As text it is the stage, the kind and the
/// micro-batch, as in PyTorch: "0F3", "0SEND_F3", "1RECV_F3", "1B3".
struct PipelineAction {
  enum class Kind : unsigned char {
    forward,   ///< F: the forward pass of the stage
    backward,  ///< B: the whole backward pass
    /// I: the half of the backward pass that the stage before waits for, dx (P. Qi, X. Wan, G. Huang, M. Lin,
    /// "Zero Bubble Pipeline Parallelism", 2024)
    input,
    weight,         ///< W: the other half, dw
    send_forward,   ///< SEND_F: sends the outputs of the stage to the next stage; does not wait
    recv_forward,   ///< RECV_F: posts the receive of the stage's inputs; the forward pass waits for them
    send_backward,  ///< SEND_B: sends dx to the stage before; does not wait
    recv_backward   ///< RECV_B: posts the receive of dy; the backward pass waits for it
  };
  Kind kind = Kind::forward;
  int stage = 0, micro_batch = 0;
  friend bool operator==(const PipelineAction&, const PipelineAction&) = default;
};
std::string to_string(const PipelineAction& action);

/// A schedule: each rank performs its actions in their order. Neighbouring stages on different ranks exchange
/// messages, which the table has as actions; stages on one rank hand their tensors over.
struct PipelineSchedule {
  std::string name;  ///< for errors: one word without '#', or empty
  int ranks = 0, micro_batches = 0;
  std::vector<int> rank_of_stage;                    ///< by stage
  std::vector<std::vector<PipelineAction>> actions;  ///< by rank
  /// For each rank the largest number of activations that it keeps: an activation is what one forward pass of
  /// one stage keeps, from F to B, or to W. In a schedule without backward passes nothing is kept.
  std::vector<int> memory;

  int stages() const noexcept { return static_cast<int>(rank_of_stage.size()); }
  /// Whether the table has backward passes.
  bool trains() const noexcept;
  friend bool operator==(const PipelineSchedule&, const PipelineSchedule&) = default;
};

/// A rank may have so many sends in flight; before a further one it waits for the oldest of them.
inline constexpr int kPipelineSendsInFlight = 24;
/// The number of receives that a rank may have posted and not yet used.
inline constexpr int kPipelineReceivesPosted = 32;

/// The schedules that weft makes.
enum class PipelineKind : unsigned char {
  /// All forward passes, then all backward passes (Y. Huang et al., "GPipe", 2019).
  gpipe,
  /// One forward pass after each backward pass: rank r of p keeps at most p − r activations (D. Narayanan et
  /// al., "PipeDream", 2019, with a flush: "1F1B").
  one_f_one_b,
  /// 1F1B with several stages a rank, stage s on rank s mod p: a shorter bubble, more messages (D. Narayanan
  /// et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021).
  interleaved,
  /// The weight halves of backward passes fill the gaps; no rank keeps more activations than the first rank
  /// does in 1F1B (ZB-H1 of the paper above).
  zero_bubble,
  forward_only  ///< for evaluation
};
/// "gpipe", "1f1b", "interleaved", "zero-bubble", "forward".
std::string_view name(PipelineKind kind) noexcept;
/// Throws bad_argument, which lists the names, for another name.
PipelineKind pipeline_kind(std::string_view name);

/// Makes a schedule of that kind for any number of micro-batches, also fewer than stages. More than one stage
/// a rank is for `interleaved` (2 or more) and `forward_only`. Throws bad_argument if a number is out of
/// range.
PipelineSchedule make_pipeline_schedule(PipelineKind kind, int ranks, int micro_batches,
                                        int stages_per_rank = 1);

/// Adds the sends and receives to a schedule that has only computations: a send behind the pass whose result
/// it sends, and a receive at least one computation before the pass that needs it, so that the message moves
/// while the rank computes. Also sets `memory` to what the schedule keeps, where it is empty. Throws
/// bad_argument for numbers out of range, and if the schedule has messages already.
PipelineSchedule with_messages(PipelineSchedule computations);

/// Proves that a schedule runs to its end, or throws bad_argument that names the action, or the two actions,
/// that do not fit:
///
/// - each stage performs F of each micro-batch once, and B, or I and W, once; F before B or I, I before W, on
///   the rank of the stage;
/// - the backward passes of a stage go by rising micro-batch, so that a gradient is summed by the number of
///   the micro-batch: its bits do not depend on the schedule;
/// - each receive has its send and each send its receive; each message is received before the pass that needs
///   it, and sent after the pass that makes it;
/// - from a rank to another, messages are sent and received in one order;
/// - a rank keeps no more activations than `memory` says, and posts no more than kPipelineReceivesPosted
///   receives;
/// - no set of actions wait for each other.
void check_pipeline_schedule(const PipelineSchedule& schedule);

/// The table as text, and back. Lines: "schedule NAME", "ranks N", "micro-batches N", "stages RANK …" (the
/// rank of each stage), "memory N …" (of each rank), and "R: ACTION …" with the actions of rank R; `#` begins
/// a comment.
std::string to_string(const PipelineSchedule& schedule);
/// Throws bad_argument that names the line. Does not check the schedule.
PipelineSchedule parse_pipeline_schedule(std::string_view text);
/// Reads and checks a file. Throws `system` if it cannot be read, and the errors of
/// parse_pipeline_schedule() and check_pipeline_schedule() behind the name of the file.
PipelineSchedule read_pipeline_schedule(const std::filesystem::path& file);
/// Writes a new file; throws the errors of check_pipeline_schedule(), and `system` if it cannot be written.
void write_pipeline_schedule(const PipelineSchedule& schedule, const std::filesystem::path& file);

/// How long the parts of a simulated schedule take, in any unit of time, for each stage.
struct PipelineCosts {
  double forward = 1, input = 1, weight = 1;  ///< a whole backward pass takes input + weight
  double message = 0;                         ///< from the send to the arrival
};
/// A simulated run.
struct PipelineTimeline {
  struct Span {
    PipelineAction action;
    double begin, end;
  };
  std::vector<std::vector<Span>> ranks;  ///< the computations of each rank, in their order
  double length = 0;
  double bubble =
      0;  ///< the part of the ranks' time, until the last rank ends, in which they compute nothing
};
/// Simulates a schedule that check_pipeline_schedule() accepts; throws its errors.
PipelineTimeline simulate_pipeline(const PipelineSchedule& schedule, const PipelineCosts& costs = {});

/// A timeline as a picture: one row for each rank, one box for each computation.
std::string timeline_svg(const PipelineTimeline& timeline, std::string_view title);

}  // namespace weft
