// How much of an all_reduce hides behind computation: the call is posted, the rank computes for about as long
// as the call takes alone, and then waits for it.
//
//   hidden = (t_comm + t_comp - t_both) / min(t_comm, t_comp)
//
// t_comm: post and wait, with nothing between them; t_comp: the computation alone; t_both: post, compute,
// wait. 100 % means that the shorter of the two costs nothing, and 0 % that they run one after the other;
// below 0 % they slow each other down. All times are medians, with all ranks at once.
//
// There are two cases, each with Progress::thread (a helper thread advances the call) and without it (the
// waiting thread advances the call). `busy`: the computation occupies the rank's core, so helper and
// computation share this core unless there are more cores than ranks. `free`: the computation runs elsewhere
// (a device, other hosts), was started just before the call was posted, and leaves the core to the helper.
// Run the program with --bind share, so that each helper has its rank's cores to itself, and without a
// real-time policy: under such a policy helper and computation do not share a core, but each keeps it as long
// as it runs.
#include <sys/prctl.h>

#include <chrono>
#include <thread>

#include "harness.hpp"

namespace weft::bench {
namespace {

using Clock = std::chrono::steady_clock;

double us_since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count() * 1e6; }

// Computes in registers: this needs a core but no memory.
double compute(std::int64_t rounds) {
  double a = 1.0, b = 1.1, c = 1.2, d = 1.3;
  for (std::int64_t k = 0; k < rounds; ++k) {
    a = a * 0.999 + 0.001;
    b = b * 0.999 + 0.001;
    c = c * 0.999 + 0.001;
    d = d * 0.999 + 0.001;
  }
  return a + b + c + d;
}

volatile double sink;

// The median by rank 0's clock, while every rank runs.
double median(const std::function<void()>& run, const Agree& agree, double seconds) {
  std::vector<double> us;
  const auto begin = Clock::now();
  do {
    for (int k = 0; k < 16; ++k) {
      const auto start = Clock::now();
      run();
      us.push_back(us_since(start));
    }
  } while (agree(us_since(begin) < seconds * 1e6) != 0);
  return times_of(us).median_us;
}

struct Groups {
  ProcessGroup caller, helped;
  explicit Groups(RankOfBench& rank) {
    Membership m = rank.membership("caller");
    caller = ProcessGroup::create(rank.context, rank.spec.backend, m);
    m = rank.membership("helped");
    m.progress = Progress::thread;
    helped = ProcessGroup::create(rank.context, rank.spec.backend, m);
  }
};

Numbers overlap(RankOfBench& rank, Groups& groups, const Case& c, const std::string& memory,
                const Agree& agree, double seconds) {
  const auto buffers = std::make_shared<Buffers>(c, rank.group.rank(), allocator(rank.context, memory));
  const auto count = Dims::line(c.block()), step = Dims::line(1);
  const ConstTensorView in{buffers->in(0), c.dtype, {}, count, step};
  const TensorView out{buffers->out(0), c.dtype, {}, count, step};
  Numbers numbers;
  ::prctl(PR_SET_TIMERSLACK, 1000);  // ns: sleeps end when they should
  for (ProcessGroup* group : {&groups.helped, &groups.caller}) {
    const std::string who = group == &groups.helped ? "thread" : "caller";
    const Prepared p = prepare(buffers, [&](std::byte*, std::byte*) { group->all_reduce(in, out).wait(); });
    const double part = seconds / 8;
    measure(p, agree, part);  // verified and warm
    const double comm = median(p.run, agree, part);
    auto start = Clock::now();
    sink = compute(100000);
    const auto rounds = agree(static_cast<std::int64_t>(100000 * comm / us_since(start)));
    const auto pause = std::chrono::nanoseconds(agree(static_cast<std::int64_t>(comm * 1e3)));
    for (const bool busy : {true, false}) {
      // The computation elsewhere has been running since `begun`, whatever this core does meanwhile.
      const auto work = [&](Clock::time_point begun) {
        if (busy) {
          sink = compute(rounds);
        } else {
          std::this_thread::sleep_until(begun + pause);
        }
      };
      const double comp = median([&] { work(Clock::now()); }, agree, part);
      const double both = median(
          [&] {
            const auto begun = Clock::now();
            Work w = group->all_reduce(in, out);
            work(begun);
            w.wait();
          },
          agree, part);
      const std::string name = who + (busy ? "_busy" : "_free");
      if (busy) numbers.emplace_back(who + "_comm_us", comm);
      numbers.emplace_back(name + "_comp_us", comp);
      numbers.emplace_back(name + "_both_us", both);
      numbers.emplace_back(name + "_hidden_%", 100 * (comm + comp - both) / std::min(comm, comp));
    }
  }
  return numbers;
}

std::vector<TableRow> table(RankOfBench& rank) {
  const auto groups = std::make_shared<Groups>(rank);
  return table_of(rank.spec, [&rank, groups](TableRow& row, const Case& c, const std::string& memory) {
    row.name = "overlap/" + row.name;
    row.measure = [&rank, groups, c, memory](const Agree& agree, double seconds) {
      return overlap(rank, *groups, c, memory, agree, seconds);
    };
  });
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  using weft::bench::Kind;
  return weft::bench::bench_main(argc, argv, {{Kind::all_reduce}, {"shared", "foreign"}}, weft::bench::table,
                                 weft::bench::settings_of);
}
