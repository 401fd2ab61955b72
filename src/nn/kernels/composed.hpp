// Kernels that are made of other kernels of the device, for devices that do not have them. They need more
// passes over the data, or more memory, than a kernel that does all at once.
#pragma once

#include <string_view>
#include <vector>

#include "weft/nn/kernels.hpp"

namespace weft::kernels {

/// Gives the table each kernel that it lacks and that can be made of those that it has.
void compose(KernelTable& table) noexcept;

/// For the page of kernels: a kernel that a device need not have, and the kernels of which it is composed.
struct Composition {
  std::string_view kernel;
  std::vector<std::string_view> parts;
};
std::vector<Composition> compositions();

}  // namespace weft::kernels
