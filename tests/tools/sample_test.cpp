// Drives the built `weft sample` on a small model that `weft train` has saved.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/temporary_folder.hpp"
#include "tools/weft_command.hpp"
#include "weft/checkpoint/checkpoint.hpp"

namespace weft::test::sample_test {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;
using Words = std::vector<std::string>;

// A model of a text that repeats itself, with averages, in the folder "run".
class SampleTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TemporaryFolder;
    std::ofstream text(file("text"));
    for (int i = 0; i < 300; ++i) text << "the quick brown fox jumps over the lazy dog\n";
    text.close();
    const auto [status, out, err] =
        run({"train",     "--text",     file("text"), "--dim", "32", "--layers", "2", "--heads",
             "4",         "--ffn",      "64",         "--seq", "48", "--batch",  "8", "--steps",
             "80",        "--lr",       "0.01",       "--tp",  "2",  "--ranks",  "2", "--save",
             file("run"), "--progress", "none",       "--ema", "0.5"});
    ASSERT_EQ(status, 0) << err;
  }
  static void TearDownTestSuite() { delete folder_; }
  static std::string file(const std::string& name) { return (*folder_ / name).string(); }

  struct Ran {
    int status;
    std::string out, err;
  };
  static Ran run(const Words& words) {
    ChildProcess process = start_weft(words, file("out"), file("err"));
    const auto status = process.wait(seconds(60));
    return {status ? status->code : -2, contents(file("out")), contents(file("err"))};
  }
  static Ran sample(Words more) {
    more.insert(more.begin(), {"sample", file("run")});
    return run(more);
  }
  static TemporaryFolder* folder_;
};
TemporaryFolder* SampleTest::folder_ = nullptr;

TEST_F(SampleTest, ContinuesATextThatItHasLearned) {
  const Ran greedy = sample({"--prompt", "the quick", "--temperature", "0", "--tokens", "30"});
  EXPECT_EQ(greedy.status, 0) << greedy.err;
  EXPECT_EQ(greedy.out, "the quick brown fox jumps over the lazy\n");
  EXPECT_THAT(greedy.err, HasSubstr("30 tokens in "));
  EXPECT_THAT(greedy.err, HasSubstr("mesh dp=1 x tp=1; a rank reads 0.1"));
  EXPECT_THAT(greedy.err,
              ::testing::ContainsRegex(
                  "at [0-9.]+ GB/s, which the memory of this host gives, that is at most [0-9]+ a second"));
  EXPECT_EQ(sample({"--prompt", "the quick", "--temperature", "0", "--stop", "fox"}).out,
            "the quick brown fox\n");
  std::ofstream(file("prompt")) << "the quick";
  EXPECT_EQ(sample({"--prompt-file", file("prompt"), "--temperature", "0", "--tokens", "6"}).out,
            "the quick brown\n");
  EXPECT_EQ(sample({"--prompt", "the quick", "--temperature", "0", "--tokens", "6", "--average"}).out,
            "the quick brown\n");
}

// The folder of a step, and the model with experts, on a mesh, too.
TEST_F(SampleTest, ReadsAStepAndAMixtureOfExperts) {
  const Ran trained = run({"train", "--text",   file("text"), "--dim",           "32", "--layers",
                           "2",     "--heads",  "4",          "--ffn",           "64", "--seq",
                           "48",    "--batch",  "8",          "--steps",         "80", "--lr",
                           "0.01",  "--model",  "moe",        "--experts",       "4",  "--expert-hidden",
                           "32",    "--save",   file("moe"),  "--top-k",         "2",  "--save-every",
                           "40",    "--router", "sigmoid",    "--shared-hidden", "16", "--progress",
                           "none"});
  ASSERT_EQ(trained.status, 0) << trained.err;
  const auto of = [&](Words words) {
    words.insert(words.end(), {"--prompt", "the quick", "--temperature", "0", "--tokens", "20"});
    words.insert(words.begin(), "sample");
    const Ran ran = run(words);
    EXPECT_EQ(ran.status, 0) << ran.err;
    return ran.out;
  };
  EXPECT_EQ(of({file("moe")}), "the quick brown fox jumps ove\n");
  EXPECT_EQ(of({file("moe"), "--no-cache"}), "the quick brown fox jumps ove\n");
  EXPECT_EQ(of({file("moe"), "--ranks", "2", "--tp", "2"}), "the quick brown fox jumps ove\n");
  EXPECT_EQ(of({file("moe/step-00000080")}), "the quick brown fox jumps ove\n");
  EXPECT_THAT(of({file("moe/step-00000040")}), ::testing::StartsWith("the quick"));
  const Ran exported = run({"checkpoint", "export", file("moe"), file("llama-moe"), "--as", "llama"});
  EXPECT_EQ(exported.status, 2);
  EXPECT_THAT(exported.err, HasSubstr("is of a mixture of experts, which has no form of a Llama"));
}

