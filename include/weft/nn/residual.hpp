// A branch whose output is added to its input.
#pragma once

#include <memory>
#include <typeinfo>
#include <utility>

#include "weft/nn/activation.hpp"
#include "weft/nn/module.hpp"

namespace weft {

/// y = x + branch(x). The child is called "branch". Its output has the shape and the layout of x.
class Residual : public AnyPart<Residual> {
 public:
  explicit Residual(std::unique_ptr<Module> branch) : branch_(std::move(branch)) { add("branch", *branch_); }
  bool has_exact_rule() const override { return typeid(*this) == typeid(Residual); }

 private:
  Tensors do_forward(Inputs x, Frame& frame) override {
    return {add_tensors(x[0], branch_->forward(x, frame)[0], frame.compute(), {path(), "x + branch"})};
  }
  Tensors do_backward(Inputs dy, Frame& frame) override {
    return {add_tensors(dy[0], branch_->backward(dy, frame)[0], frame.compute(), {path(), "d(x + branch)"})};
  }
  std::unique_ptr<Module> branch_;
};

}  // namespace weft
