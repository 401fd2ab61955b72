// The tables of a configuration of weft train, and the file that lies beside a run.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

#include "tools/train_runs.hpp"

namespace weft::test::train_config_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class TrainConfigTest : public TrainRuns {
 protected:
  std::string write(const std::string& name, const std::string& text) {
    std::ofstream(folder_ / name) << text;
    return file(name);
  }
  // Each table, with the same values as `flags()`.
  std::string tables() {
    return "steps = 8\nbatch = 4\nseq = 32\nprogress = 'none'\nmetrics = '" + file("m") +
           "'\n[model]\nkind = 'dense'\ndim = 32\nlayers = 2\nheads = 4\nffn_hidden = 64\n"
           "[parallelism]\nranks = 4\ntensor = 2\ndata = 2\nparameters = 'fsdp'\nsequence_parallel = true\n"
           "[optimizer]\nkind = 'lion'\nlr = 0.003\nlr_floor = 0.001\nwarmup = 2\nschedule = 'linear'\nclip "
           "= 0.5\n"
           "weight_decay = 0.2\n[data]\ntext = '" +
           file("text") +
           "'\nheld_out = 0.2\ndraw = 'sequences'\ndocument_end = \"\\n\"\n[eval]\nevery = 3\nbatches = 2\n"
           "[checkpoint]\nfolder = '" +
           file("run") + "'\nevery = 4\nkeep = 1\n";
  }
  Words flags() {
    return {"train",
            "--steps",
            "8",
            "--batch",
            "4",
            "--seq",
            "32",
            "--progress",
            "none",
            "--metrics",
            file("m"),
            "--model",
            "dense",
            "--dim",
            "32",
            "--layers",
            "2",
            "--heads",
            "4",
            "--ffn",
            "64",
            "--ranks",
            "4",
            "--tp",
            "2",
            "--dp",
            "2",
            "--data",
            "fsdp",
            "--sequence-parallel",
            "--optimizer",
            "lion",
            "--lr",
            "0.003",
            "--lr-floor",
            "0.001",
            "--warmup",
            "2",
            "--schedule",
            "linear",
            "--clip",
            "0.5",
            "--weight-decay",
            "0.2",
            "--text",
            file("text"),
            "--held-out",
            "0.2",
            "--draw",
            "sequences",
            "--document-end",
            "\n",
            "--eval-every",
            "3",
            "--eval-batches",
            "2",
            "--save",
            file("run"),
            "--save-every",
            "4",
            "--keep",
            "1"};
  }
  // The metrics without the times, which no two runs share.
  std::vector<nlohmann::json> steps_of(const std::string& name) {
    std::vector<nlohmann::json> steps;
    std::ifstream in(folder_ / name);
    for (std::string line; std::getline(in, line);) {
      steps.push_back(nlohmann::json::parse(line));
      for (const char* of_time : {"seconds", "tokens_per_s", "memory_mib", "peak_share"})
        steps.back().erase(of_time);
    }
    return steps;
  }
};

TEST_F(TrainConfigTest, TablesAndFlagsGiveTheSameBits) {
  ASSERT_EQ(run(flags()), 0) << err();
  const auto by_flags = steps_of("m");
  ASSERT_EQ(by_flags.size(), 8u);
  EXPECT_TRUE(by_flags[2].contains("eval_loss"));
  const std::string beside = contents(folder_ / "run/config.toml");
  std::filesystem::rename(folder_ / "run", folder_ / "first");
  ASSERT_EQ(run({"train", "--config", write("run.toml", tables())}), 0) << err();
  EXPECT_EQ(steps_of("m"), by_flags);
  EXPECT_EQ(run({"checkpoint", "diff", file("first"), file("run")}), 0) << out();
  EXPECT_EQ(contents(folder_ / "run/config.toml"), beside)
      << "the whole configuration, wherever it came from";
  // The file beside the run is the run.
  std::filesystem::rename(folder_ / "run", folder_ / "second");
  ASSERT_EQ(run({"train", "--config", file("second/config.toml")}), 0) << err();
  EXPECT_EQ(steps_of("m"), by_flags);
  EXPECT_EQ(contents(folder_ / "run/config.toml"), beside);
  // Flags over it.
  ASSERT_EQ(
      run({"train", "--config", file("run.toml"), "--lr", "0.002", "--until", "2", "--save", file("third")}),
      0)
      << err();
  EXPECT_NE(steps_of("m")[1], by_flags[1]);
  EXPECT_THAT(contents(folder_ / "third/config.toml"), HasSubstr("\nlr = 0.002\n"));
}

// Every option has one place, and the printed file has all of them.
TEST_F(TrainConfigTest, ThePrintedFileHasTables) {
  Words words = flags();
  words.push_back("--print-config");
  ASSERT_EQ(run(words), 0) << err();
  const std::string printed = out();
  for (const char* line :
       {"\n[model]\ndim = 32\n", "\nkind = 'dense'\n", "\n[parallelism]\n", "\ntensor = 2\n",
        "\nparameters = 'fsdp'\n", "\n[optimizer]\n", "\nkind = 'lion'\n", "\nlr_floor = 0.001\n",
        "\n[data]\n", "\nheld_out = 0.2\n", "\ndocument_end = \"\\u000a\"\n", "\n[eval]\n", "\nbatches = 2\n",
        "\n[checkpoint]\n", "\nkeep = 1\n"})
    EXPECT_THAT(printed, HasSubstr(line));
  EXPECT_THAT(printed, Not(HasSubstr("\nlr-floor")));
  ASSERT_EQ(run({"train", "--config", write("printed.toml", printed), "--print-config"}), 0) << err();
  EXPECT_EQ(out(), printed);
}

