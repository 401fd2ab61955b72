// `weft bench` from outside, with tiny samples: tables, files, turns, texts about missing programs; and the
// code that verifies the results of every program.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "cases.hpp"
#include "support/processes.hpp"
#include "support/temporary_folder.hpp"
#include "weft/base/error.hpp"

namespace weft::test::bench_test {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

class WeftBench : public ::testing::Test {
 protected:
  ChildProcess start(std::vector<std::string> words) {
    return ChildProcess::fork([&] {
      const auto open_as = [&](const char* name, int fd) {
        return ::dup2(::open((folder_ / name).c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), fd) == fd;
      };
      if (!open_as("out", 1) || !open_as("err", 2)) return 99;
      ::signal(SIGTERM, SIG_DFL);
      ::setenv("WEFT_TEST_MARK", folder_.path().c_str(), 1);
      words.insert(words.begin(), {WEFT_COMMAND, "bench"});
      std::vector<char*> argv;
      for (auto& word : words) argv.push_back(word.data());
      argv.push_back(nullptr);
      ::execv(argv[0], argv.data());
      return 99;
    });
  }
  ExitStatus run(std::vector<std::string> words) {
    words.insert(words.end(), {"--seconds", "0.005"});
    ChildProcess process = start(std::move(words));
    const ExitStatus status = process.wait(seconds(50)).value_or(ExitStatus{});
    out_ = contents(folder_ / "out");
    err_ = contents(folder_ / "err");
    return status;
  }
  void expect_refused(const std::vector<std::string>& words, const std::string& text) {
    EXPECT_EQ(run(words), (ExitStatus{.code = 2})) << text;
    EXPECT_THAT(err_, HasSubstr(text));
    EXPECT_EQ(out_, "");
  }

  /// A folder that contains only weft's own programs.
  std::string our_programs() {
    const auto folder = folder_ / "programs";
    std::filesystem::create_directories(folder);
    for (const char* name : {"collectives_bench", "machine_bench"})
      if (!std::filesystem::exists(folder / name))
        std::filesystem::create_symlink(std::filesystem::path(WEFT_COMMAND).parent_path() / name,
                                        folder / name);
    return folder;
  }
  /// … and a peer that is a shell script.
  void add_peer(const std::string& script) {
    const std::string path = our_programs() + "/gloo_collectives";
    std::ofstream(path) << "#!/bin/sh\n" << script;
    ASSERT_EQ(::chmod(path.c_str(), 0700), 0);
  }

  /// Processes that carry our mark.
  int left_behind() {
    int count = 0;
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator("/proc", ignored))
      if (std::atoi(entry.path().filename().c_str()) > 0 &&
          contents(entry.path() / "environ").find("WEFT_TEST_MARK=" + folder_.path().string()) !=
              std::string::npos)
        ++count;
    return count;
  }

  TemporaryFolder folder_;
  std::string out_, err_;
};

// ---- what comes out ----

// Other programs that run meanwhile are reported.
TEST_F(WeftBench, OtherLoadIsTold) {
  std::vector<ChildProcess> others;
  for (unsigned k = 0; k < 2 * std::thread::hardware_concurrency(); ++k)
    others.push_back(ChildProcess::fork([] {
      const Deadline end = Deadline::after(std::chrono::seconds(60));
      while (!end.passed()) {}
      return 0;
    }));
  ASSERT_EQ(run({"all_reduce", "--bytes", "8", "--rounds", "1"}), ExitStatus{.code = 0}) << err_;
  for (ChildProcess& other : others) other.kill(SIGKILL);
  EXPECT_THAT(out_,
              ContainsRegex("\n  other programs took [0-9]+ % of the cores meanwhile, so times vary\n"));
}

