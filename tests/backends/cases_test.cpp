// Runs tests/cases/*.txt, which tests/cases/README.md explains, over every backend that is built here: over
// shm with ranks as threads and as processes, over gloo, and, under mpirun, over the MPI that
// WEFT_TEST_BACKEND names.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <numeric>

#include "support/cases.hpp"
#include "support/run_ranks.hpp"
#include "support/sanitizers.hpp"
#include "support/values.hpp"
#include "weft/base/tensor.hpp"

namespace weft::test::cases_test {
namespace {

using testing::HasSubstr;

// ---- The buffers of one rank's call

class CaseBuffers {
 public:
  CaseBuffers(Context& context, const CaseRank& part, int rank) : part_(part), call_(*part.call) {
    const auto in_count = static_cast<std::int64_t>(part.in.size());
    const auto out_count = static_cast<std::int64_t>(part.out.size());
    if (!call_.in_place) {
      if (part.has_in) in_ = whole(context, in_count);
      if (part.has_out) out_ = whole(context, out_count);
    } else if (part.has_out && in_count < out_count) {  // `in` is this rank's block of `out`
      out_ = whole(context, out_count);
      in_ = out_->slice_flat(block(part.out_counts, part.out_offsets, rank, in_count), Shape{in_count});
    } else if (part.has_out && in_count > out_count) {  // `out` is this rank's block of `in`
      in_ = whole(context, in_count);
      out_ = in_->slice_flat(block(part.in_counts, part.in_offsets, rank, out_count), Shape{out_count});
    } else {
      in_ = whole(context, std::max(in_count, out_count));
      if (part.has_out) out_ = in_;
    }
    for (std::int64_t i = 0; i < in_count; ++i) store(*in_, i, part.in[static_cast<std::size_t>(i)]);
  }

  Call make() const {
    const ConstTensorView in = in_ ? ConstTensorView(*in_) : ConstTensorView{};
    const TensorView out = out_ ? TensorView(*out_) : TensorView{};
    const Blocks ins{part_.in_counts, part_.in_offsets}, outs{part_.out_counts, part_.out_offsets};
    const CallOptions o{.op = call_.reduce, .order = call_.order, .tag = call_.tag};
    switch (call_.op) {
      case Op::all_reduce: return call::all_reduce(in, out, o);
      case Op::scan: return call::scan(in, out, o);
      case Op::exscan: return call::exscan(in, out, o);
      case Op::reduce: return call::reduce(in, out, call_.root, o);
      case Op::broadcast: return call::broadcast(in, out, call_.root, o);
      case Op::all_gather: return call::all_gather(in, out, o);
      case Op::all_gather_v: return call::all_gather_v(in, out, outs, o);
      case Op::reduce_scatter: return call::reduce_scatter(in, out, o);
      case Op::reduce_scatter_v: return call::reduce_scatter_v(in, out, ins, o);
      case Op::gather: return call::gather(in, out, call_.root, o);
      case Op::scatter: return call::scatter(in, out, call_.root, o);
      case Op::all_to_all: return call::all_to_all(in, out, o);
      case Op::all_to_all_v: return call::all_to_all_v(in, out, ins, outs, o);
      case Op::send: return call::send(in, call_.peer, o);
      case Op::recv: return call::recv(out, call_.peer, o);
      case Op::barrier:
      case Op::exchange:
      case Op::wait_message:
      case Op::none: break;
    }
    return call::barrier();
  }

  void expect_results(const std::string& where) const {
    for (std::size_t i = 0; i < part_.out.size(); ++i) {
      if (!part_.out[i]) continue;
      const double expected = *part_.out[i], got = load(*out_, static_cast<std::int64_t>(i));
      const bool same = std::isnan(expected) ? std::isnan(got)
                                             : got == expected && std::signbit(got) == std::signbit(expected);
      EXPECT_TRUE(same) << where << "out[" << i << "] is " << got << "; expected " << expected;
    }
    if (call_.in_place || !in_) return;
    for (std::size_t i = 0; i < part_.in.size(); ++i) {
      const double got = load(*in_, static_cast<std::int64_t>(i));
      EXPECT_TRUE(got == part_.in[i] || std::isnan(got)) << where << "in[" << i << "] was changed to " << got;
    }
  }

 private:
  Tensor whole(Context& context, std::int64_t count) const {
    Tensor t(context, Shape{count}, call_.dtype);
    for (std::int64_t i = 0; i < count; ++i) store(t, i, kCaseUntouched);
    return t;
  }
  static std::int64_t block(const std::vector<std::int64_t>& counts, const std::vector<std::int64_t>& offsets,
                            int rank, std::int64_t equal) {
    if (!offsets.empty()) return offsets[static_cast<std::size_t>(rank)];
    if (counts.empty()) return rank * equal;
    return std::accumulate(counts.begin(), counts.begin() + rank, std::int64_t{0});
  }

