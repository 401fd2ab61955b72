// A tensor that is on its way to another layout.
#pragma once

#include <memory>

#include "weft/base/tensor.hpp"

namespace weft {

/// What start_redistribute() and a Boundary begin, and finish() ends. Several may be in flight; the ranks begin
/// and finish them in the same order, also in relation to other calls of the same groups. Used by one thread. Dropping one that is not finished gives it up, and with it the
/// group that it communicates in, as dropping a Work does.
///
/// Of a Transfer of several steps (a gather, then a reduction) the first is begun at once and the others in
/// finish(): a later step begun as soon as the one before it is done would come at another moment on each rank.
/// With one step, the usual case, all is under way from the beginning.
class Transfer {
 public:
  /// How a kind of boundary moves what it moves.
  class Steps {
   public:
    virtual ~Steps() = default;
    /// As Transfer::done(). Begins no communication.
    virtual bool done() = 0;
    /// Waits. Called once.
    virtual Tensor finish() = 0;
  };

  Transfer() = default;
  /// Nothing moves.
  explicit Transfer(Tensor ready) : ready_(std::move(ready)) {}
  explicit Transfer(std::unique_ptr<Steps> steps) : steps_(std::move(steps)) {}

  /// Without waiting: true once what was begun is done, so that finish() waits only for steps after the first.
  /// Throws what the communication throws.
  bool done();
  /// Waits, and gives the tensor; empty where there was nothing to give. The Transfer is empty afterwards.
  Tensor finish();

 private:
  Tensor ready_;
  std::unique_ptr<Steps> steps_;
};

}  // namespace weft
