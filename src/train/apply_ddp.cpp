#include "weft/train/apply_ddp.hpp"

#include "mesh/axis_ranks.hpp"
#include "train/masters.hpp"

namespace weft {

std::unique_ptr<GradientReducer> apply_ddp(Module& root, const DeviceMesh& axes,
                                           const GradientReducerOptions& options) {
  given_mesh("apply_ddp", axes);
  auto reducer = std::make_unique<GradientReducer>(root.parameters(), axes, options);
  expect_same_masters(root.parameters(), {&axes, 1});
  for (Parameter* p : root.parameters())
    if (p->layout() == nullptr) {
      const LayoutRef layout = replicated_layout(axes, p->global_shape());
      if (p->materialised())
        p->set_master(p->master().with_layout(layout));
      else
        p->set_layout(layout);
    }
  for (ModuleBuffer* b : root.buffers())
    if (b->layout() == nullptr && !b->materialised())
      b->set_layout(replicated_layout(axes, b->global_shape()));
  return reducer;
}

}  // namespace weft
