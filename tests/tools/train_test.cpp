// Drives the built `weft train` and `weft parity` on small models.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "base/cpu/isa.hpp"
#include "support/processes.hpp"
#include "support/temporary_folder.hpp"
#include "support/terminal.hpp"
#include "tools/train_runs.hpp"
#include "weft/store/tcp.hpp"

namespace weft::test::train_test {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::Not;

class TrainTest : public TrainRuns {};

TEST_F(TrainTest, LearnsOnOneRank) {
  ASSERT_EQ(run(small({"--metrics", file("m")})), 0) << err();
  const std::vector<double> l = losses("m");
  ASSERT_EQ(l.size(), 20u);
  EXPECT_NEAR(l.front(), std::log(256.0), 0.2);
  EXPECT_LT(l.back(), 0.75 * l.front());
  EXPECT_THAT(out(), HasSubstr("mesh dp=1 x tp=1"));
  EXPECT_THAT(out(), HasSubstr("tokens/s"));
  EXPECT_THAT(out(), HasSubstr("nats per byte"));
}

// The output of weft with these words on a terminal of so many columns.
std::string on_a_terminal(std::vector<std::string> words, int columns) {
  words.insert(words.begin(), WEFT_COMMAND);
  const OnATerminal got = run_on_a_terminal(std::move(words), columns, seconds(60), [] {
    for (const char* inherited : {"WEFT_RANK", "RANK", "WEFT_STORE", "COLUMNS", "WEFT_TERMINAL"})
      ::unsetenv(inherited);
  });
  EXPECT_TRUE(got.status && got.status->code == 0) << got.text;
  return got.text;
}

// The lines of a terminal that tell the state of the run: what stands between two ends of line or returns.
std::vector<std::string> bars_of(const std::string& text) {
  std::vector<std::string> bars;
  std::string line;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text.compare(i, 3, "\x1b[K") == 0) {
      i += 2;
    } else if (text[i] != '\r' && text[i] != '\n') {
      line += text[i];
    } else {
      if (line.find("step ") < 5) bars.push_back(line);
      line.clear();
    }
  }
  return bars;
}

TEST_F(TrainTest, TheProgressBarFitsTheTerminal) {
  for (const int columns : {20, 40, 80, 132})
    for (const bool launched : {false, true}) {
      Words words = small({"--steps", "12345", "--until", "2", "--progress", "bar"});
      if (launched) {
        const Words run{"run", "-n", "2", WEFT_COMMAND};
        words.insert(words.begin(), run.begin(), run.end());
      }
      const std::string text = on_a_terminal(words, columns);
      const std::vector<std::string> bars = bars_of(text);
      ASSERT_FALSE(bars.empty()) << text;
      EXPECT_THAT(text, HasSubstr("\x1b[K\r"));
      for (const std::string& bar : bars) {
        EXPECT_LT(static_cast<int>(bar.size()), columns) << bar;
        EXPECT_EQ(bar.find('[', 5) != std::string::npos, columns >= 132) << bar;
        EXPECT_EQ(bar.find(" left") != std::string::npos, columns >= 80) << bar;
        EXPECT_EQ(bar.find(" tok") != std::string::npos, columns >= 40) << bar;
      }
      for (std::size_t at = text.find(" |"), end = 0; at != std::string::npos; at = text.find(" |", end)) {
        end = text.find('\r', at);  // the curve, too
        EXPECT_LE(end - text.rfind('\n', at), static_cast<std::size_t>(std::max(columns, 45)) + 1);
      }
    }
}

TEST_F(TrainTest, NoBarIsDrawnIntoAFile) {
  ASSERT_EQ(run(small({"--until", "2", "--progress", "bar"})), 0) << err();
  EXPECT_THAT(out(), ::testing::AllOf(Not(HasSubstr("\r")), Not(HasSubstr("\x1b"))));
  EXPECT_THAT(out(), ::testing::ContainsRegex("step 2/2 \\[=+\\] loss "));
}

TEST_F(TrainTest, TheSameLossesOnEveryMesh) {
  ASSERT_EQ(run(small({"--metrics", file("one")})), 0) << err();
  for (const char* mesh : {"1", "2", "4"}) {
    ASSERT_EQ(run(small({"--ranks", "4", "--tp", mesh, "--metrics", file("four")})), 0) << err();
    const std::vector<double> one = losses("one"), four = losses("four");
    ASSERT_EQ(four.size(), one.size());
    for (std::size_t i = 0; i < one.size(); ++i)
      EXPECT_NEAR(four[i], one[i], 1e-4 * one[i]) << "tp " << mesh << " step " << i;
  }
}

// Losses have the same bits for every pipeline, whatever its schedule; a checkpoint of one resumes without.
TEST_F(TrainTest, APipelineHasTheLossesOfOneStage) {
  const auto with = [&](Words more, const char* metrics) {
    more.insert(more.end(), {"--micro-batches", "3", "--clip", "0", "--metrics", file(metrics)});
    return small(more);
  };
  ASSERT_EQ(run(with({}, "one")), 0) << err();
  ASSERT_EQ(run(with({"--ranks", "2", "--pp", "2", "--save", file("ckpt"), "--until", "8"}, "part")), 0)
      << err();
  ASSERT_EQ(run(with({"--save", file("ckpt"), "--resume"}, "part")), 0) << err();
  EXPECT_EQ(losses("part"), losses("one"));
  const std::string own = file("own.txt");
  std::ofstream(own) << "schedule own\nranks 2\nmicro-batches 3\nstages 0 1\nmemory 3 3\n"
                        "0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0F2 0SEND_F2 0RECV_B1 0B0 0RECV_B2 0B1 0B2\n"
                        "1: 1RECV_F0 1RECV_F1 1F0 1RECV_F2 1F1 1F2 1B0 1SEND_B0 1B1 1SEND_B1 1B2 1SEND_B2\n";
  // Each stage begins from the stages of another run, and has options for its own parameters.
  ASSERT_EQ(run(with({"--ranks", "2", "--pp", "2", "--init-from", file("ckpt"), "--groups",
                      "output_head:rate=0.5:decay=0", "--until", "4"},
                     "fine")),
            0)
      << err();
  ASSERT_EQ(
      run(with({"--init-from", file("ckpt"), "--groups", "output_head:rate=0.5:decay=0", "--until", "4"},
               "plain")),
      0)
      << err();
  EXPECT_EQ(losses("fine"), losses("plain"));
  ASSERT_EQ(
      run(small({"--ranks", "4", "--pp", "2", "--data", "fsdp", "--save", file("parts.run"), "--save-every",
                 "3", "--micro-batches", "2", "--clip", "0", "--metrics", file("parts")})),
      0)
      << err();
  for (std::size_t i = 0; i < losses("one").size(); ++i)
    EXPECT_NEAR(losses("parts")[i], losses("one")[i], 1e-4 * losses("one")[i]);
  for (const std::string& pipeline : {std::string("zero-bubble"), std::string("interleaved"), own}) {
    ASSERT_EQ(run(with({"--ranks", "2", "--pp", "2", "--pipeline", pipeline}, "two")), 0) << err();
    EXPECT_EQ(losses("two"), losses("one")) << pipeline;
  }
}

