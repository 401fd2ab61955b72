// The norm of the gradients of all stages, alone; tests/models/pipeline_test.cpp has it in a Trainer.
#include "weft/pp/grad_norm.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/errors.hpp"
#include "support/run_ranks.hpp"
#include "weft/base/tensor.hpp"
#include "weft/mesh/layout.hpp"

namespace weft::pipeline_grad_norm_test {
namespace {

using test::error_of;
using test::Rank;
using test::Ranks;
using ::testing::ElementsAre;

// 2 x 2 ranks: each stage has a gradient of 3 and one of 4, on both of its data ranks.
TEST(PipelineGradNorm, CountsEachGradientOnce) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"pp", 2}, {"dp", 2}});
    Tensor three(rank.context, {1}), four(rank.context, {1});
    three.f32()[0] = 3;
    four.f32()[0] = 4;
    const LayoutRef layout = replicated_layout(mesh, {1});
    const std::vector<Gradient> all{{"a", three, layout}, {"b", four, layout}};
    EXPECT_EQ(pipeline_grad_norm(all, mesh["pp"]), std::sqrt(50.0));
    EXPECT_EQ(clip_pipeline_grad_norm(all, mesh["pp"], 100), std::sqrt(50.0));
    EXPECT_EQ(three.f32()[0], 3);
    EXPECT_EQ(clip_pipeline_grad_norm(all, mesh["pp"], 1), std::sqrt(50.0));
    EXPECT_NEAR(three.f32()[0], 3 / std::sqrt(50.0), 1e-6);
  });
}

TEST(PipelineGradNorm, ArgumentsAreChecked) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"pp", 2}, {"dp", 2}}), line(rank.group(), {{"all", 4}});
    Tensor values(rank.context, {2}), halves(rank.context, {2}, DType::bf16);
    values.f32()[0] = values.f32()[1] = 0;
    const bool wrong = rank.rank == 2;
    // On rank 2 the gradient that does not fit, on the others one that does.
    const auto expect = [&](const Gradient& gradient, double max_norm, const std::string& text,
                            ErrorCode code = ErrorCode::layout) {
      const std::vector<Gradient> good{{"w", values, replicated_layout(mesh, {2})}}, bad{gradient};
      const Error e =
          error_of([&] { clip_pipeline_grad_norm(wrong ? bad : good, mesh["pp"], wrong ? max_norm : 1); });
      EXPECT_EQ(std::string(e.what()),
                "pipeline_grad_norm: " +
                    (wrong ? text : std::string("rank 2 gave wrong arguments; its own error says why")));
      EXPECT_EQ(e.code(), wrong ? code : ErrorCode::bad_argument);
    };
    const Gradient fits{"w", values, replicated_layout(mesh, {2})};
    expect(fits, 0, "max_norm is 0; expected more than 0", ErrorCode::bad_argument);
    expect({"w", halves, replicated_layout(mesh, {2})}, 1,
           "the gradient of \"w\" is bf16; expected f32, whose squares are exact", ErrorCode::bad_argument);
    expect({"w", values, nullptr}, 1, "the gradient of \"w\" is plain; on pp=2 x dp=2 it needs a layout");
    expect({"w", values, replicated_layout(line, {2})}, 1, "the gradient of \"w\" lies over another mesh");
    const LayoutRef partial = make_layout(mesh, {Replicate{}, Partial{}}, {2});
    expect({"w", values, partial}, 1,
           fmt::format("the gradient of \"w\" is {}; it must be reduced first", to_string(*partial)));
    const Error differs =
        error_of([&] { clip_pipeline_grad_norm(std::vector<Gradient>{fits}, mesh["pp"], wrong ? 2 : 1); });
    EXPECT_EQ(differs.code(), ErrorCode::mismatch);
    EXPECT_EQ(
        std::string(differs.what()),
        fmt::format("pipeline_grad_norm: max_norm or non_finite is another one on rank {}", wrong ? 0 : 2));
    EXPECT_THAT(differs.ranks(), ElementsAre(wrong ? 0 : 2));
    values.f32()[1] = wrong ? std::numeric_limits<float>::infinity() : 0;
    EXPECT_TRUE(std::isnan(pipeline_grad_norm(std::vector<Gradient>{fits}, mesh["pp"])));
  });
}

}  // namespace
}  // namespace weft::pipeline_grad_norm_test
