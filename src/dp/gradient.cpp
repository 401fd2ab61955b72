#include "weft/dp/gradient.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <string>

#include "base/floating.hpp"
#include "mesh/pieces.hpp"
#include "mesh/view_memory.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

// Memory given twice would be summed or scaled twice.
void expect_apart(std::string_view what, std::span<const Gradient> gradients) {
  Pieces<const Gradient*> by_address;
  for (const Gradient& g : gradients)
    if (g.data.count() > 0) by_address.push_back(&g);
  std::sort(by_address.begin(), by_address.end(),
            [](const Gradient* a, const Gradient* b) { return std::less<>()(a->data.data, b->data.data); });
  for (std::size_t i = 1; i < by_address.size(); ++i)
    if (overlap(by_address[i - 1]->data, by_address[i]->data))
      throw Error(ErrorCode::bad_argument,
                  fmt::format("{}: the gradients of \"{}\" and \"{}\" overlap; give each once", what,
                              by_address[i - 1]->name, by_address[i]->name));
}

}  // namespace

const Shape& local_shape_of_gradient(std::string_view name, const LayoutRef& layout) {
  if (layout == nullptr)
    throw Error(ErrorCode::bad_argument,
                fmt::format("make_gradient: layout of \"{}\" is null, so its shape is not known; for a "
                            "gradient of this rank alone write Gradient{{\"{}\", view(...)}}",
                            name, name));
  return layout->local_shape();
}

void check_gradients(std::string_view what, std::span<const Gradient> gradients, const Compute* compute) {
  for (const Gradient& g : gradients) {
    const auto wrong = [&](ErrorCode code, const std::string& text) {
      throw Error(code, fmt::format("{}: the gradient of \"{}\" {}", what, g.name, text));
    };
    const DType t = g.data.dtype;
    if (!is_floating(t))
      wrong(ErrorCode::bad_argument, fmt::format("is {}; expected {}", name(t), kFloatingNames));
    if (const std::string fault = device_fault(g.data.device, compute); !fault.empty())
      wrong(ErrorCode::bad_argument, fault);
    if (const std::string fault = memory_fault(g.data); !fault.empty()) wrong(ErrorCode::bad_argument, fault);
    if (g.layout != nullptr && !(g.data.shape == g.layout->local_shape()))
      wrong(ErrorCode::layout, fmt::format("is {}; {} is {} on this rank", to_string(g.data.shape),
                                           to_string(*g.layout), to_string(g.layout->local_shape())));
  }
  expect_apart(what, gradients);
}

}  // namespace weft