TEST_F(WeftBench, TableJsonAndPlotCarryTheSizes) {
  const std::string file = folder_ / "r.json", plot = folder_ / "r.svg";
  ASSERT_EQ(run({"all_reduce", "--bytes", "1K,8", "--rounds", "2", "--json", file, "--plot", plot}),
            ExitStatus{.code = 0})
      << err_;
  EXPECT_THAT(out_,
              AllOf(HasSubstr("all_reduce f32, 2 processes, in place"), HasSubstr("weft shared"),
                    HasSubstr("weft foreign"), HasSubstr("memory limit"), HasSubstr("better of 2 rounds")));
  EXPECT_THAT(out_, ContainsRegex("\n8 .*[0-9] \\(.*\n1024 .*[0-9] \\("));
  std::istringstream lines(out_);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 80u) << line;

  const json all = json::parse(contents(file));
  ASSERT_EQ(all.at("results").size(), 1u);
  const json& r = all.at("results")[0];
  EXPECT_EQ(r.at("op"), "all_reduce");
  std::vector<std::string> names;
  for (const json& c : r.at("competitors")) {
    names.push_back(c.at("name"));
    ASSERT_EQ(c.at("rows").size(), 2u);
    EXPECT_EQ(c.at("rows")[0].at("bytes"), 8);
    EXPECT_EQ(c.at("rows")[1].at("bytes"), 1024);
    for (const json& row : c.at("rows")) {
      const std::vector<double> rounds = row.at("rounds_us");
      ASSERT_EQ(rounds.size(), 2u);
      EXPECT_EQ(row.at("median_us"), std::min(rounds[0], rounds[1]));
      EXPECT_GT(row.at("median_us"), 0);
      EXPECT_GE(row.at("p99_us"), row.at("median_us"));
      // Two ranks: a factor of 2 (n-1)/n = 1.
      EXPECT_NEAR(row.at("bus_GBs"), row.at("bytes").get<double>() / row.at("median_us").get<double>() * 1e-3,
                  1e-3 * row.at("bus_GBs").get<double>());
    }
  }
  EXPECT_THAT(names, ::testing::ElementsAre("shared", "foreign"));

  const std::string svg = contents(plot);
  EXPECT_THAT(svg, AllOf(HasSubstr("<svg"), HasSubstr(">8 B<"), HasSubstr(">1 KB<"),
                         HasSubstr(">weft shared<"), HasSubstr("</svg>")));
}

TEST_F(WeftBench, OtherOperationsTypesAndPlaces) {
  ASSERT_EQ(
      run({"all_reduce", "--bytes", "64", "--rounds", "1", "--dtype", "f32,bf16", "--memory", "foreign"}),
      ExitStatus{.code = 0})
      << err_;
  EXPECT_THAT(out_, AllOf(HasSubstr("all_reduce f32 and bf16"), HasSubstr("weft foreign f32"),
                          HasSubstr("weft foreign bf16")));
  for (const char* op : {"all_gather", "reduce_scatter", "broadcast", "all_to_all", "reduce"}) {
    ASSERT_EQ(run({op, "--bytes", "1000", "--rounds", "1", "--ranks", op[0] == 'a' ? "3" : "2", "--dtype",
                   "bf16", "--memory", "foreign", "--buffers", "rotating", "--markdown"}),
              ExitStatus{.code = 0})
        << err_;
    EXPECT_THAT(out_, AllOf(HasSubstr(fmt::format("**{} bf16, {} processes", op, op[0] == 'a' ? 3 : 2)),
                            HasSubstr("| 1000 "), HasSubstr("rotating buffers")));
  }
  ASSERT_EQ(run({"all_gather", "--bytes", "64", "--rounds", "1", "--ranks-as", "threads", "--place", "in",
                 "--memory", "shared"}),
            ExitStatus{.code = 0})
      << err_;
  EXPECT_THAT(out_, AllOf(HasSubstr("2 threads, in place"), HasSubstr("ranks are threads")));
}

TEST_F(WeftBench, MessagesFacadeAndOverlap) {
  ASSERT_EQ(run({"p2p", "--bytes", "8", "--rounds", "1"}), ExitStatus{.code = 0}) << err_;
  EXPECT_THAT(out_, AllOf(HasSubstr("ping_pong f32, 2 processes"), HasSubstr("one_way f32, 2 processes")));
  ASSERT_EQ(run({"halo", "--bytes", "64,4096", "--rounds", "1", "--ranks", "3"}), ExitStatus{.code = 0})
      << err_;
  EXPECT_THAT(out_,
              AllOf(HasSubstr("halo_rows f32, 3 processes"), HasSubstr("halo_columns f32, 3 processes"),
                    HasSubstr("halo_four_columns f32, 3 processes"), HasSubstr("halo_3d f32, 3 processes"),
                    HasSubstr("halo_fields f32, 3 processes"), HasSubstr("halo_3d_fields f32, 3 processes")));
  ASSERT_EQ(run({"facade", "--bytes", "8,64", "--rounds", "1"}), ExitStatus{.code = 0}) << err_;
  EXPECT_THAT(out_, ContainsRegex("bytes +8 +64\n(.*\n)*facade_us .*\nbackend_us .*\ndifference_ns "));
  ASSERT_EQ(run({"overlap", "--bytes", "65536", "--rounds", "1"}), ExitStatus{.code = 0}) << err_;
  EXPECT_THAT(out_, AllOf(HasSubstr("thread_free_hidden_%"), HasSubstr("caller_busy_hidden_%")));
}

