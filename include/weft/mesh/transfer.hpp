// A tensor that is on its way to another layout.
#pragma once

#include <memory>

#include "weft/base/tensor.hpp"

namespace weft {

/// What start_redistribute() and a Boundary begin, and finish() ends. Several may be in flight; the ranks begin
/// them in the same order. Used by one thread. Dropping one that is not finished gives it up, and with it the
/// group that it communicates in, as dropping a Work does.
///
/// A Transfer of several steps (a gather, then a reduction) begins the next one in done() or finish(): with one
/// step, the usual case, all is under way once it has begun.
class Transfer {
 public:
  /// How a kind of boundary moves what it moves.
  class Steps {
   public:
    virtual ~Steps() = default;
    /// Without waiting: takes steps; true once finish() would not wait.
    virtual bool done() = 0;
    /// Waits. Called once.
    virtual Tensor finish() = 0;
  };

  Transfer() = default;
  /// Nothing moves.
  explicit Transfer(Tensor ready) : ready_(std::move(ready)) {}
  explicit Transfer(std::unique_ptr<Steps> steps) : steps_(std::move(steps)) {}

  /// Takes steps; true once finish() would not wait. Throws what the communication throws.
  bool done();
  /// Waits, and gives the tensor; empty where there was nothing to give. The Transfer is empty afterwards.
  Tensor finish();

 private:
  Tensor ready_;
  std::unique_ptr<Steps> steps_;
};

}  // namespace weft
