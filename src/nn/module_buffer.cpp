#include "weft/nn/module_buffer.hpp"

#include <fmt/format.h>

#include "weft/base/error.hpp"
#include "weft/mesh/layout.hpp"

namespace weft {

void ModuleBuffer::set_layout(LayoutRef layout) {
  if (materialised())
    throw Error(ErrorCode::bad_argument, fmt::format("buffer \"{}\": set_layout after materialise", path_));
  if (layout && (!(layout->global == global_) || layout->partial()))
    throw Error(ErrorCode::layout, fmt::format("buffer \"{}\" is {}; its layout is {}", path_,
                                               to_string(global_), to_string(*layout)));
  layout_ = layout;
}

void ModuleBuffer::materialise(Compute& compute, Memory memory) {
  if (materialised())
    throw Error(ErrorCode::bad_argument, fmt::format("buffer \"{}\": materialised twice", path_));
  compute_ = &compute;
  tensor_ = compute.make(layout_ ? layout_->local_shape() : global_, dtype_, memory).with_layout(layout_);
}

Compute& ModuleBuffer::compute() const {
  tensor();  // made with it
  return *compute_;
}

const Tensor& ModuleBuffer::tensor() const {
  if (!materialised())
    throw Error(ErrorCode::bad_argument, fmt::format("buffer \"{}\": used before materialise", path_));
  return tensor_;
}

}  // namespace weft