// ---- peers ----

#ifdef WEFT_HAVE_TRAIN
TEST_F(WeftBench, LayersAreComparedAndVerified) {
  const auto json_path = folder_ / "layers.json";
  ASSERT_EQ(run({"layers", "--layers", "linear2,attention", "--tokens", "8", "--passes", "forward,both",
                 "--rounds", "1", "--against", "torch", "--python", "/bin/false", "--json", json_path}),
            ExitStatus{.code = 0})
      << err_;
  EXPECT_THAT(out_, ContainsRegex("layer, dtype, tokens, pass +weft +weft tp 2"));
  EXPECT_THAT(out_, ContainsRegex("linear2/f32/8/forward +[0-9.]+ \\([0-9.]+\\) +[0-9.]+ \\("));
  EXPECT_THAT(out_, ContainsRegex("GFLOP/s +tp 2: gain"));
  EXPECT_THAT(out_, HasSubstr("weft % of peak"));
  EXPECT_THAT(out_, HasSubstr("torch: left out: exit code 1"));
  EXPECT_THAT(err_, ContainsRegex("layers: linear2/f32/8/both: us: weft [0-9.]+, weft tp 2 [0-9.]+"));
  const json all = json::parse(contents(json_path));
  std::set<std::string> cases;
  for (const json& row : all.at("rows")) {
    EXPECT_GT(row.at("median_us").get<double>(), 0);
    EXPECT_GE(row.at("peak_GFLOPs").get<double>(), 0);
    cases.insert(row.at("case"));
  }
  EXPECT_EQ(cases, (std::set<std::string>{"linear2/f32/8/forward", "linear2/f32/8/both",
                                          "attention/f32/8/forward", "attention/f32/8/both"}));
}

// Float8 layers are verified before they are timed; the row has the name of the dtype.
TEST_F(WeftBench, LayersInFloat8) {
  const auto json_path = folder_ / "layers.json";
  ASSERT_EQ(run({"layers", "--layers", "linear2,mlp", "--tokens", "8", "--passes", "forward,both", "--rounds",
                 "1", "--tp", "1,2", "--dtype", "f8", "--json", json_path}),
            ExitStatus{.code = 0})
      << err_;
  std::set<std::string> cases;
  const json all = json::parse(contents(json_path));
  for (const json& row : all.at("rows")) cases.insert(row.at("case"));
  EXPECT_EQ(cases, (std::set<std::string>{"linear2/f8e4m3/8/forward", "linear2/f8e4m3/8/both",
                                          "mlp/f8e4m3/8/forward", "mlp/f8e4m3/8/both"}));
}

TEST_F(WeftBench, LayersWhoseResultsDifferAreNoResult) {
  // torch's place is taken by a program that is fast and wrong.
  const std::string programs = our_programs();
  std::filesystem::create_symlink(std::filesystem::path(WEFT_COMMAND).parent_path() / "layers_bench",
                                  std::filesystem::path(programs) / "layers_bench");
  const std::string script = programs + "/wrong.sh";
  std::ofstream(script) << "#!/bin/sh\n"
                           "for word in \"$@\"; do last=$word; done\n"
                           "echo '{\"who\": \"torch\", \"settings\": \"wrong\"}'\n"
                           "head -c 1 \"$last\" > /dev/null\n"
                           "echo '{\"case\": \"linear2/f32/8/forward\", \"median_us\": 1, \"p99_us\": 1, "
                           "\"along_y\": 0, \"norm_y\": 0}'\n";
  std::filesystem::permissions(script, std::filesystem::perms::owner_all);
  EXPECT_EQ(run({"layers", "--layers", "linear2", "--tokens", "8", "--passes", "forward", "--rounds", "1",
                 "--tp", "1", "--against", "torch", "--python", script, "--programs", programs}),
            (ExitStatus{.code = 1}));
  EXPECT_THAT(
      err_,
      ContainsRegex("bench: torch: linear2/f32/8/forward: along_y is 0; expected -?[0-9.]+ as weft has it"));
}

