// Kernels that are made of other kernels of the device, for devices that do not have them: they need a pass
// over the data, or memory, more than a kernel that does all at once, and no kernel of their own.
#pragma once

#include <string_view>
#include <vector>

#include "weft/nn/kernels.hpp"

namespace weft::kernels {

/// Gives the table each kernel that it lacks and that can be made of those that it has.
void compose(KernelTable& table) noexcept;

/// For the page of kernels: a kernel that a device need not have, and what it is made of.
struct Composition {
  std::string_view kernel;
  std::vector<std::string_view> parts;
};
std::vector<Composition> compositions();

}  // namespace weft::kernels
