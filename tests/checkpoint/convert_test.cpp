// Copies of checkpoints and of safetensors files with other names, dtypes and numbers of files.
#include "weft/checkpoint/convert.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "support/errors.hpp"
#include "support/run_ranks.hpp"
#include "support/temporary_folder.hpp"
#include "weft/checkpoint/checkpoint.hpp"
#include "weft/checkpoint/reader.hpp"
#include "weft/checkpoint/safetensors.hpp"

namespace weft::convert_test {
namespace {

using test::error_text;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class Convert : public ::testing::Test {
 protected:
  void SetUp() override {
    std::iota(weight_.begin(), weight_.end(), 0.25f);
    test::run_ranks(test::Ranks::threads, 2, [&](test::Rank& rank) {
      const DeviceMesh mesh(rank.group(), {{"tp", 2}});
      const LayoutRef cut = make_layout(mesh, {{"tp", Shard{1}}}, {7, 4});
      std::vector<float> mine;
      for (std::size_t i = 0; i < weight_.size(); ++i)
        if (static_cast<int>(i % 4 / 2) == rank.rank) mine.push_back(weight_[i]);
      save_checkpoint(folder_ / "run", mesh, 9,
                      std::vector<NamedView>{{"weight", view(mine.data(), {7, 2}), cut},
                                             {"to_qkv.weight_u", view(u_), replicated_layout(mesh, {6})},
                                             {"step", view(&step_, 1), replicated_layout(mesh, {1})}},
                      {{"note", "mine"}});
    });
  }
  std::string convert(const std::string& to, const ConvertOptions& options) {
    convert_checkpoint(folder_ / "run", folder_ / to, options);
    EXPECT_TRUE(verify_checkpoint(folder_ / to).empty());
    return to;
  }
  // The files of the latest checkpoints of two runs have the same bytes.
  void expect_same(const std::string& a, const std::string& b) {
    const auto in_a = latest_checkpoint(folder_ / a)->folder, in_b = latest_checkpoint(folder_ / b)->folder;
    std::size_t files = 0;
    for (const auto& entry : std::filesystem::directory_iterator(in_a)) {
      EXPECT_EQ(test::contents(entry.path()), test::contents(in_b / entry.path().filename())) << entry.path();
      ++files;
    }
    EXPECT_GE(files, 2u);
    EXPECT_EQ(files, static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(in_b), {})));
  }

  test::TemporaryFolder folder_;
  Context context_;
  std::vector<float> weight_ = std::vector<float>(28), u_ = {0, 1, 2, 3, 4, 5};
  std::int64_t step_ = 9;
};

TEST_F(Convert, IntoAnyNumberOfFiles) {
  for (const int files : {1, 3, 8}) {
    const std::string to = convert(std::to_string(files), {.files = files});
    const CheckpointReader reader = CheckpointReader::open(folder_ / to);
    EXPECT_EQ(reader.info().step, 9);
    EXPECT_EQ(reader.info().extra.at("note"), "mine");
    EXPECT_TRUE(reader.hashed());
    EXPECT_EQ(reader.tensor("weight").parts, std::min(files, 7));
    EXPECT_EQ(reader.tensor("step").parts, 1);
    const Tensor weight = reader.read(context_, "weight");
    EXPECT_TRUE(std::ranges::equal(weight.f32(), weight_));
    EXPECT_EQ(reader.read(context_, "step").as<std::int64_t>()[0], 9);
  }
  // The copy loads like any other checkpoint, and a second conversion gives the same files.
  std::vector<float> weight(28), u(6);
  load_checkpoint(
      folder_ / "3", {},
      std::vector<MutableNamedView>{
          {"weight", view(weight.data(), {7, 4})}, {"to_qkv.weight_u", view(u)}, {"step", view(&step_, 1)}});
  EXPECT_EQ(weight, weight_);
  convert_checkpoint(folder_ / "8", folder_ / "again", {.files = 3});
  expect_same("3", "again");
}