TEST_F(SampleTest, AveragesThatARunHasNotAreNamed) {
  const Ran trained = run({"train", "--text", file("text"),  "--dim",      "16",  "--layers", "1", "--heads",
                           "2",     "--ffn",  "16",          "--seq",      "16",  "--batch",  "2", "--steps",
                           "1",     "--save", file("plain"), "--progress", "none"});
  ASSERT_EQ(trained.status, 0) << trained.err;
  const Ran refused = run({"sample", file("plain"), "--average"});
  EXPECT_NE(refused.status, 0);
  EXPECT_THAT(refused.err, HasSubstr("--average: \"" + file("plain") +
                                     "/step-00000001\" has no averages; "
                                     "expected a run of weft train --ema"));
}

TEST_F(SampleTest, HasTheSameTextOnEachMesh) {
  const Words words{"--prompt", "the ", "--temperature", "2", "--exact", "--tokens", "40", "--seed", "3"};
  const auto with = [&](Words more) {
    more.insert(more.end(), words.begin(), words.end());
    const Ran ran = sample(more);
    EXPECT_EQ(ran.status, 0) << ran.err;
    return ran.out;
  };
  const std::string one = with({});
  EXPECT_EQ(with({"--no-cache"}), one);
  EXPECT_EQ(with({"--ranks", "2", "--tp", "2"}), one);
  EXPECT_EQ(with({"--ranks", "4", "--tp", "2"}), one);
  EXPECT_EQ(with({"--ranks", "2", "--data", "fsdp"}), one);
}

TEST_F(SampleTest, PrintsEachContinuationOfSeveralPrompts) {
  const Ran ran = sample({"--prompt", "the quick", "--prompt", "over", "--samples", "2", "--tokens", "5",
                          "--temperature", "0", "--json"});
  std::istringstream lines(ran.out);
  std::vector<std::string> prompts, texts;
  for (std::string line; std::getline(lines, line);) {
    const auto j = nlohmann::json::parse(line);
    prompts.push_back(j.at("prompt"));
    texts.push_back(j.at("text"));
    EXPECT_EQ(j.at("tokens").size(), 5U);
    EXPECT_FALSE(j.at("stopped").get<bool>());
  }
  EXPECT_EQ(prompts, (Words{"the quick", "the quick", "over", "over"}));
  EXPECT_EQ(texts, (Words{" brow", " brow", " the ", " the "}));
  EXPECT_THAT(
      sample({"--prompt", "the quick", "--prompt", "over", "--tokens", "5", "--temperature", "0"}).out,
      HasSubstr("--- 2 of 2\nover the \n"));
}

