// Tensors that modules keep in addition to their parameters: names, layouts, memory, values.
#include "weft/nn/module_buffer.hpp"

#include "nn/support.hpp"
#include "weft/mesh/layout.hpp"

namespace weft::module_buffer_test {
namespace {

using test::error_text;

struct Counter : Module {
  Counter() { count = add("count", std::make_shared<ModuleBuffer>(Shape{2, 3}, DType::i64, Constant{4})); }
  using Module::add;
  ModuleBufferRef count;

 private:
  Tensors do_forward(Inputs x, Frame&) override { return {x.begin(), x.end()}; }
  Tensors do_backward(Inputs dy, Frame&) override { return {dy.begin(), dy.end()}; }
};

TEST(ModuleBuffer, IsNamedLaidOutAndInitialisedAsParametersAre) {
  test::Bench bench;
  Sequential model;
  auto& counter = static_cast<Counter&>(model.append("counter", std::make_unique<Counter>()));
  EXPECT_EQ(counter.count->path(), "counter.count");
  EXPECT_THAT(model.buffers(), ::testing::ElementsAre(counter.count.get()));
  EXPECT_TRUE(model.parameters().empty());
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { counter.count->tensor(); }),
            "buffer \"counter.count\": used before materialise");
  const DeviceMesh mesh = DeviceMesh::arithmetic(bench.context, {{"tp", 2}}, 1);
  counter.count->set_layout(make_layout(mesh, {Shard{1}}, {2, 3}));
  EXPECT_EQ(error_text(ErrorCode::layout,
                       [&] {
                         counter.count->set_layout(make_layout(mesh, {Shard{0}}, {3, 2}));
                       }),
            "buffer \"counter.count\" is (2, 3); its layout is (3, 2) as [tp: Shard(0)]");
  materialise(model, bench.compute);
  initialise(model, 5);
  EXPECT_THAT(counter.count->tensor().as<std::int64_t>(), ::testing::ElementsAre(4, 4));
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { counter.count->set_layout(nullptr); }),
            "buffer \"counter.count\": set_layout after materialise");
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { counter.count->materialise(bench.compute); }),
            "buffer \"counter.count\": materialised twice");
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] { counter.add("count", std::make_shared<Parameter>(Shape{1})); }),
            "module \"counter\": cannot add parameter \"count\": the name is taken");
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] { counter.add("a.b", std::make_shared<ModuleBuffer>(Shape{1})); }),
            "module \"counter\": cannot add buffer \"a.b\": a name is not empty and holds no dot");
  ModuleBuffer odd({2}, DType::u8);
  odd.materialise(bench.compute);
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { initialise(odd, 1); }),
            "initialise: \"\" is u8; expected f32, or a constant in f64 or i64");
  for (const auto& [constant, shown] : {std::pair{1.5, "1.5"}, std::pair{1e30, "1e+30"}}) {
    ModuleBuffer whole({2}, DType::i64, Constant{constant});
    EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { (void)whole.compute(); }),
              "buffer \"\": used before materialise");
    whole.materialise(bench.compute);
    EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { initialise(whole, 1); }),
              std::string("initialise: \"\" is i64; its constant ") + shown + " is no integer of 64 bits");
  }
}

}  // namespace
}  // namespace weft::module_buffer_test
