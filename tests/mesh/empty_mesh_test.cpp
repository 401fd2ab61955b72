// The error of every function of weft/mesh for a DeviceMesh that was made by default, or moved from: an
// error that names the argument, and never a crash.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "mesh/mesh_state.hpp"
#include "support/errors.hpp"
#include "weft/mesh/boundary.hpp"
#include "weft/mesh/layout.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/mesh/replicas.hpp"

namespace weft::empty_mesh_test {
namespace {

using test::error_text;

struct Case {
  std::string call;  // as the text names it
  std::function<void(const DeviceMesh&)> run;
};

const std::vector<Case> kMethods = {
    {"operator[]", [](const DeviceMesh& m) { m["dp"]; }},
    {"operator[]",
     [](const DeviceMesh& m) {
       m[{"dp", "tp"}];
     }},
    {"submesh",
     [](const DeviceMesh& m) {
       const std::string names[] = {"dp"};
       m.submesh(names);
     }},
    {"flatten", [](const DeviceMesh& m) { m.flatten("all"); }},
    {"unflatten",
     [](const DeviceMesh& m) {
       m.unflatten("tp", MeshShape{{"a", 2}});
     }},
    {"each_axis", [](const DeviceMesh& m) { m.each_axis(); }},
    {"root", [](const DeviceMesh& m) { m.root(); }},
    {"is_root", [](const DeviceMesh& m) { m.is_root(); }},
    {"shape", [](const DeviceMesh& m) { m.shape(); }},
    {"shape", [](const DeviceMesh& m) { m.size(); }},
    {"shape", [](const DeviceMesh& m) { m.size("dp"); }},
    {"shape", [](const DeviceMesh& m) { m.has("dp"); }},
    {"rank", [](const DeviceMesh& m) { m.rank(); }},
    {"coordinate", [](const DeviceMesh& m) { m.coordinate("dp"); }},
    {"name", [](const DeviceMesh& m) { m.name(); }},
    {"ranks", [](const DeviceMesh& m) { m.ranks(); }},
    {"root_axes", [](const DeviceMesh& m) { m.root_axes(); }},
    {"group", [](const DeviceMesh& m) { m.group(); }},
    {"context", [](const DeviceMesh& m) { m.context(); }},
    {"state", [](const DeviceMesh& m) { detail::MeshAccess::state(m); }},
};

struct Functions {
  Context context;
  DeviceMesh mesh = DeviceMesh::arithmetic(context, MeshShape{{"dp", 1}}, 0);
  LayoutRef layout = replicated_layout(mesh, {2});
  Tensor x = as_layout(Tensor::zeros(context, {2}), layout);

  std::vector<Case> cases() const {
    return {
        {"make_layout: mesh", [](const DeviceMesh& m) { make_layout(m, Placements{}, {2}); }},
        {"make_layout: mesh",
         [](const DeviceMesh& m) {
           make_layout(m, {{"dp", Shard{0}}}, {2});
         }},
        {"replicated_layout: mesh", [](const DeviceMesh& m) { replicated_layout(m, {2}); }},
        {"layout: axes", [this](const DeviceMesh& m) { layout->on(m); }},
        {"layout: axes", [this](const DeviceMesh& m) { layout->with(m, Shard{0}); }},
        {"layout: axes", [this](const DeviceMesh& m) { layout->shard_inside(m, 0); }},
        {"placement_on: axes", [this](const DeviceMesh& m) { placement_on(x, m, "x"); }},
        {"placement_on: axes", [](const DeviceMesh& m) { placement_on(LayoutRef(), m, "x"); }},
        {"expect_layout: axes", [this](const DeviceMesh& m) { expect_layout(x, m, Replicate{}, "x"); }},
        {"redistribute: axes", [this](const DeviceMesh& m) { redistribute(x, m, Shard{0}); }},
        {"redistribute: axes", [this](const DeviceMesh& m) { start_redistribute(x, m, Shard{0}); }},
        {"boundary: axes", [](const DeviceMesh& m) { RedistributeBoundary(m, Replicate{}, Shard{0}); }},
        {"boundary: axes", [](const DeviceMesh& m) { boundary::enter(m); }},
        {"boundary: axes", [](const DeviceMesh& m) { boundary::leave(m); }},
        {"boundary: axes", [](const DeviceMesh& m) { boundary::gather(m, 0); }},
        {"boundary: axes", [](const DeviceMesh& m) { boundary::scatter(m, 0, Partial{}); }},
        {"check_replicas: axes", [](const DeviceMesh& m) { check_replicas({}, m); }},
    };
  }
};

DeviceMesh take(DeviceMesh& mesh) { return std::move(mesh); }

TEST(EmptyMesh, EveryMethodAndFunctionRefusesIt) {
  const Functions functions;
  DeviceMesh moved_from = functions.mesh;
  const DeviceMesh taken = take(moved_from);
  for (const DeviceMesh& mesh : {DeviceMesh(), moved_from}) {
    EXPECT_FALSE(mesh);
    EXPECT_EQ(mesh, DeviceMesh());
    EXPECT_FALSE(mesh == taken);
    for (const Case& c : kMethods)
      EXPECT_EQ(
          error_text([&] { c.run(mesh); }),
          "bad_argument: DeviceMesh::" + c.call + ": empty DeviceMesh: it was made by default or moved from");
    for (const Case& c : functions.cases())
      EXPECT_EQ(error_text([&] { c.run(mesh); }),
                "bad_argument: " + c.call + " is an empty DeviceMesh, made by default or moved from");
  }
}

TEST(EmptyMesh, ANullLayoutIsRefused) {
  const Functions functions;
  EXPECT_EQ(error_text([&] { as_layout(functions.x, nullptr); }),
            "bad_argument: as_layout: layout is null; a plain tensor is x.with_layout(nullptr)");
}

}  // namespace
}  // namespace weft::empty_mesh_test
