// `weft doctor trace`: files that ranks really left, and files made by hand with every kind of trouble.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "support/command_output.hpp"
#include "support/run_ranks.hpp"
#include "support/temporary_folder.hpp"
#include "weft/base/view.hpp"

namespace weft::test::trace_test {
namespace {

using namespace std::chrono_literals;
using nlohmann::json;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

using Outcome = CommandOutput;

class DoctorTrace : public testing::Test {
 protected:
  Outcome doctor(const std::string& words) const {
    const std::string command = fmt::format("cd '{}' && timeout 60 '{}' doctor trace {} 2>&1 </dev/null",
                                            folder.path().string(), WEFT_COMMAND, words);
    return output_of(command);
  }
  void put(const std::string& name, const std::string& text) const { std::ofstream(folder / name) << text; }

  TemporaryFolder folder;
};

// ---- What ranks leave

// Rank 1 comes 400 ms late to the second call and never to the third, which fails at its deadline.
TEST_F(DoctorTrace, RealRanksWithADelay) {
  ::setenv("WEFT_TRACE", folder.path().c_str(), 1);
  const RankOptions options;
  RankProcesses ranks(
      3,
      [](Rank& r) {
        std::vector<float> x(1000), all(30);
        r.group().barrier().wait();
        if (r.rank == 1) std::this_thread::sleep_for(400ms);
        r.group().all_reduce(view(x), view(x)).wait();
        if (r.rank == 1) {
          r.store->get("told", Deadline::after(20s));
          return;
        }
        const Error e = error_of(
            [&] { r.group().all_gather(view(x.data(), 10), view(all), {.deadline = 300ms}).wait(); });
        EXPECT_EQ(e.code(), ErrorCode::timeout);
        if (r.store->add("failed", 1) == 2) r.store->set("told", "1");
      },
      options);
  ranks.finish();
  ::unsetenv("WEFT_TRACE");
  const Outcome o = doctor("--chrome merged.chrome .");
  EXPECT_EQ(o.status, 0) << o.text;
  EXPECT_THAT(o.text, HasSubstr("2 files, 1 group; one host, one clock\n\n"
                                "group \"world\" (weft/world#1, 3 ranks, over shm)\n"));
  EXPECT_THAT(
      o.text,
      HasSubstr("  failure     timeout: all_gather: not finished within 0.3 s: rank 1 had not arrived"));
  EXPECT_THAT(o.text, HasSubstr("(says ranks 0, 2)"));
  EXPECT_THAT(o.text, HasSubstr("  no file     of rank 1\n"));  // it noticed nothing, and nobody asked it
  const json merged = json::parse(std::ifstream(folder / "merged.chrome"));
  int processes = 0, calls = 0;
  for (const json& e : merged["traceEvents"]) {
    processes += e["name"] == "process_name";
    calls += e["ph"] == "X";
  }
  EXPECT_EQ(processes, 2);
  EXPECT_EQ(calls, 6);
}

// The report from the files of all ranks, which SIGUSR2 makes.
TEST_F(DoctorTrace, ALateRankIsNamedWithItsDelay) {
  ::setenv("WEFT_TRACE", folder.path().c_str(), 1);
  const RankOptions options;
  RankProcesses ranks(
      3,
      [](Rank& r) {
        std::vector<float> x(1000);
        r.group().barrier().wait();
        if (r.rank == 1) std::this_thread::sleep_for(400ms);
        r.group().all_reduce(view(x), view(x)).wait();
        r.meet("ready");
        if (r.rank == 1) {
          r.store->get("go", Deadline::after(20s));
          std::this_thread::sleep_for(100ms);
        }
        Work w = r.group().broadcast(view(x), view(x), 1);
        r.meet("posted");
        w.wait();
        r.store->get("end", Deadline::after(20s));
      },
      options);
  ranks.store().get("test/met/ready", Deadline::after(20s));
  ranks.store().set("go", "1");
  ranks.store().get("test/met/posted", Deadline::after(20s));
  for (int r = 0; r < 3; ++r) ranks[r].kill(SIGUSR2);
  const auto files = [&] {
    int n = 0;
    for (const auto& e : std::filesystem::directory_iterator(folder.path()))
      n += e.path().extension() == ".json";
    return n;
  };
  for (const Deadline d = Deadline::after(20s); files() < 3 && !d.passed();) std::this_thread::sleep_for(2ms);
  ranks.store().set("end", "1");
  ranks.finish();
  ::unsetenv("WEFT_TRACE");
  const Outcome o = doctor("*.json");
  EXPECT_EQ(o.status, 0) << o.text;
  EXPECT_THAT(o.text, HasSubstr("3 files, 1 group;"));
  EXPECT_THAT(o.text, Not(HasSubstr("no file")));
  EXPECT_THAT(o.text, Not(HasSubstr("different")));
  EXPECT_THAT(o.text, Not(HasSubstr("failure")));
  // rank 1 first: 0.4 s and then 0.1 s, and whatever the machine adds
  EXPECT_THAT(
      o.text,
      ContainsRegex("late         rank   was last       in all     at worst\n"
                    " +1     [123] of 3 +([5-9][0-9][0-9] ms|[0-9.]+ s) +([4-9][0-9][0-9] ms|[0-9.]+ s)  "
                    "\\[call 1\\]\n"));
  EXPECT_THAT(
      o.text,
      ContainsRegex("all_reduce f32 x1000 sum \\[call 1\\]: rank 1 by ([4-9][0-9][0-9] ms|[0-9.]+ s)\n"));
  EXPECT_THAT(o.text, ContainsRegex("broadcast f32 x1000 root 1 \\[call 2\\]: rank 1 by "));
}

// Under `weft run` even the rank for which all others wait writes its trace before it is ended.
TEST_F(DoctorTrace, WeftRunAsksThoseItEnds) {
  const std::string command =
      fmt::format("cd '{}' && WEFT_TRACE=. timeout 60 '{}' run -n 3 -- '{}' 2>&1 </dev/null",
                  folder.path().string(), WEFT_COMMAND, WEFT_LATE_RANK);
  EXPECT_NE(std::system(command.c_str()), 0);
  const Outcome o = doctor(".");
  EXPECT_THAT(o.text, HasSubstr("3 files, 1 group; one host, one clock\n"));
  EXPECT_THAT(o.text, HasSubstr("timeout: all_reduce: not finished within 0.5 s: rank 2 had not arrived"));
  EXPECT_THAT(o.text, HasSubstr("              rank 2 had not heard of it\n"));
  EXPECT_THAT(
      o.text,
      HasSubstr("  missing     rank 2 at all_reduce f32 x1000 sum [call 1]: the last of its calls here is "
                "all_reduce f32 x1000 sum [call 0], done\n"));
  EXPECT_THAT(o.text, ContainsRegex("at worst\n +2     [12] of 2 .*; has not come to call 1\n"))
      << "nobody else is to blame";
  EXPECT_THAT(o.text,
              HasSubstr("worst calls all_reduce f32 x1000 sum [call 1]: rank 2 has not come within "));
}

// ---- By hand

json call(const std::string& op, int number, std::int64_t posted, const std::string& state = "done") {
  json c{{"op", op},      {"call", number},      {"dtype", "f32"},
         {"count", 8},    {"posted_ns", posted}, {"finished_ns", posted + 1000},
         {"state", state}};
  if (op == "all_reduce" || op == "reduce") c["reduce"] = "sum";
  if (op == "reduce" || op == "broadcast") c["root"] = 0;
  return c;
}

json trace(int rank, int size, const std::vector<json>& calls, const std::string& group = "world") {
  return {{"weft_trace", 1},
          {"group", group},
          {"id", "weft/" + group + "#1"},
          {"rank", rank},
          {"size", size},
          {"backend", "gloo"},
          {"host", "h"},
          {"boot", "b"},
          {"process", 100 + rank},
          {"process_rank", 0},
          {"began_monotonic_ns", 1'000'000'000},
          {"began_realtime_ns", 1'700'000'000'000'000'000},
          {"taken_ns", 9'000'000},
          {"forgotten", 0},
          {"calls", calls}};
}

TEST_F(DoctorTrace, WhoIsMissingWhoDiffersWhoIsLate) {
  put("0.json", trace(0, 4,
                      {call("barrier", 0, 0), call("all_reduce", 1, 1'000'000),
                       call("broadcast", 2, 2'000'000), call("all_reduce", 3, 3'000'000, "pending")})
                    .dump());
  json one = trace(1, 4, {call("barrier", 0, 500'000), call("all_gather", 1, 1'000'000)});
  one["failure"] = {{"code", "peer_lost"}, {"text", "rank 3 left"}, {"noticed_ns", 5'000'000}};
  put("1.json", one.dump());
  put("2.json", trace(2, 4,
                      {call("barrier", 0, 2'500'000), call("all_reduce", 1, 4'000'000),
                       call("broadcast", 2, 4'500'000), call("all_reduce", 3, 4'600'000)})
                    .dump());
  const Outcome o = doctor("0.json 1.json 2.json");
  EXPECT_EQ(o.status, 0);
  EXPECT_EQ(o.text,
            "3 files, 1 group; one host, one clock\n"
            "\n"
            "group \"world\" (weft/world#1, 4 ranks, over gloo)\n"
            "  failure     peer_lost: rank 3 left (says rank 1)\n"
            "              ranks 0, 2 had not heard of it\n"
            "  no file     of rank 3\n"
            "  missing     rank 1 at all_reduce f32 x8 sum [call 3]: the last of its calls here is "
            "all_gather f32 x8 "
            "[call 1], done\n"
            "  pending     rank 0: all_reduce f32 x8 sum [call 3], for 6 ms\n"
            "  different   call 1: rank 0 all_reduce f32 x8 sum, rank 1 all_gather f32 x8\n"
            "  late         rank   was last       in all     at worst\n"
            "                  1     2 of 4      13.5 ms         7 ms  [call 2]; has not come to call 2\n"
            "                  2     2 of 4       9.6 ms         3 ms  [call 1]\n"
            "                  0     0 of 4         0 us         0 us\n"
            "  worst calls broadcast f32 x8 root 0 [call 2]: rank 1 has not come within 7 ms\n"
            "              all_reduce f32 x8 sum [call 3]: rank 1 has not come within 6 ms\n"
            "              all_reduce f32 x8 sum [call 1]: rank 2 by 3 ms\n"
            "              barrier [call 0]: rank 2 by 2.5 ms\n");
}

// A rank has not missed calls that its file no longer holds, nor calls that are younger than its file.
TEST_F(DoctorTrace, WhatAFileCannotHaveIsNotMissing) {
  put("0.json",
      trace(0, 3, {call("barrier", 0, 0), call("barrier", 1, 1'000'000), call("barrier", 2, 10'000'000)})
          .dump());
  put("1.json", trace(1, 3, {call("barrier", 1, 1'500'000), call("barrier", 2, 10'500'000)}).dump());
  put("2.json",
      trace(2, 3, {call("barrier", 0, 0), call("barrier", 1, 1'000'000)}).dump());  // written after 9 ms
  const Outcome o = doctor("0.json 1.json 2.json");
  EXPECT_THAT(o.text, Not(HasSubstr("has not come")));
  EXPECT_THAT(o.text, HasSubstr("                  1     2 of 3         1 ms       500 us  [call 1]\n"));
}

// Several hosts: their monotonic clocks have nothing in common. Rank 1's began 5 s "later" and is 2 ms late.
TEST_F(DoctorTrace, HostsAreLinedUpByRealTime) {
  put("0.json", trace(0, 2, {call("barrier", 0, 1'000'000)}).dump());
  json one = trace(1, 2, {call("barrier", 0, 3'000'000)});
  one["boot"] = "another";
  one["began_monotonic_ns"] = 6'000'000'000;
  put("1.json", one.dump());
  const Outcome o = doctor("0.json 1.json --chrome out.json");
  EXPECT_THAT(o.text, HasSubstr("2 hosts, lined up by their real-time clocks"));
  EXPECT_THAT(o.text, HasSubstr("worst calls barrier [call 0]: rank 1 by 2 ms\n"));
  std::vector<double> at;
  const json merged = json::parse(std::ifstream(folder / "out.json"));
  for (const json& e : merged["traceEvents"])
    if (e["ph"] == "X") at.push_back(e["ts"]);
  ASSERT_EQ(at.size(), 2u);
  EXPECT_NEAR(at[1] - at[0], 2000.0, 1.0);
}

TEST_F(DoctorTrace, TheFirstFailureOfSeveralGroups) {
  for (const auto& [group, at] : {std::pair("tp", 7'000'000), std::pair("dp", 6'000'000)}) {
    json t = trace(0, 2, {call("barrier", 0, 0, "failed")}, group);
    t["failure"] = {{"code", "timeout"}, {"text", fmt::format("{} was slow", group)}, {"noticed_ns", at}};
    put(fmt::format("{}.json", group), t.dump());
  }
  const Outcome o = doctor(".");
  EXPECT_THAT(o.text,
              HasSubstr("the first failure is that of group \"dp\", noticed by its rank 0: dp was slow\n"));
  EXPECT_THAT(o.text, HasSubstr("  late        nothing to compare: no call that two of these files have\n"));
}

TEST_F(DoctorTrace, WhatIsNoTraceIsRefusedByName) {
  const auto refused = [&](const std::string& words, const std::string& text) {
    const Outcome o = doctor(words);
    EXPECT_EQ(o.status, 2) << words;
    EXPECT_THAT(o.text, testing::StartsWith("weft: " + text)) << words;
  };
  refused("absent.json", "absent.json: cannot read it: No such file or directory\n");
  put("garbage", "\x01\x02garbage");
  refused("garbage", "garbage: no trace, for it is no JSON (byte ");
  put("cut", trace(0, 1, {call("barrier", 0, 0)}).dump().substr(0, 200));
  refused("cut", "cut: no trace, for it is no JSON (byte ");
  put("empty", "");
  refused("empty", "empty: no trace, for it is empty\n");
  put("list", "[1, 2]");
  refused("list", "list: it is no object\n");
  put("other", "{\"traceEvents\": []}");
  refused("other", "other: no trace of weft: it has no \"weft_trace\"\n");
  const auto changed = [&](const char* path, const json& value, const std::string& text) {
    json t = trace(0, 2, {call("barrier", 0, 0), call("all_reduce", 1, 1)});
    t[json::json_pointer(path)] = value;
    put("changed", t.dump());
    refused("changed", "changed: " + text + "\n");
  };
  changed("/weft_trace", 2, "weft_trace is 2; expected an integer from 1 to 1");
  changed("/rank", 2, "rank is 2; expected an integer from 0 to 1");
  changed("/rank", "0", "rank is \"0\"; expected an integer from 0 to 1");
  changed("/size", 0, "size is 0; expected an integer from 1 to 2147483647");
  changed("/group", 7, "group is 7; expected a text");
  changed("/calls", "none", "calls is no list");
  changed("/calls/1", 3, "calls[1] is no object");
  changed("/calls/1/op", "all_seduce", "calls[1].op is \"all_seduce\", which weft does not know");
  changed("/calls/1/call", 18446744073709551615u,
          "calls[1].call is 18446744073709551615; expected an integer from 0 to 1152921504606846976");
  changed("/calls/0/posted_ns", 0.5,
          "calls[0].posted_ns is 0.5; expected an integer from -1152921504606846976 to 1152921504606846976");
  changed("/failure", {{"code", "boredom"}}, "failure.code is \"boredom\", which weft does not know");
  json t = trace(0, 2, {});
  t.erase("boot");
  put("less", t.dump());
  refused("less", "less: boot is missing\n");

  put("a.json", trace(0, 2, {}).dump());
  put("b.json", trace(0, 2, {}).dump());
  refused("a.json b.json", "b.json: of rank 0 of group \"world\", as a.json is; expected files of one job\n");
  put("b.json", trace(1, 3, {}).dump());
  refused("a.json b.json",
          "b.json: group \"world\" has 3 ranks, and in a.json it has 2; expected files of one job\n");
  std::filesystem::create_directory(folder / "nothing");
  refused("nothing", "nothing: no file in this folder ends in .json\n");
  const Outcome full = doctor("a.json --chrome /nowhere/at/all");
  EXPECT_EQ(full.status, 1);
  EXPECT_THAT(full.text, ::testing::ContainsRegex(
                             "weft: --chrome: cannot create /nowhere/at/all.tmp.[0-9a-f]+: No such file or "
                             "directory"));
  EXPECT_EQ(doctor("").status, 2);
}

// Depth, size and kind of file are bounded, and nothing is said twice.
TEST_F(DoctorTrace, HostileFilesAreRefusedByName) {
  const auto refused = [&](const std::string& name, const std::string& text) {
    const Outcome o = doctor(name);
    EXPECT_EQ(o.status, 2) << name;
    EXPECT_EQ(o.text, "weft: " + name + ": " + text + "\n");
  };
  put("deep", std::string(100'000, '['));
  refused("deep", "no trace, for it nests deeper than 32 levels");
  put("twice", "{\"weft_trace\": 1, \"weft_trace\": 2}");
  refused("twice", "no trace, for it has the key \"weft_trace\" twice");
  put("number", "{\"weft_trace\": 1e999}");
  refused("number", "no trace, for it has a number that is too large for JSON's readers");
  put("large", "");
  std::filesystem::resize_file(folder / "large", (std::size_t{64} << 20) + 1);
  refused("large", "has more than 67108864 bytes");
  ASSERT_EQ(::mkfifo((folder / "fifo.json").c_str(), 0600), 0);
  refused("fifo.json", "is not a regular file (it is a FIFO)");
  refused("/dev/zero", "is not a regular file (it is a character device)");
  json t = trace(0, 2, {call("barrier", 0, 0)});
  t["calls"][0]["posted_ns"] = 1e300;
  put("float", t.dump());
  refused(
      "float",
      "calls[0].posted_ns is 1e+300; expected an integer from -1152921504606846976 to 1152921504606846976");
}

// For any contents of a file the result is a report, or an error that names the file.
TEST_F(DoctorTrace, DamagedFilesAreReportedOrRefused) {
  json whole = trace(0, 2, {call("barrier", 0, 0), call("all_reduce", 1, 1, "pending")});
  whole["failure"] = {{"code", "timeout"}, {"text", "late"}, {"noticed_ns", 7}};
  const std::string text = whole.dump();
  put("other.json", trace(1, 2, {call("barrier", 0, 5)}).dump());
  std::mt19937 random(5);
  const auto below = [&](std::size_t n) {
    return std::uniform_int_distribution<std::size_t>(0, n - 1)(random);
  };
  int refused = 0;
  for (int k = 0; k < 150; ++k) {
    std::string damaged = text;
    for (std::size_t i = 1 + below(3); i > 0; --i) {
      const std::size_t at = below(damaged.size());
      switch (below(5)) {
        case 0: damaged[at] = static_cast<char>(below(256)); break;
        case 1: damaged.resize(at + 1); break;
        case 2: damaged.erase(at, 1 + below(20)); break;
        case 3: damaged.insert(at, "9999999999"); break;
        default: damaged.insert(at, damaged.substr(below(damaged.size()), below(60)));
      }
    }
    put("damaged.json", damaged);
    const Outcome o = doctor("damaged.json other.json");
    ASSERT_TRUE(o.status == 0 || o.status == 2) << o.status << "\n" << o.text << "\n" << damaged;
    if (o.status == 2) {
      ++refused;
      EXPECT_THAT(o.text, HasSubstr("damaged.json: "));
    }
  }
  EXPECT_GT(refused, 50);
  EXPECT_LT(refused, 150);
}

}  // namespace
}  // namespace weft::test::trace_test
