// One rank's part in steps of a training: a reducer of gradients, in buckets or cut over the ranks, the memory of its tensors, and the
// comparison of what came with what the calls that it stands for must give.
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
  /// What the rank does meanwhile.
  struct Meanwhile {
    std::function<void()> before_waiting;  ///< it may wait for others from now on
    std::function<void()> in_flight;       ///< in the middle of the last round
  };
  /// `me`: the rank's number in the group of n.
  GradientTrial(Context& context, const Step& s, int me, int n, Pool* pool = nullptr);
  /// All rounds, with the others of the group. Returns what is wrong with what came of them; empty: nothing. Throws what it throws:
  /// mismatch, where a rank gives another list or option.
  std::string run(ProcessGroup& group, bool exact, const Meanwhile& meanwhile);
  void overwrite() { buffers_.overwrite(); }
  std::string overwritten() const { return buffers_.overwritten(); }

 private:
  struct Entry {
    std::string name;
    std::int64_t rows = 0, columns = 1;
    DType dtype = DType::f32;  // of gradients; of values, where they are cut
    ReduceOp::Kind reduce = ReduceOp::Kind::sum;
    bool bound = false;            // in memory of the program's
    std::byte* data = nullptr;     // the gradient; where tensors are cut, the whole one
    std::byte* reduced = nullptr;  // cut: this rank's part of it
    std::byte* kept = nullptr;     // cut: this rank's part of the values
    std::byte* whole = nullptr;    // cut: where the values are gathered
    std::int64_t count() const { return rows * columns; }
  };
  void make_entries();
  void differ();
  void lay_out();
  std::int64_t first_row(const Entry& e, int rank) const;
  std::int64_t own_count(const Entry& e) const;
  std::int64_t own_from(const Entry& e) const;
  Step gradient_of(std::size_t i, int round) const;
  Step values_of(std::size_t i, int round) const;
  std::string in_buckets(ProcessGroup& group, bool exact, const Meanwhile& meanwhile);
  std::string cut(ProcessGroup& group, bool exact, const Meanwhile& meanwhile);
  std::string complaint_of_reduced(std::size_t i, int round, bool exact) const;
  std::string stray() const;

  const Step s_;
  const Step memory_;  // for the buffers, which have tensors of several dtypes
  const int me_, n_;
  bool unused_is_error_ = true;              // buckets
  DType gradient_dtype_ = DType::f32;        // cut
  ReduceOp::Kind op_ = ReduceOp::Kind::sum;  // cut
  std::int64_t bytes_ = 1;
  Buffers buffers_;
  std::vector<Entry> entries_;
};

}  // namespace weft::check
