// Programs of `weft check` as text: a drawn program is read back, and a foreign program is refused if it
// could not be run.
#include "program.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "runner.hpp"
#include "shrink.hpp"
#include "support/errors.hpp"
#include "verdict.hpp"
#include "weft/backends/plugin.hpp"

namespace weft::check::program_test {
namespace {

using nlohmann::json;

Range range(const char* backend, bool faults) {
  Range r;
  r.backend = backend;
  r.traits = *known_traits(backend);
  r.ranks = {1, 2, 3, 5, kMostRanks};
  r.most = 1 << 24;
  r.faults = faults;
  return r;
}

TEST(Program, IsReadAsItIsWritten) {
  for (const char* backend : {"shm", "gloo"})
    for (const bool faults : {false, true})
      for (std::uint64_t i = 0; i < 200; ++i) {
        const std::string text = encode(draw(17, i, range(backend, faults)));
        ASSERT_EQ(test::error_text([&] { decode(text); }), "no error") << text;
        ASSERT_EQ(encode(decode(text)), text);
      }
}

TEST(Program, StaysOneThatCanBeRunWhileItIsMadeSmaller) {
  for (std::uint64_t i = 0; i < 30; ++i) {
    const auto runs = [](const Program& p) {
      const std::string error = test::error_text([&] { decode(encode(p)); });
      EXPECT_EQ(error, "no error") << describe(p);
      return error == "no error";
    };
    runs(shrink(draw(17, i, range("shm", true)), runs, 40));
  }
}

TEST(Program, WhatCannotBeRunIsRefused) {
  Program p;
  for (std::uint64_t i = 0; p.groups.size() < 2; ++i) p = draw(17, i, range("shm", false));
  const json sound = json::parse(encode(p));
  const std::string start = "bad_argument: check: not a program: ";
  const auto refused = [&](const char* path, const json& value, const std::string& why) {
    json changed = sound;
    changed[json::json_pointer(path)] = value;
    EXPECT_EQ(test::error_text([&] { decode(changed.dump()); }), start + why);
  };
  const auto is = [](const char* where, const char* what, auto min, auto max) {
    return fmt::format("{} is {}; expected an integer from {} to {}", where, what, min, max);
  };
  refused("/seed", -1, "seed is -1; expected an integer from 0 to 2^64 - 1");
  refused("/homes", json::array(), "homes has 0 ranks; expected 1 to 8");
  refused("/homes", std::vector<int>(9), "homes has 9 ranks; expected 1 to 8");
  refused("/homes/0", -1, is("homes[0]", "-1", 0, 0));
  refused("/homes/0", 1, is("homes[0]", "1", 0, 0));  // no process 0
  refused("/in_flight", 0, is("in_flight", "0", 1, 1000));
  refused("/helper", 1, "helper is 1; expected true or false");
  refused("/path", 1, "path is 1; expected a text");
  refused("/heartbeats", "yes", "heartbeats is \"yes\"; expected true or false");
  EXPECT_EQ(test::error_text([] { decode("{"); }), start + "it is no JSON (byte 2 of its 1)");
  EXPECT_EQ(test::error_text([] { decode("[]"); }), start + "it is no object");
  EXPECT_EQ(test::error_text([] { decode(std::string(100'000, '[')); }),
            start + "it nests deeper than 8 levels");
  EXPECT_EQ(test::error_text([] { decode("{\"seed\":1,\"seed\":2}"); }),
            start + "it has the key \"seed\" twice");
  EXPECT_EQ(test::error_text([] { decode(std::string(2 << 20, ' ')); }),
            start + "it has 2097152 bytes; at most 1048576 are allowed");
}

TEST(Program, GroupsThatCannotBeMadeAreRefused) {
  Program p;
  p.homes = {0, 1, 2};
  p.groups = {{.ranks = {0, 1, 2}},
              {.how = GroupPlan::How::split, .before = 1, .ranks = {0, 2}},
              {.how = GroupPlan::How::split, .before = 1, .joined = true, .ranks = {1}},
              {.how = GroupPlan::How::duplicate, .parent = 1, .before = 1, .ranks = {0, 2}}};
  p.steps.resize(2);
  const std::string start = "bad_argument: check: not a program: ";
  const auto refused = [&](const auto& change, const std::string& why) {
    Program q = p;
    change(q);
    EXPECT_EQ(test::error_text([&] { decode(encode(q)); }), start + why);
  };
  EXPECT_EQ(test::error_text([&] { decode(encode(p)); }), "no error");
  refused([](Program& q) { q.groups.clear(); }, "groups is empty; expected the group of all ranks");
  refused(
      [](Program& q) {
        q.groups[0].ranks = {0, 2, 1};
      },
      "groups[0].ranks is not all 3 ranks in their order");
  refused([](Program& q) { q.groups[1].parent = 1; },
          "groups[1].parent is 1; expected an integer from 0 to 0");
  refused([](Program& q) { q.groups[1].how = GroupPlan::How::world; },
          "groups[1].how is 0; expected an integer from 1 to 3");
  refused([](Program& q) { q.groups[1].before = 3; },
          "groups[1].before is 3; expected an integer from 0 to 2");
  refused([](Program& q) { q.groups[3].before = 0; },
          "groups[3].before is 0; expected an integer from 1 to 2");
  refused([](Program& q) { q.groups[1].ranks = {7}; },
          "groups[1].ranks has rank 7, which is not in its parent");
  refused([](Program& q) { q.groups[1].ranks = {0, 0}; }, "groups[1].ranks has rank 0 twice");
  refused([](Program& q) { q.groups[1].ranks = {}; },
          "groups[1].ranks is empty; expected the ranks of a group");
  refused([](Program& q) { q.groups[2].ranks = {2}; },
          "groups[2].ranks has rank 2, which has the color before it");
  refused([](Program& q) { q.groups[1].joined = true; },
          "groups[1].joined is true, but the group before it is no other color of the same split");
  refused([](Program& q) { q.groups.insert(q.groups.begin() + 3, q.groups[2]); },
          "groups[3].joined is true for a third color of one split");
  refused([](Program& q) { q.groups[3].ranks = {0}; },
          "groups[3].ranks is not what its parent has, of which it is a duplicate");
  refused([](Program& q) { q.steps[0].group = 1; }, "steps[0].group is 1, which is made before step 1 only");
  refused([](Program& q) { q.steps[0].group = 4; }, "steps[0].group is 4; expected an integer from 0 to 3");
}

TEST(Program, StepsAndFaultsThatCannotBeRunAreRefused) {
  Program p;
  p.homes = {0, 1, 2};
  p.groups = {{.ranks = {0, 1, 2}}, {.how = GroupPlan::How::subgroup, .ranks = {2}}};
  p.steps.resize(2);
  p.steps[0].op = Op::all_reduce;
  p.steps[1].group = 1;
  const json sound = json::parse(encode(p));
  const std::string start = "bad_argument: check: not a program: ";
  const auto refused = [&](const json& patch, const std::string& why) {
    EXPECT_EQ(test::error_text([&] { decode(sound.patch(patch).dump()); }), start + why);
  };
  const auto put = [](const char* path, const json& value) {
    return json::array({{{"op", "add"}, {"path", path}, {"value", value}}});
  };
  EXPECT_EQ(test::error_text([&] { decode(sound.dump()); }), "no error");
  // Several starts if nobody is struck, of a collective that is submitted alone.
  const auto starts = [&](const json& patch) {
    return decode(sound.patch(put("/steps/0/starts", 3)).patch(patch).dump()).steps[0].starts;
  };
  Program calm = p;
  calm.fault.kind = FaultKind::none;
  EXPECT_EQ(starts(put("/fault", json::parse(encode(calm))["fault"])), 3);
  EXPECT_EQ(starts(put("/steps/0/op", static_cast<int>(Op::send))), 1);
  EXPECT_EQ(starts(put("/steps/0/op", static_cast<int>(Op::all_reduce))),
            p.fault.kind == FaultKind::none ? 3 : 1);
  refused(put("/steps/0/group", 1e300), "steps[0].group is 1e+300; expected an integer from 0 to 1");
  refused(put("/steps/0/op", 0), "steps[0].op is 0; expected an integer from 1 to 16");
  refused(put("/steps/0/op", 17), "steps[0].op is 17; expected an integer from 1 to 16");
  refused(put("/steps/0/count", 8.7), "steps[0].count is 8.7; expected an integer from 0 to 16777216");
  refused(put("/steps/0/dtype", "f31"), "steps[0].dtype is \"f31\", which weft does not know");
  refused(put("/steps/0/reduce", 13), "steps[0].reduce is 13; expected an integer from 0 to 12");
  refused(put("/steps/0/reduce", static_cast<int>(ReduceOp::Kind::bit_and)),
          "steps[0].reduce is bit_and of f32, which weft does not know");
  refused(put("/steps/0/scale", 1e30), "steps[0].scale is 1e+30; expected a number from -1000 to 1000");
  refused(put("/steps/0/root", 3), "steps[0].root is 3; expected an integer from 0 to 2");
  for (const int n : {0, 5})
    refused(put("/steps/0/starts", n),
            "steps[0].starts is " + std::to_string(n) + "; expected an integer from 1 to 4");
  refused(put("/steps/0/peer", -1), "steps[0].peer is -1; expected an integer from 0 to 2");
  refused(put("/steps/0/tag", 2147483648),
          "steps[0].tag is 2147483648; expected an integer from 0 to 2147483647");
  refused(put("/steps/0/counts", {1, 2, 3}),
          "steps[0].counts has 3 numbers; expected 0, for all_reduce of 3 ranks");
  refused(put("/steps/0/salt", 0.5), "steps[0].salt is 0.5; expected an integer from 0 to 2^64 - 1");
  refused(put("/steps/0/does", kDoesHere),
          fmt::format("steps[0].does is {}; expected an integer from 0 to {}", kDoesHere, kDoesHere - 1));
  refused(put("/steps/0/does", 2), "steps[0].op is 1; expected an integer from 0 to 0");
  refused(put("/ending", "well"), "ending is \"well\", which weft does not know");
  refused(put("/ends", 1), "ends is 1; expected true or false");
  json large = sound;
  for (int k = 0; k < 8; ++k)
    large["steps"].push_back(sound["steps"][0]), large["steps"].back()["count"] = 1 << 24;
  EXPECT_EQ(test::error_text([&] { decode(large.dump()); }),
            start + "steps move 402653184 elements; at most 268435456 are allowed");
  refused(put("/fault/kind", kFaultKinds),
          fmt::format("fault.kind is {}; expected an integer from 0 to {}", kFaultKinds, kFaultKinds - 1));
  refused(put("/fault/point", 6), "fault.point is 6; expected an integer from 0 to 5");
  refused(put("/fault/rank", 3), "fault.rank is 3; expected an integer from 0 to 2");
  refused(put("/fault/step", 2), "fault.step is 2; expected an integer from 0 to 1");
  refused(put("/fault", {{"kind", 1}, {"point", 0}, {"rank", 2}, {"step", 1}}),
          "fault.rank is 2, which has nobody beside it in group 1 of step 1");
  refused(put("/fault", {{"kind", 1}, {"point", 0}, {"rank", 0}, {"step", 1}}),
          "fault.rank is 0, which has nobody beside it in group 1 of step 1");
}

// A rank that had no processor explains a deadline that passed, but no other error: such a program is run
// again.
TEST(Verdict, ARankWithoutAProcessorMakesAProgramSlow) {
  Program p;
  p.homes = {0, 1, 2};
  p.groups = {{.ranks = {0, 1, 2}}};
  p.steps.resize(2);
  p.fault = {.kind = FaultKind::late, .point = FaultPoint::before_post, .rank = 2};
  Settings settings;
  settings.traits = *known_traits("shm");
  settings.deadline = std::chrono::seconds(1);
  const auto judged = [&](ErrorCode code, std::int64_t starved_ms) {
    const auto shared = std::make_unique<SharedReport>();
    shared->ran = true;
    for (int r = 0; r < 3; ++r) shared->ranks[r].phase.store(Phase::done);
    RankReport& rank = shared->ranks[0];
    rank.has_error = true;
    rank.code = code;
    rank.op = Op::barrier;
    rank.blamed_count = 1;
    rank.blamed[0] = 1;  // not the one that was late
    rank.text.set("of rank 1");
    shared->ranks[1].starved_ns = starved_ms * 1'000'000;
    return judge(p, settings, *shared);
  };
  const std::string wrong = "rank 0: the error does not name rank 2\n  its error: timeout: of rank 1";
  EXPECT_EQ(judged(ErrorCode::timeout, 499).complaint, wrong);
  EXPECT_FALSE(judged(ErrorCode::timeout, 499).slow);
  EXPECT_EQ(judged(ErrorCode::timeout, 501).complaint, wrong);
  EXPECT_TRUE(judged(ErrorCode::timeout, 501).slow);
  EXPECT_FALSE(judged(ErrorCode::mismatch, 501).slow);
}

TEST(Program, StepsThatAreNoCallsAreRefusedToo) {
  Program p;
  p.homes = {0, 1};
  p.groups = {{.ranks = {0, 1}}};
  p.steps.resize(kDoesHere - 1);
  for (Step& s : p.steps) s.op = Op::none;
  p.steps[0].does = Does::window;
  p.steps[0].count = 3;
  p.steps[0].counts = {2, 1};
  p.steps[0].window = {.before = 2, .after = 1};
  p.steps[1].does = Does::agreement;
  p.steps[2].does = Does::overlap;
  if (kDoesHere == kDoes) {
    p.steps.back().does = Does::gradients;
    p.steps.back().counts = {5, 0, 3};
  }
  const json sound = json::parse(encode(p));
  EXPECT_EQ(test::error_text([&] { decode(sound.dump()); }), "no error");
  const auto refused = [&](const char* path, const json& value, const std::string& why) {
    json changed = sound;
    changed[json::json_pointer(path)] = value;
    EXPECT_EQ(test::error_text([&] { decode(changed.dump()); }),
              "bad_argument: check: not a program: " + why);
  };
  const char* const window = "/steps/0/window/";
  const auto of = [&](const char* key) { return fmt::format("{}{}", window, key); };
  refused(of("before").c_str(), 3, "steps[0].window.before is 3; expected an integer from 0 to 2");
  refused(of("after").c_str(), -1, "steps[0].window.after is -1; expected an integer from 0 to 2");
  refused(of("edge").c_str(), 0, "steps[0].window.edge is 0; expected an integer from 1 to 5");
  refused(of("exchanges").c_str(), 0, "steps[0].window.exchanges is 0; expected an integer from 1 to 8");
  refused(of("fields").c_str(), 9, "steps[0].window.fields is 9; expected an integer from 1 to 8");
  refused("/steps/0/counts", {1}, "steps[0].counts has 1 numbers; expected 2, for window of 2 ranks");
  refused("/steps/0/counts", {0, 0},
          "steps[0].window.before is of a window on no rows; expected counts above 0");
  json truths = sound;
  truths["steps"][0]["dtype"] = "bool";
  truths["steps"][0]["window"]["adjoint"] = true;
  EXPECT_EQ(
      test::error_text([&] { decode(truths.dump()); }),
      "bad_argument: check: not a program: steps[0].window.adjoint is true for bool, which has no sums");
  refused("/steps/1/value", "mind", "steps[1].value is \"mind\", which weft does not know");
  refused("/steps/2/overlap", "none", "steps[2].overlap is \"none\", which weft does not know");
  if (kDoesHere < kDoes) return;
  refused("/steps/3/gradients/rounds", 9, "steps[3].gradients.rounds is 9; expected an integer from 1 to 8");
  refused("/steps/3/gradients/bytes", 0,
          "steps[3].gradients.bytes is 0; expected an integer from 1 to 16777216");
  refused("/steps/3/gradients/cut", 1, "steps[3].gradients.cut is 1; expected true or false");
  refused("/steps/3/gradients/at_once", 1, "steps[3].gradients.at_once is 1; expected true or false");
  json both = sound;
  both["steps"][3]["gradients"]["cut"] = true;
  both["steps"][3]["gradients"]["at_once"] = true;
  EXPECT_EQ(test::error_text([&] { decode(both.dump()); }),
            "bad_argument: check: not a program: steps[3].gradients.at_once is true of tensors that are cut");
  refused("/steps/3/counts", json::array(),
          "steps[3].counts has 0 numbers; expected 1 to 64, one for each tensor");
}

}  // namespace
}  // namespace weft::check::program_test
