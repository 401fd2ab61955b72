// Tests what happens if a transport's blocking function throws an exception.
#include "weft/backends/blocking.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include "support/run_ranks.hpp"
#include "weft/base/view.hpp"

namespace weft::test::blocking_test {
namespace {

using testing::HasSubstr;

struct Silent : std::exception {
  const char* what() const noexcept override { return ""; }
};
struct Null : std::exception {
  const char* what() const noexcept override { return nullptr; }
};

// Its collectives throw.
class Throwing final : public BlockingBackend {
 public:
  Throwing(const GroupInit& b, std::function<void()> thrower)
      : BlockingBackend(b), thrower_(std::move(thrower)) {
    traits_.name = "throwing";
    traits_.ops = op_bit(Op::all_reduce) | op_bit(Op::send) | op_bit(Op::recv);
    traits_.dtypes = dtype_bit(DType::f32);
    traits_.reduces.fill(dtype_bit(DType::f32));
    traits_.progress = ProgressStyle::threaded;
    begin();
  }
  ~Throwing() override { end(); }
  const Traits& traits() const noexcept override { return traits_; }
  std::vector<int> missing(const OpState&, std::string&) noexcept override { return {}; }

 private:
  void run(const OpState&) override { thrower_(); }
  void start(OpState& s) noexcept override { finished(s); }
  void interrupt() noexcept override {}

  const std::function<void()> thrower_;
  Traits traits_;
};

struct Case {
  const char* name;
  std::function<void()> thrower;
  const char* said;
};

// The calls of all groups wait at the same time: each waits for a better reason before it reports its own.
TEST(Blocking, WhateverIsThrownFailsTheCall) {
  const std::vector<Case> cases{
      {"text", [] { throw std::runtime_error("broken pipe"); }, "all_reduce: broken pipe"},
      {"empty", [] { throw std::runtime_error(""); }, "all_reduce: an exception of type std::runtime_error"},
      {"silent", [] { throw Silent(); }, "Silent"},
      {"null", [] { throw Null(); }, "Null"},
      {"int", [] { throw 42; }, "all_reduce: an exception of type int"},
      {"error", [] { throw Error(ErrorCode::unsupported, ""); }, "group \"error\""},
  };
  run_ranks(Ranks::threads, 2, [&](Rank& r) {
    std::vector<ProcessGroup> groups;
    for (const Case& c : cases)
      groups.push_back(ProcessGroup::create(
          r.context, [&](const GroupInit& b) { return std::make_unique<Throwing>(b, c.thrower); },
          r.membership(c.name)));
    std::vector<float> in(4, 1), out(4 * cases.size());
    std::vector<Work> works;
    for (std::size_t i = 0; i < cases.size(); ++i)
      works.push_back(groups[i].all_reduce(view(in), view(out.data() + 4 * i, 4)));
    for (std::size_t i = 0; i < cases.size(); ++i) {
      const Error e = error_of([&] { works[i].wait(); });
      EXPECT_EQ(e.op(), Op::all_reduce) << cases[i].name << ": " << e.what();
      EXPECT_EQ(e.code(), i + 1 == cases.size() ? ErrorCode::unsupported : ErrorCode::system)
          << cases[i].name;
      EXPECT_THAT(e.what(), HasSubstr(cases[i].said));
    }
    r.meet("end");  // nobody leaves while another reads the reason
  });
}

}  // namespace
}  // namespace weft::test::blocking_test
