// The gradients of a host framework's own buffers on a mesh of dp × tp ranks: averaged over dp while backward
// runs, reduced over tp as their layouts say, and clipped by their norm. The program uses no weft module and
// no weft tensor.
//   weft run -n 4 -- ./gradients
#include <cstdio>
#include <vector>

#include "weft/weft.hpp"

int main() {
  weft::Context context;
  auto group = weft::ProcessGroup::create(context, "auto", weft::Membership::from_env(context));
  const weft::DeviceMesh mesh(group, {{"dp", group.size() % 2 == 0 ? 2 : 1}, {"tp", -1}});
  const int dp = mesh.coordinate("dp"), tp = mesh.coordinate("tp");

  // The host framework's tensors: a weight cut into rows over tp, and a bias that every tp rank holds whole
  // and uses for its own part of the work. Ranks along dp see different data, so all gradients are Partial on
  // dp.
  const weft::Shard rows{0};
  const weft::Partial sum{};
  struct Buffer {
    const char* name;
    weft::LayoutRef layout;
    std::vector<float> gradient;
  };
  std::vector<Buffer> buffers = {{"weight", weft::make_layout(mesh, {sum, rows}, {6, 4}), {}},
                                 {"bias", weft::make_layout(mesh, {sum, sum}, {6}), {}}};
  std::vector<weft::BucketEntry> entries;
  for (Buffer& b : buffers) {
    b.gradient.resize(static_cast<std::size_t>(b.layout->local_shape().count()));
    entries.push_back({b.name, b.layout->local_shape().count()});
  }
  weft::BucketReducer reducer(mesh["dp"], entries);
  for (std::size_t i = 0; i < buffers.size(); ++i) reducer.bind(i, weft::view(buffers[i].gradient));

  for (int step = 0; step < 3; ++step) {
    for (std::size_t i = buffers.size(); i-- > 0;) {  // backward
      for (float& g : buffers[i].gradient) g = static_cast<float>(1 + dp + 10 * tp + step);
      reducer.ready(i);
    }
    reducer.finish();

    std::vector<weft::Gradient> gradients;
    for (Buffer& b : buffers)
      gradients.push_back(
          weft::make_gradient(b.name, b.gradient.data(), b.layout->with("dp", weft::Replicate{})));
    weft::reduce_gradients(gradients, mesh["tp"]);
    const double norm = weft::clip_grad_norm(gradients, 1.0);
    const weft::NamedView replicas[] = {{"bias", gradients[1].data, gradients[1].layout}};
    weft::check_replicas(replicas, mesh);  // an error names a rank with other bits
    if (group.rank() == 0)
      std::printf("step %d: norm %.6f, bias gradient %.6f after clipping\n", step, norm,
                  static_cast<double>(buffers[1].gradient[0]));
  }
}
