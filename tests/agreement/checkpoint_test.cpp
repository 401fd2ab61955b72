// Checkpoints.
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <string>
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

// A tensor over two ranks, and a folder that both use.
struct Saving {
  explicit Saving(Rank& r)
      : mesh(r.group(), {{"dp", 2}}), layout(make_layout(mesh, {Shard{0}}, {4})), odd(r.rank == 1) {}
  std::vector<NamedView> views() { return {{odd && other_name ? "v" : "w", view(values), layout}}; }
  std::vector<MutableNamedView> targets() { return {{"w", view(values), layout}}; }

  DeviceMesh mesh;
  LayoutRef layout;
  bool odd = false, other_name = false;
  std::vector<float> values = {1, 2};
};

const std::filesystem::path& folder() {
  static const test::TemporaryFolder one;
  return one.path();
}

Row save_row(
    const char* function, const char* value, const char* text,
    std::function<void(Saving&, std::int64_t&, std::filesystem::path&, CheckpointExtra&, SaveOptions&)>
        change) {
  return {function,
          value,
          "with the tensors, before anything is written",
          ErrorCode::mismatch,
          text,
          [=, background = std::string(function) == "AsyncCheckpoint::save"](Rank& r) {
            Saving s(r);
            std::int64_t step = 1;
            std::filesystem::path directory = folder() / "run";
            CheckpointExtra extra = {{"k", "v"}};
            SaveOptions options;
            if (s.odd) change(s, step, directory, extra, options);
            if (background)
              AsyncCheckpoint(s.mesh).save(directory, step, s.views(), extra, options);
            else
              save_checkpoint(directory, s.mesh, step, s.views(), extra, options);
          }};
}

// Each rank reads its own directory; the directory of rank 1 has another checkpoint under the same name.
Row load_row() {
  return {"load_checkpoint",
          "the checkpoint",
          "rank 0 says which; the others open that one",
          ErrorCode::mismatch,
          "rank 0 loads step 1 of …is another checkpoint on this rank, of step 1",
          [](Rank& r) {
            Saving s(r);
            for (const char* name : {"a", "b"}) {
              save_checkpoint(folder() / name, s.mesh, 1, s.views());
              s.values = {3, 4};
            }
            s.mesh.group().barrier().wait();
            load_checkpoint(folder() / (s.odd ? "b" : "a"), s.mesh, s.targets());
          }};
}

}  // namespace
}  // namespace checkpoint_test

Rows checkpoint_rows() {
  using namespace checkpoint_test;
  using Path = std::filesystem::path;
  using Extra = CheckpointExtra;
  Rows rows;
  for (const char* function : {"save_checkpoint", "AsyncCheckpoint::save"}) {
    rows.push_back(save_row(
        function, "names, dtypes and layouts of the tensors", "save_checkpoint: tensor 0 is \"w\"…\"v\"",
        [](Saving& s, std::int64_t&, Path&, Extra&, SaveOptions&) { s.other_name = true; }));
    rows.push_back(save_row(function, "step", "save_checkpoint: argument 0 is step 1…step 2",
                            [](Saving&, std::int64_t& step, Path&, Extra&, SaveOptions&) { step = 2; }));
    rows.push_back(
        save_row(function, "directory", "save_checkpoint: argument 1 is directory …/run\"…/other\"",
                 [](Saving&, std::int64_t&, Path& at, Extra&, SaveOptions&) { at = folder() / "other"; }));
    rows.push_back(save_row(function, "options.keep",
                            "save_checkpoint: argument 2 is options.keep 0…options.keep 3",
                            [](Saving&, std::int64_t&, Path&, Extra&, SaveOptions& o) { o.keep = 3; }));
    rows.push_back(save_row(
        function, "options.deadline",
        "save_checkpoint: argument 3 is options.deadline …options.deadline 1000000000 ns",
        [](Saving&, std::int64_t&, Path&, Extra&, SaveOptions& o) { o.deadline = std::chrono::seconds(1); }));
    rows.push_back(
        save_row(function, "extra", "save_checkpoint: argument 4 is extra \"k\" = \"v\"…extra \"k\" = \"w\"",
                 [](Saving&, std::int64_t&, Path&, Extra& extra, SaveOptions&) { extra["k"] = "w"; }));
  }
  rows.push_back(load_row());
  const auto full = [](const char* value, const char* text, bool other_name, bool other_root) {
    return Row{
        "gather_full_state", value, "before anything is moved", ErrorCode::mismatch, text, [=](Rank& r) {
          Saving s(r);
          s.other_name = other_name;
          gather_full_state(s.mesh, s.views(), other_root && s.odd ? 1 : 0,
                            [](std::string_view, const ConstTensorView&) {});
        }};
  };
  rows.push_back(full("names, dtypes and layouts of the tensors",
                      "gather_full_state: tensor 0 is \"w\"…\"v\"", true, false));
  rows.push_back(full("root", "gather_full_state: ranks gave different roots, ", false, true));
  const auto set = [](const char* value, const char* text, bool other_name, bool other_root) {
    return Row{"set_full_state", value, "before anything is moved", ErrorCode::mismatch, text, [=](Rank& r) {
                 Saving s(r);
                 std::vector<MutableNamedView> targets = s.targets();
                 if (other_name && s.odd) targets[0].name = "v";
                 set_full_state(s.mesh, targets, other_root && s.odd ? 1 : 0,
                                [](std::string_view, const TensorView&) {});
               }};
  };
  rows.push_back(set("names, dtypes and layouts of the tensors", "set_full_state: tensor 0 is \"w\"…\"v\"",
                     true, false));
  rows.push_back(set("root", "set_full_state: ranks gave different roots, ", false, true));
  return rows;
}

TEST(AgreementOfCheckpoints, EachRankIsTold) { expect_told(checkpoint_rows()); }

}  // namespace weft::agreement
