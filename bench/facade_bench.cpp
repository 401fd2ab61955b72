// What ProcessGroup costs above its transport: all_reduce through the group, post and wait, and through a
// bare backend of the same ranks, post and poll, a sample of the one after a sample of the other, in one run.
// One row a size:
//
//   facade_us      median of ProcessGroup::all_reduce(…).wait()
//   backend_us     median of Backend::post() and Backend::poll() until it is done
//   difference_ns  the first less the second: what checks, numbering, recording and the ticket take
//   ratio          the first over the second
#include <chrono>
#include <stdexcept>

#include "harness.hpp"
#include "weft/backends/plugin.hpp"

namespace weft::bench {
namespace {

using Clock = std::chrono::steady_clock;

// A transport with nothing above it.
class Bare {
 public:
  explicit Bare(RankOfBench& rank)
      : backend_(load_backend(rank.context, rank.spec.backend)(
            GroupInit{.context = rank.context,
                      .store = rank.store,
                      .token = "bench/bare",
                      .name = "bare",
                      .rank = rank.group.rank(),
                      .size = rank.group.size(),
                      .process_rank = rank.group.rank(),
                      .ranks_here = rank.group.size(),
                      .deadline = Deadline::after(std::chrono::seconds(60))})) {}

  void all_reduce(const ConstTensorView& in, const TensorView& out) {
    state_.op = Op::all_reduce;
    state_.dtype = in.dtype;
    state_.reduce = ReduceOp::sum;
    state_.call = calls_++;
    state_.in = in.data;
    state_.out = out.data;
    state_.in_count = state_.out_count = in.count();
    backend_->post(state_);
    for (;;) {
      const Step step = backend_->poll(state_);
      if (step == Step::done) return;
      if (step == Step::failed) throw std::runtime_error(backend_->failure().text);
      if (step == Step::pending) __builtin_ia32_pause();
    }
  }

 private:
  std::unique_ptr<Backend> backend_;
  OpState state_{};
  std::uint64_t calls_ = 0;
};

Numbers compare(RankOfBench& rank, Bare& bare, const Case& c, const std::string& memory, const Agree& agree,
                double seconds) {
  // The same memory for both: where it lies may make more of a difference than what is measured.
  const auto buffers = std::make_shared<Buffers>(c, rank.group.rank(), allocator(rank.context, memory));
  const auto prepared = [&](const std::function<void(const ConstTensorView&, const TensorView&)>& call) {
    return prepare(buffers, [c, call](std::byte* in, std::byte* out) {
      const auto count = Dims::line(c.block()), step = Dims::line(1);
      call({in, c.dtype, {}, count, step}, {out, c.dtype, {}, count, step});
    });
  };
  const Prepared facade = prepared(
      [&](const ConstTensorView& in, const TensorView& out) { rank.group.all_reduce(in, out).wait(); });
  const Prepared backend =
      prepared([&](const ConstTensorView& in, const TensorView& out) { bare.all_reduce(in, out); });
  // Verified, warm, and how many runs make a sample.
  const Times rough = measure(backend, agree, seconds / 4);
  measure(facade, agree, seconds / 4);
  const auto runs = static_cast<int>(rough.runs);
  std::vector<double> us[2];
  const auto begin = Clock::now();
  do {
    for (int s = 0; s < 32; ++s) {
      const Prepared& p = s % 2 == 0 ? facade : backend;
      p.run();  // after the other's
      const auto start = Clock::now();
      for (int k = 0; k < runs; ++k) p.run();
      us[s % 2].push_back(std::chrono::duration<double>(Clock::now() - start).count() * 1e6 / runs);
    }
  } while (agree(std::chrono::duration<double>(Clock::now() - begin).count() < seconds) != 0);
  const double with = times_of(us[0]).median_us, without = times_of(us[1]).median_us;
  return {{"facade_us", with},
          {"backend_us", without},
          {"difference_ns", (with - without) * 1e3},
          {"ratio", with / without}};
}

std::vector<TableRow> table(RankOfBench& rank) {
  const auto bare = std::make_shared<Bare>(rank);
  return table_of(rank.spec, [&rank, bare](TableRow& row, const Case& c, const std::string& memory) {
    row.name = "facade/" + row.name;
    row.measure = [&rank, bare, c, memory](const Agree& agree, double seconds) {
      return compare(rank, *bare, c, memory, agree, seconds);
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
