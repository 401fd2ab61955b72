// `weft checkpoint` as a user calls it.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <complex>
#include <cstdio>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <vector>

#include "support/command_output.hpp"
#include "support/temporary_folder.hpp"
#include "weft/checkpoint/checkpoint.hpp"
#include "weft/checkpoint/safetensors.hpp"

namespace weft::test::checkpoint_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

using Outcome = CommandOutput;

class CheckpointCommand : public testing::Test {
 protected:
  Outcome command(const std::string& words) const {
    const std::string line = fmt::format("cd '{}' && timeout 60 '{}' checkpoint {} 2>&1 </dev/null",
                                         folder.path().string(), WEFT_COMMAND, words);
    return output_of(line);
  }
  void save(const std::string& run, const std::vector<NamedView>& tensors, std::int64_t step = 3) const {
    save_checkpoint(folder / run, DeviceMesh(), step, tensors, {{"note", "first\nsecond"}});
  }

  TemporaryFolder folder;
  std::vector<float> weight = {1, 2, 3, 4, 5, 6};
  std::vector<std::int64_t> count = {7};
};

TEST_F(CheckpointCommand, InspectShowsWhatThereIs) {
  save("run", {{"param.weight", view(weight.data(), {2, 3})}, {"steps", view(count)}});
  const Outcome shown = command("inspect run");
  EXPECT_EQ(shown.status, 0);
  EXPECT_EQ(shown.text,
            "run/step-00000003\n"
            "step 3, written on one rank, with hashes\n"
            "  note: first ...\n"
            "param.weight  f32    (2, 3)                   24 B  1 part \n"
            "steps         i64    (1)                       8 B  1 part \n"
            "2 tensors, 32 B\n");
  EXPECT_THAT(command("inspect run/step-00000003 --only 'param.*'").text, HasSubstr("1 tensors, 24 B"));
  const auto json = nlohmann::json::parse(command("inspect run --json").text);
  EXPECT_EQ(json["step"], 3);
  EXPECT_EQ(json["extra"]["note"], "first\nsecond");
  EXPECT_EQ(json["tensors"]["param.weight"]["shape"], (std::vector<int>{2, 3}));
  EXPECT_EQ(json["tensors"]["steps"]["files"][0], "rank-00000.safetensors");
}

TEST_F(CheckpointCommand, ControlCharactersOfNamesAreNotPrinted) {
  save("run", {{"a\x1b[2Jb", view(count)}});
  const Outcome shown = command("inspect run");
  EXPECT_EQ(shown.status, 0);
  EXPECT_THAT(shown.text, HasSubstr("a?[2Jb "));

  // Nor in what is wrong with them: a byte of the data, one of the header, the index.
  const std::filesystem::path file = folder / "run/step-00000003/rank-00000.safetensors",
                              index = folder / "run/step-00000003/index.json";
  std::vector<char> bytes;
  {
    std::ifstream in(file, std::ios::binary);
    bytes.assign(std::istreambuf_iterator<char>(in), {});
  }
  bytes.back() ^= 1;
  std::ofstream(file, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  EXPECT_THAT(command("verify run").text, HasSubstr("of \"a?[2Jb\", are not those that were written"));
  EXPECT_THAT(command("export run out").text, HasSubstr("of \"a?[2Jb\", are not those that were written"));
  std::ofstream(index) << R"({"format":"weft checkpoint","version":1,"step":3,"mesh":"\u001b[2J","extra":{},)"
                       << R"("tensors":{"a\u0007\u009b":{"dtype":"f32","layout":["\u001b]0;x"],"shape":[1],)"
                       << R"("parts":[{"file":"b","offset":[0],"shape":[2]}]}}})";
  for (const char* what : {"verify run", "inspect run"}) {
    const std::string text = command(what).text;
    EXPECT_THAT(text, HasSubstr("the part of \"a??\" in b is (2) at (0), outside of the whole (1)"));
    EXPECT_EQ(text.find('\x1b'), text.npos);
  }
  std::ofstream(index) << R"({"format":"weft checkpoint","version":1,"step":3,"mesh":"\u001b[2J","extra":{},)"
                       << R"("tensors":{"a":{"dtype":"f32","layout":["\u001b]0;x"],"shape":[1],)"
                       << R"("parts":[{"file":"b","offset":[0],"shape":[1]}]}}})";
  const std::string text = command("inspect run").text;
  EXPECT_THAT(text, HasSubstr("written on ?[2J, without hashes"));
  EXPECT_THAT(text, HasSubstr("1 part   ?]0;x\n"));
}

TEST_F(CheckpointCommand, OnlyARegularFileIsOverwritten) {
  save("run", {{"weight", view(weight)}});
  std::filesystem::create_symlink(folder / "elsewhere", folder / "link");
  std::filesystem::create_directory(folder / "folder");
  for (const char* name : {"link", "folder"}) {
    const Outcome refused = command(std::string("export run --overwrite ") + name);
    EXPECT_NE(refused.status, 0);
    EXPECT_THAT(refused.text, HasSubstr("\" is no regular file; expected one, or another name"));
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "elsewhere"));
}