TEST_F(WeftBench, DataIsComparedAndVerified) {
  const auto json_path = folder_ / "data.json";
  ASSERT_EQ(run({"data", "--cases", "reduce/one,reduce/buckets,step/local,step/ddp,step/fully_shard",
                 "--rounds", "1", "--against", "torch", "--python", "/bin/false", "--json", json_path}),
            ExitStatus{.code = 0})
      << err_;
  EXPECT_THAT(out_, ContainsRegex("2 ranks +weft"));
  EXPECT_THAT(out_, ContainsRegex("reduce/buckets +[0-9.]+ \\([0-9.]+\\)"));
  EXPECT_THAT(out_, ContainsRegex("step/ddp +step/local +[0-9.]+ .*25.21 .*25.21"));
  EXPECT_THAT(out_, HasSubstr("torch: left out: exit code 1"));
  for (const json& row : json::parse(contents(json_path)).at("rows")) {
    EXPECT_GT(row.at("median_us").get<double>(), 0);
    EXPECT_EQ(row.at("sent_bytes").get<double>(), row.at("theory_bytes").get<double>()) << row.at("case");
  }
  expect_refused(
      {"data", "--cases", "step/zero"},
      "bench: --cases \"step/zero\"; expected reduce/one, reduce/one_foreign, reduce/buckets, reduce/bound, "
      "reduce/each, step/local, step/ddp, step/fully_shard");
  expect_refused({"data", "--against", "gloo"}, "bench: --against \"gloo\"; expected torch");
}

TEST_F(WeftBench, LayersInSpaceAreBesideTheirParts) {
  const auto json_path = folder_ / "domain.json";
  ASSERT_EQ(run({"domain", "--maps", "4x8x8", "--sequences", "300", "--passes", "both", "--rounds", "1",
                 "--json", json_path}),
            ExitStatus{.code = 0})
      << err_;
  EXPECT_THAT(out_, ContainsRegex("case +step us +local us +exchange us +step / the larger"));
  EXPECT_THAT(out_, ContainsRegex("conv/4x8x8/both +[0-9.]+ +[0-9.]+ +[0-9.]+ +[0-9.]+\n"));
  EXPECT_THAT(out_, ContainsRegex("attention/300/both +[0-9.]+ +[0-9.]+ +[0-9.]+\n"));
  const json rows = json::parse(contents(json_path)).at("rows");
  ASSERT_EQ(rows.size(), 2U);
  EXPECT_GT(rows[0].at("local_us").get<double>(), 0);
  EXPECT_GT(rows[1].at("gain").get<double>(), 0);
  expect_refused({"domain", "--passes", "backward"}, "bench: --passes \"backward\"; expected forward, both");
  expect_refused({"domain", "--dtype", "bf16"}, "bench: --dtype \"bf16\"; expected f32");
  expect_refused({"domain", "--against", "torch"},
                 "bench: --against \"torch\"; expected none: domain is ours alone");
}

TEST_F(WeftBench, PipelinesHaveTheirBubbles) {
  const std::string picture = (folder_ / "pipeline.svg").string();
  EXPECT_EQ(run({"pipeline", "--ranks", "2", "--bytes", "64K", "--plot", picture}), ExitStatus{.code = 0})
      << err_;
  EXPECT_THAT(out_, HasSubstr("2 ranks, 8 micro-batches, passes of 5 ms\n"));
  EXPECT_THAT(out_, ContainsRegex("gpipe +11\\.1 % +[0-9]+\\.[0-9] %\n"));
  EXPECT_THAT(out_, ContainsRegex("zero-bubble +4\\.0 % +[0-9]+\\.[0-9] %\n"));
  EXPECT_THAT(out_, HasSubstr("message of 65536 bytes: "));
  EXPECT_THAT(contents(picture),
              AllOf(HasSubstr("zero-bubble, measured (bubble"), HasSubstr("<title>1W7</title>")));
  expect_refused({"pipeline", "--against", "torch"},
                 "bench: --against \"torch\"; expected none: pipeline is ours alone");
  expect_refused({"pipeline", "--json", "x"}, "bench: --json \"x\"; expected none for pipeline");
}

TEST_F(WeftBench, ExpertsAreBesideTheirParts) {
  const auto json_path = folder_ / "experts.json";
  ASSERT_EQ(
      run({"experts", "--dispatch", "16x32", "--expert-layers", "8", "--rounds", "1", "--json", json_path}),
      ExitStatus{.code = 0})
      << err_;
  EXPECT_THAT(out_, ContainsRegex("case +dispatch us +bare us +ratio +combine us +ratio +travel us"));
  EXPECT_THAT(out_, ContainsRegex("dispatch/16x32( +[0-9.]+){6}\n"));
  EXPECT_THAT(out_, ContainsRegex("layer/8 +[0-9.]+ +[0-9.]+ +[0-9.]+\n"));
  const json rows = json::parse(contents(json_path)).at("rows");
  ASSERT_EQ(rows.size(), 2U);
  EXPECT_GT(rows[0].at("sent_bytes").get<double>(), 0);
  EXPECT_GT(rows[1].at("dense_us").get<double>(), 0);
  expect_refused({"experts", "--against", "gloo"},
                 "bench: --against \"gloo\"; expected openmpi, mpich, intelmpi, torch");
}

