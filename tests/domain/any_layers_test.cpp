// Layers of any sizes on maps of any size, cut on meshes of any kind: the bits of one rank, and its errors.
#include <gtest/gtest.h>

#include <random>

#include "domain/as_serial.hpp"
#include "weft/dp/replicated.hpp"
#include "weft/nn/maps/conv_transpose.hpp"
#include "weft/nn/maps/resample.hpp"

namespace weft::domain_any_layers_test {
namespace {

using kernels::Padding;
using test::MakeModule;
using test::Rank;

// The axes that cut each dimension, and the axes along which ranks have different samples.
struct Cut {
  MeshShape mesh;
  std::vector<std::string> axes;
  std::vector<int> dims;
  std::vector<std::string> data{};
};

// All ranks draw the same random numbers.
class Draw {
 public:
  explicit Draw(unsigned seed) : random_(seed) {}
  std::int64_t number(std::int64_t lo, std::int64_t hi) {
    return lo + static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(hi - lo + 1));
  }
  Extent2d extent(std::int64_t lo, std::int64_t hi) {
    const std::int64_t height = number(lo, hi);
    return {height, number(lo, hi)};
  }
  Padding padding() {
    constexpr Padding all[] = {Padding::zeros, Padding::reflect, Padding::replicate, Padding::circular};
    return all[number(0, 3)];
  }
  Pool2dConfig pool() {
    Pool2dConfig c{.kernel = extent(1, 5), .stride = extent(1, 4)};
    c.padding = {number(0, c.kernel.height / 2), number(0, c.kernel.width / 2)};
    return c;
  }
  // A layer for maps of 4 channels; `what` gets its kind.
  MakeModule layer(std::string& what) {
    switch (number(0, 6)) {
      case 0:
      case 1: {
        const Conv2dConfig c{.in = 4,
                             .out = 6,
                             .kernel = extent(1, 5),
                             .stride = extent(1, 4),
                             .padding = extent(0, 5),
                             .dilation = extent(1, 3),
                             .groups = number(1, 2),
                             .padding_mode = padding(),
                             .bias = number(0, 1) == 1};
        what = "conv";
        return [c] { return std::make_unique<Conv2d>(c); };
      }
      case 2: {
        const ConvTranspose2dConfig c{.in = 4,
                                      .out = 6,
                                      .kernel = extent(1, 5),
                                      .stride = extent(1, 4),
                                      .padding = extent(0, 4),
                                      .dilation = extent(1, 3),
                                      .groups = number(1, 2)};
        what = "transposed conv";
        return [c] { return std::make_unique<ConvTranspose2d>(c); };
      }
      case 3: {
        Pool2dConfig c = pool();
        c.dilation = extent(1, 3);
        what = "max pool";
        return [c] { return std::make_unique<MaxPool2d>(c); };
      }
      case 4: {
        Pool2dConfig c = pool();
        c.count_padding = number(0, 1) == 1;
        what = "average pool";
        return [c] { return std::make_unique<AvgPool2d>(c); };
      }
      case 5: {
        Resize2dConfig c{.mode = number(0, 1) == 1 ? Resizing::nearest : Resizing::bilinear,
                         .out = extent(1, 20)};
        c.align_corners = c.mode == Resizing::bilinear && number(0, 1) == 1;
        what = "resize";
        return [c] { return std::make_unique<Resize2d>(c); };
      }
      default: {
        const Pad2dConfig c{.top = number(0, 4),
                            .bottom = number(0, 4),
                            .left = number(0, 4),
                            .right = number(0, 4),
                            .rows = padding(),
                            .columns = padding()};
        what = "pad";
        return [c] { return std::make_unique<Pad2d>(c); };
      }
    }
  }

 private:
  std::mt19937 random_;
};

void expect_as_serial(Compute& compute, const DeviceMesh& mesh, const Cut& cut, const MakeModule& make,
                      const Shape& shape, int& done) {
  test::Serial serial;
  const std::string of_serial = test::error_text([&] { serial = test::run_serial(make, shape, compute); });
  DomainOptions options{.dims = cut.dims};
  if (!cut.data.empty()) options.data = mesh.submesh(cut.data);
  const std::unique_ptr<Module> split = make();
  const DomainManager manager = apply_domain_parallel(*split, mesh.submesh(cut.axes), options);
  replicate(*split, mesh);
  test::set_up(*split, compute);
  Frame frame(compute);
  const Tensor x = distribute(test::random_map(compute.context(), shape, "x"), manager.layout(shape));
  Tensor y;
  ASSERT_EQ(test::error_text([&] { y = split->forward(x, frame)[0]; }), of_serial);
  if (!y) return;
  const auto expect = [](const char* what, const Tensor& got, const Tensor& whole) {
    const Tensor want = distribute(whole, got.layout());
    ASSERT_TRUE(test::same_bits(got, want)) << what << " differs by " << test::difference(got, want);
  };
  ASSERT_EQ(y.layout(), manager.layout(serial.y.shape()));
  ASSERT_NO_FATAL_FAILURE(expect("y", y, serial.y));
  const Tensor dx = split->backward(distribute(serial.dy, y.layout()), frame)[0];
  ASSERT_NO_FATAL_FAILURE(expect("dx", dx, serial.dx));
  std::vector<Gradient> gradients;
  for (Parameter* p : split->parameters())
    gradients.push_back({p->path(), p->gradient(), p->gradient_layout()});
  sync_replicated_gradients(gradients, mesh);
  for (const Gradient& g : gradients)
    ASSERT_LE(test::difference(split->parameter(std::string(g.name))->gradient(),
                               serial.model->parameter(std::string(g.name))->gradient()),
              1e-6)
        << g.name;
  ++done;
}

// Maps of 1 to 14 rows and columns. Some ranks have no part of small maps. If a map is too small, the layer
// throws.
TEST(DomainLayers, OfAnySizesOnAnyMesh) {
  for (const Cut& cut :
       {Cut{{{"h", 2}}, {"h"}, {2}}, Cut{{{"w", 4}}, {"w"}, {3}},
        Cut{{{"h", 3}, {"w", 2}}, {"h", "w"}, {2, 3}}, Cut{{{"a", 2}, {"b", 2}}, {"a", "b"}, {3, 2}},
        Cut{{{"a", 2}, {"b", 3}}, {"b", "a"}, {2, 2}}, Cut{{{"d", 2}, {"h", 3}}, {"h"}, {2}, {"d"}}})
    test::run_ranks(test::Ranks::threads, cut.mesh.size(), [&](Rank& rank) {
      Compute compute(rank.context, 1);
      const DeviceMesh mesh(rank.group(), cut.mesh);
      Draw draw(static_cast<unsigned>(cut.mesh.size()));
      int done = 0;
      for (int i = 0; i < 150; ++i) {
        const Shape shape{draw.number(1, 2), 4, draw.number(1, 14), draw.number(1, 14)};
        std::string what;
        const MakeModule make = draw.layer(what);
        SCOPED_TRACE(testing::Message()
                     << to_string(cut.mesh) << ", number " << i << ": " << what << " " << to_string(shape));
        ASSERT_NO_FATAL_FAILURE(expect_as_serial(compute, mesh, cut, make, shape, done));
      }
      EXPECT_GT(done, 100);
    });
}

}  // namespace
}  // namespace weft::domain_any_layers_test
