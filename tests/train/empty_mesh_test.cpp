// The errors of functions of dp, nn, tp and train for an empty DeviceMesh (tests/mesh/empty_mesh_test.cpp
// has those of mesh).
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "support/errors.hpp"
#include "train/bag.hpp"
#include "weft/dp/sampler.hpp"
#include "weft/nn/loss.hpp"
#include "weft/tp/linear.hpp"
#include "weft/tp/parallelize.hpp"
#include "weft/train/gradient_reducer.hpp"
#include "weft/train/gradients.hpp"
#include "weft/train/replicas.hpp"

namespace weft::empty_mesh_test {
namespace {

TEST(EmptyMesh, IsRefusedAboveTheMeshes) {
  Context context;
  Compute compute(context);
  test::Bag bag;
  const DeviceMesh m;
  std::vector<Gradient> none;
  const std::vector<std::pair<std::string, std::function<void()>>> calls = {
      {"bucket_reducer: axes",
       [&] {
         BucketReducer(m, {{"w", 1}});
       }},
      {"average_gradients: axes", [&] { average_gradients(none, m); }},
      {"sync_replicated_gradients: axes", [&] { sync_replicated_gradients(none, m); }},
      {"sync_replicated_gradients: axes",
       [&] { sync_replicated_gradients(std::span<Parameter* const>(), m); }},
      {"sampler: axis", [&] { Sampler(m, 10, 1, 0); }},
      {"scalar: mesh", [&] { scalar(m, 1); }},
      {"replicate: mesh", [&] { replicate(bag, m); }},
      {"parallelize: axis", [&] { parallelize(bag, m, Plan()); }},
      {"column_linear_backward: axes", [&] { column_linear_backward(compute, m, {}, {}, {}, {}); }},
      {"row_linear_forward: axes", [&] { row_linear_forward(compute, m, {}, {}, {}, {}); }},
      {"gradient_reducer: axes", [&] { GradientReducer({}, m); }},
      {"check_replicas: axes", [&] { check_replicas(std::span<Parameter* const>(), m); }},
  };
  for (const auto& [argument, call] : calls)
    EXPECT_EQ(test::error_text(call),
              "bad_argument: " + argument + " is an empty DeviceMesh, made by default or moved from");
}

}  // namespace
}  // namespace weft::empty_mesh_test