TEST_F(WeftBench, LayersThatThereAreNotAreNamed) {
  expect_refused({"layers", "--layers", "lstm"},
                 "bench: --layers \"lstm\"; expected linear2, mlp, attention, conv, head");
  expect_refused({"layers", "--passes", "backward"}, "bench: --passes \"backward\"; expected forward, both");
  expect_refused({"layers", "--tokens", "7"}, "bench: --tokens \"7\"; expected 8, 32, 128, 512, 2048, 8192");
  expect_refused({"layers", "--dtype", "f64"}, "bench: --dtype \"f64\"; expected f32, bf16, f8e4m3");
  expect_refused({"layers", "--against", "torch", "--dtype", "f8"},
                 "bench: --dtype \"f8e4m3\"; expected f32, bf16");
  expect_refused({"layers", "--against", "gloo"}, "bench: --against \"gloo\"; expected torch");
  expect_refused({"layers", "--tp", "3"}, "bench: --tp \"3\"; expected 1, 2, 4, 8");
}
#endif

TEST_F(WeftBench, PeersThatAreNotThereAreNamedWithWhatToInstall) {
  ASSERT_EQ(run({"all_reduce", "--bytes", "8", "--rounds", "1", "--memory", "shared", "--against",
                 "openmpi,mpich,intelmpi,gloo,torch,deepspeed", "--programs", our_programs()}),
            ExitStatus{.code = 0})
      << err_;
  EXPECT_THAT(
      err_, AllOf(HasSubstr("openmpi is left out: "), HasSubstr("mpich is left out: "),
                  HasSubstr("intelmpi is left out: its folder is not known; pip install impi-rt impi-devel"),
                  HasSubstr("gloo_collectives is not there; install libgloo-dev"),
                  HasSubstr("torch is left out: "), HasSubstr("deepspeed is left out: ")));
  EXPECT_THAT(out_, HasSubstr("gloo is left out"));  // in the report, too
}

TEST_F(WeftBench, PeersThatAreThereAreComparedWith) {
  const auto folder = std::filesystem::path(WEFT_COMMAND).parent_path();
  std::vector<std::string> there;
  for (const std::string name : {"openmpi", "mpich"})
    if (std::filesystem::exists(folder / ("mpi_collectives_" + name))) there.push_back(name);
  if (std::filesystem::exists(folder / "gloo_collectives")) there.push_back("gloo");
  if (there.empty())
    GTEST_SKIP() << "no peer is built: libopenmpi-dev, libmpich-dev and libgloo-dev are not installed";
  const std::string file = folder_ / "r.json";
  for (const std::string& name : there) {
    ASSERT_EQ(run({"all_reduce", "--bytes", "8,4096", "--rounds", "1", "--memory", "shared", "--against",
                   name, "--json", file}),
              ExitStatus{.code = 0})
        << err_;
    const json r = json::parse(contents(file)).at("results").at(0);
    if (r.at("competitors").size() == 1)
      continue;  // its launcher is not there, or not for this user: said in a line
    const json& c = r.at("competitors").at(1);
    EXPECT_EQ(c.at("name"), name);
    EXPECT_NE(c.at("version"), "");
    EXPECT_GT(c.at("rows").at(1).at("median_us"), 0);
    EXPECT_EQ(c.at("rows").at(1).at("bytes"), 4096);
    EXPECT_EQ(out_.find("best MPI") != std::string::npos, name != "gloo");
  }
  EXPECT_EQ(left_behind(), 0);
}

// Peers that a python has, which WEFT_TEST_PYTHON names.
class PeersInPython : public WeftBench, public ::testing::WithParamInterface<const char*> {};

