// A module of nothing but parameters, for tests that make gradients by hand.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "support/run_ranks.hpp"
#include "weft/base/error.hpp"
#include "weft/mesh/layout.hpp"
#include "weft/nn/module.hpp"

namespace weft::test {

class Bag : public Module {
 public:
  /// With memory. `layout` null: a plain one.
  Parameter& put(Context& context, const std::string& name, const Shape& shape, LayoutRef layout = nullptr) {
    const ParameterRef p = add(name, std::make_shared<Parameter>(shape));
    p->set_layout(layout);
    if (!compute_) compute_.emplace(context);
    p->materialise(*compute_);
    return *p;
  }

  /// After the first put().
  Compute& compute() { return *compute_; }

 private:
  std::optional<Compute> compute_;
  Tensors do_forward(Inputs, Frame&) override { return {}; }
  Tensors do_backward(Inputs, Frame&) override { return {}; }
};

/// One use's gradient: element i is value(i). `last`: of this pass, so that it is final.
inline void use(Parameter& p, LayoutRef layout, const std::function<float(std::size_t)>& value,
                bool last = true) {
  p.accumulate(layout, [&](const Tensor& into, bool add) {
    const auto g = into.f32();
    for (std::size_t i = 0; i < g.size(); ++i) g[i] = value(i) + (add ? g[i] : 0.0f);
  });
  if (last) p.announce_final();
}

inline std::vector<float> gradient(const Parameter& p) {
  return {p.gradient().f32().begin(), p.gradient().f32().end()};
}

}  // namespace weft::test