TEST_F(CheckpointCommand, VerifyFindsAFlippedBit) {
  save("run", {{"weight", view(weight)}});
  const Outcome whole = command("verify run");
  EXPECT_EQ(whole.status, 0);
  EXPECT_EQ(whole.text, "run/step-00000003: 1 tensors, 24 B, all bytes are those that were written\n");
  std::fstream file(folder / "run/step-00000003/rank-00000.safetensors",
                    std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(-1, std::ios::end);
  file.put('\x41');
  file.close();
  const Outcome spoiled = command("verify run");
  EXPECT_EQ(spoiled.status, 1);
  EXPECT_THAT(spoiled.text, HasSubstr("of \"weight\", are not those that were written"));
  EXPECT_THAT(spoiled.text, HasSubstr("1 fault in run\n"));
}

TEST_F(CheckpointCommand, DiffSaysHowFarApart) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<std::complex<float>> z = {{1, 2}, {3, 4}}, w = {{1, 2}, {3, 4.5f}};
  std::vector<bf16> half = {bf16(1.0f), bf16(2.0f)}, other_half = {bf16(1.0f), bf16(2.5f)};
  std::vector<float> changed = {1, 2, 3, 4, 5.25f, 6}, with_nan = {1, nan, 3, 4, 5, 6};
  std::vector<float> row = {1, 2, 3};
  save("a", {{"same", view(weight)},
             {"changed", view(weight)},
             {"nan", view(weight)},
             {"z", view(z)},
             {"half", view(half)},
             {"only_a", view(weight)},
             {"shape", view(weight)}});
  save("b",
       {{"same", view(weight)},
        {"changed", view(changed)},
        {"nan", view(with_nan)},
        {"z", view(w)},
        {"half", view(other_half)},
        {"only_b", view(weight)},
        {"shape", view(row)}},
       4);
  const Outcome differ = command("diff a b");
  EXPECT_EQ(differ.status, 1);
  EXPECT_EQ(differ.text,
            "changed: 1 of 6 numbers differ, by at most 0.25\n"
            "half: 1 of 2 numbers differ, by at most 0.5\n"
            "nan: 1 of 6 numbers differ, by at most inf\n"
            "only_a: only in a\n"
            "shape: f32 (6) and f32 (3)\n"
            "z: 1 of 4 numbers differ, by at most 0.5\n"
            "only_b: only in b\n"
            "step 3 and step 4\n"
            "1 tensor alike, 7 different\n");
  const Outcome near = command("diff a b --tolerance 0.3 --only changed --only same");
  EXPECT_EQ(near.status, 0);
  EXPECT_THAT(near.text, HasSubstr("2 tensors alike (to 0.3), 0 different\n"));
  EXPECT_EQ(command("diff a a").status, 0);
}

TEST_F(CheckpointCommand, ExportWritesOneFile) {
  save("run", {{"param.weight", view(weight.data(), {2, 3})}, {"steps", view(count)}});
  EXPECT_EQ(command("export run out.safetensors --only 'param.*' --strip param.").status, 0);
  EXPECT_THAT(SafetensorsFile::open(folder / "out.safetensors").names(), ElementsAre("weight"));
  const Outcome again = command("export run out.safetensors");
  EXPECT_EQ(again.status, 2);
  EXPECT_EQ(again.text, "weft: \"out.safetensors\" exists; another name, or --overwrite, is expected\n");
  EXPECT_EQ(command("export run out.safetensors --overwrite").status, 0);
  EXPECT_THAT(SafetensorsFile::open(folder / "out.safetensors").names(),
              ElementsAre("param.weight", "steps"));
}

TEST_F(CheckpointCommand, ExportPutsAveragesInThePlaceOfParameters) {
  std::vector<float> average = {6, 5, 4, 3, 2, 1};
  save("run", {{"param.a", view(weight)},
               {"param.frozen", view(weight)},
               {"buffer.b", view(weight)},
               {"ema.average.a", view(average)},
               {"ema.updates.a", view(count)}});
  EXPECT_EQ(command("export run all.safetensors --ema").status, 0);
  EXPECT_EQ(command("export run model.safetensors --ema --only 'param.*' --strip param.").status, 0);
  EXPECT_THAT(SafetensorsFile::open(folder / "all.safetensors").names(),
              ElementsAre("buffer.b", "param.a", "param.frozen"));
  const auto model = SafetensorsFile::open(folder / "model.safetensors");
  EXPECT_THAT(model.names(), ElementsAre("a", "frozen"));
  Context context;
  EXPECT_THAT(model.read(context, "a").f32(), ElementsAre(6, 5, 4, 3, 2, 1));
  EXPECT_THAT(model.read(context, "frozen").f32(), ElementsAre(1, 2, 3, 4, 5, 6));
  save("none", {{"param.a", view(weight)}});
  const Outcome none = command("export none x.safetensors --ema");
  EXPECT_EQ(none.status, 2);
  EXPECT_EQ(none.text, "weft: none/step-00000003 has no averages (\"ema.average.*\") to export for --ema\n");
}