// A run that is stopped at a checkpoint and resumed gives the bits of a run that never stopped.
TEST_F(TrainTest, LearnsWithExpertsOnAnyMesh) {
  const auto with = [&](Words more) {
    Words words = small({"--model", "moe", "--experts", "4", "--expert-hidden", "32", "--shared-hidden", "16",
                         "--router", "sigmoid", "--router-bias", "selects"});
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  ASSERT_EQ(run(with({"--metrics", file("one")})), 0) << err();
  EXPECT_THAT(out(), HasSubstr("mesh dp=1 x ep=1 x tp=1"));
  EXPECT_THAT(out(), HasSubstr("experts of layers.1.mlp: "));
  const std::vector<double> one = losses("one");
  EXPECT_LT(one.back(), 0.75 * one.front());
  ASSERT_EQ(run(with({"--ranks", "4", "--ep", "2", "--tp", "2", "--metrics", file("four"), "--until", "6",
                      "--save", file("saved")})),
            0)
      << err();
  EXPECT_THAT(out(), HasSubstr("mesh dp=1 x ep=2 x tp=2"));
  const std::vector<double> four = losses("four");
  for (std::size_t i = 0; i < four.size(); ++i) EXPECT_NEAR(four[i], one[i], 1e-4) << i;
  std::ifstream metrics(folder_ / "four");
  std::string line;
  std::getline(metrics, line);
  const auto first = nlohmann::json::parse(line);
  EXPECT_EQ(first["imbalance"].size(), 2u);
  EXPECT_GE(first["imbalance"][0].get<double>(), 1);
  EXPECT_EQ(first["dropped"][1].get<double>(), 0);
  // The checkpoint goes on with other expert ranks, and with divided parameters.
  ASSERT_EQ(run(with({"--ranks", "4", "--ep", "4", "--data", "fsdp", "--resume", "--save", file("saved"),
                      "--metrics", file("more")})),
            0)
      << err();
  std::ifstream more(folder_ / "more");
  for (std::size_t i = 6; std::getline(more, line); ++i)
    EXPECT_NEAR(nlohmann::json::parse(line)["loss"].get<double>(), one[i], 1e-3) << i;
  ASSERT_EQ(run(with({"--save", file("saved"), "--resume", "--top-k", "1"})), 2);
  EXPECT_THAT(err(), HasSubstr("--top-k is 2 there and 1 here"));
  ASSERT_EQ(run(with({"--ranks", "3", "--ep", "3"})), 2);
  EXPECT_THAT(err(), HasSubstr("train: 4 experts do not divide into ep=3 (4 = 3 x 1 + 1)"));
  ASSERT_EQ(run(with({"--exact", "--ranks", "2", "--tp", "2"})), 2);
  EXPECT_THAT(err(), HasSubstr("train: exact with experts over tp=2"));
  ASSERT_EQ(run(with({"--exact", "--batch", "8", "--until", "4", "--metrics", file("exact1")})), 0) << err();
  ASSERT_EQ(run(with({"--exact", "--batch", "8", "--until", "4", "--ranks", "4", "--ep", "4", "--metrics",
                      file("exact4")})),
            0)
      << err();
  EXPECT_EQ(losses("exact4"), losses("exact1"));
  ASSERT_EQ(run(with({"--sequence-parallel"})), 2);
  EXPECT_THAT(err(), HasSubstr("train: sequence-parallel with experts"));
  ASSERT_EQ(run(with({"--top-k", "5"})), 2);
  EXPECT_THAT(err(), HasSubstr("train: top-k is 5; expected 1 to 4 (experts)"));
  ASSERT_EQ(run(small({"--ranks", "2", "--ep", "2"})), 2);
  EXPECT_THAT(err(), HasSubstr("train: ep is 2; expected 1, since the model has no experts"));
}

TEST_F(TrainTest, ResumingChangesNothing) {
  ASSERT_EQ(run(small({"--ranks", "4", "--tp", "2", "--metrics", file("whole")})), 0) << err();
  ASSERT_EQ(run(small({"--ranks", "4", "--tp", "2", "--metrics", file("parts"), "--save", file("ckpt"),
                       "--until", "8"})),
            0)
      << err();
  ASSERT_EQ(run(small({"--ranks", "4", "--tp", "2", "--metrics", file("parts"), "--save", file("ckpt"),
                       "--resume"})),
            0)
      << err();
  EXPECT_THAT(out(), HasSubstr("resumed at step 8"));
  EXPECT_EQ(losses("parts"), losses("whole"));
}

// Averages and label smoothing belong to a run: they continue after a restart, and other values make another
// run.
TEST_F(TrainTest, AveragesAndLabelSmoothingGoOn) {
  const Words options{"--ranks",           "2",   "--tp",     "2",     "--ema", "0.8",
                      "--label-smoothing", "0.1", "--z-loss", "0.001", "--save"};
  const auto with = [&](const Words& more) {
    Words words = options;
    words.insert(words.end(), more.begin(), more.end());
    return small(words);
  };
  ASSERT_EQ(run(with({file("whole"), "--until", "6", "--metrics", file("a")})), 0) << err();
  ASSERT_EQ(run(with({file("parts"), "--until", "3", "--metrics", file("b")})), 0) << err();
  ASSERT_EQ(run(with({file("parts"), "--until", "6", "--metrics", file("b"), "--resume"})), 0) << err();
  EXPECT_EQ(losses("a"), losses("b"));
  EXPECT_EQ(run({"checkpoint", "diff", file("whole"), file("parts")}), 0) << out();
  ASSERT_EQ(run({"checkpoint", "export", file("whole"), file("masters"), "--only", "param.*"}), 0) << err();
  ASSERT_EQ(run({"checkpoint", "export", file("whole"), file("averages"), "--only", "param.*", "--ema"}), 0)
      << err();
  EXPECT_EQ(std::filesystem::file_size(folder_ / "masters"),
            std::filesystem::file_size(folder_ / "averages"));
  EXPECT_NE(contents(folder_ / "masters"), contents(folder_ / "averages"));

  ASSERT_EQ(run(small({"--ranks", "2", "--tp", "2", "--until", "1", "--metrics", file("plain")})), 0)
      << err();
  EXPECT_GT(std::abs(losses("plain")[0] - losses("a")[0]), 1e-4) << "the loss is another one";
  EXPECT_EQ(run(small({"--ranks", "2", "--tp", "2", "--save", file("whole"), "--resume"})), 2);
  EXPECT_THAT(err(),
              HasSubstr("is of another run: --ema is 0.8 there and not set here, --label-smoothing is 0.1 "
                        "there and not set here, --z-loss is 0.001 there and not set here"));
}

// A part of the model that is unfrozen by step, over a stop, and on another mesh.
TEST_F(TrainTest, AFreezeScheduleGoesOn) {
  const auto with = [&](const Words& more) {
    Words words{"--ranks", "2", "--freeze", "3:trained:layers.0,0:frozen:layers.0", "--ema", "0.8", "--save"};
    words.insert(words.end(), more.begin(), more.end());
    return small(words);
  };
  ASSERT_EQ(run(with({file("whole"), "--until", "6", "--metrics", file("a")})), 0) << err();
  for (const std::string stop : {"2", "4"}) {
    const std::string parts = "parts" + stop;
    ASSERT_EQ(run(with({file(parts), "--until", stop, "--metrics", file("b")})), 0) << err();
    ASSERT_EQ(run(with({file(parts), "--until", "6", "--metrics", file("b"), "--resume"})), 0) << err();
    EXPECT_EQ(losses("a"), losses("b"));
    EXPECT_EQ(run({"checkpoint", "diff", file("whole"), file(parts)}), 0) << out();
  }
  ASSERT_EQ(run(with({file("whole"), "--until", "8", "--resume", "--data", "fsdp"})), 0) << err();
  EXPECT_EQ(run(small({"--ranks", "2", "--ema", "0.8", "--save", file("whole"), "--resume"})), 2);
  EXPECT_THAT(err(),
              HasSubstr("is of another run: --freeze is 0:frozen:layers.0,3:trained:layers.0 there and "
                        "not set here"));
}

// Weights and activations in bf16: the losses are those of f32 except for rounding, also on a mesh, and the
// dtypes are part of the run's identity.
TEST_F(TrainTest, WeightsAndActivationsInBf16) {
  ASSERT_EQ(run(small({"--until", "6", "--metrics", file("f32")})), 0) << err();
  const Words bf16{"--weights", "bf16", "--activations", "bf16", "--until", "6", "--save"};
  for (const Words& mesh :
       {Words{"--ranks", "1"}, Words{"--ranks", "4", "--tp", "2", "--sequence-parallel"}}) {
    Words words = bf16;
    words.push_back(file("run" + mesh[1]));
    words.insert(words.end(), mesh.begin(), mesh.end());
    words.insert(words.end(), {"--metrics", file("bf16")});
    ASSERT_EQ(run(small(words)), 0) << err();
    const auto wide = losses("f32"), narrow = losses("bf16");
    EXPECT_NE(wide, narrow);
    ASSERT_EQ(wide.size(), narrow.size());
    for (std::size_t i = 0; i < wide.size(); ++i) EXPECT_NEAR(narrow[i], wide[i], 0.02 * wide[i]) << i;
    std::filesystem::remove(folder_ / "bf16");
  }
  EXPECT_EQ(run(small({"--save", file("run1"), "--resume"})), 2);
  EXPECT_THAT(err(),
              HasSubstr("--activations is bf16 there and not set here, --weights is bf16 there and not "
                        "set here"));
}

// Every optimizer trains, continues where it was saved, and is part of the run's identity.
TEST_F(TrainTest, OtherOptimizersAndGroupsGoOn) {
  for (const std::string optimizer : {"sgd", "lion", "schedule-free", "muon"}) {
    const auto with = [&](const Words& more) {
      Words words{"--ranks",     "2",       "--tp",     "2",
                  "--optimizer", optimizer, "--groups", "layers.0:rate=0.5:decay=0",
                  "--save"};
      words.insert(words.end(), more.begin(), more.end());
      return small(words);
    };
    ASSERT_EQ(run(with({file(optimizer), "--until", "4", "--metrics", file(optimizer + ".a")})), 0) << err();
    const std::string parts = optimizer + ".parts";
    ASSERT_EQ(run(with({file(parts), "--until", "2", "--metrics", file(optimizer + ".b")})), 0) << err();
    ASSERT_EQ(run(with({file(parts), "--until", "4", "--metrics", file(optimizer + ".b"), "--resume"})), 0)
        << err();
    EXPECT_EQ(losses(optimizer + ".a"), losses(optimizer + ".b"));
    EXPECT_EQ(run({"checkpoint", "diff", file(optimizer), file(parts)}), 0) << out();
  }
  // A copy of its parameters alone would be taken for what is evaluated.
  EXPECT_EQ(run({"checkpoint", "convert", file("schedule-free"), file("alone"), "--only", "param.*"}), 2);
  EXPECT_THAT(
      err(),
      HasSubstr("schedule-free AdamW has trained \"param.layers.0.attention.k_proj.weight\", and the copy "
                "would have no \"optimizer.z.layers.0.attention.k_proj.weight\", from which the values "
                "for evaluation come; expected all of \"optimizer.*\" beside \"param.*\", or weft "
                "checkpoint export, which writes these values"));
  EXPECT_EQ(run({"checkpoint", "convert", file("schedule-free"), file("copy")}), 0) << err();
  EXPECT_EQ(run({"checkpoint", "convert", file("lion"), file("alone"), "--only", "param.*"}), 0) << err();
  EXPECT_EQ(run(small({"--ranks", "2", "--tp", "2", "--save", file("lion"), "--resume"})), 2);
  EXPECT_THAT(err(), HasSubstr("--groups is layers.0:rate=0.5:decay=0 there and not set here, --optimizer is "
                               "lion there and not set here"));
}

// More tensor ranks than key/value heads.
TEST_F(TrainTest, TensorRanksShareKeyAndValueHeads) {
  const Words model{"--kv-heads", "2", "--until", "4", "--metrics"};
  const auto with = [&](const Words& more, const std::string& metrics) {
    Words words = model;
    words.push_back(file(metrics));
    words.insert(words.end(), more.begin(), more.end());
    return small(words);
  };
  ASSERT_EQ(run(with({"--ranks", "1"}, "one")), 0) << err();
  ASSERT_EQ(run(with({"--ranks", "4", "--tp", "4", "--sequence-parallel"}, "four")), 0) << err();
  EXPECT_THAT(out(), HasSubstr("mesh dp=1 x tp_kv=2 x\n  tp_rep=2"));
  const std::vector<double> one = losses("one"), four = losses("four");
  ASSERT_EQ(four.size(), 4u);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(four[i], one[i], 1e-5 * one[i]);
}

// Modules that run again in backward give the same losses; a checkpoint does not know of them.
TEST_F(TrainTest, ActivationCheckpointingKeepsTheLosses) {
  ASSERT_EQ(run(small({"--until", "4", "--metrics", file("none")})), 0) << err();
  const std::vector<double> none = losses("none");
  Words words = small({"--save", file("ckpt"), "--resume=auto", "--metrics", file("ac"), "--until", "2"});
  words.insert(words.end(), {"--ac", "full", "--ac-every", "2"});
  ASSERT_EQ(run(words), 0) << err();
  words.insert(words.end(), {"--until", "4", "--ac", "selective", "--ac-every", "1"});
  ASSERT_EQ(run(words), 0) << err();
  EXPECT_EQ(losses("ac"), none);
  EXPECT_EQ(run(small({"--ac", "selective", "--ac-every", "2"})), 2);
  EXPECT_THAT(err(), HasSubstr("ac-every is 2 with ac \"selective\"; expected 1, or more with ac full"));
}

// Checkpoints are written in the background, and the run is killed again and again.
TEST_F(TrainTest, ARunThatIsKilledGoesOn) {
  ASSERT_EQ(run(small({"--metrics", file("whole")})), 0) << err();
  const std::vector<double> whole = losses("whole");
  const Words words = small({"--save", file("ckpt"), "--save-every", "1", "--keep", "2", "--async-save",
                             "--resume=auto", "--metrics", file("m")});
  for (int kill = 0; kill < 5; ++kill) {
    ChildProcess process = start(words);
    std::this_thread::sleep_for(std::chrono::milliseconds(60 + 25 * kill));
    process.kill(SIGKILL);
    ASSERT_TRUE(process.wait(seconds(30)).has_value());
  }
  ASSERT_EQ(run(words), 0) << err();
  EXPECT_EQ(losses("m"), whole);
}

// The newest checkpoint has lost a file: the run goes on from the one before, and one warning says so.
TEST_F(TrainTest, ARunGoesOnFromTheNewestWholeCheckpoint) {
  const Words words = small({"--ranks", "2", "--save", file("ckpt"), "--save-every", "2", "--metrics",
                             file("m"), "--no-async-save"});
  const auto with = [&](const Words& more) {
    Words all = words;
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  ASSERT_EQ(run(with({"--until", "6"})), 0) << err();
  const std::vector<double> whole = losses("m");
  const std::string lost = file("ckpt/step-00000006/rank-00000.safetensors");
  std::filesystem::remove(lost);
  ASSERT_EQ(run(with({"--until", "6", "--resume"})), 0) << err();
  EXPECT_THAT(out(), HasSubstr("resumed at step 4"));
  EXPECT_THAT(
      err(), HasSubstr("is loaded, the newest whole checkpoint; a newer one is broken: checkpoint: " + lost));
  EXPECT_EQ(losses("m"), whole);
  for (const char* step : {"2", "4", "6"})
    std::filesystem::remove(file(fmt::format("ckpt/step-0000000{}/index.json", step)));
  EXPECT_EQ(run(with({"--until", "6", "--resume=auto"})), 1) << "it must not begin anew over them";
}

// Fine-tuning begins with the parameters of another run, except those that are named.
TEST_F(TrainTest, BeginsFromTheParametersOfAnotherRun) {
  ASSERT_EQ(run(small({"--save", file("first"), "--metrics", file("a"), "--until", "8"})), 0) << err();
  const Words words =
      small({"--ranks", "2", "--tp", "2", "--init-from", file("first"), "--schedule", "constant", "--until",
             "2", "--freeze", "0:frozen:token_embedding", "--metrics", file("b")});
  ASSERT_EQ(run(words), 0) << err();
  EXPECT_LT(losses("b")[0], losses("a")[0] - 0.1) << "it has learned already";
  Words except = words;
  except.insert(except.end(), {"--init-except", "layers,norm,output_head,token_embedding"});
  ASSERT_EQ(run(except), 0) << err();
  EXPECT_NEAR(losses("b")[0], losses("a")[0], 0.1) << "nothing of it is read";
  Words wrong = words;
  wrong.insert(wrong.end(), {"--init-except", "haed"});
  EXPECT_NE(run(wrong), 0);
  EXPECT_THAT(err(), HasSubstr("init_from: except: nothing in the model matches \"haed\""));
  // A layer more: the second one of the checkpoint is the third one of the model.
  const auto hashes_of = [&](const std::string& layer, const Words& more) {
    Words moved = small({"--init-from", file("first"), "--schedule", "constant", "--lr", "1e-30", "--until",
                         "1", "--hash-every", "1", "--hash-file", file("hashes")});
    moved.insert(moved.end(), more.begin(), more.end());
    EXPECT_EQ(run(moved), 0) << err();
    Words hashes;
    std::ifstream lines(file("hashes"));
    for (std::string line; std::getline(lines, line);)
      if (const std::size_t at = line.find("parameter " + layer + "."); at != std::string::npos)
        hashes.push_back(line.substr(at + 10 + layer.size()));
    return hashes;
  };
  const Words hashes = hashes_of("layers.1", {});
  EXPECT_FALSE(hashes.empty());
  EXPECT_EQ(hashes_of("layers.2",
                      {"--layers", "3", "--init-remap", "layers.1=layers.2", "--init-except", "layers.1"}),
            hashes);
  const auto refused = [&](const std::string& remap, const std::string& text) {
    EXPECT_NE(run(small({"--init-from", file("first"), "--init-remap", remap})), 0);
    EXPECT_THAT(err(), HasSubstr(text));
  };
  refused("layers", "init-remap has \"layers\"; expected OLD=NEW, two paths");
  refused("layers=a=b", "init-remap has \"layers=a=b\"; expected OLD=NEW, two paths");
  refused("blocks=layers", "has no \"blocks\"; expected a path of it");
  EXPECT_EQ(run(small({"--init-remap", "a=b"})), 2);
  EXPECT_THAT(err(), HasSubstr("--init-remap: needs --init-from"));
  EXPECT_EQ(run(small({"--init-except", "layers"})), 2);
  EXPECT_THAT(err(), HasSubstr("--init-except: needs --init-from"));
  EXPECT_EQ(run(small({"--save-minutes", "5"})), 2);
  EXPECT_THAT(err(), HasSubstr("--save-minutes: needs --save"));
}

// Lines of steps behind the checkpoint, and one that is not whole, as a kill leaves them.
TEST_F(TrainTest, ResumingTakesOutMetricsOfStepsThatAreTakenAgain) {
  ASSERT_EQ(run(small({"--metrics", file("whole")})), 0) << err();
  const Words words = small({"--save", file("ckpt"), "--resume=auto", "--metrics", file("m")});
  Words half = words;
  half.insert(half.end(), {"--until", "2"});
  ASSERT_EQ(run(half), 0) << err();
  std::ofstream(folder_ / "m", std::ios::app)
      << R"({"step": 2, "loss": 9, "grad_norm": 9, "tokens_per_s": 9})"
      << "\n"
      << R"({"step": 3, "lo)";
  ASSERT_EQ(run(words), 0) << err();
  EXPECT_EQ(losses("m"), losses("whole"));
}

TEST_F(TrainTest, ResumeRefusesAnotherRunAndNamesWhatDiffers) {
  EXPECT_EQ(run(small({"--save", file("none"), "--resume"})), 2);
  EXPECT_THAT(err(), HasSubstr("resume: no checkpoint in"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "none"));
  ASSERT_EQ(run(small({"--save", file("ckpt"), "--until", "2"})), 0) << err();
  EXPECT_EQ(run(small({"--save", file("ckpt"), "--resume", "--seed", "7", "--kv-heads", "2"})), 2);
  EXPECT_EQ(err(),
            fmt::format("weft: train: resume: \"{}\" is of another run: --kv-heads is 4 there and 2 here, "
                        "--seed is 1 there and 7 here\n",
                        file("ckpt/step-00000002")));
  std::ofstream(folder_ / "text", std::ios::app) << "more\n";
  EXPECT_EQ(run(small({"--ranks", "2", "--save", file("ckpt"), "--resume"})), 2);
  EXPECT_THAT(err(), HasSubstr("is of another run: --text has other bytes\n"));
  EXPECT_EQ(run(small({"--resume"})), 2);
  EXPECT_THAT(err(), HasSubstr("--resume: needs --save"));
}

TEST_F(TrainTest, ACheckpointOfAnotherRunIsReplacedOnlyWhereAsked) {
  ASSERT_EQ(run(small({"--save", file("ckpt"), "--until", "2"})), 0) << err();
  EXPECT_EQ(run(small({"--save", file("ckpt"), "--until", "1"})), 0) << "the same run may begin again";
  EXPECT_EQ(run(small({"--save", file("ckpt"), "--until", "1", "--clip", "0.5"})), 2);
  EXPECT_THAT(
      err(),
      HasSubstr("is of another run, and would be replaced: --clip is 1 there and 0.5 here; expected another "
                "folder, or --overwrite\n"));
  EXPECT_EQ(run(small({"--save", file("ckpt"), "--until", "1", "--steps", "30"})), 2);
  EXPECT_THAT(
      err(),
      HasSubstr("--steps is 20 there and 30 here; expected another folder, --resume, or --overwrite\n"));
  EXPECT_EQ(run(small({"--save", file("ckpt"), "--until", "1", "--clip", "0.5", "--overwrite"})), 0) << err();
  EXPECT_EQ(run(small({"--save", file("ckpt"), "--until", "1", "--clip", "0.5", "--resume"})), 0) << err();
  EXPECT_THAT(out(), HasSubstr("nothing is left to do: step 1 of 1 is reached"));
  EXPECT_EQ(run(small({"--save", file("ckpt"), "--overwrite", "--resume"})), 2);
  EXPECT_THAT(err(), HasSubstr("--overwrite: replaces what --resume goes on from"));
}

// Found before the first step, and by the process that would start the ranks.
TEST_F(TrainTest, AFolderThatCannotBeWrittenIsFoundAtTheStart) {
  for (const char* ranks : {"0", "2"}) {
    EXPECT_EQ(run(small({"--ranks", ranks, "--save", file("text") + "/ckpt"})), 1);
    EXPECT_EQ(err(), fmt::format("weft: train: --save: cannot make the folder \"{}/ckpt\": Not a directory\n",
                                 file("text")));
    EXPECT_EQ(run(small({"--ranks", ranks, "--save", "/proc"})), 1);
    EXPECT_THAT(err(), HasSubstr("train: --save: cannot write into the folder \"/proc\": "));
    EXPECT_EQ(out(), "");
  }
  EXPECT_EQ(run(small({"--save-every", "5"})), 2);
  EXPECT_THAT(err(), HasSubstr("--save-every: needs --save"));
  EXPECT_EQ(run(small({"--keep", "5"})), 2);
  EXPECT_THAT(err(), HasSubstr("--keep: needs --save"));
}

TEST_F(TrainTest, ResumeAutoBeginsWhereThereIsNoCheckpoint) {
  const Words words = small({"--save", file("ckpt"), "--resume=auto", "--metrics", file("m")});
  Words first = words;
  first.insert(first.end(), {"--until", "3"});
  ASSERT_EQ(run(first), 0) << err();
  EXPECT_THAT(out(), Not(HasSubstr("resumed")));
  ASSERT_EQ(run(words), 0) << err();
  EXPECT_THAT(out(), HasSubstr(", resumed at step 3"));
  EXPECT_EQ(losses("m").size(), 20u);
  EXPECT_EQ(run(small({"--save", file("ckpt"), "--resume=perhaps"})), 2);
  EXPECT_THAT(err(), HasSubstr("weft: train: --resume is perhaps; expected no, auto, latest\n"));
}

// A finished run continues if it gets more steps: the new steps follow the longer schedule, although the
// earlier steps followed the shorter one.
TEST_F(TrainTest, AFinishedRunCanBeExtended) {
  const auto rates = [&](const std::string& name) {
    std::vector<double> found;
    std::ifstream in(folder_ / name);
    for (std::string line; std::getline(in, line);)
      found.push_back(nlohmann::json::parse(line).at("lr").get<double>());
    return found;
  };
  ASSERT_EQ(run(small({"--save", file("ckpt"), "--metrics", file("m")})), 0) << err();
  ASSERT_EQ(run(small({"--save", file("ckpt"), "--metrics", file("m"), "--resume", "--steps", "40"})), 0)
      << err();
  EXPECT_THAT(out(), HasSubstr("another schedule from step 20 on: --steps is 20 there and 40 here\n"));
  EXPECT_EQ(losses("m").size(), 40u);
  ASSERT_EQ(run(small({"--metrics", file("long"), "--steps", "40"})), 0) << err();
  const std::vector<double> extended = rates("m"), whole = rates("long");
  ASSERT_EQ(extended.size(), 40u);
  ASSERT_EQ(whole.size(), 40u);
  for (std::size_t i = 20; i < 40; ++i) EXPECT_EQ(extended[i], whole[i]) << i;
  EXPECT_EQ(run(small({"--save", file("ckpt"), "--resume", "--steps", "30"})), 2);
  EXPECT_THAT(err(), HasSubstr("step-00000040\" is 40 steps old; --steps is 30; expected 40 or more"));
}

TEST_F(TrainTest, WarmUpFollowsTheSteps) {
  Words words = small({"--steps", "9", "--metrics", file("m")});
  const auto at = std::find(words.begin(), words.end(), "--warmup");
  words.erase(at, at + 2);
  ASSERT_EQ(run(words), 0) << err();
  std::vector<double> rates;
  std::ifstream in(folder_ / "m");
  for (std::string line; std::getline(in, line);)
    rates.push_back(nlohmann::json::parse(line).at("lr").get<double>());
  ASSERT_EQ(rates.size(), 9u);
  EXPECT_LT(rates[1], 0.01);
  EXPECT_DOUBLE_EQ(rates[2], 0.01);  // a third of nine
}

TEST_F(TrainTest, TheScheduleIsAnOption) {
  const auto rates = [&](const std::string& name) {
    std::vector<double> found;
    std::ifstream in(folder_ / name);
    for (std::string line; std::getline(in, line);)
      found.push_back(nlohmann::json::parse(line).at("lr").get<double>());
    return found;
  };
  // Warm-up 5, peak 0.01, floor 0.001, 20 steps; the decay takes a fifth of them.
  ASSERT_EQ(run(small({"--schedule", "wsd", "--save", file("ckpt"), "--metrics", file("m"), "--decay-shape",
                       "1-sqrt"})),
            0)
      << err();
  const std::vector<double> wsd = rates("m");
  ASSERT_EQ(wsd.size(), 20u);
  EXPECT_DOUBLE_EQ(wsd[0], 0.002);
  for (std::size_t i = 4; i <= 16; ++i) EXPECT_DOUBLE_EQ(wsd[i], 0.01) << i;
  EXPECT_DOUBLE_EQ(wsd[17], 0.001 + 0.009 * 0.5);
  ASSERT_EQ(run(small({"--schedule", "none", "--until", "2", "--metrics", file("n"), "--warmup", "-1"})), 0)
      << err();
  EXPECT_EQ(rates("n"), (std::vector<double>{0.01, 0.01}));

  EXPECT_EQ(run(small({"--save", file("ckpt"), "--resume", "--steps", "24"})), 2);
  EXPECT_THAT(err(), HasSubstr("--schedule is wsd there and not set here"));
  const Words more{"--save", file("ckpt"), "--resume", "--steps", "24", "--schedule", "wsd"};
  EXPECT_EQ(run(small(more)), 2);
  EXPECT_THAT(err(), HasSubstr("is of another run: --decay-shape is 1-sqrt there and linear here"));
  Words same = more;
  same.insert(same.end(), {"--decay-shape", "1-sqrt", "--decay-steps", "6"});
  ASSERT_EQ(run(small(same)), 0) << err();
  EXPECT_THAT(out(), HasSubstr("another schedule from step 20 on: --decay-steps is 4 there and 6 here, "
                               "--steps is 20 there and 24 here\n"));

  const auto refused = [&](const Words& words, const std::string& text) {
    EXPECT_EQ(run(small(words)), 2) << text;
    EXPECT_THAT(err(), HasSubstr(text));
  };
  refused({"--schedule", "step"},
          "schedule: form is \"step\"; expected one of none, constant, linear, cosine, wsd, rex");
  refused({"--schedule", "wsd", "--decay-shape", "exp"},
          "schedule: shape is \"exp\"; expected one of linear, cosine, 1-sqrt");
  refused({"--schedule", "wsd", "--decay-steps", "16"},
          "schedule: decay is 16; expected 1 to 15 (total 20 - warmup 5)");
  refused({"--decay-steps", "3"}, "schedule: decay is 3; expected 0 with form cosine: only wsd has it");
  refused({"--schedule", "none"}, "schedule: warmup is 5; expected 0 with form none");
}

// All ranks save the same step, whichever of them got the signal and when.
TEST_F(TrainTest, ASignalEndsTheRunWithACheckpoint) {
  const auto waits_for_steps = [&](const std::string& name) {
    for (const Deadline limit = Deadline::after(seconds(30)); !limit.passed();) {
      if (contents(folder_ / name).find("\"step\":2") != std::string::npos) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    ADD_FAILURE() << "no step is made";
  };
  int number = 0;
  for (const auto& [signal, launched] :
       {std::pair{SIGINT, 0}, {SIGTERM, 0}, {SIGINT, 1}, {SIGTERM, 1}, {SIGINT, 2}}) {
    const std::string name = std::to_string(++number);
    Words words = small({"--steps", "1000000", "--tp", launched == 0 ? "1" : "2", "--save",
                         file("ckpt" + name), "--metrics", file("m" + name)});
    if (launched == 1) words.insert(words.end(), {"--ranks", "4"});
    const Words launcher{"run", "-n", "2", WEFT_COMMAND};
    if (launched == 2) words.insert(words.begin(), launcher.begin(), launcher.end());
    ChildProcess process = start(words);
    waits_for_steps("m" + name);
    process.kill(signal);
    const auto status = process.wait(seconds(30));
    ASSERT_TRUE(status.has_value());
    EXPECT_EQ(status->code, 128 + signal) << err();
    EXPECT_EQ(err(), "");
    const std::size_t done = losses("m" + name).size();
    EXPECT_THAT(out(),
                HasSubstr(fmt::format("stopped by SIG{} after step {} of 1000000: --resume goes on from here",
                                      signal == SIGINT ? "INT" : "TERM", done)));
    EXPECT_TRUE(std::filesystem::exists(folder_ / ("ckpt" + name) / fmt::format("step-{:08}", done)));
  }
  // One of four ranks gets the signal, by its own process id.
  ChildProcess process = start(small({"--steps", "1000000", "--ranks", "4", "--metrics", file("m")}));
  waits_for_steps("m");
  const std::string supervisor = contents(fmt::format("/proc/{0}/task/{0}/children", process.pid()));
  const std::string ranks =
      contents(fmt::format("/proc/{0}/task/{0}/children", std::atoi(supervisor.c_str())));
  ASSERT_GT(std::atoi(ranks.c_str()), 0);
  ::kill(std::atoi(ranks.c_str()), SIGTERM);
  const auto status = process.wait(seconds(30));
  ASSERT_TRUE(status.has_value());
  EXPECT_EQ(status->code, 128 + SIGTERM) << err();
  EXPECT_THAT(out(), HasSubstr("nothing is saved, for want of --save"));
}

// ---- --config ----

TEST_F(TrainTest, AConfigFileGivesOptionsAndTheCommandLineWins) {
  std::ofstream(folder_ / "run.toml") << "# a comment\nsteps = 7\nlr = 0.5\nmetrics = '" << file("m")
                                      << "'\nprogress = \"none\"\nranks = 2\n";
  Words words = small({"--config", file("run.toml")});
  for (const char* flag : {"--steps", "--lr", "--progress"}) {
    const auto at = std::find(words.begin(), words.end(), flag);
    words.erase(at, at + 2);
  }
  ASSERT_EQ(run(words), 0) << err();
  EXPECT_EQ(losses("m").size(), 7u);
  EXPECT_THAT(out(), HasSubstr("mesh dp=2 x tp=1"));
  EXPECT_THAT(contents(folder_ / "m"), HasSubstr("\"lr\":0.5"));
  words.insert(words.end(), {"--steps=6", "--ranks", "1"});
  ASSERT_EQ(run(words), 0) << err();
  EXPECT_EQ(losses("m").size(), 6u);
  EXPECT_THAT(out(), HasSubstr("mesh dp=1 x tp=1"));
}

TEST_F(TrainTest, WhatIsWrongInAConfigFileIsNamedWithItsLine) {
  for (const char* command : {"train", "parity"}) {
    const auto expect = [&](const std::string& text, const std::string& where, const std::string& why) {
      std::ofstream(folder_ / "run.toml") << text;
      EXPECT_EQ(run({command, "--config=" + file("run.toml")}), 2);
      EXPECT_THAT(err(), HasSubstr(file("run.toml") + where + why)) << text;
    };
    const std::string weft = std::string("weft ") + command;
    expect("steps = 3\nstepz = 4\n", ":2: ", weft + " has no option \"stepz\"; is steps meant?");
    expect("\n[modell]\ndim = 4\n", ":2: ", weft + " has no option \"modell\"; is model meant?");
    expect("\n[model]\nhead = 4\n", ":3: ", "[model] has no \"head\"; is heads or head_size meant?");
    expect("[model]\ndim = 30\n", ":2: ", "transformer: dim 30 does not divide into heads 4");
    expect("model = 3\n", ":1: ", "model is 3; expected a table, [model]");
    expect("steps = 3\nkv-heads = 4\n[model]\ndim = 32\n",
           ":2: ", "kv-heads is given beside the table [model]; expected it there");
    expect("config = 'x'\n", ":1: ", weft + " has no option \"config\"\n");
    expect("steps = 3\nlr = \n", ":2: ", "not TOML: ");
    expect("steps = 3\nsteps = 4\n", ":2: ", "not TOML: ");
    expect("nonsense\n", ":1: ", "not TOML: ");
    expect("steps = 'three'\n", ":1: ", "steps is 'three'; expected an integer");
    expect("steps = 3.5\n", ":1: ", "steps is 3.5; expected an integer");
    expect("lr = true\n", ":1: ", "lr is true; expected a number");
    expect("text = 3\n", ":1: ", "text is 3; expected a text in quotes");
    expect("text = 'nowhere'\n", ":1: ", "--text is nowhere, which is not there");
    expect("threads = 99999999999\n", ":1: ", "");
  }
  std::ofstream(folder_ / "run.toml") << "ranks = 1000\n";
  EXPECT_EQ(run({"train", "--config", file("run.toml")}), 2);
  EXPECT_THAT(err(), HasSubstr("run.toml:1: --ranks is 1000; expected 0 to 256"));
  std::ofstream(folder_ / "run.toml") << "meshes = [1]\n";
  EXPECT_EQ(run({"parity", "--config", file("run.toml")}), 2);
  EXPECT_THAT(err(), HasSubstr("run.toml:1: meshes is [ 1 ]; expected an array of texts"));
  EXPECT_EQ(run({"train", "--config", file("nowhere.toml")}), 2);
  EXPECT_THAT(err(), HasSubstr("nowhere.toml\": cannot open it: No such file or directory"));
  EXPECT_EQ(run({"train", "--config"}), 2);
}

// No other number is taken in its place.
TEST_F(TrainTest, NumbersAreDecimalAndFit) {
  const auto expect = [&](const char* flag, const char* value, const char* expected) {
    EXPECT_EQ(run(small({flag, value})), 2);
    EXPECT_THAT(err(), HasSubstr(std::string(flag) + " is " + value +
                                 "; expected a decimal number without leading zeros, from " + expected));
  };
  for (const char* value : {"99999999999999999999", "-99999999999999999999", "010", "-010", "0x10"})
    expect("--warmup", value, "-9223372036854775808 to 9223372036854775807");
  for (const char* value : {"99999999999999999999", "-1", "010"})
    expect("--seed", value, "0 to 18446744073709551615");
  EXPECT_EQ(run(small({"--seed", "18446744073709551615", "--warmup", "+1", "--print-config"})), 0) << err();
}

// A read of these files would never end, or would wait.
TEST_F(TrainTest, FilesThatAreNoneAreRefusedAtOnce) {
  ASSERT_EQ(::mkfifo(file("fifo").c_str(), 0600), 0);
  const auto expect = [&](const Words& words, const std::string& text) {
    EXPECT_NE(run(words), 0) << text;
    EXPECT_THAT(err(), HasSubstr(text));
  };
  expect({"train", "--config", file("fifo")}, "fifo\": is not a regular file (it is a FIFO)");
  expect({"train", "--config", "/dev/zero"}, "/dev/zero\": is not a regular file (it is a character device)");
  expect({"train", "--text", file("fifo"), "--steps", "1"}, "is not a regular file (it is a FIFO)");
  expect(small({"--metrics", file("fifo")}), "train: --metrics: cannot write " + file("fifo") +
                                                 ": it is a FIFO; expected a regular file or nothing");
}

TEST_F(TrainTest, APrintedConfigGivesTheSameRun) {
  const Words words = small({"--ranks", "2", "--lr", "0.012345678901234567", "--clip", "0.1", "--metrics",
                             file("m \"1\""), "--save", file("ckpt"), "--resume=auto", "--until", "4"});
  Words printing = words;
  printing.push_back("--print-config");
  ASSERT_EQ(run(printing), 0) << err();
  const std::string printed = out();
  std::ofstream(folder_ / "run.toml") << printed;
  EXPECT_THAT(printed, HasSubstr("\n# Steps of the schedule\nsteps = 20\n"));
  EXPECT_THAT(printed, HasSubstr("\n[model]\ndim = 32\nlayers = 2\n"));

  ASSERT_EQ(run({"train", "--config", file("run.toml"), "--print-config"}), 0) << err();
  EXPECT_EQ(out(), printed);
  ASSERT_EQ(run({"train", "--config", file("run.toml")}), 0) << err();
  const std::vector<double> from_file = losses("m \"1\"");
  EXPECT_EQ(from_file.size(), 4u);
  std::filesystem::remove_all(folder_ / "ckpt");
  ASSERT_EQ(run(words), 0) << err();
  EXPECT_EQ(losses("m \"1\""), from_file);

  ASSERT_EQ(run({"parity", "--meshes", "1x1,2x1", "--tolerance", "1e-7", "--print-config"}), 0) << err();
  const std::string parity = out();
  EXPECT_THAT(parity, HasSubstr("meshes = ["));
  std::ofstream(folder_ / "parity.toml") << parity;
  ASSERT_EQ(run({"parity", "--config", file("parity.toml"), "--print-config"}), 0) << err();
  EXPECT_EQ(out(), parity);
}

// Values that no flag gives, too; for `weft parity` on all its meshes.
TEST_F(TrainTest, TheModelOfAConfigFileIsTheOneThatIsTrained) {
  const std::string model =
      "[model]\ndim = 32\nlayers = 1\nheads = 4\nkv_heads = 2\nffn_hidden = 48\ntied = true\n";
  const std::string rest = "text = '" + file("text") + "'\nseq = 32\nbatch = 4\nsteps = 5\nlr = 0.01\n";
  std::ofstream(folder_ / "run.toml") << rest << "progress = 'none'\nsave = '" << file("ckpt") << "'\n"
                                      << model;
  ASSERT_EQ(run({"train", "--config", file("run.toml")}), 0) << err();
  // embedding 256 x 32, norms 3 x 32, q and o 2 x 32 x 32, k and v 2 x 16 x 32, mlp 3 x 32 x 48
  EXPECT_THAT(out(), HasSubstr(fmt::format("{} parameters", 256 * 32 + 3 * 32 + 3 * 32 * 32 + 3 * 32 * 48)));
  EXPECT_EQ(run({"train", "--config", file("run.toml"), "--layers", "2"}), 2) << "the command line wins";
  EXPECT_THAT(err(), HasSubstr("--layers is 1 there and 2 here"));
  std::ofstream(folder_ / "run.toml", std::ios::app) << "norm_eps = 1e-4\n";
  EXPECT_EQ(run({"train", "--config", file("run.toml"), "--resume"}), 2);
  EXPECT_THAT(err(), HasSubstr("[model] norm_eps is not set there and 0.0001 here"));

  std::ofstream(folder_ / "parity.toml") << rest << "compare = 3\nmeshes = ['1x1', '2x1', '1x2']\n" << model;
  ASSERT_EQ(run({"parity", "--config", file("parity.toml")}), 0) << out() << err();
  EXPECT_THAT(out(), HasSubstr("passed"));
  EXPECT_THAT(out(), HasSubstr(fmt::format("{} parameters", 256 * 32 + 3 * 32 + 3 * 32 * 32 + 3 * 32 * 48)));
  std::ofstream(folder_ / "run.toml") << rest << "[model]\nvocab = 100\n";
  EXPECT_EQ(run({"train", "--config", file("run.toml")}), 2);
  EXPECT_THAT(err(), HasSubstr("train: vocab is 100; expected 256 or more: one for each byte"));
}

TEST_F(TrainTest, OneKeyValueHeadWithASplitVocabulary) {
  Words words = small({"--ranks", "2", "--tp", "2", "--vocab", "shard"});
  *std::next(std::ranges::find(words, "--kv-heads")) = "1";
  *std::next(std::ranges::find(words, "--steps")) = "6";
  EXPECT_EQ(run(words), 0) << err();
}

TEST_F(TrainTest, LearnsInFloat8AndSaysWhatItConverted) {
  for (const char* recipe : {"tensorwise", "rowwise", "rowwise_gw_hp"}) {
    ASSERT_EQ(
        run(small({"--float8", recipe, "--metrics", file("m"), "--save", file("saved"), "--overwrite"})), 0)
        << err();
    const std::vector<double> l = losses("m");
    EXPECT_LT(l.back(), 0.75 * l.front());
    EXPECT_THAT(out(), HasSubstr(std::string("float8 ") + recipe + ": 14 of 15 linear layers\n" +
                                 "  \"output_head.proj\" (256, 32) stays: \"output_head\" is left out"));
  }
  // Scales of the whole do not depend on the number of ranks.
  const auto losses_of = [&](const Words& words) {
    EXPECT_EQ(run(small(words)), 0) << err();
    return losses("m").back();
  };
  const double one = losses_of({"--float8", "rowwise", "--metrics", file("m")}),
               two = losses_of({"--float8", "rowwise", "--float8-scales", "whole", "--ranks", "2",
                                "--metrics", file("m")});
  EXPECT_NEAR(two, one, 0.02 * one);
  // A checkpoint does not know of float8.
  ASSERT_EQ(run(small({"--save", file("saved"), "--resume", "--steps", "22"})), 0) << err();
  EXPECT_THAT(out(), HasSubstr("resumed at step 20"));
}

TEST_F(TrainTest, WrongFlagsEndAtOnceWithTheArithmetic) {
  const auto expect = [&](const Words& words, const std::string& text) {
    EXPECT_EQ(run(small(words)), 2) << text;
    EXPECT_THAT(err(), HasSubstr(text));
  };
  expect({"--ranks", "3", "--tp", "3"}, "4 heads do not divide into tp=3 (4 = 3 x 1 + 1)");
  expect({"--ranks", "4", "--tp", "4", "--heads", "12", "--dim", "48", "--kv-heads", "3"},
         "tp=4 does not divide into 3 kv_heads (4 = 3 x 1 + 1)");
  expect({"--ranks", "3", "--tp", "3", "--heads", "6", "--kv-heads", "3", "--dim", "48", "--ffn", "96"},
         "256 vocabulary entries do not divide into tp=3 (256 = 3 x 85 + 1); --vocab shard takes any number");
  expect({"--label-smoothing", "1.5"}, "label-smoothing is 1.5; expected 0 to 1");
  expect({"--optimizer", "adam"}, "--optimizer");
  expect({"--weights", "f16"}, "--weights");
  expect({"--activations", "bf16"}, "activations is bf16 with weights f32; expected --weights bf16");
  expect({"--weights", "bf16", "--activations", "bf16", "--exact"},
         "activations is bf16 with --exact; expected f32");
  expect({"--groups", "head"}, "groups has \"head\"; expected PATTERN,...:rate=NUMBER:decay=NUMBER");
  expect({"--groups", "head:lr=1"},
         "groups has \"lr=1\"; expected rate=NUMBER or decay=NUMBER, each at most once, of 0 or more");
  expect({"--groups", "head:rate=x"}, "groups has \"rate=x\"; expected rate=NUMBER");
  expect({"--groups", "head:rate=-1"}, "groups has \"rate=-1\"; expected rate=NUMBER");
  expect({"--groups", "head:rate=1:rate=0"}, "groups has \"rate=0\"; expected rate=NUMBER");
  expect({"--groups", ":rate=1"}, "groups has \":rate=1\"; expected PATTERN,...:rate=NUMBER");
  expect({"--groups", "head:rate=1;"}, "groups has \"\"; expected PATTERN,...:rate=NUMBER");
  expect({"--groups", "tail:rate=1"}, "a group has the pattern \"tail\", which matches no parameter");
  expect({"--freeze", "0:thawed:layers.0"},
         "freeze schedule: \"0:thawed:layers.0\"; expected STEP:frozen:PATTERN or STEP:trained:PATTERN");
  expect({"--freeze", "0:frozen:layer.0"},
         "freeze schedule: the pattern \"layer.0\" of step 0 matches no parameter");
  expect({"--z-loss", "-1"}, "z-loss is -1; expected a finite number of 0 or more");
  expect({"--ema", "1"}, "ema is 1; expected 0 (none) or more, and less than 1");
  expect({"--ranks", "4", "--dp", "3"}, "dp=3");
  expect({"--ranks", "4", "--dp", "3", "--tp", "1"}, "mesh: dp=3 x tp=1 = 3 ranks; the group has 4");
  expect({"--pp", "0"}, "pp is 0; expected 1 or more");
  expect({"--pipeline", "gpipe"}, "pipeline is \"gpipe\" with pp 1; expected pp of 2 or more");
  expect({"--stages-per-rank", "2"}, "stages-per-rank is 2 with pp 1; expected pp of 2 or more");
  expect({"--ranks", "2", "--pp", "2", "--exact", "--data", "fsdp"},
         "pp is 2 with --exact and --data fsdp or hsdp; a pipeline does not support that");
  expect({"--ranks", "2", "--pp", "2", "--pipeline", "2f2b"},
         "the schedule is \"2f2b\"; expected one of gpipe");
  expect({"--ranks", "2", "--pp", "2", "--pipeline", "forward"},
         "pipeline \"forward\" has no backward passes");
  const Words of_file = {"--ranks", "2", "--pp", "2", "--micro-batches", "2", "--pipeline"};
  const auto with_file = [&](const char* name, const std::string& text) {
    if (!text.empty()) std::ofstream(file(name)) << text;
    Words words = of_file;
    words.push_back(file(name));
    return words;
  };
  const std::string head = "schedule own\nranks 2\nmicro-batches 3\nstages 0 1\nmemory 3 3\n",
                    first =
                        "0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0F2 0SEND_F2 0RECV_B1 0B0 0RECV_B2 0B1 0B2\n",
                    second = "1: 1RECV_F0 1RECV_F1 1F0 1RECV_F2 1F1 1F2 1B0 1SEND_B0 1B1 1SEND_B1 1B2 ";
  expect(with_file("other.txt", head + first + second + "1SEND_B2\n"),
         "is for 2 ranks and 3 micro-batches; pp is 2 and micro-batches 2");
  expect(with_file("lost.txt", head + first + second + "\n"), "0RECV_B2");
  expect(with_file("wrong.txt", "schedule own\nranks two\n"), "wrong.txt");
  EXPECT_NE(run(small(with_file("none.txt", ""))), 0);
  EXPECT_THAT(err(), HasSubstr("none.txt"));
  expect({"--ranks", "8", "--pp", "8"}, "8 stages; the model has ");
  expect({"--micro-batches", "0"}, "micro-batches is 0; expected 1 or more");
  expect({"--micro-batches", "99"}, "micro-batches is 99; expected as many sequences for each of dp=1");
  expect({"--heads", "5"}, "transformer: dim 32 does not divide into heads 5");
  expect({"--seq", "500", "--max-seq", "128"}, "seq is 500; expected 1 to 128 (max-seq)");
  expect({"--lr-floor", "0.02"}, "lr-floor is 0.02 and lr 0.01; expected 0 <= lr-floor <= lr");
  expect({"--seed", "-1"}, "--seed");
  expect({"--replicate", "2"}, "replicate is 2 with data \"ddp\"; it is of hsdp alone");
  expect({"--stepz", "3"}, "weft: train has no option \"--stepz\"; is --steps meant?");
  expect({"--batch", "1", "--ranks", "2"}, "batch is 1; expected at least one sequence for each of dp=2");
  expect({"--steps", "0"}, "steps is 0");
  expect({"--float8", "mxfp8"},
         "float8: the recipe is \"mxfp8\"; expected tensorwise, rowwise or rowwise_gw_hp");
  expect({"--float8", "delayed"}, "delayed scaling takes scales from earlier steps");
  expect({"--float8-scales", "whole"}, "float8-scales is whole; expected a recipe in --float8");
  expect({"--float8", "rowwise", "--float8-scales", "half"}, "--float8-scales is half; expected own, whole");
  expect({"--exact", "--float8", "tensorwise"},
         "is a float8 layer of the recipe tensorwise; expected rowwise or rowwise_gw_hp");
  expect({"--float8", "rowwise", "--dim", "24", "--ffn", "24"},
         "float8: nothing to convert; expected at least one linear layer");
  expect({"--vocab", "half"}, "--vocab is half; expected whole, shard");
  expect({"--data", "all"}, "--data is all; expected ddp, fsdp, hsdp");
  expect({"--ranks", "3", "--data", "hsdp"}, "replicate is 2; expected a number that divides dp=3");
  expect({"--text", file("nowhere")}, "nowhere, which is not there");
  expect({"--what"}, "--what");
}

// Missing sizes follow the given sizes, from flags as well as from the table of a file.
TEST_F(TrainTest, WhatIsNotGivenFollowsWhatIs) {
  const auto config = [&](const Words& more) {
    Words words{"train", "--text", file("text"), "--print-config"};
    words.insert(words.end(), more.begin(), more.end());
    EXPECT_EQ(run(words), 0) << err();
    return out();
  };
  const std::string plain = config({});
  for (const char* line : {"kv_heads = 4\n", "ffn_hidden = 352\n", "max_seq = 128\n", "lr_floor = 0.0002"})
    EXPECT_THAT(plain, HasSubstr(line));
  const std::string flags = config({"--heads", "8", "--dim", "256", "--seq", "200", "--lr", "1e-4"});
  for (const char* line : {"kv_heads = 8\n", "ffn_hidden = 704\n", "max_seq = 200\n", "lr_floor = 1e-05"})
    EXPECT_THAT(flags, HasSubstr(line));
  std::ofstream(folder_ / "table.toml") << "seq = 200\n[model]\ndim = 256\nheads = 2\n";
  const std::string table = config({"--config", file("table.toml")});
  for (const char* line : {"kv_heads = 2\n", "ffn_hidden = 704\n", "max_seq = 200\n"})
    EXPECT_THAT(table, HasSubstr(line));
  std::ofstream(folder_ / "said.toml")
      << "[model]\ndim = 256\nheads = 8\nkv_heads = 2\nffn_hidden = 64\nmax_seq = 300\n";
  const std::string said = config({"--config", file("said.toml")});
  for (const char* line : {"kv_heads = 2\n", "ffn_hidden = 64\n", "max_seq = 300\n"})
    EXPECT_THAT(said, HasSubstr(line));
}

TEST_F(TrainTest, ParityNeedsSomethingToCompare) {
  const Words base{"parity", "--text", file("text"), "--steps", "4"};
  const auto expect = [&](Words more, const std::string& text) {
    more.insert(more.begin(), base.begin(), base.end());
    EXPECT_EQ(run(more), 2);
    EXPECT_THAT(err(), HasSubstr(text));
  };
  expect({"--meshes", "2x1"}, "parity: meshes are 2x1: nothing to compare; expected two or more");
  expect({"--compare", "5"}, "parity: compare is 5; expected at most 4, the steps");
  expect({"--compare", "-1"}, "parity: --compare is -1; expected 0 or more\n");
  expect({"--every", "0"}, "parity: --every is 0; expected 1 or more\n");
  expect({"--tolerance", "-1"}, "parity: --tolerance is -1; expected 0 to 1000000000\n");
  expect({"--seq", "0"}, "weft: parity: on 1x1: seq is 0; expected 1 or more\n");
  expect({"--clip", "-1"}, "weft: parity: on 1x1: clip is -1; expected 0 (no clipping) or more\n");
  expect({"--batch", "1"},
         "weft: parity: on 2x1: batch is 1; expected at least one sequence for each of dp=2");
}

TEST_F(TrainTest, ExactParity) {
  std::ofstream(folder_ / "model.toml") << "text = '" << file("text")
                                        << "'\nseq = 32\nbatch = 4\nsteps = 3\nlr = 0.01\n[model]\ndim = 32\n"
                                           "layers = 1\nheads = 4\nkv_heads = 2\nffn_hidden = 48\n";
  ASSERT_EQ(run({"parity", "--exact", "--config", file("model.toml"), "--json", file("exact.json")}), 0)
      << out() << err();
  EXPECT_THAT(out(), HasSubstr("EXACT: 1x1, 2x1, 1x2, 2x2, sp:1x2, fsdp:2x1 have the same bits"));
  const auto j = nlohmann::json::parse(std::ifstream(folder_ / "exact.json"));
  EXPECT_EQ(j["passed"], true);
  EXPECT_EQ(j["loss"]["1x1"], j["loss"]["fsdp:2x1"]);

  // A run with other weights differs from its first step on; hashes of one run are those of another.
  const auto hashes = [&](const Words& more) {
    Words words{"train",      "--exact", "--config",     file("model.toml"),
                "--progress", "none",    "--hash-every", "2"};
    words.insert(words.end(), more.begin(), more.end());
    EXPECT_EQ(run(words), 0) << err();
    std::string lines;
    std::istringstream in(out());
    for (std::string line; std::getline(in, line);)
      if (line.starts_with("step 1 ")) lines += line + "\n";
    return lines;
  };
  const std::string one = hashes({});
  const auto lines_of = [&](const std::string& kind) {
    int count = 0;
    for (std::size_t at = 0; (at = one.find("step 1 " + kind + " ", at)) != std::string::npos; ++at) ++count;
    return count;
  };
  EXPECT_EQ(lines_of("gradient"), 12) << one;
  EXPECT_EQ(lines_of("parameter"), 12) << one;
  EXPECT_EQ(lines_of("state"), 3 * 12) << one;  // two moments and a count of steps
  for (const char* module : {"model", "layers.0.attention", "layers.0.attention.q_proj", "norm"})
    EXPECT_EQ(lines_of(fmt::format("activation {}", module)), 1) << module << "\n" << one;
  EXPECT_EQ(hashes({"--ranks", "2", "--tp", "2"}), one);
  std::string of_stages;  // without activations and the optimizer's state
  std::istringstream in(one);
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("step 1 gradient ") || line.starts_with("step 1 parameter "))
      of_stages += line + "\n";
  EXPECT_EQ(hashes({"--ranks", "2", "--pp", "2", "--pipeline", "gpipe"}), of_stages);
  EXPECT_NE(hashes({"--seed", "2"}), one);
}

// The loss in chunks: the losses of a run without chunks, in the last digits.
TEST_F(TrainTest, LossInChunks) {
  const auto losses = [&](const Words& more) {
    Words words = small({"--steps", "3", "--warmup", "0", "--metrics", file("metrics")});
    words.insert(words.end(), more.begin(), more.end());
    EXPECT_EQ(run(words), 0) << err();
    std::vector<double> all;
    std::ifstream in(folder_ / "metrics");
    for (std::string line; std::getline(in, line);) all.push_back(nlohmann::json::parse(line).at("loss"));
    return all;
  };
  const std::vector<double> at_once = losses({}), chunked = losses({"--loss-chunk", "40"});
  ASSERT_EQ(at_once.size(), 3u);
  ASSERT_EQ(chunked.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_NEAR(chunked[i], at_once[i], 1e-5);
  const auto refused = [&](const Words& more, const std::string& text) {
    Words words = small({"--loss-chunk"});
    words.insert(words.end(), more.begin(), more.end());
    EXPECT_EQ(run(words), 2);
    EXPECT_THAT(err(), HasSubstr(text));
  };
  refused({"-1"}, "loss-chunk is -1; expected 0 or more");
  refused({"8", "--exact"}, "loss-chunk is 8 with --exact; expected 0");
}

// Sizes that follow others follow those of the command line, too.
TEST_F(TrainTest, SizesThatFollowOthersInATable) {
  const auto shown = [&](const std::string& table, const Words& more) {
    std::ofstream(folder_ / "table.toml") << "text = '" << file("text") << "'\n[model]\n" << table;
    Words words{"train", "--config", file("table.toml"), "--print-config"};
    words.insert(words.end(), more.begin(), more.end());
    EXPECT_EQ(run(words), 0) << err();
    std::string sizes;
    std::istringstream in(out());
    for (std::string line; std::getline(in, line);)
      if (line.starts_with("kv_heads") || line.starts_with("ffn_hidden")) sizes += line + "\n";
    return sizes;
  };
  EXPECT_EQ(shown("rope_theta = 50.0\n", {"--dim", "32", "--heads", "8"}), "kv_heads = 8\nffn_hidden = 96\n");
  EXPECT_EQ(shown("dim = 64\nheads = 4\n", {}), "kv_heads = 4\nffn_hidden = 192\n");
  EXPECT_EQ(shown("kv_heads = 2\nffn_hidden = 40\n", {"--dim", "32", "--heads", "8"}),
            "kv_heads = 2\nffn_hidden = 40\n");
}

// Runs over several transports, and runs that stop on one mesh and go on on another.
TEST_F(TrainTest, ExactParityOverTransportsAndOfResumedRuns) {
  std::ofstream(folder_ / "model.toml") << "text = '" << file("text")
                                        << "'\nseq = 32\nbatch = 4\nsteps = 4\nlr = 0.01\n[model]\ndim = 32\n"
                                           "layers = 1\nheads = 4\nkv_heads = 2\nffn_hidden = 48\n";
  const Words parity{"parity", "--exact", "--config", file("model.toml")};
  const auto with = [&](const Words& more) {
    Words words = parity;
    words.insert(words.end(), more.begin(), more.end());
    return run(words);
  };
  ASSERT_EQ(with({"--meshes", "1x1,2x1,fsdp:2x1,1x1>2x2", "--resume"}), 0) << out() << err();
  EXPECT_THAT(out(), HasSubstr("EXACT: 1x1, 2x1, fsdp:2x1, 1x1>2x2, 2x1>2x2 have the same bits"));
  EXPECT_THAT(out(), HasSubstr("12 gradients, 12 parameters and 36 tensors"));
  EXPECT_EQ(with({"--meshes", "1x1,2x1>1x2", "--compare", "1"}), 2);
  EXPECT_EQ(err(), "weft: parity: compare is 1; expected 2 or more for 2x1>1x2, which stops in the middle\n");
  EXPECT_EQ(with({"--meshes", "1x1,2x1", "--backends", "shm,nothing"}), 1);
  EXPECT_THAT(err(), HasSubstr("parity: training on dp x tp = 2x1 nothing ended with "));
  if (!WEFT_HAVE_GLOO) GTEST_SKIP() << "the build found no Gloo";
  ASSERT_EQ(with({"--meshes", "1x1,4x1,2x1>1x2", "--backends", "shm,gloo"}), 0) << out() << err();
  EXPECT_THAT(out(), HasSubstr("EXACT: 1x1, 4x1 shm, 4x1 gloo, 2x1>1x2 shm, 2x1>1x2 gloo have the same"));
}

// The options of parity are those of its runs: another optimizer gives other losses than AdamW.
TEST_F(TrainTest, ParityTrainsWithTheOptionsThatItIsGiven) {
  const auto losses_with = [&](const Words& more) {
    Words words =
        small({"--steps", "3", "--warmup", "0", "--meshes", "1x1,2x1", "--json", file("parity.json")});
    words[0] = "parity";
    std::erase(words, "lines");
    std::erase(words, "--progress");
    words.insert(words.end(), more.begin(), more.end());
    EXPECT_EQ(run(words), 0) << out() << err();
    const auto j = nlohmann::json::parse(contents(folder_ / "parity.json"));
    std::filesystem::remove(folder_ / "parity.json");
    return j.at("loss").at("1x1").get<std::vector<double>>();
  };
  const std::vector<double> adamw = losses_with({}), lion = losses_with({"--optimizer", "lion"});
  EXPECT_EQ(adamw[0], lion[0]);
  EXPECT_NE(adamw[2], lion[2]);
}

// Steps that loss scaling skips have no norm; frozen parameters have no gradient.
TEST_F(TrainTest, ExactParityOfSkippedStepsAndOfAFreezeSchedule) {
  Words words = small({"--steps", "3", "--warmup", "0", "--meshes", "1x1,2x1", "--exact", "--loss-scale",
                       "1e38", "--freeze", "0:frozen:layers.*,2:trained:layers.1"});
  words[0] = "parity";
  std::erase(words, "lines");
  std::erase(words, "--progress");
  ASSERT_EQ(run(words), 0) << out() << err();
  EXPECT_THAT(out(),
              HasSubstr("EXACT: 1x1, 2x1 have the same bits of 31 activations, losses, norms, 12\n"
                        "gradients, 21 parameters and 36 tensors of the optimizer's state in each of 3\n"
                        "steps"));
}

TEST_F(TrainTest, ValuesOfATensorThatIsNoneAreAnError) {
  EXPECT_EQ(run(small({"--steps", "1", "--warmup", "0", "--values-of", "gradient nope", "--values-file",
                       file("values")})),
            2);
  EXPECT_THAT(err(),
              HasSubstr("train: --values-of is \"gradient nope\"; expected activation, gradient, "
                        "parameter or state, a blank, and a path that the last step has, as in \"gradient "
                        "norm.weight\""));
}

TEST_F(TrainTest, FlagsThatDifferBetweenRanksAreNamed) {
  const auto expect = [&](const std::string& more, const std::string& text) {
    Words words{"run", "-n", "2", "--", "sh", "-c", "exec \"$0\" \"$@\" " + more, WEFT_COMMAND};
    const Words rest = small({});
    words.insert(words.end(), rest.begin(), rest.end());
    EXPECT_NE(run(words), 0);
    EXPECT_THAT(err(), HasSubstr("train: the ranks have other options: " + text)) << out();
  };
  expect("--seed $WEFT_RANK", "--seed is 0 on rank 0 and 1 on rank 1");
  expect("--held-out 0.2 --eval-batches $((WEFT_RANK + 1))", "--eval-batches is 1 on rank 0 and 2 on rank 1");
  expect("--weights $(test $WEFT_RANK = 0 && echo f32 || echo bf16) --batch $((2 * WEFT_RANK + 4))",
         "--batch is 4 on rank 0 and 6 on rank 1, --weights is f32 on rank 0 and bf16 on rank 1");
}

// A run writes no file that it reads, and no file twice.
TEST_F(TrainTest, AFileThatTheRunReadsIsNotWritten) {
  const auto expect = [&](const Words& more, const std::string& text) {
    Words words = small({});
    words.insert(words.end(), more.begin(), more.end());
    EXPECT_EQ(run(words), 2);
    EXPECT_THAT(err(), HasSubstr(text));
  };
  const std::string text = file("mine");
  const std::string kept(4000, 'x');
  std::ofstream(text) << kept;
  for (const char* const flag : {"--metrics", "--csv", "--values-file"}) {
    Words words{"--text", text, flag, folder_.path().string() + "/./mine"};
    if (std::string_view(flag) == "--values-file") words.insert(words.end(), {"--values-of", "loss"});
    expect(words, fmt::format("{}: is \"{}/./mine\", the file of --text; expected another file", flag,
                              folder_.path().string()));
  }
  std::filesystem::create_symlink(text, file("link.svg"));
  expect({"--text", text, "--curves", file("link.svg")}, "the file of --text; expected another file");
  expect({"--hash-every", "1", "--hash-file", file("new"), "--metrics", file("new")},
         "--hash-file: is \"" + file("new") + "\", the file of --metrics; expected another file");
  std::ifstream after(text);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(after), {}), kept);
}