TEST_F(TrainConfigTest, AMixtureOfExpertsIsAModelOfItsTable) {
  const std::string text = "steps = 2\nbatch = 2\nseq = 16\nprogress = 'none'\n[data]\ntext = '" +
                           file("text") +
                           "'\n[model]\nkind = 'moe'\nexperts = 4\nlayers = 2\ntop_k = 1\ndim = 32\n";
  ASSERT_EQ(run({"train", "--config", write("run.toml", text)}), 0) << err();
  EXPECT_THAT(out(), HasSubstr("mesh dp=1 x ep=1 x tp=1"));
  ASSERT_EQ(run({"train", "--config", file("run.toml"), "--print-config"}), 0);
  EXPECT_THAT(out(), HasSubstr("\nkind = 'moe'\n"));
  EXPECT_THAT(out(), HasSubstr("\nexperts = 4\n"));
  EXPECT_THAT(out(), HasSubstr("\nlayers = 2\n"));
  ASSERT_EQ(run({"train", "--config", write("run.toml", "[model]\nkind = 'moe'\n"), "--print-config"}), 0)
      << err();
  EXPECT_THAT(out(), HasSubstr("\nexperts = 8\n"));
  EXPECT_EQ(run({"train", "--experts", "4", "--model", "dense", "--print-config"}), 2);
  EXPECT_THAT(err(), HasSubstr("experts is 4 with --model dense; expected 0, or --model moe"));
}

TEST_F(TrainConfigTest, WhatIsWrongInATableIsNamedWithItsLine) {
  for (const char* command : {"train", "parity"}) {
    const auto expect = [&](const std::string& text, const std::string& why) {
      EXPECT_EQ(run({command, "--config", write("run.toml", text)}), 2) << text;
      EXPECT_THAT(err(), HasSubstr(file("run.toml") + why)) << text;
    };
    expect("[optimizer]\nlr = 1e-3\nwarm_up = 3\n", ":3: [optimizer] has no \"warm_up\"; is warmup meant?");
    expect("[optimizer]\nlr = 'high'\n", ":2: [optimizer] lr is 'high'; expected a number");
    expect("[optimiser]\nlr = 1\n",
           ":1: weft " + std::string(command) + " has no option \"optimiser\"; is optimizer meant?");
    expect("lr = 1e-3\n[optimizer]\nlr = 1e-3\n",
           ":3: [optimizer] lr is given beside lr; expected one of them");
    expect("[data]\nheld-out = 0.1\n", ":2: [data] has no \"held-out\"; is held_out");
    expect("[data]\nheld_out = 'x'\n", ":2: [data] held_out is 'x'; expected a number");
    expect("[model]\nkind = 'dense'\nhead = 4\n",
           ":3: [model] has no \"head\"; is heads or head_size meant?");
    expect("[model]\nkind = 'convolution'\n", ":2: --model is convolution; expected dense, moe");
    expect("steps = 3\nkv-heads = 4\n[model]\nkind = 'dense'\n",
           ":2: kv-heads is given beside the table [model]; expected it there");
  }
  const auto expect = [&](const std::string& text, const std::string& why) {
    EXPECT_EQ(run({"train", "--config", write("run.toml", text)}), 2) << text;
    EXPECT_THAT(err(), HasSubstr(file("run.toml") + why)) << text;
  };
  expect("[parallelism]\ntensors = 2\n", ":2: [parallelism] has no \"tensors\"; is tensor meant?");
  expect("[parallelism]\nspace = 2\n", ":2: [parallelism] has no \"space\"");
  expect("[checkpoint]\nkeep = -1\n", ":2: --keep is -1; expected 0 to 1000000");
  expect("[eval]\nevery = 1.5\n", ":2: [eval] every is 1.5; expected an integer");
  expect("[evaluate]\nevery = 1\n", ":1: weft train has no option \"evaluate\"");
  // parity has no parallelism, evaluation and checkpoints, but --resume.
  EXPECT_EQ(run({"parity", "--config", write("run.toml", "[checkpoint]\nkeep = 1\n")}), 2);
  EXPECT_THAT(err(), HasSubstr(":2: [checkpoint] has no \"keep\""));
}

TEST_F(TrainConfigTest, WhatIsInThePlaceOfTheConfigurationIsNamed) {
  std::filesystem::create_directories(folder_ / "run/config.toml");
  EXPECT_NE(run(small({"--save", file("run")})), 0);
  EXPECT_THAT(err(),
              HasSubstr("train: --save: cannot write " + file("run/config.toml") + ": it is a folder"));
}

}  // namespace
}  // namespace weft::test::train_config_test
