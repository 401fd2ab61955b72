// The trace of a group's calls, read back as JSON.
#include "backends/recorder.hpp"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "support/recording_backend.hpp"
#include "support/run_ranks.hpp"
#include "weft/base/view.hpp"

namespace weft::test {
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

// A call may be pending while its entry is used again for a later one, whose state is its own.
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

TEST_F(Trace, NamesAreEscaped) {
  EXPECT_EQ(json::parse(make("a \"b\"\\c").trace_json())["group"], "a \"b\"\\c");
  EXPECT_EQ(json::parse(make("line\nbreak\ttab").trace_json())["group"], "line?break?tab");
  EXPECT_EQ(json::parse(make("größe").trace_json())["group"], "größe");
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
}  // namespace weft::test