TEST_F(TrainTest, OptionsOfOtherModelsAreRefused) {
  const auto expect = [&](const Words& more, const std::string& text) {
    Words words = small({});
    words.insert(words.end(), more.begin(), more.end());
    EXPECT_EQ(run(words), 2);
    EXPECT_THAT(err(), HasSubstr(text));
  };
  expect({"--model", "dense", "--experts", "4"},
         "experts is 4 with --model dense; expected 0, or --model moe");
  expect(
      {"--top-k", "3"},
      "top-k is 3 with --model dense, a model of tokens without experts that has no such option; expected 2");
  expect({"--capacity-factor", "1.5"}, "capacity-factor is 1.5 with --model dense");
  expect({"--router", "sigmoid"}, "router is \"sigmoid\" with --model dense");
  expect({"--stages-per-rank", "2"}, "stages-per-rank is 2 with pp 1; expected pp of 2 or more");
  expect({"--until", "-2"}, "--until: is -2; expected a step, or -1");
}

TEST_F(TrainTest, ExactModeRefusesWithTheArithmetic) {
  const auto expect = [&](const Words& more, const std::string& text) {
    Words words = small({"--exact"});
    words.insert(words.end(), more.begin(), more.end());
    EXPECT_EQ(run(words), 2);
    EXPECT_THAT(err(), HasSubstr(text));
  };
  expect({"--ranks", "3", "--batch", "9"}, "exact: batch: sequences: 3 ranks do not divide 8 blocks");
  expect({"--ranks", "8", "--batch", "12"},
         "exact: batch: sequences: 12 over 8 ranks (12 = 8 x 1 + 4); expected equal parts");
  expect({"--ranks", "2", "--tp", "2", "--sequence-parallel", "--seq", "31"},
         "exact: seq: tokens of a sequence: 31 over 2 ranks");
  expect({"--hash-file", file("hashes")}, "--hash-file: needs --hash-every");
  expect({"--values-of", "gradient norm.weight"}, "--values-of: goes with --values-file");
}