TEST_P(PeersInPython, AreComparedWith) {
  const std::string name = GetParam();
  const char* const named = std::getenv("WEFT_TEST_PYTHON");
  const std::string python = named != nullptr ? named : "python3";
  for (const std::string& module : {std::string("torch"), name}) {
    const std::string look = fmt::format(
        "'{}' -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec(\"{}\") is None)' 2>&1",
        python, module);
    if (std::system(look.c_str()) != 0)
      GTEST_SKIP() << python << " has no " << module << " (WEFT_TEST_PYTHON names one that has)";
  }
  const std::string file = folder_ / "r.json";
  ASSERT_EQ(run({"all_reduce", "--bytes", "8,4096", "--rounds", "1", "--memory", "shared", "--against", name,
                 "--python", python, "--json", file}),
            ExitStatus{.code = 0})
      << err_;
  const json r = json::parse(contents(file)).at("results").at(0);
  ASSERT_EQ(r.at("competitors").size(), 2u) << err_;
  const json& c = r.at("competitors").at(1);
  EXPECT_EQ(c.at("name"), name);
  EXPECT_NE(c.at("version"), "");
  for (const json& row : c.at("rows")) EXPECT_GT(row.at("median_us"), 0) << out_;
  EXPECT_EQ(left_behind(), 0);
}

INSTANTIATE_TEST_SUITE_P(Peers, PeersInPython, ::testing::Values("torch", "deepspeed"),
                         [](const auto& peer) { return std::string(peer.param); });

TEST_F(WeftBench, APeerThatDoesNotFinishIsShownSo) {
  add_peer("echo '{\"who\": \"gloo\", \"settings\": \"a script\"}'\nexec sleep 60\n");
  ASSERT_EQ(run({"all_reduce", "--bytes", "8,16", "--rounds", "1", "--memory", "shared", "--against", "gloo",
                 "--limit", "1", "--programs", our_programs()}),
            ExitStatus{.code = 0})
      << err_;
  EXPECT_THAT(out_, AllOf(HasSubstr("did not finish in 1 s"), HasSubstr("not run"), HasSubstr("ahead")));
  EXPECT_EQ(left_behind(), 0);
}

// The machine's own program says that it is far slower than what is measured on it.
TEST_F(WeftBench, AboveTheLimitIsExplained) {
  const std::string machine = our_programs() + "/machine_bench";
  std::filesystem::remove(machine);
  std::ofstream(machine) << "#!/bin/sh\necho '{\"settings\": \"a script\"}'\n"
                            "exec 3<\"$(echo \"$*\" | sed 's/.*--turns //')\"\n"
                            "while [ -n \"$(dd bs=1 count=2 2>/dev/null <&3)\" ]; do\n"
                            "  echo '{\"bytes\": 8, \"copy_us\": 1e9, \"pass_us\": 1e9, \"line_us\": 1e9}'\n"
                            "done\n";
  ASSERT_EQ(::chmod(machine.c_str(), 0700), 0);
  ASSERT_EQ(run({"all_reduce", "--bytes", "8", "--rounds", "1", "--memory", "shared", "--programs",
                 our_programs()}),
            ExitStatus{.code = 0})
      << err_;
  EXPECT_THAT(
      out_, HasSubstr("\n  above 100 % of the limit: the machine was busy with something else while the\n"));
}

TEST_F(WeftBench, APeerThatFailsIsShownWithItsWords) {
  add_peer(
      "echo '{\"who\": \"gloo\", \"settings\": \"a script\"}'\necho 'rank 1: element 5 is 3; expected 7' "
      ">&2\nexit 1\n");
  ASSERT_EQ(run({"all_reduce", "--bytes", "8", "--rounds", "1", "--memory", "shared", "--against", "gloo",
                 "--programs", our_programs()}),
            ExitStatus{.code = 0})
      << err_;
  EXPECT_THAT(out_, HasSubstr("gloo at 8 bytes: exit code 1: rank 1: element 5 is 3; expected 7"));
}

TEST_F(WeftBench, ASignalEndsItAndAllItStarted) {
  add_peer("echo '{\"who\": \"gloo\", \"settings\": \"a script\"}'\nexec sleep 60\n");
  ChildProcess process =
      start({"all_reduce", "--bytes", "8", "--against", "gloo", "--programs", our_programs()});
  const Deadline deadline = Deadline::after(seconds(20));
  while (left_behind() < 6 && !deadline.passed()) std::this_thread::sleep_for(milliseconds(10));
  process.kill(SIGTERM);
  EXPECT_EQ(process.wait(seconds(20)), (ExitStatus{.code = 128 + SIGTERM}));
  EXPECT_EQ(left_behind(), 0);
}

// ---- what there is ----

TEST_F(WeftBench, ListsOperationsPeersAndWhereTheProgramsAre) {
  const std::string programs = our_programs();
  ASSERT_EQ(run({"--list", "--programs", programs, "--python", "no-python"}), ExitStatus{.code = 0}) << err_;
  EXPECT_THAT(out_, AllOf(HasSubstr("\n  all_reduce       every rank gets the sum of all ranks' buffers\n"),
                          HasSubstr("\n  gloo             is left out: " + programs +
                                    "/gloo_collectives is not there; install libgloo-dev"),
                          HasSubstr("\n  torch            is left out: no-python is not there; "),
                          HasSubstr("\nprograms\n  " + programs + "\n")));
}

