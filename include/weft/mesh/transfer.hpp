// A tensor that is being moved to another layout.
#pragma once

#include <memory>

#include "weft/base/tensor.hpp"

namespace weft {

/// A transfer that start_redistribute() or a Boundary begins. finish() ends it. Several transfers may be in
/// flight. All ranks must begin and finish them in the same order, and in the same order relative to other
/// calls of the same groups. Used by one thread. If an unfinished Transfer is destroyed, the group in which
/// it communicates fails, as with an unfinished Work.
///
/// A Transfer of several steps (a gather, then a reduction) begins the first step at once and the others in
/// finish(). If it began a step as soon as the previous step is done, ranks would begin this step in
/// different orders relative to other calls. With one step, the usual case, all communication begins at once.
class Transfer {
 public:
  /// The steps of a transfer. Each kind of boundary has its own class.
  class Steps {
   public:
    virtual ~Steps() = default;
    /// Like Transfer::done(). Must begin no communication.
    virtual bool done() = 0;
    /// Waits for the result. Called once.
    virtual Tensor finish() = 0;
  };

  Transfer() = default;
  /// A transfer that is finished already: finish() returns `ready`.
  explicit Transfer(Tensor ready) : ready_(std::move(ready)) {}
  explicit Transfer(std::unique_ptr<Steps> steps) : steps_(std::move(steps)) {}

  /// Returns true if the first step is done, so that finish() waits only for later steps. Does not wait.
  /// Throws the errors of the communication.
  bool done();
  /// Waits, and returns the tensor (an empty Tensor if the transfer writes into the caller's memory). The
  /// Transfer is empty afterwards.
  Tensor finish();

 private:
  Tensor ready_;
  std::unique_ptr<Steps> steps_;
};

}  // namespace weft