// Every rank of a job that `weft run` started reports the error.
TEST_F(TrainTest, WrongFlagsEndEveryRank) {
  Words words{"run", "-n", "4", "--", WEFT_COMMAND};
  const Words train = small({"--tp", "3"});
  words.insert(words.end(), train.begin(), train.end());
  EXPECT_EQ(run(words), 2);
  for (const char* rank : {"[0]", "[1]", "[2]", "[3]"})
    EXPECT_THAT(err(), HasSubstr(std::string(rank) + " weft: "));
}

TEST_F(TrainTest, RunsUnderWeftRun) {
  Words words{"run", "-n", "4", "--", WEFT_COMMAND};
  const Words train = small({"--tp", "2", "--until", "3"});
  words.insert(words.end(), train.begin(), train.end());
  EXPECT_EQ(run(words), 0) << err();
  EXPECT_THAT(out(), HasSubstr("[0] weft train:"));
  EXPECT_THAT(out(), HasSubstr("mesh dp=2 x tp=2"));
}

TEST_F(TrainTest, RunsWithTorchrunsVariables) {
  std::string port;
  {
    Logger quiet(LogLevel::error);
    port = std::to_string(TcpStoreServer(quiet).port());  // free a moment ago
  }
  std::vector<ChildProcess> ranks;
  for (int r = 0; r < 4; ++r) {
    ranks.push_back(start(small({"--tp", "2", "--until", "3"}),
                          {"RANK=" + std::to_string(r), "WORLD_SIZE=4", "LOCAL_RANK=" + std::to_string(r),
                           "MASTER_ADDR=127.0.0.1", "MASTER_PORT=" + port},
                          std::to_string(r)));
  }
  for (int r = 0; r < 4; ++r) {
    const auto status = ranks[static_cast<std::size_t>(r)].wait(seconds(60));
    ASSERT_TRUE(status.has_value()) << "rank " << r << " hangs";
    EXPECT_EQ(status->code, 0) << err(std::to_string(r));
  }
  EXPECT_THAT(out("0"), HasSubstr("mesh dp=2 x tp=2"));
}

