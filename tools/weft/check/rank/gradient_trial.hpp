// One rank's part in steps of a training. It reduces gradients, in buckets, sharded over the ranks or all at
// once, owns the memory of its tensors, and compares the results with those of the equivalent plain calls.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "oracle.hpp"
#include "program.hpp"
#include "rank/buffers.hpp"
#include "weft/group/process_group.hpp"

namespace weft::check {

class GradientTrial {
 public:
  /// The rank's work meanwhile.
  struct Meanwhile {
    std::function<void()> before_waiting;  ///< it may wait for others from now on
    std::function<void()> in_flight;       ///< in the middle of the last round
  };
  /// `me`: the rank's number in the group of n. `alone`: gradients that are reduced at once may be reduced
  /// over one axis of their mesh, whose group the ranks make in the step. It is false if a rank is struck.
  GradientTrial(Context& context, const Step& s, int me, int n, Pool* pool = nullptr, bool alone = false);
  /// Runs all rounds, with the other ranks of the group. Returns a description of the wrong result; empty:
  /// all results are right. Passes on the exceptions of the calls: mismatch if a rank gave another list or
  /// option.
  std::string run(ProcessGroup& group, bool exact, const Meanwhile& meanwhile);
  void overwrite() { buffers_.overwrite(); }
  std::string overwritten() const { return buffers_.overwritten(); }

 private:
  struct Entry {
    std::string name;
    std::int64_t rows = 0, columns = 1;
    DType dtype = DType::f32;  // of gradients; of values, if they are sharded
    ReduceOp::Kind reduce = ReduceOp::Kind::sum;
    Placements placements;         // at once: on dp and tp
    std::int64_t local = 0;        // at once: this rank's elements
    bool bound = false;            // in memory of the program's
    std::byte* data = nullptr;     // the gradient; if tensors are sharded, the whole gradient
    std::byte* reduced = nullptr;  // sharded: this rank's part of it
    std::byte* kept = nullptr;     // sharded: this rank's part of the values
    std::byte* whole = nullptr;    // sharded: where the values are gathered
    std::int64_t count() const { return rows * columns; }
  };
  // A gradient as the equivalent all_reduce.
  struct Reduced {
    Step step;
    int me = 0, n = 1;  // among the ranks on whose axes it is partial
  };
  void make_entries();
  Placements any_placements(Dice& d, const Entry& e) const;
  Reduced reduced(std::size_t i, int round) const;
  void differ();
  void lay_out();
  std::int64_t first_row(const Entry& e, int rank) const;
  std::int64_t own_count(const Entry& e) const;
  std::int64_t own_from(const Entry& e) const;
  Step gradient_of(std::size_t i, int round) const;
  Step values_of(std::size_t i, int round) const;
  std::string in_buckets(ProcessGroup& group, bool exact, const Meanwhile& meanwhile);
  std::string cut(ProcessGroup& group, bool exact, const Meanwhile& meanwhile);
  std::string at_once(ProcessGroup& group, bool exact, const Meanwhile& meanwhile);
  std::string complaint_of_reduced(std::size_t i, int round, bool exact) const;
  std::string stray() const;

  const Step s_;
  const Step memory_;  // for the buffers, which have tensors of several dtypes
  const int me_, n_;
  const bool alone_;
  int tp_ = 1;                               // at once: the ranks of the second axis
  bool odd_ = false;                         // at once: this rank gives another option
  bool unused_is_error_ = true;              // buckets
  DType gradient_dtype_ = DType::f32;        // cut
  ReduceOp::Kind op_ = ReduceOp::Kind::sum;  // cut
  std::int64_t bytes_ = 1;
  Buffers buffers_;
  std::vector<Entry> entries_;
};

}  // namespace weft::check
