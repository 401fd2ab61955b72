// A tensor that is on its way to another layout.
#pragma once

#include <memory>

#include "weft/base/tensor.hpp"

namespace weft {

/// A transfer that start_redistribute() or a Boundary begins, and finish() ends. Several may be in flight;
/// the ranks begin and finish them in the same order, also in relation to other calls of the same groups.
/// Used by one thread. Dropping one that is not finished gives it up, and with it the group that it
/// communicates in, as dropping a Work does.
///
/// A Transfer of several steps (a gather, then a reduction) begins the first step at once and the others in
/// finish(). If it began a step as soon as the one before is done, ranks would begin it in different orders
/// relative to other calls. With one step, the usual case, all communication begins at once.
class Transfer {
 public:
  /// The steps of a transfer; each kind of boundary has its own.
  class Steps {
   public:
    virtual ~Steps() = default;
    /// Like Transfer::done(). Begins no communication.
    virtual bool done() = 0;
    /// Waits. Called once.
    virtual Tensor finish() = 0;
  };

  Transfer() = default;
  /// A transfer that is done already: nothing moves.
  explicit Transfer(Tensor ready) : ready_(std::move(ready)) {}
  explicit Transfer(std::unique_ptr<Steps> steps) : steps_(std::move(steps)) {}

  /// True once the first step is done, so that finish() waits for later steps only. Does not wait. Throws
  /// what the communication throws.
  bool done();
  /// Waits, and gives the tensor; empty if there was nothing to give. The Transfer is empty afterwards.
  Tensor finish();

 private:
  Tensor ready_;
  std::unique_ptr<Steps> steps_;
};

}  // namespace weft