TEST_F(TrainTest, ExactModeNeedsOneInstructionSet) {
  std::string port;
  {
    Logger quiet(LogLevel::error);
    port = std::to_string(TcpStoreServer(quiet).port());  // free a moment ago
  }
  if (cpu_has() == CpuIsa::baseline) GTEST_SKIP() << "this CPU has one instruction set";
  std::vector<ChildProcess> ranks;
  for (int r = 0; r < 2; ++r)
    ranks.push_back(start(
        small({"--exact", "--until", "3"}),
        {"RANK=" + std::to_string(r), "WORLD_SIZE=2", "LOCAL_RANK=" + std::to_string(r),
         "MASTER_ADDR=127.0.0.1", "MASTER_PORT=" + port, r == 0 ? "WEFT_CPU_ISA=avx2" : "WEFT_CPU_ISA="},
        std::to_string(r)));
  for (int r = 0; r < 2; ++r) {
    const auto status = ranks[static_cast<std::size_t>(r)].wait(seconds(60));
    ASSERT_TRUE(status.has_value()) << "rank " << r << " hangs";
    if (cpu_has() == CpuIsa::avx2) continue;  // the same
    EXPECT_EQ(status->code, 2);
    EXPECT_THAT(
        err(std::to_string(r)),
        HasSubstr(
            "the instruction set of an exact step (WEFT_CPU_ISA chooses one) is not the same on all ranks"));
  }
}

