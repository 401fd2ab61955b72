// One rank's part in a step that exchanges windows: its fields, the exchanges, and the comparison of the
// results. They are compared with the definition of a window, row by row, or, for the adjoint, with the sum
// over all rows of all windows.
#pragma once

#include <list>
#include <string>
#include <vector>

#include "program.hpp"
#include "rank/buffers.hpp"
#include "weft/mesh/window.hpp"

namespace weft::check {

/// The windows that a rank has made. They borrow its groups, so they must end before the groups.
class Windows {
 public:
  /// The window of the step. Steps of one group, with equal rows and edges, share one window.
  /// `copy`: windows of one step that start together are several windows of one mesh.
  const Window& of(const Step& s, ProcessGroup& group, int copy = 0);
  void end() { made_.clear(); }

 private:
  struct Made {
    int group;
    std::vector<std::int64_t> rows;
    WindowPlan plan;
    int copy;
    DeviceMesh mesh;
    Window window;
  };
  std::list<Made> made_;
};

class WindowTrial {
 public:
  /// `me`: the rank's number in the group of n.
  WindowTrial(Context& context, const Step& s, int me, int n, Pool* pool = nullptr);
  /// Starts all exchanges; waits if the ranks have yet to compare their arguments.
  std::vector<WindowTransfer> start(Windows& windows, ProcessGroup& group);
  /// The fault in the memory after all exchanges are finished. Empty: none.
  std::string complaint() const;
  void overwrite() { buffers_.overwrite(); }
  std::string overwritten() const { return buffers_.overwritten(); }

 private:
  struct Field {
    std::byte *in, *out;
  };
  /// The part of a tensor of all_ rows that a rank has.
  struct Part {
    std::int64_t first = 0, rows = 0;
    std::int64_t wanted = 0;  ///< rows of its window, which begins `before` rows earlier
  };
  ExchangePlan plan() const;
  std::int64_t bytes_of_row() const { return s_.count * size_bytes(s_.dtype); }
  std::int64_t in_rows() const { return s_.window.adjoint ? mine_.wanted : mine_.rows; }
  std::int64_t out_rows() const { return s_.window.adjoint ? mine_.rows : mine_.wanted; }
  std::vector<std::byte> given(std::size_t field, int rank, std::int64_t row) const;
  std::vector<std::byte> expected(std::size_t field, std::int64_t row) const;
  std::vector<std::byte> row(std::size_t field, std::int64_t row) const;

  const Step s_;
  const int me_;
  std::vector<Part> parts_;  // by rank
  Part mine_;
  std::int64_t all_ = 0;
  Buffers buffers_;
  std::vector<Field> fields_;  // of the first exchange, of the second, …
};

}  // namespace weft::check
