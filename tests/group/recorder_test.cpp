// The trace of a group's calls, read back as JSON.
#include "group/trace/recorder.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "support/recording_backend.hpp"
#include "support/run_ranks.hpp"
#include "weft/base/view.hpp"

namespace weft::test::recorder_test {
namespace {

using nlohmann::json;
using namespace std::chrono_literals;

class Trace : public testing::Test {
 protected:
  ProcessGroup make(const std::string& name = "x") {
    Membership m;
    m.store = make_local_store();
    m.rank = 1;
    m.size = 3;
    m.name = name;
    return ProcessGroup::create(context, recording.factory(), m);
  }

  Context context;
  Recording recording;
  std::vector<float> a = std::vector<float>(12), b = std::vector<float>(12);
};

TEST_F(Trace, EveryCallWithWhatItWas) {
  ProcessGroup g = make();
  g.all_reduce(view(a), view(b), {.op = ReduceOp::max}).wait();
  g.broadcast(view(a), view(b), 2).wait();
  g.barrier().wait();
  g.send(view(a.data(), 5), 0).wait();
  g.all_gather(view(a.data(), 4), view(b)).wait();
  const json trace = json::parse(g.trace_json());
  EXPECT_EQ(trace["group"], "x");
  EXPECT_EQ(trace["rank"], 1);
  EXPECT_EQ(trace["size"], 3);
  const json& calls = trace["calls"];
  ASSERT_EQ(calls.size(), 5u);
  EXPECT_EQ(calls[0]["op"], "all_reduce");
  EXPECT_EQ(calls[0]["reduce"], "max");
  EXPECT_EQ(calls[0]["dtype"], "f32");
  EXPECT_EQ(calls[0]["count"], 12);
  EXPECT_EQ(calls[0]["call"], 0);
  EXPECT_FALSE(calls[0].contains("root") || calls[0].contains("peer"));
  EXPECT_EQ(calls[1]["op"], "broadcast");
  EXPECT_EQ(calls[1]["root"], 2);
  EXPECT_FALSE(calls[1].contains("reduce"));
  EXPECT_EQ(calls[2]["op"], "barrier");
  EXPECT_EQ(calls[2]["count"], 0);
  EXPECT_EQ(calls[3]["op"], "send");
  EXPECT_EQ(calls[3]["peer"], 0);
  EXPECT_EQ(calls[3]["call"], 0);
  EXPECT_EQ(calls[4]["count"], 12);
  EXPECT_EQ(calls[4]["call"], 3);
  std::int64_t before = 0;
  for (const json& c : calls) {
    EXPECT_EQ(c["state"], "done");
    EXPECT_GE(c["posted_ns"].get<std::int64_t>(), before);
    before = c["posted_ns"];
  }
}

TEST_F(Trace, AnEmptyOneParses) { EXPECT_TRUE(json::parse(make().trace_json())["calls"].empty()); }

TEST_F(Trace, TheLast1024OldestFirst) {
  ProcessGroup g = make();
  for (int k = 0; k < 3000; ++k) g.barrier().wait();
  const json calls = json::parse(g.trace_json())["calls"];
  ASSERT_EQ(calls.size(), 1024u);
  for (std::size_t i = 0; i < calls.size(); ++i) ASSERT_EQ(calls[i]["call"], 3000 - 1024 + i);
}

TEST_F(Trace, States) {
  ProcessGroup g = make();
  g.barrier().wait();
  recording.decide({.kind = Fate::never});
  Work w = g.all_reduce(view(a), view(a));
  EXPECT_FALSE(w.wait_for(20ms));
  const json pending = json::parse(g.trace_json())["calls"];
  EXPECT_EQ(pending[0]["state"], "done");
  EXPECT_EQ(pending[1]["state"], "pending");
  EXPECT_EQ(pending[1]["finished_ns"], 0);
  g.abort("over");
  EXPECT_EQ(error_of([&] { w.wait(); }).code(), ErrorCode::aborted);
  const json failed = json::parse(g.trace_json())["calls"];
  EXPECT_EQ(failed[0]["state"], "done");
  EXPECT_EQ(failed[1]["state"], "failed");
  EXPECT_GT(failed[1]["finished_ns"].get<std::int64_t>(),
            failed[1]["posted_ns"].get<std::int64_t>() + 15'000'000);
}

// A call may still be pending while its entry is reused for a later call. The entry then has the state of the
// later call.
TEST_F(Trace, ACallThatOutlivesItsEntryLeavesTheNextAlone) {
  ProcessGroup g = make();
  recording.decide(
      [](const OpState& s) { return Fate{.kind = s.op == Op::recv ? Fate::never : Fate::finish}; });
  Work old = g.recv(view(a), 0);
  for (int k = 0; k < 1023; ++k) g.barrier().wait();
  Work pending = g.recv(view(b), 0);  // takes the entry of `old`
  g.abort("over");
  EXPECT_EQ(error_of([&] { old.wait(); }).code(), ErrorCode::aborted);
  EXPECT_EQ(error_of([&] { pending.wait(); }).code(), ErrorCode::aborted);
  ProcessGroup h = make();
  Work first = h.recv(view(a), 0);
  for (int k = 0; k < 1030; ++k) h.barrier().wait();
  h.abort("over");
  EXPECT_EQ(error_of([&] { first.wait(); }).code(), ErrorCode::aborted);
  const json calls = json::parse(h.trace_json())["calls"];
  ASSERT_EQ(calls.size(), 1024u);
  for (const json& c : calls) ASSERT_EQ(c["state"], "done");
}

// The fields by which a reader aligns the traces of ranks, and the failure.
TEST_F(Trace, ClocksAndTheFailure) {
  const auto nanoseconds = [](auto t) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(t.time_since_epoch()).count();
  };
  const std::int64_t monotonic = nanoseconds(Clock::now()),
                     real = nanoseconds(std::chrono::system_clock::now());
  ProcessGroup g = make();
  g.barrier().wait();
  const json well = json::parse(g.trace_json());
  EXPECT_GE(well["began_monotonic_ns"].get<std::int64_t>(), monotonic);
  EXPECT_LT(well["began_monotonic_ns"].get<std::int64_t>(), nanoseconds(Clock::now()));
  EXPECT_LT(std::abs(well["began_realtime_ns"].get<std::int64_t>() - real), 30'000'000'000);
  EXPECT_GE(well["taken_ns"].get<std::int64_t>(), well["calls"][0]["posted_ns"].get<std::int64_t>());
  EXPECT_EQ(well["process"], ::getpid());
  EXPECT_EQ(well["backend"], "recording");
  EXPECT_EQ(well["id"], "weft/x#1");
  EXPECT_EQ(well["forgotten"], 0);
  EXPECT_FALSE(well.contains("failure"));
  recording.decide({.kind = Fate::never});
  Work w = g.all_reduce(view(a), view(a));
  recording.lose({.code = ErrorCode::peer_lost,
                  .text = "rank 0 \"went\"",
                  .op = Op::all_reduce,
                  .call = 1,
                  .ranks = {0, 2}});
  EXPECT_EQ(error_of([&] { w.wait(); }).code(), ErrorCode::peer_lost);
  const json failure = json::parse(g.trace_json())["failure"];
  EXPECT_EQ(failure["code"], "peer_lost");
  EXPECT_EQ(failure["op"], "all_reduce");
  EXPECT_EQ(failure["call"], 1);
  EXPECT_EQ(failure["ranks"], json({0, 2}));
  EXPECT_EQ(failure["text"], "rank 0 \"went\"");
  EXPECT_GT(failure["noticed_ns"].get<std::int64_t>(), 0);
  g.abort("later");
  EXPECT_EQ(json::parse(g.trace_json())["failure"], failure);  // the first counts
}

// Chrome's viewers show one process with a row for the group, and more where calls overlap.
TEST_F(Trace, ChromesFormat) {
  ProcessGroup g = make("tp \"x\"");
  g.barrier().wait();
  recording.decide({.kind = Fate::never});
  Work first = g.all_reduce(view(a), view(a), {.op = ReduceOp::max});
  Work second = g.recv(view(b), 2);
  EXPECT_FALSE(first.wait_for(30ms));
  const json trace = json::parse(g.trace_chrome());
  std::vector<json> processes, rows, calls;
  for (const json& e : trace["traceEvents"])
    (e["ph"] == "X" ? calls : e["name"] == "thread_name" ? rows : processes).push_back(e);
  ASSERT_EQ(processes.size(), 2u);
  EXPECT_EQ(processes[0]["name"], "process_name");
  EXPECT_THAT(processes[0]["args"]["name"].get<std::string>(),
              testing::MatchesRegex("rank 1 \\(.*, process " + std::to_string(::getpid()) + "\\)"));
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0]["args"]["name"], "tp \"x\", rank 1 of 3");
  ASSERT_EQ(calls.size(), 3u);
  const std::int64_t now = Clock::now().time_since_epoch().count() / 1000;
  for (const json& c : calls) {
    EXPECT_EQ(c["pid"], processes[0]["pid"]);
    EXPECT_LE(c["ts"].get<double>(), static_cast<double>(now));
    EXPECT_GT(c["ts"].get<double>(), static_cast<double>(now) - 60e6);
  }
  EXPECT_EQ(calls[0]["name"], "barrier");
  EXPECT_EQ(calls[0]["args"]["state"], "done");
  EXPECT_EQ(calls[1]["name"], "all_reduce");
  EXPECT_EQ(calls[1]["args"]["state"], "pending");
  EXPECT_EQ(calls[1]["args"]["reduce"], "max");
  EXPECT_EQ(calls[1]["args"]["count"], 12);
  EXPECT_EQ(calls[1]["args"]["call"], 1);
  EXPECT_GE(calls[1]["dur"].get<double>(), 30e3);  // until now
  EXPECT_EQ(calls[2]["args"]["peer"], 2);
  EXPECT_EQ(calls[0]["tid"], calls[1]["tid"]);
  EXPECT_NE(calls[1]["tid"], calls[2]["tid"]);  // at the same time
  g.abort("over");
  EXPECT_EQ(error_of([&] { first.wait(); }).code(), ErrorCode::aborted);
  EXPECT_EQ(error_of([&] { second.wait(); }).code(), ErrorCode::aborted);
  const json failed = json::parse(g.trace_chrome())["traceEvents"].back();
  EXPECT_EQ(failed["ph"], "i");
  EXPECT_EQ(failed["name"], "aborted");
  EXPECT_EQ(failed["args"]["text"], "aborted by rank 1: over");
}

TEST_F(Trace, NamesAreEscaped) {
  EXPECT_EQ(json::parse(make("a \"b\"\\c").trace_json())["group"], "a \"b\"\\c");
  EXPECT_EQ(json::parse(make("line\nbreak\ttab").trace_json())["group"], "line?break?tab");
  EXPECT_EQ(json::parse(make("größe").trace_json())["group"], "größe");
  EXPECT_EQ(json::parse(make("no \xff text \xc3").trace_json())["group"], "no ? text ?");
  EXPECT_EQ(json::parse(make("\xe2\x82 \xed\xa0\x80 \xf0\x9f\xa7\xb5").trace_chrome())["traceEvents"].size(),
            3u);
}

TEST_F(Trace, MayBeReadWhileCallsAreMade) {
  ProcessGroup g = make();
  std::thread reader([&] {
    for (int k = 0; k < 20; ++k) EXPECT_LE(json::parse(g.trace_json())["calls"].size(), 1024u);
  });
  for (int k = 0; k < 5000; ++k) g.barrier().wait();
  reader.join();
}

}  // namespace
}  // namespace weft::test::recorder_test