TEST_F(CheckpointCommand, ConvertWritesItAnew) {
  std::vector<float> qkv(12);
  std::iota(qkv.begin(), qkv.end(), 0.0f);
  save("old", {{"a.to_qkv.weight", view(qkv.data(), {3, 4, 1, 1})},
               {"a.to_qkv.weight_v", view(weight)},
               {"b", view(weight)}});
  std::ofstream(folder / "names") << "# a comment\n*.weight_v buffer.*.weight_v\n\n* param.*  # all others\n";
  const Outcome converted = command(
      "convert old new --old-names --names names --dtype bf16 --files 2 --only 'param.*' --only 'buffer.*'");
  EXPECT_EQ(converted.status, 0) << converted.text;
  EXPECT_EQ(converted.text, "new/step-00000003: 7 tensors; 2 had older names or shapes\n");
  EXPECT_THAT(
      command("inspect new").text,
      testing::AllOf(
          HasSubstr("param.a.to_k.weight     bf16   (1, 4)"),
          HasSubstr("buffer.a.to_q.weight_v  bf16   (6)                      12 B  2 parts  Shard(0)"),
          HasSubstr("7 tensors, 72 B")));
  EXPECT_EQ(command("verify new").status, 0);
  const Outcome again = command("convert new/step-00000003 new");
  EXPECT_EQ(again.status, 2);
  EXPECT_EQ(again.text, "weft: \"new\" has a checkpoint; another folder, or --overwrite, is expected\n");
  EXPECT_EQ(command("export new whole.safetensors").status, 0);
  EXPECT_EQ(command("convert whole.safetensors back").status, 0);
  EXPECT_EQ(command("diff new back").status, 0);
  // 0 to 11 and the weights are numbers that bf16 has: only the dtypes differ
  EXPECT_EQ(command("convert new wide --dtype f32").status, 0);
  const Outcome wide = command("diff new wide --only 'param.a.to_k*'");
  EXPECT_EQ(wide.status, 1);
  EXPECT_THAT(wide.text,
              HasSubstr("param.a.to_k.weight: bf16 and f32, 0 of 4 numbers differ, by at most 0\n"));
  EXPECT_EQ(command("diff new wide --tolerance 1e-9").status, 0);
  for (const char* words : {"inspect new", "diff new wide", "export new none.safetensors"}) {
    const Outcome none = command(std::string(words) + " --only 'param.*' --only 'nobody*'");
    EXPECT_EQ(none.status, 2);
    EXPECT_THAT(none.text, HasSubstr("weft: --only 'nobody*': none of the "));
  }
  EXPECT_THAT(command("inspect whole.safetensors").text,
              HasSubstr("whole.safetensors\nstep 3, written on one rank"));
  std::ofstream(folder / "names") << "a b c\n";
  EXPECT_EQ(command("convert old x --names names").text,
            "weft: names \"names\", line 1: expected two names, OLD NEW\n");
  std::ofstream(folder / "names") << "\na *\n";
  EXPECT_EQ(command("convert old x --names names").text,
            "weft: names \"names\", line 2: expected at most one * in OLD, and in NEW no more than there\n");
  ASSERT_EQ(::mkfifo((folder / "fifo").c_str(), 0600), 0);
  EXPECT_EQ(command("convert old x --names fifo").text,
            "weft: names \"fifo\": is not a regular file (it is a FIFO)\n");
  EXPECT_EQ(command("convert old x --names /dev/zero").text,
            "weft: names \"/dev/zero\": is not a regular file (it is a character device)\n");
  EXPECT_EQ(command("convert old x --dtype f16").status, 2);
  EXPECT_EQ(command("convert old x --files 0").status, 2);
}

TEST_F(CheckpointCommand, WrongWordsAreNamed) {
  EXPECT_EQ(command("").status, 2);
  EXPECT_EQ(command("look run").status, 2);
  const Outcome none = command("inspect nowhere");
  EXPECT_EQ(none.status, 2);
  EXPECT_EQ(none.text, "weft: checkpoint: nowhere holds no checkpoint: neither latest nor index.json\n");
  EXPECT_EQ(command("diff nowhere").status, 2);
  EXPECT_EQ(command("diff a b --tolerance -1").status, 2);
}

TEST_F(CheckpointCommand, ACommandThatItDoesNotHaveIsNamed) {
  const Outcome wrong = command("verfy run");
  EXPECT_EQ(wrong.status, 2);
  EXPECT_THAT(wrong.text,
              HasSubstr("unknown command \"checkpoint verfy\"; is verify meant? The commands are inspect, "));
}

}  // namespace
}  // namespace weft::test::checkpoint_test