  const CaseRank& part_;
  const CaseCall& call_;
  std::optional<Tensor> in_, out_;
};

void run_case(Rank& r, const Case& c) {
  const CaseRank& part = c.ranks[static_cast<std::size_t>(r.rank)];
  const std::string where = fmt::format("{}: case {}, rank {}: ", c.place, c.name, r.rank);
  ProcessGroup& g = r.group();
  if (part.call) {
    const CaseBuffers buffers(r.context, part, r.rank);
    const std::string said = error_text([&] {
      g.submit(buffers.make()).wait();
      return 0;
    });
    if (!part.error) {
      EXPECT_EQ(said, "no error") << where;
      if (said == "no error") buffers.expect_results(where);
    } else {
      const auto colon = part.error->find(": ");
      EXPECT_THAT(said, testing::StartsWith(part.error->substr(0, colon + 2))) << where;
      EXPECT_THAT(said, HasSubstr(part.error->substr(colon + 2))) << where;
      g.quiesce(std::chrono::seconds(10));  // before the buffers go
    }
  }
  // Once more, as a persistent call, if nothing is wrong on any rank.
  if (part.call && std::none_of(c.ranks.begin(), c.ranks.end(), [](const CaseRank& p) { return p.error; })) {
    const CaseBuffers buffers(r.context, part, r.rank);
    PersistentCall call = g.make(buffers.make());
    call.start().wait();
    buffers.expect_results(where + "started: ");
  } else if (part.error && part.error->starts_with("bad_argument")) {
    const CaseBuffers buffers(r.context, part, r.rank);
    EXPECT_THAT(error_text([&] {
                  g.make(buffers.make());
                  return 0;
                }),
                HasSubstr(part.error->substr(part.error->find(": ") + 2)))
        << where;
  }
  r.meet(fmt::format("end of {}", c.name));
}

// ---- Files and backends

std::vector<std::filesystem::path> case_files() {
  std::vector<std::filesystem::path> all;
  for (const auto& entry : std::filesystem::directory_iterator(WEFT_CASES))
    if (entry.path().extension() == ".txt") all.push_back(entry.path());
  std::sort(all.begin(), all.end());
  return all;
}

struct Setting {
  std::string backend;
  Ranks kind;
  std::filesystem::path file;
};
void PrintTo(const Setting& s, std::ostream* to) { *to << s.file.filename().string(); }

std::vector<Setting> settings() {
  std::vector<Setting> all;
  for (const auto& file : case_files()) {
    if (const char* const job = std::getenv("WEFT_TEST_BACKEND")) {
      all.push_back({job, Ranks::job, file});
      continue;
    }
    all.push_back({"shm", Ranks::threads, file});
    if (kProcesses) all.push_back({"shm", Ranks::processes, file});
    if (WEFT_HAVE_GLOO) all.push_back({"gloo", Ranks::threads, file});
  }
  return all;
}

bool fails_the_group(const Case& c) {
  return std::any_of(c.ranks.begin(), c.ranks.end(),
                     [](const CaseRank& r) { return r.error && r.error->starts_with("mismatch"); });
}

class Cases : public testing::TestWithParam<Setting> {};
INSTANTIATE_TEST_SUITE_P(Each, Cases, testing::ValuesIn(settings()), [](const auto& p) {
  const Setting& s = p.param;
  return s.kind == Ranks::job ? "job_" + s.file.stem().string()
                              : fmt::format("{}_{}_{}", s.backend, to_string(s.kind), s.file.stem().string());
});

TEST_P(Cases, GiveWhatTheySay) {
  const Setting& s = GetParam();
  RankOptions options;
  options.backend = s.backend;
  options.deadline = std::chrono::seconds(10);
  if (s.kind == Ranks::job)  // MPI_Init waits for every process of the job, though cases have fewer ranks
    run_ranks(
        s.kind, job_size(), [](Rank& r) { r.group().barrier().wait(); }, options);
  for (const Case& c : read_cases(s.file)) {
    const int n = static_cast<int>(c.ranks.size());
    // An MPI job in which a group has failed does not end well: mpi_test has failures in jobs of their own.
    if (s.kind == Ranks::job && (n > job_size() || fails_the_group(c))) continue;
    run_ranks(
        s.kind, n, [&](Rank& r) { run_case(r, c); }, options);
  }
}

// ---- The reader

std::string fault(const std::string& text) {
  try {
    read_cases(text, "a.txt");
  } catch (const std::exception& e) {
    return e.what();
  }
  return "no error";
}

TEST(CaseFiles, AreReadWithCommentsAndRepetitions) {
  const std::vector<Case> all = read_cases(
      "# all\n\ncase one # here\nranks 2\ncall reduce f64 max root 1 canonical\nin 0: 1 2x3\nin 1: -0 nan "
      "inf 4\n"
      "out 1: ? 5 6 7\ncase two\nranks 3\ncall 0: send i8 to 2 tag 7\ncall 2: recv i8 from 0 tag 7\n"
      "error 0,2: mismatch: rank #1\n",
      "a.txt");
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0].place, "a.txt:3");
  EXPECT_EQ(all[0].name, "one");
  ASSERT_EQ(all[0].ranks.size(), 2u);
  EXPECT_EQ(all[0].ranks[0].in, (std::vector<double>{1, 2, 2, 2}));
  EXPECT_EQ(all[0].ranks[1].call->root, 1);
  EXPECT_EQ(all[0].ranks[1].call->order, Order::canonical);
  EXPECT_EQ(all[0].ranks[1].call->reduce, ReduceOp::max);
  EXPECT_FALSE(all[0].ranks[0].has_out);
  EXPECT_FALSE(all[0].ranks[1].out[0]);
  EXPECT_EQ(all[0].ranks[1].out[3], 7);
  EXPECT_FALSE(all[1].ranks[1].call);
  EXPECT_EQ(all[1].ranks[2].call->peer, 0);
  EXPECT_EQ(all[1].ranks[2].call->tag, 7);
  EXPECT_EQ(all[1].ranks[2].error, "mismatch: rank #1");
  EXPECT_FALSE(all[1].ranks[1].error);
}