TEST_F(WeftBench, HelpSaysWhatAnOperationMeasures) {
  ASSERT_EQ(run({"facade", "--help"}), ExitStatus{.code = 0}) << err_;
  EXPECT_THAT(out_, AllOf(HasSubstr("--seconds"),
                          HasSubstr("\nfacade: what ProcessGroup costs above its transport, ours alone. Its "
                                    "program is\nfacade_bench.")));
  ASSERT_EQ(run({"--help"}), ExitStatus{.code = 0}) << err_;
  EXPECT_THAT(out_, HasSubstr("\n  overlap          what Progress::thread hides behind computation"));
}

// ---- what is refused ----

TEST_F(WeftBench, WrongFlagsAreNamedWithTheirValueAndWhatWasExpected) {
  expect_refused({}, "bench: no operation was given; expected all_reduce, all_gather, ");
  expect_refused({"all_sum"}, "bench: operation \"all_sum\"; expected all_reduce, all_gather, ");
  expect_refused({"all_reduce", "--against", "mpich,lam"},
                 "bench: --against \"lam\"; expected openmpi, mpich, intelmpi, gloo, torch, deepspeed");
  expect_refused({"all_reduce", "--memory", "pooled"},
                 "bench: --memory \"pooled\"; expected shared, foreign, single_copy, staged");
  expect_refused({"all_reduce", "--backend", "tcp"},
                 "bench: --backend \"tcp\"; expected shm, gloo, mpi-openmpi, mpi-mpich or a plug-in in "
                 "WEFT_BACKEND_PATH that moves host memory: backend \"tcp\" was not found");
  expect_refused({"all_reduce", "--place", "there"}, "bench: --place \"there\"; expected in, out");
  expect_refused({"all_to_all", "--place", "in"},
                 "bench: --place \"in\"; expected out: all_to_all has no form in place");
  expect_refused({"all_reduce", "--buffers", "cold"}, "bench: --buffers \"cold\"; expected hot, rotating");
  expect_refused({"all_reduce", "--ranks-as", "fibres"},
                 "bench: --ranks-as \"fibres\"; expected processes, threads");
  expect_refused({"all_reduce", "--dtype", "f33"}, "f33");
  expect_refused({"all_reduce", "--dtype", "f32,bf16", "--against", "mpich"},
                 "bench: --dtype \"f32,bf16\"; expected one dtype with --against");
  expect_refused({"all_reduce", "--bytes", "0"},
                 "bench: --bytes \"0\"; expected sizes from 1 to 4294967296, such as 8, 32K or 8M");
  for (const char* size : {"abc", "8k", "-8", "8 M", "5000M", "99999999999999999999"})
    expect_refused({"all_reduce", "--bytes", fmt::format("8,{}", size)},
                   fmt::format("bench: --bytes \"{}\"; expected sizes", size));
  expect_refused({"all_reduce", "--ranks", "1"}, "bench: --ranks \"1\"; expected 2 to 64");
  expect_refused({"p2p", "--ranks", "3"}, "bench: --ranks \"3\"; expected 2: p2p is between two ranks");
  expect_refused({"all_reduce", "--rounds", "0"}, "bench: --rounds \"0\"; expected 1 to 100");
  expect_refused({"all_reduce", "--limit", "0"}, "bench: --limit \"0\"; expected 1 to 3600 seconds");
}

TEST_F(WeftBench, ProgramsThatAreNotBuiltAreNamed) {
  EXPECT_EQ(run({"all_reduce", "--programs", folder_.path()}), (ExitStatus{.code = 1}));
  EXPECT_THAT(err_,
              AllOf(HasSubstr("/collectives_bench is not there; expected a benchmark program of weft: "),
                    HasSubstr("install libbenchmark-dev")));
}

// ---- what verifies ----

using bench::Buffers;
using bench::Case;
using bench::Kind;