TEST_F(Convert, ToBf16AndBack) {
  const auto all = [](DType to) { return [to](std::string_view, DType) { return to; }; };
  convert("half", {.dtype = all(DType::bf16)});
  const CheckpointReader half = CheckpointReader::open(folder_ / "half");
  EXPECT_EQ(half.tensor("weight").dtype, DType::bf16);
  EXPECT_EQ(half.tensor("step").dtype, DType::i64);
  const Tensor rounded = half.read(context_, "weight");
  for (std::size_t i = 0; i < weight_.size(); ++i)
    EXPECT_EQ(static_cast<float>(rounded.as<bf16>()[i]), static_cast<float>(bf16(weight_[i])));
  convert_checkpoint(folder_ / "half", folder_ / "whole", {.dtype = all(DType::f32)});
  convert_checkpoint(folder_ / "whole", folder_ / "half2", {.dtype = all(DType::bf16)});
  convert_checkpoint(folder_ / "half", folder_ / "half3", {.dtype = all(DType::bf16)});
  expect_same("half", "half2");
  expect_same("half", "half3");
  EXPECT_EQ(
      error_text([&] { convert("x", {.dtype = all(DType::f16)}); }),
      "bad_argument: convert_checkpoint: options.dtype of \"to_qkv.weight_u\" is f16; expected f32 or bf16");
}

TEST_F(Convert, NamesAndShapes) {
  convert("new", {.remap = remap_old_names, .rename = [](std::string_view name) {
                    return name == "step" ? std::string() : "param." + std::string(name);
                  }});
  const CheckpointReader reader = CheckpointReader::open(folder_ / "new");
  EXPECT_THAT(reader.names(), ElementsAre("param.to_k.weight_u", "param.to_q.weight_u", "param.to_v.weight_u",
                                          "param.weight"));
  EXPECT_THAT(reader.read(context_, "param.to_k.weight_u").f32(), ElementsAre(2, 3));
  convert_checkpoint(folder_ / "new", folder_ / "again", {.remap = remap_old_names});
  expect_same("new", "again");
  EXPECT_EQ(error_text([&] { convert("x", {.rename = [](std::string_view) { return std::string("y"); }}); }),
            "bad_argument: convert_checkpoint: \"step\" and \"to_qkv.weight_u\" would both be called \"y\"");
  EXPECT_EQ(error_text([&] { convert("x", {.rename = [](std::string_view) { return std::string(); }}); }),
            "bad_argument: convert_checkpoint: of the 3 tensors none is left");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "x"));
}

// A safetensors file of another program.
TEST_F(Convert, OfASafetensorsFile) {
  write_safetensors(folder_ / "model.safetensors",
                    std::vector<SafetensorsEntry>{{"weight", view(weight_.data(), {7, 4})}, {"u", view(u_)}},
                    {{"format", "pt"}});
  convert_checkpoint(folder_ / "model.safetensors", folder_ / "imported", {.files = 2});
  const CheckpointReader reader = CheckpointReader::open(folder_ / "imported");
  EXPECT_EQ(reader.info().step, 0);
  EXPECT_EQ(reader.info().extra.at("format"), "pt");
  EXPECT_TRUE(std::ranges::equal(reader.read(context_, "weight").f32(), weight_));
  // The reverse: an exported file converts back to the checkpoint, with its step.
  export_checkpoint(folder_ / "run", folder_ / "whole.safetensors");
  convert_checkpoint(folder_ / "whole.safetensors", folder_ / "back");
  convert("plain", {});
  expect_same("plain", "back");
  EXPECT_EQ(CheckpointReader::open(folder_ / "model.safetensors").names().size(), 2u);
}

TEST_F(Convert, WhatIsWrongIsNamed) {
  EXPECT_EQ(error_text([&] { convert("x", {.files = 0}); }),
            "bad_argument: convert_checkpoint: options.files is 0; expected 1 to 99999");
  for (const char* to : {"run", "run/step-00000009", "run/../run"})
    EXPECT_EQ(error_text([&] { convert_checkpoint(folder_ / "run", folder_ / to); }),
              "bad_argument: convert_checkpoint: " + (folder_ / "run").string() + " lies in " +
                  (folder_ / to).string() + "; expected another folder to write to");
  const auto file = folder_ / "run" / "step-00000009" / "rank-00000.safetensors";
  std::string bytes = test::contents(file);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  std::ofstream(file, std::ios::binary) << bytes;
  EXPECT_THAT(error_text([&] { convert_checkpoint(folder_ / "run", folder_ / "x"); }),
              HasSubstr("are not those that were written"));
  EXPECT_FALSE(latest_checkpoint(folder_ / "x"));
  EXPECT_TRUE(std::filesystem::is_empty(folder_ / "x"));
}

}  // namespace
}  // namespace weft::convert_test
