// One rank's part in a step that exchanges windows: its fields, the exchanges, and the comparison of what came with the
// definition of a window, row by row.
#pragma once

#include <list>
#include <string>
#include <vector>

#include "program.hpp"
#include "rank/buffers.hpp"
#include "weft/mesh/window.hpp"

namespace weft::check {

/// The windows that a rank has made, which borrow its groups: they end before these.
class Windows {
 public:
  /// The window of the step. Steps of one group, of equal rows and edges, share one.
  const Window& of(const Step& s, ProcessGroup& group);
  void end() { made_.clear(); }

 private:
  struct Made {
    int group;
    std::vector<std::int64_t> rows;
    WindowPlan plan;
    DeviceMesh mesh;
    Window window;
  };
  std::list<Made> made_;
};

class WindowTrial {
 public:
  /// `me`: the rank's number in the group of n.
  WindowTrial(Context& context, const Step& s, int me, int n, Pool* pool = nullptr);
  /// Starts all exchanges; waits where the ranks have yet to compare what they gave.
  std::vector<WindowTransfer> start(const Window& window);
  /// What is wrong with the memory now that all are finished; empty: nothing.
  std::string complaint() const;
  void overwrite() { buffers_.overwrite(); }
  std::string overwritten() const { return buffers_.overwritten(); }

 private:
  struct Field {
    std::byte *in, *out;
  };
  std::int64_t bytes_of_row() const { return s_.count * size_bytes(s_.dtype); }
  std::vector<std::byte> row(std::size_t field, std::int64_t row) const;

  const Step s_;
  std::int64_t first_ = 0, rows_ = 0, all_ = 0;  // this rank's rows, and those of all ranks
  std::int64_t wanted_ = 0;                      // rows of the window
  Buffers buffers_;
  std::vector<Field> fields_;  // of the first exchange, of the second, …
};

}  // namespace weft::check