TEST(BenchBuffers, SeeAMisplacedElementOfEveryOperation) {
  for (const Kind kind : {Kind::all_reduce, Kind::reduce, Kind::broadcast, Kind::all_gather,
                          Kind::reduce_scatter, Kind::all_to_all})
    for (const DType dtype : {DType::f32, DType::bf16, DType::i8}) {
      const Case c{kind, dtype, 600, false, false, 2};
      Buffers zero(c, 0, bench::allocate_pages), one(c, 1, bench::allocate_pages);
      EXPECT_THAT(zero.wrong(), HasSubstr("rank 0: element 0 is "))
          << bench::name(kind);  // nothing was called yet
      EXPECT_THAT(zero.wrong(), HasSubstr("; expected "));
    }
  // all_gather by hand, then one element of another rank's block in the wrong place.
  const Case c{Kind::all_gather, DType::i8, 512, false, false, 2};
  Buffers zero(c, 0, bench::allocate_pages), one(c, 1, bench::allocate_pages);
  std::memcpy(zero.out(0), zero.in(0), 256);
  std::memcpy(zero.out(0) + 256, one.in(0), 256);
  EXPECT_EQ(zero.wrong(), "");
  zero.out(0)[300] = zero.out(0)[301];
  EXPECT_THAT(zero.wrong(), HasSubstr("all_gather of 512 bytes: rank 0: element 300 is "));
  zero.reset();
  EXPECT_NE(zero.wrong(), "");
}

TEST(BenchMeasure, GivesNoTimeWithoutARightAnswer) {
  bench::Prepared p;
  int runs = 0;
  p.run = [&] { ++runs; };
  p.verify = [] { return "rank 0: element 1 is 2; expected 3"; };
  EXPECT_THAT([&] { bench::measure(p, bench::alone, 0.01); },
              ::testing::ThrowsMessage<std::runtime_error>(HasSubstr("element 1 is 2; expected 3")));
  EXPECT_EQ(runs, 1);
  // A result that is right at first and wrong after the timing is also an error.
  p.reset = [] {};
  p.verify = [&] { return runs > 1 ? "it went wrong later; expected not to" : ""; };
  runs = 0;
  EXPECT_THAT([&] { bench::measure(p, bench::alone, 0.001); },
              ::testing::ThrowsMessage<std::runtime_error>(HasSubstr("it went wrong later")));
}

TEST(BenchCases, CountBytesAndFactorsAsNcclTestsDoes) {
  EXPECT_EQ(bench::bus_factor(Kind::all_reduce, 4), 1.5);
  EXPECT_EQ(bench::bus_factor(Kind::all_gather, 4), 0.75);
  EXPECT_EQ(bench::bus_factor(Kind::reduce_scatter, 4), 0.75);
  EXPECT_EQ(bench::bus_factor(Kind::all_to_all, 4), 0.75);
  EXPECT_EQ(bench::bus_factor(Kind::broadcast, 4), 1);
  EXPECT_EQ(bench::bus_factor(Kind::reduce, 4), 1);
  // The larger of the two buffers, in equal blocks of whole elements.
  const Case gather{Kind::all_gather, DType::f32, 1000, false, false, 3};
  EXPECT_EQ(gather.in_count(), 84);
  EXPECT_EQ(gather.out_count(), 252);
  EXPECT_EQ(gather.moved_bytes(), 1008);
}

TEST(BenchSpec, RefusesFlagsByName) {
  const auto parse = [](std::vector<std::string> words) {
    words.insert(words.begin(), "program");
    std::vector<char*> argv;
    for (auto& w : words) argv.push_back(w.data());
    argv.push_back(nullptr);
    int argc = static_cast<int>(words.size());
    return bench::parse_spec(argc, argv.data(), {{Kind::all_reduce}, {"shared", "foreign"}});
  };
  const auto refuses = [&](std::vector<std::string> words, const std::string& text) {
    EXPECT_THAT([&] { parse(words); }, ::testing::ThrowsMessage<Error>(HasSubstr(text)));
  };
  refuses({"--op", "broadcast"}, "--op \"broadcast\"; expected one of all_reduce");
  refuses({"--bytes", "8,x"}, "--bytes \"x\"; expected whole numbers from 1 to 4294967296");
  refuses({"--seconds", "0"}, "--seconds \"0\"; expected seconds above 0, up to 60");
  refuses({"--dtype", "c64"}, "--dtype \"c64\"; expected a number that can be summed");
  refuses({"--ranks"}, "--ranks \"\"; expected a value after it");
  refuses({"--fast"}, "flag \"--fast\"; expected --op, ");
  const bench::Spec spec =
      parse({"--bytes", "8,16", "--memory", "shared", "--place", "out", "--benchmark_filter=x"});
  EXPECT_EQ(spec.bytes, (std::vector<std::int64_t>{8, 16}));
  EXPECT_EQ(bench::cases_of(spec).size(), 2u);
}

}  // namespace
}  // namespace weft::test::bench_test
