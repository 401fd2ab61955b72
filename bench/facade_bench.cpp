// What ProcessGroup costs above its transport: all_reduce through the group, post and wait, and through a
// bare backend of the same ranks, post and poll, a sample of the one after a sample of the other, in one run.
// One row a size:
//
//   facade_us      median of ProcessGroup::all_reduce(…).wait()
//   backend_us     median of Backend::post() and Backend::poll() until it is done
//   difference_ns  the first less the second: what checks, numbering, recording and the ticket take
//   ratio          the first over the second
//
// With --c what weft.h costs above ProcessGroup, on one group and one memory:
//
//   c_us           median of weft_all_reduce() that waits
//   cpp_us         median of ProcessGroup::all_reduce(…).wait()
//   difference_ns  the first less the second: options, handles and exceptions turned into statuses
//   ratio          the first over the second
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "capi/handles.hpp"
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

using AllReduce = std::function<void(const ConstTensorView& in, const TensorView& out)>;
struct Side {
  const char* name;
  AllReduce call;
};

// Samples of both in turn; the difference is the first's.
Numbers compare(RankOfBench& rank, const Side& first, const Side& second, const Case& c,
                const std::string& memory, const Agree& agree, double seconds) {
  // The same memory for both: where it lies may make more of a difference than what is measured.
  const auto buffers = std::make_shared<Buffers>(c, rank.group.rank(), allocator(rank.context, memory));
  const auto prepared = [&](const AllReduce& call) {
    return prepare(buffers, [c, call](std::byte* in, std::byte* out) {
      const auto count = Dims::line(c.block()), step = Dims::line(1);
      call({in, c.dtype, {}, count, step}, {out, c.dtype, {}, count, step});
    });
  };
  const Prepared sides[2] = {prepared(first.call), prepared(second.call)};
  // Verified, warm, and how many runs make a sample.
  const Times rough = measure(sides[1], agree, seconds / 4);
  measure(sides[0], agree, seconds / 4);
  const auto runs = static_cast<int>(rough.runs);
  std::vector<double> us[2];
  const auto begin = Clock::now();
  do {
    for (int s = 0; s < 32; ++s) {
      const Prepared& p = sides[s % 2];
      p.run();  // after the other's
      const auto start = Clock::now();
      for (int k = 0; k < runs; ++k) p.run();
      us[s % 2].push_back(std::chrono::duration<double>(Clock::now() - start).count() * 1e6 / runs);
    }
  } while (agree(std::chrono::duration<double>(Clock::now() - begin).count() < seconds) != 0);
  const double with = times_of(us[0]).median_us, without = times_of(us[1]).median_us;
  return {{first.name, with},
          {second.name, without},
          {"difference_ns", (with - without) * 1e3},
          {"ratio", with / without}};
}

std::vector<TableRow> table_of_sides(RankOfBench& rank, const std::string& name, const Side& first,
                                     const Side& second) {
  return table_of(rank.spec,
                  [&rank, name, first, second](TableRow& row, const Case& c, const std::string& memory) {
                    row.name = name + "/" + row.name;
                    row.measure = [&rank, first, second, c, memory](const Agree& agree, double seconds) {
                      return compare(rank, first, second, c, memory, agree, seconds);
                    };
                  });
}

std::vector<TableRow> above_transport(RankOfBench& rank) {
  const auto bare = std::make_shared<Bare>(rank);
  return table_of_sides(
      rank, "facade",
      {"facade_us",
       [&rank](const ConstTensorView& in, const TensorView& out) { rank.group.all_reduce(in, out).wait(); }},
      {"backend_us",
       [bare](const ConstTensorView& in, const TensorView& out) { bare->all_reduce(in, out); }});
}

std::vector<TableRow> above_cpp(RankOfBench& rank) {
  const auto handle = std::make_shared<weft_group>(weft_group{std::make_shared<capi::GroupHandle>(
      nullptr, ProcessGroup::create(rank.context, rank.spec.backend, rank.membership("c")))});
  return table_of_sides(
      rank, "facade_c",
      {"c_us",
       [handle](const ConstTensorView& in, const TensorView& out) {
         const weft_buffer from = {const_cast<std::byte*>(in.data), in.count(),
                                   static_cast<weft_dtype>(in.dtype), WEFT_CPU};
         const weft_buffer to = {out.data, out.count(), static_cast<weft_dtype>(out.dtype), WEFT_CPU};
         const weft_call_options options = WEFT_CALL_OPTIONS_INIT;
         // Made once, as a program with a loop does: its initialiser alone writes a kilobyte, 30 to 40 ns.
         static thread_local weft_error error = WEFT_ERROR_INIT;
         if (weft_all_reduce(handle.get(), &from, &to, &options, nullptr, &error) != WEFT_OK)
           throw std::runtime_error(error.text);
       }},
      {"cpp_us", [handle](const ConstTensorView& in, const TensorView& out) {
         handle->handle->group.all_reduce(in, out).wait();
       }});
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  using weft::bench::Kind;
  const bool c = argc > 1 && std::strcmp(argv[1], "--c") == 0;
  if (c) {
    argv[1] = argv[0];
    --argc, ++argv;
  }
  return weft::bench::bench_main(argc, argv, {{Kind::all_reduce}, {"shared", "foreign"}},
                                 c ? weft::bench::above_cpp : weft::bench::above_transport,
                                 weft::bench::settings_of);
}