TEST_F(TrainTest, ParityComparesMeshes) {
  Words words = small({"--meshes", "1x1,2x1,1x2", "--compare", "6", "--json", file("p")});
  words[0] = "parity";
  words.erase(std::find(words.begin(), words.end(), "--progress"),
              std::find(words.begin(), words.end(), "--progress") + 2);
  ASSERT_EQ(run(words), 0) << err() << out();
  EXPECT_THAT(out(), HasSubstr("passed"));
  const auto j = nlohmann::json::parse(contents(folder_ / "p"));
  EXPECT_TRUE(j.at("passed").get<bool>());
  for (const char* mesh : {"1x1", "2x1", "1x2"}) EXPECT_EQ(j.at("loss").at(mesh).size(), 6u);
  // The sequence (5 tokens, uneven) and the vocabulary split, if there are tensor ranks.
  Words split = words;
  split.insert(split.end(), {"--seq", "5", "--sequence-parallel", "--vocab", "shard"});
  ASSERT_EQ(run(split), 0) << err() << out();
  EXPECT_THAT(out(), HasSubstr("passed"));
  std::istringstream lines(out());
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 80u) << line;
  // A tolerance that nothing meets: the table says so and so does the exit code.
  words.insert(words.end(), {"--tolerance", "0"});
  EXPECT_EQ(run(words), 1);
  EXPECT_THAT(out(), HasSubstr("FAILED"));
  words.insert(words.end(), {"--meshes", "1x1,3x"});
  EXPECT_EQ(run(words), 2);
  EXPECT_THAT(err(), HasSubstr("mesh \"3x\" is not dp x tp"));
  words.back() = "zero:2x1";
  EXPECT_EQ(run(words), 2);
  EXPECT_THAT(err(),
              HasSubstr("mesh \"zero:2x1\" is not dp x tp; expected such as \"2x1\", or \"fsdp:2x1\""));
}

