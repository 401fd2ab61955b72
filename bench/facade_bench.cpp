// The cost of ProcessGroup above its transport: all_reduce through the group, post and wait, and through a
// bare backend of the same ranks, post and poll, with alternating samples in one run. One row for each size:
//
//   facade_us      median of ProcessGroup::all_reduce(…).wait()
//   backend_us     median of Backend::post() and Backend::poll() until it is done
//   difference_ns  the first less the second: what checks, numbering, recording and the ticket take
//   ratio          the first over the second
//   start_us       median of PersistentCall::start() and wait(), of the same all_reduce
//   start_difference_ns  that less backend_us: no check and no description of the call any more
//   start_share    the one difference over the other
//
// With --c the program measures the cost of weft.h above ProcessGroup, on one group and with the same
// buffers:
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

// A transport without a group above it.
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

// The persistent calls of all buffers of a row, used in turn.
class Started {
 public:
  explicit Started(ProcessGroup& group) : group_(group) {}

  void all_reduce(const ConstTensorView& in, const TensorView& out) {
    if (next_ >= all_.size() || all_[next_].in != in.data || all_[next_].out != out.data ||
        all_[next_].count != in.count() || all_[next_].dtype != in.dtype)
      next_ = find(in, out);
    const std::size_t now = next_;
    if (++next_ == all_.size()) next_ = 0;
    all_[now].call.start().wait();
  }

 private:
  struct Made {
    const std::byte *in, *out;
    std::int64_t count;
    DType dtype;
    PersistentCall call;
  };
  [[gnu::noinline]] std::size_t find(const ConstTensorView& in, const TensorView& out) {
    for (std::size_t k = 0; k < all_.size(); ++k)
      if (all_[k].in == in.data && all_[k].out == out.data && all_[k].count == in.count() &&
          all_[k].dtype == in.dtype)
        return k;
    all_.push_back({in.data, out.data, in.count(), in.dtype, group_.make_all_reduce(in, out)});
    return all_.size() - 1;
  }
  ProcessGroup& group_;
  std::vector<Made> all_;
  std::size_t next_ = 0;
};

using AllReduce = std::function<void(const ConstTensorView& in, const TensorView& out)>;
struct Side {
  const char* name;
  AllReduce call;
};

// Takes samples of all sides in turn. The first side is the measured call, the last side is the baseline; the
// differences are to the last side. A side between them gets its own numbers, and the ratio of its difference
// to the first side's difference.
Numbers compare(RankOfBench& rank, const std::vector<Side>& all, const Case& c, const std::string& memory,
                const Agree& agree, double seconds) {
  // All sides use the same memory: its place may have a larger effect than the measured difference.
  const auto buffers = std::make_shared<Buffers>(c, rank.group.rank(), allocator(rank.context, memory));
  std::vector<Prepared> sides;
  for (const Side& side : all)
    sides.push_back(prepare(buffers, [c, call = side.call](std::byte* in, std::byte* out) {
      const auto count = Dims::line(c.block()), step = Dims::line(1);
      call({in, c.dtype, {}, count, step}, {out, c.dtype, {}, count, step});
    }));
  // Verifies and warms up each side, and finds the number of runs in a sample.
  const Times rough = measure(sides.back(), agree, seconds / 4);
  for (std::size_t s = 0; s + 1 < sides.size(); ++s) measure(sides[s], agree, seconds / 4);
  const auto runs = static_cast<int>(rough.runs);
  std::vector<std::vector<double>> us(sides.size());
  const auto begin = Clock::now();
  do {
    for (std::size_t s = 0; s < 16 * sides.size(); ++s) {
      const Prepared& p = sides[s % sides.size()];
      p.run();  // a first run, after the run of another side
      const auto start = Clock::now();
      for (int k = 0; k < runs; ++k) p.run();
      us[s % sides.size()].push_back(std::chrono::duration<double>(Clock::now() - start).count() * 1e6 /
                                     runs);
    }
  } while (agree(std::chrono::duration<double>(Clock::now() - begin).count() < seconds) != 0);
  std::vector<double> medians;
  for (auto& samples : us) medians.push_back(times_of(samples).median_us);
  const double with = medians.front(), without = medians.back();
  Numbers numbers{{all.front().name, with},
                  {all.back().name, without},
                  {"difference_ns", (with - without) * 1e3},
                  {"ratio", with / without}};
  for (std::size_t s = 1; s + 1 < all.size(); ++s) {
    const std::string name = all[s].name;
    numbers.push_back({name + "_us", medians[s]});
    numbers.push_back({name + "_difference_ns", (medians[s] - without) * 1e3});
    numbers.push_back({name + "_share", (medians[s] - without) / (with - without)});
  }
  return numbers;
}

std::vector<TableRow> table_of_sides(RankOfBench& rank, const std::string& name,
                                     const std::vector<Side>& sides) {
  return table_of(rank.spec, [&rank, name, sides](TableRow& row, const Case& c, const std::string& memory) {
    row.name = name + "/" + row.name;
    row.measure = [&rank, sides, c, memory](const Agree& agree, double seconds) {
      return compare(rank, sides, c, memory, agree, seconds);
    };
  });
}

std::vector<TableRow> above_transport(RankOfBench& rank) {
  const auto bare = std::make_shared<Bare>(rank);
  const auto started = std::make_shared<Started>(rank.group);
  return table_of_sides(
      rank, "facade",
      {{"facade_us",
        [&rank](const ConstTensorView& in, const TensorView& out) { rank.group.all_reduce(in, out).wait(); }},
       {"start",
        [started](const ConstTensorView& in, const TensorView& out) { started->all_reduce(in, out); }},
       {"backend_us",
        [bare](const ConstTensorView& in, const TensorView& out) { bare->all_reduce(in, out); }}});
}

std::vector<TableRow> above_cpp(RankOfBench& rank) {
  const auto handle = std::make_shared<weft_group>(std::make_shared<capi::GroupHandle>(
      nullptr, ProcessGroup::create(rank.context, rank.spec.backend, rank.membership("c"))));
  return table_of_sides(
      rank, "facade_c",
      {{"c_us",
        [handle](const ConstTensorView& in, const TensorView& out) {
          const weft_buffer from = {const_cast<std::byte*>(in.data), in.count(),
                                    static_cast<weft_dtype>(in.dtype), WEFT_CPU};
          const weft_buffer to = {out.data, out.count(), static_cast<weft_dtype>(out.dtype), WEFT_CPU};
          const weft_call_options options = WEFT_CALL_OPTIONS_INIT;
          // Made once outside the loop, as in a program: its initialiser writes a kilobyte, which takes 30 to
          // 40 ns.
          static thread_local weft_error error = WEFT_ERROR_INIT;
          if (weft_all_reduce(handle.get(), &from, &to, &options, nullptr, &error) != WEFT_OK)
            throw std::runtime_error(error.text);
        }},
       {"cpp_us", [handle](const ConstTensorView& in, const TensorView& out) {
          handle->handle->group.all_reduce(in, out).wait();
        }}});
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