TEST_F(SampleTest, RefusesWhatItCannotDo) {
  const auto says = [&](const Words& words, const std::string& text) {
    const Ran ran = sample(words);
    EXPECT_EQ(ran.status, 2) << ran.out << ran.err;
    EXPECT_THAT(ran.err, HasSubstr(text));
  };
  says({"--prompt", std::string(48, 'a')},
       "generate: prompt 0 has 48 tokens; expected at most 47, one below max_seq");
  says({"--prompt", ""}, "generate: prompt 0 is empty; expected 1 token or more");
  says({"--temperature", "-1"}, "generate: temperature is -1; expected 0 or more");
  says({"--top-p", "2"}, "generate: top_p is 2; expected more than 0, and 1 at most");
  says({"--ranks", "3", "--tp", "2"}, "sample: dp 1 x tp 2 is not 3 ranks");
  says({"--tp", "0"}, "sample: --tp is 0; expected 1 or more");
  says({"--stop", "fox", "--stop", ""}, "sample: --stop is empty; expected a text");
  const Ran nowhere = run({"sample", file("nowhere"), "--ranks", "2"});
  EXPECT_EQ(nowhere.status, 2);
  EXPECT_THAT(nowhere.err, HasSubstr("sample: no checkpoint in \"" + file("nowhere") + "\""));
  const Ran no_file = sample({"--prompt-file", file("nowhere")});
  EXPECT_NE(no_file.status, 0);
  EXPECT_THAT(no_file.err, HasSubstr("sample: --prompt-file \"" + file("nowhere") + "\":"));
}

// A model that goes to the form of Llama models and back gives the same text.
TEST_F(SampleTest, ReadsWhatWasExportedAsLlama) {
  const Words words{"--prompt", "the quick", "--temperature", "0", "--tokens", "20"};
  const auto text_of = [&](const std::string& run_folder) {
    Words all{"sample", file(run_folder)};
    all.insert(all.end(), words.begin(), words.end());
    return run(all).out;
  };
  const Ran exported = run({"checkpoint", "export", file("run"), file("llama"), "--as", "llama"});
  EXPECT_EQ(exported.status, 0) << exported.err;
  EXPECT_THAT(exported.out, HasSubstr("llama/model.safetensors: 21 tensors, "));
  const Ran imported = run({"checkpoint", "convert", file("llama"), file("back"), "--as", "llama"});
  EXPECT_EQ(imported.status, 0) << imported.err;
  EXPECT_THAT(imported.out, HasSubstr("back/step-00000000: 21 tensors"));
  EXPECT_EQ(text_of("back"), text_of("run"));

  const auto says = [&](const Words& more, const std::string& text) {
    Words all{"checkpoint"};
    all.insert(all.end(), more.begin(), more.end());
    const Ran ran = run(all);
    EXPECT_EQ(ran.status, 2) << ran.out;
    EXPECT_THAT(ran.err, HasSubstr(text));
  };
  says({"export", file("run"), file("llama"), "--as", "llama"},
       "llama/model.safetensors\" exists; another folder, or --overwrite, is expected");
  says({"export", file("run"), file("x"), "--as", "llama", "--strip", "param."},
       "--as llama: --strip has no meaning with it");
  says({"export", file("run"), file("x"), "--dtype", "bf16"}, "--dtype: export has it with --as llama only");
  says({"convert", file("llama"), file("x"), "--as", "llama", "--files", "2"},
       "--as llama: --files has no meaning with it");
  says({"export", file("run"), file("x"), "--as", "gpt"}, "--as");
  const std::vector<float> one(1);
  const std::vector<NamedView> tensors{{"param.norm.weight", view(one)}};
  save_checkpoint(file("nameless"), DeviceMesh(), 1, tensors);
  says({"export", file("nameless"), file("x"), "--as", "llama"}, "does not say which model it is of");
}

// Checkpoints that do not name their model, or are of another vocabulary.
TEST_F(SampleTest, RefusesOtherModels) {
  const auto says = [&](const std::string& name, const CheckpointExtra& extra, const std::string& text) {
    std::vector<float> one(1);
    const std::vector<NamedView> tensors{{"param.norm.weight", view(one)}};
    save_checkpoint(file(name), DeviceMesh(), 1, tensors, extra);
    const Ran ran = run({"sample", file(name)});
    EXPECT_EQ(ran.status, 2) << ran.err;
    EXPECT_THAT(ran.err, HasSubstr(text));
  };
  says("vocab", {{"model", "[model]\nvocab = 300\n"}},
       "is of a model of 300 tokens; expected 256, one for each byte");
  says("bare", {}, "does not say which model it is of; expected a checkpoint of this version of weft train");
}

}  // namespace
}  // namespace weft::test::sample_test
