// Drives the built `weft train`, `weft parity` and `weft doctor` on small models.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/processes.hpp"
#include "support/temporary_folder.hpp"
#include "weft/store/tcp.hpp"

namespace weft::test::train_test {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::Not;

class TrainTest : public ::testing::Test {
 protected:
  using Words = std::vector<std::string>;

  // A text with something to learn in it, and a model that learns it in moments.
  TrainTest() {
    std::ofstream text(folder_ / "text");
    for (int i = 0; i < 400; ++i) text << "the quick brown fox " << i % 17 << " jumps over the lazy dog\n";
  }
  Words small(Words more) const {
    Words words{"train",      "--text",   (folder_ / "text").string(),
                "--dim",      "32",       "--layers",
                "2",          "--heads",  "4",
                "--kv-heads", "4",        "--ffn",
                "64",         "--seq",    "32",
                "--batch",    "4",        "--steps",
                "20",         "--warmup", "5",
                "--lr",       "0.01",     "--progress",
                "lines"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }

  // `environment`: NAME=value, set before the program starts.
  ChildProcess start(const Words& words, const Words& environment = {}, const std::string& name = "") {
    return ChildProcess::fork([&] {
      for (const char* inherited : {"WEFT_RANK", "RANK", "WEFT_STORE", "WORLD_SIZE", "WEFT_WORLD_SIZE"})
        ::unsetenv(inherited);
      for (const std::string& e : environment) ::putenv(const_cast<char*>(e.c_str()));
      if (std::freopen((folder_ / ("out" + name)).c_str(), "w", stdout) == nullptr ||
          std::freopen((folder_ / ("err" + name)).c_str(), "w", stderr) == nullptr)
        return 99;
      Words all = words;
      all.insert(all.begin(), WEFT_COMMAND);
      std::vector<char*> argv;
      for (std::string& word : all) argv.push_back(word.data());
      argv.push_back(nullptr);
      ::execv(argv[0], argv.data());
      return 99;
    });
  }
  int run(const Words& words) {
    ChildProcess process = start(words);
    const auto status = process.wait(seconds(60));
    return status ? status->code : -2;
  }
  std::string out(const std::string& name = "") { return contents(folder_ / ("out" + name)); }
  std::string err(const std::string& name = "") { return contents(folder_ / ("err" + name)); }

  std::vector<double> losses(const std::string& file) {
    std::vector<double> found;
    std::ifstream in(folder_ / file);
    for (std::string line; std::getline(in, line);) {
      const auto j = nlohmann::json::parse(line);
      EXPECT_EQ(j.at("step").get<std::size_t>(), found.size());
      EXPECT_GT(j.at("tokens_per_s").get<double>(), 0);
      EXPECT_GT(j.at("grad_norm").get<double>(), 0);
      found.push_back(j.at("loss").get<double>());
    }
    return found;
  }
  std::string file(const std::string& name) { return (folder_ / name).string(); }

  TemporaryFolder folder_;
};

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

// Stopped at a checkpoint and taken up again, a run gives the bits of one that never stopped.
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

TEST_F(TrainTest, ResumeRefusesAnotherRun) {
  EXPECT_EQ(run(small({"--save", file("none"), "--resume"})), 2);
  EXPECT_THAT(err(), HasSubstr("resume: no checkpoint in"));
  ASSERT_EQ(run(small({"--save", file("ckpt"), "--until", "2"})), 0) << err();
  EXPECT_EQ(run(small({"--save", file("ckpt"), "--resume", "--seed", "7"})), 2);
  EXPECT_THAT(err(), HasSubstr("is of another run"));
  EXPECT_EQ(run(small({"--resume"})), 2);
  EXPECT_THAT(err(), HasSubstr("--resume"));
}

TEST_F(TrainTest, WrongFlagsEndAtOnceWithTheArithmetic) {
  const auto expect = [&](const Words& words, const std::string& text) {
    EXPECT_EQ(run(small(words)), 2) << text;
    EXPECT_THAT(err(), HasSubstr(text));
  };
  expect({"--ranks", "3", "--tp", "3"}, "4 heads do not divide into tp=3 (4 = 3 x 1 + 1)");
  expect({"--ranks", "4", "--dp", "3"}, "dp=3");
  expect({"--ranks", "4", "--dp", "3", "--tp", "1"}, "mesh: dp=3 x tp=1 = 3 ranks; the group has 4");
  expect({"--heads", "5"}, "transformer: dim 32 does not divide into heads 5");
  expect({"--seq", "500"}, "seq is 500; expected 1 to 128 (max_seq)");
  expect({"--batch", "1", "--ranks", "2"}, "batch is 1; expected at least one sequence for each of dp=2");
  expect({"--steps", "0"}, "steps is 0");
  expect({"--text", file("nowhere")}, "File does not exist");
  expect({"--what"}, "--what");
}

// The same, told by every rank of a job that weft run started.
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
  // A tolerance that nothing meets: the table says so and so does the exit code.
  words.insert(words.end(), {"--tolerance", "-1"});
  EXPECT_EQ(run(words), 1);
  EXPECT_THAT(out(), HasSubstr("FAILED"));
  words.insert(words.end(), {"--meshes", "1x1,3x"});
  EXPECT_EQ(run(words), 2);
  EXPECT_THAT(err(), HasSubstr("mesh \"3x\" is not dp x tp"));
}

TEST_F(TrainTest, DoctorFindsNothingWrong) {
  EXPECT_EQ(run({"doctor"}), 0) << out() << err();
  EXPECT_THAT(out(), HasSubstr("nothing is wrong"));
  EXPECT_THAT(out(), Not(HasSubstr("WEFT_STORE"))) << "only what is set is shown";
  EXPECT_THAT(out(), HasSubstr("memory that peers map        works"));
  EXPECT_EQ(run({"doctor", "--all"}), 0) << out() << err();
  EXPECT_THAT(out(), HasSubstr("WEFT_STORE"));
}

// The same numbers under either mpirun as over shared memory: no rank order matters in a sum of two.
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