TEST(CaseFiles, BrokenOnesAreToldWithFileAndLine) {
  EXPECT_EQ(fault("# nothing\n"), "a.txt:1: no case; expected \"case NAME\"");
  EXPECT_EQ(fault("ranks 2\n"), "a.txt:1: \"ranks\" before the first case");
  EXPECT_EQ(fault("case\n"), "a.txt:1: expected \"case NAME\", where NAME is one word");
  EXPECT_EQ(fault("case a\nranks 1\ncall barrier\ncase a\n"), "a.txt:4: there are two cases \"a\"");
  EXPECT_EQ(fault("case a\ncall barrier\n"), "a.txt:2: \"call\" before \"ranks N\"");
  EXPECT_EQ(fault("case a\nranks 9\n"), "a.txt:2: expected \"ranks N\", where N is from 1 to 8");
  EXPECT_EQ(fault("case a\nranks 2\n\nin 0: 1\n"), "a.txt:4: case a without a call");
  const std::string head = "case a\nranks 2\n";
  EXPECT_EQ(fault(head + "call allreduce f32\n"), "a.txt:3: there is no operation \"allreduce\"");
  EXPECT_EQ(fault(head + "call all_reduce\n"), "a.txt:3: all_reduce without a dtype");
  EXPECT_EQ(fault(head + "call all_reduce f31\n"), "a.txt:3: there is no dtype \"f31\"");
  EXPECT_EQ(fault(head + "call all_reduce f32 plus\n"), "a.txt:3: there is no reduction or option \"plus\"");
  EXPECT_EQ(fault(head + "call all_reduce f32 user\n"), "a.txt:3: a case cannot have the reduction user");
  EXPECT_EQ(fault(head + "call reduce f32 root x\n"),
            "a.txt:3: root is \"x\"; expected an integer, 0 or more");
  EXPECT_EQ(fault(head + "in 2: 1\n"), "a.txt:3: there is no rank 2; the case has 2");
  EXPECT_EQ(fault(head + "in 0: 1 2y\n"), "a.txt:3: \"2y\" is no number");
  EXPECT_EQ(fault(head + "in 0: ?\n"), "a.txt:3: \"?\" stands in out alone");
  EXPECT_EQ(fault(head + "in_counts 1\n"), "a.txt:3: 1 numbers; expected one for each of 2 ranks");
  EXPECT_EQ(fault(head + "error mismatch\n"), "a.txt:3: expected \"error CODE: TEXT\"");
  EXPECT_EQ(
      fault(head + "inn 0: 1\n"),
      "a.txt:3: \"inn\"; expected case, ranks, call, in, out, error, in_counts, out_counts, in_offsets or "
      "out_offsets");
}

TEST(CaseFiles, ThereAreThirtyOfThemOrMore) {
  std::size_t count = 0;
  for (const auto& file : case_files()) count += read_cases(file).size();
  EXPECT_GE(count, 30u);
}

}  // namespace
}  // namespace weft::test::cases_test
