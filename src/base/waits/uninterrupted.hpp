// Waits that no Interrupt ends.
#pragma once

#include "weft/base/interrupt.hpp"

namespace weft {

/// While it lives, this thread's Interrupt ends no wait and is not seen: for a collective within a call that may be interrupted. Other ranks
/// are in that collective, too; the next wait after it ends at once, and tells them.
class Uninterrupted {
 public:
  Uninterrupted() noexcept;
  ~Uninterrupted();
  Uninterrupted(const Uninterrupted&) = delete;
  Uninterrupted& operator=(const Uninterrupted&) = delete;

 private:
  Interruptible* const outer_;
};

}  // namespace weft
