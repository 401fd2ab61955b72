// One rank's part in one step: its buffers, in this rank's random layout, and the comparison of the results.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "oracle.hpp"
#include "program.hpp"
#include "rank/buffers.hpp"
#include "weft/backends/call.hpp"

namespace weft::check {

class Trial {
 public:
  /// `me`: the rank's number in the group of n. `whole`: of all memory kinds, the ones that need no shared
  /// memory. `pool`: the source of its shared memory, if not null.
  Trial(Context& context, const Step& s, int me, int n, Duration deadline, Pool* pool = nullptr);
  /// The calls that it makes: none if the rank has no part, two if a message goes to the rank itself.
  const std::vector<Call>& calls() const { return calls_; }
  /// The fault in the buffers after the calls. Empty: none.
  std::string complaint(bool exact) const;
  /// Restores all buffers to their state before the call.
  void renew();
  /// Writes a pattern over all memory to which peers may have written, and checks whether it is still there.
  void overwrite() { buffers_.overwrite(); }
  std::string overwritten() const { return buffers_.overwritten(); }

 private:
  struct Side {
    bool there = false, loose = false;
    std::vector<std::int64_t> counts, offsets;
    std::int64_t total = 0;
    std::byte* data = nullptr;
    Blocks blocks() const {
      return {counts, loose ? std::span<const std::int64_t>(offsets) : std::span<const std::int64_t>{}};
    }
  };
  void lay_out(Dice& habits, bool in, bool out);
  void give();
  void make_calls(Duration deadline, bool in, bool out);
  template <class Elements>
  Side side(Dice& habits, bool parted, bool there, const Elements& elements) const;
  ConstTensorView in_view() const;
  TensorView out_view() const;
  int source(int block) const;
  std::int64_t give(int to) const;

  const Step s_;
  const int me_, n_, size_;
  Buffers buffers_;
  Side in_, out_;
  bool in_place_ = false;
  std::vector<Call> calls_;
};

}  // namespace weft::check
