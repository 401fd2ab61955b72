// Checkpoints, and wholes of tensors.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "agreement/row.hpp"
#include "support/temporary_folder.hpp"
#include "weft/checkpoint/async.hpp"
#include "weft/checkpoint/checkpoint.hpp"
#include "weft/checkpoint/full_state.hpp"

namespace weft::agreement {
namespace checkpoint_test {
namespace {

using test::Rank;

// One tensor, cut over two ranks; rank 1 calls it otherwise where it gives another list.
struct Listed {
  explicit Listed(Rank& r)
      : odd(r.rank == 1),
        mesh(r.group(), {{"dp", r.size}}),
        layout(make_layout(mesh, {Shard{0}}, {4})),
        v(2, 1.0f),
        name(odd ? "b" : "a") {}
  std::vector<NamedView> views() const { return {{name, view(v), layout}}; }
  std::vector<MutableNamedView> targets() { return {{name, view(v), layout}}; }
  bool odd;
  DeviceMesh mesh;
  LayoutRef layout;
  std::vector<float> v;
  std::string name;
};

const std::string kLists = "in an exchange before anything is written or read";

std::string lists_differ(const std::string& function) {
  return function +
         ": tensor 0 is \"a\" (f32 (4) as [dp: Shard(0)]) on dp rank 0, but \"b\" (f32 (4) as [dp: "
         "Shard(0)]) on dp rank 1";
}

Rows files() {
  const auto folder = std::make_shared<test::TemporaryFolder>();
  return {
      {"save_checkpoint", "list of tensors", kLists, ErrorCode::mismatch, lists_differ("save_checkpoint"),
       [folder](Rank& r) {
         const Listed t(r);
         save_checkpoint(folder->path(), t.mesh, 1, t.views());
       }},
      {"AsyncCheckpoint::save", "list of tensors", kLists, ErrorCode::mismatch,
       lists_differ("save_checkpoint"),
       [folder](Rank& r) {
         const Listed t(r);
         AsyncCheckpoint(t.mesh).save(folder->path(), 1, t.views());
       }},
      {"load_checkpoint", "list of tensors", kLists, ErrorCode::mismatch, lists_differ("load_checkpoint"),
       [folder](Rank& r) {
         Listed t(r);
         t.name = "a";
         save_checkpoint(folder->path() / "loaded", t.mesh, 1, t.views());
         t.name = t.odd ? "b" : "a";
         load_checkpoint(folder->path() / "loaded", t.mesh, t.targets());
       }},
  };
}

Rows wholes() {
  const FullStateVisitor see = [](std::string_view, const ConstTensorView&) {};
  const FullStateSource give = [](std::string_view, const TensorView&) {};
  return {
      {"gather_full_state", "list of tensors", kLists, ErrorCode::mismatch, lists_differ("gather_full_state"),
       [see](Rank& r) {
         const Listed t(r);
         gather_full_state(t.mesh, t.views(), 0, see);
       }},
      {"gather_full_state", "root", kLists, ErrorCode::mismatch,
       "gather_full_state: ranks gave different roots, ",
       [see](Rank& r) {
         Listed t(r);
         t.name = "a";
         gather_full_state(t.mesh, t.views(), r.rank, see);
       }},
      {"set_full_state", "list of tensors", kLists, ErrorCode::mismatch, lists_differ("set_full_state"),
       [give](Rank& r) {
         Listed t(r);
         set_full_state(t.mesh, t.targets(), 0, give);
       }},
      {"set_full_state", "root", kLists, ErrorCode::mismatch, "set_full_state: ranks gave different roots, ",
       [give](Rank& r) {
         Listed t(r);
         t.name = "a";
         set_full_state(t.mesh, t.targets(), r.rank, give);
       }},
  };
}

}  // namespace
}  // namespace checkpoint_test

Rows checkpoint_rows() {
  using namespace checkpoint_test;
  Rows rows;
  for (const Rows& some : {files(), wholes()}) rows.insert(rows.end(), some.begin(), some.end());
  return rows;
}

TEST(AgreementOfCheckpoints, EachRankIsTold) { expect_told(checkpoint_rows()); }

}  // namespace weft::agreement
