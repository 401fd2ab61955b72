// Gradients in ordinary vectors, as a host framework has them.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "support/run_ranks.hpp"
#include "weft/base/error.hpp"
#include "weft/dp/gradient.hpp"
#include "weft/mesh/layout.hpp"

namespace weft::test {

class Vectors {
 public:
  /// One more gradient: element i of this rank's part is value(i). `layout` null: a plain gradient, of that
  /// shape.
  std::vector<float>& put(const std::string& name, LayoutRef layout, const Shape& shape,
                          const std::function<float(std::size_t)>& value) {
    const Shape local = layout == nullptr ? shape : layout->local_shape();
    std::vector<float>& v = values_.emplace_back(static_cast<std::size_t>(local.count()));
    for (std::size_t i = 0; i < v.size(); ++i) v[i] = value(i);
    names_.push_back(name);
    gradients_.push_back({names_.back(),
                          {reinterpret_cast<std::byte*>(v.data()), DType::f32, {}, local, row_major(local)},
                          layout});
    return v;
  }
  std::vector<float>& put(const std::string& name, LayoutRef layout,
                          const std::function<float(std::size_t)>& value) {
    return put(name, layout, layout->global, value);
  }
  std::span<Gradient> all() { return gradients_; }
  Gradient& at(std::size_t i) { return gradients_[i]; }
  std::vector<float>& values(std::size_t i) { return values_[i]; }

 private:
  std::deque<std::vector<float>> values_;
  std::deque<std::string> names_;
  std::vector<Gradient> gradients_;
};

}  // namespace weft::test
