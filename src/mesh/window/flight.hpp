// Exchanges in flight, of one window (exchange.cpp) or of several (together.cpp): a call of the group. The
// plan's thread uses them.
#pragma once

#include <exception>
#include <span>
#include <utility>

#include "mesh/window/exchange.hpp"
#include "weft/group/work.hpp"

namespace weft {
class GroupState;
}

namespace weft::windows {

struct Known {
  const Window::Plan::Program* program = nullptr;
  const Judged* fields = nullptr;
};

inline bool is_alone(const Window::Plan& plan) { return !plan.axes || plan.axes.size() == 1; }

inline Stream stream_for(Stream given, std::span<const WindowField> fields) {
  return given == Stream{} && !fields.empty() ? Stream(fields[0].in.device) : given;
}

/// Checks the fields, and at the first start, with the other ranks, the arguments of the window. Throws the
/// same errors as Window::start(), but their texts do not name the function that the program called.
Known prepare(const Window& window, Window::Plan& plan, std::span<const WindowField> fields, Stream stream,
              Way way);

class Flight : public WindowTransfer::Steps {
 public:
  Flight(const Flight&) = delete;
  Flight& operator=(const Flight&) = delete;
  bool done() override;
  void finish() override;
  Work& work() override { return work_; }

 protected:
  /// `plan`: of the first window, with whose name errors begin. The derived class keeps it.
  explicit Flight(const Window::Plan& plan) : plan_(plan) {}
  void set_work(Work work);
  /// The destructors of derived classes call it: the call ends before its memory goes.
  void drop() noexcept;
  /// Exchange::leave() of all windows.
  virtual void leave() const noexcept = 0;

 private:
  void check() const;

  const Window::Plan& plan_;
  GroupState* group_ = nullptr;  // lives while work_ is valid: the program may have let go of the group
  std::exception_ptr why_;       // done() has thrown it
  Work work_;
};

}  // namespace weft::windows