// A file that parity cannot write is an error before it trains, and its folder goes when nobody reads.
TEST_F(TrainTest, ParityLeavesNothingBehind) {
  Words words = small({"--meshes", "1x1,1x1,1x1,1x1,1x1,1x1,1x1", "--compare", "2"});
  words[0] = "parity";
  words.erase(std::find(words.begin(), words.end(), "--progress"),
              std::find(words.begin(), words.end(), "--progress") + 2);
  const auto with = [&](const Words& more) {
    Words all = words;
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  EXPECT_EQ(run(with({"--json", file("nowhere/p")})), 1);
  EXPECT_THAT(err(), HasSubstr("parity: --json: "));
  EXPECT_EQ(out(), "");
  EXPECT_EQ(run(with({"--json", folder_.path().string()})), 2);
  EXPECT_EQ(out(), "");

  std::filesystem::create_directory(folder_ / "tmp");
  const auto of_temporary = [&](const std::string& folder) { return Words{"TMPDIR=" + folder}; };
  const Words nowhere = of_temporary(file("nowhere"));
  ChildProcess refused = start(words, nowhere);
  EXPECT_EQ(refused.wait(seconds(60)).value().code, 1);
  EXPECT_EQ(err(), "weft: parity: cannot make a temporary folder; TMPDIR says where\n");

  const Words temporary = of_temporary(file("tmp"));
  ChildProcess whole = start(words, temporary);
  EXPECT_EQ(whole.wait(seconds(60)).value().code, 0) << err();
  std::istringstream lines(out());
  std::string line;
  while (std::getline(lines, line)) {
    if (line.starts_with("[")) continue;
    EXPECT_LE(line.size(), 80u) << line;  // seven columns are two tables
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder_ / "tmp"));

  ::setenv("TMPDIR", file("tmp").c_str(), 1);
  std::string command = std::string("{ '") + WEFT_COMMAND + "'";
  for (const std::string& word : words) command += " '" + word + "'";
  command += "; echo $? > '" + file("status") + "'; } 2>&1 | head -1 > /dev/null";
  EXPECT_EQ(std::system(command.c_str()), 0);
  ::unsetenv("TMPDIR");
  EXPECT_EQ(contents(folder_ / "status"), "1\n");
  EXPECT_TRUE(std::filesystem::is_empty(folder_ / "tmp"));
}

// Divided parameters train like replicated ones, and a run can continue in another form than it was saved in.
TEST_F(TrainTest, DataRanksMayDivideTheParameters) {
  Words words = small({"--meshes", "1x1,fsdp:3x1,fsdp:2x2,hsdp:4x1", "--compare", "4"});
  words[0] = "parity";
  words.erase(std::find(words.begin(), words.end(), "--progress"),
              std::find(words.begin(), words.end(), "--progress") + 2);
  ASSERT_EQ(run(words), 0) << err() << out();
  EXPECT_THAT(out(), HasSubstr("passed"));

  ASSERT_EQ(run(small({"--ranks", "4", "--data", "hsdp", "--until", "4", "--metrics", file("one")})), 0)
      << err();
  EXPECT_THAT(out(), HasSubstr("mesh dp_replicate=2 x\n  dp_shard=2 x tp=1"));
  EXPECT_THAT(out(), HasSubstr("memory of a rank in MiB: parameters "));
  EXPECT_THAT(out(), HasSubstr(";\n  gathered blocks at most "));
  ASSERT_EQ(run(small({"--ranks", "4", "--data", "hsdp", "--until", "2", "--save", file("saved"), "--metrics",
                       file("two")})),
            0)
      << err();
  ASSERT_EQ(run(small({"--ranks", "2", "--data", "fsdp", "--until", "3", "--save", file("saved"), "--resume",
                       "--metrics", file("two")})),
            0)
      << err();
  ASSERT_EQ(run(small({"--ranks", "2", "--tp", "2", "--until", "4", "--save", file("saved"), "--resume",
                       "--metrics", file("two")})),
            0)
      << err();
  const std::vector<double> one = losses("one"), two = losses("two");
  ASSERT_EQ(one.size(), 4u);
  ASSERT_EQ(two.size(), 4u);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(two[i], one[i], 1e-5 * one[i]);
}

// Under either mpirun the numbers are the same as over shared memory, because the order does not matter in a
// sum of two.
TEST_F(TrainTest, TrainsUnderMpirun) {
  ASSERT_EQ(run(small({"--ranks", "2", "--until", "4", "--metrics", (folder_ / "shm").string()})), 0)
      << err();
  const std::vector<double> expected = losses("shm");
  ASSERT_EQ(expected.size(), 4u);
  int present = 0;
  for (const auto& [backend, mpirun, there] :
       {std::tuple{"mpi-openmpi", "mpirun.openmpi --oversubscribe --allow-run-as-root", WEFT_HAS_OPENMPI},
        std::tuple{"mpi-mpich", "mpirun.mpich", WEFT_HAS_MPICH}}) {
    if (!there) continue;
    ++present;
    for (const int ranks : {2, 4}) {
      const std::string metrics = fmt::format("{}{}", backend, ranks);
      std::string command =
          fmt::format("OMPI_MCA_mpi_yield_when_idle=1 timeout 100 {} -n {} {}", mpirun, ranks, WEFT_COMMAND);
      for (const std::string& word : small({"--backend", backend, "--until", "4", "--metrics",
                                            (folder_ / metrics).string(), "--threads", "1"}))
        command += " " + word;
      ASSERT_EQ(std::system((command + " >/dev/null 2>" + (folder_ / "err").string()).c_str()), 0) << err();
      const std::vector<double> got = losses(metrics);
      ASSERT_EQ(got.size(), expected.size()) << metrics;
      for (std::size_t i = 0; i < got.size(); ++i)
        EXPECT_NEAR(got[i], expected[i], 1e-4) << metrics << " " << i;
    }
  }
  if (present == 0) GTEST_SKIP() << "neither Open MPI nor MPICH is installed";
}

}  // namespace
}  // namespace weft::test::train_test
