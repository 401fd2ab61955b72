// Measures the cost of data parallelism, compared with torch (peers/torch_data.py). The first part reduces
// 200 gradients of 26 MB in all, in several ways, and compares this with one all-reduce of as many bytes. The
// second part runs a step (forward, backward, reduction, SGD) of 24 x Linear(512) with 64 rows per rank: on
// each rank by itself, with averaged gradients, and sharded. One thread per rank.
//
//   data_bench --ranks 2 --cases reduce/one,reduce/buckets,step/local,step/ddp
//   data_bench --rounds 2                    every case twice, round by round
//   data_bench --bucket 1048576              buckets of that many bytes
//
// The program compares the gradients of a step with those of one rank that computes all rows. In addition to
// the times it reports the bytes that a rank sends in a run, and the theoretical minimum. It counts the bytes
// from the group's recorded calls, as if ring algorithms sent them.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>

#include "harness.hpp"
#include "inputs.hpp"
#include "program.hpp"
#include "weft/base/error.hpp"
#include "weft/dp/bucket_reducer.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/linear.hpp"
#include "weft/nn/optimizer.hpp"
#include "weft/train/fully_shard.hpp"
#include "weft/train/gradient_reducer.hpp"

namespace weft::bench {
namespace {

const std::vector<std::string> kCases = {"reduce/one",   "reduce/one_foreign", "reduce/buckets",
                                         "reduce/bound", "reduce/each",        "step/local",
                                         "step/ddp",     "step/fully_shard"};

struct What {
  std::vector<std::string> cases = kCases;
  int rounds = 1;
  std::int64_t bucket_bytes = BucketOptions{}.bucket_bytes;
};

// Counts the calls in a group's flight recorder, and the bytes that a rank would send for them with ring
// algorithms (bus_factor).
struct Sent {
  std::size_t calls = 0;
  double bytes = 0;
};
Sent sent_by(const ProcessGroup& group, std::size_t skip) {
  const std::string trace = group.trace_json();
  const auto after = [&](std::size_t at, const char* key) {
    return trace.find(key, at) + std::char_traits<char>::length(key);
  };
  Sent sent;
  for (std::size_t at = trace.find("\"op\": \""); at != std::string::npos;
       at = trace.find("\"op\": \"", at + 1)) {
    if (sent.calls++ < skip) continue;
    const std::size_t op = after(at, "\"op\": \""), dtype = after(at, "\"dtype\": \""),
                      count = after(at, "\"count\": ");
    std::string name = trace.substr(op, trace.find('"', op) - op);
    if (name.ends_with("_v")) name.resize(name.size() - 2);
    if (name == "barrier") continue;
    sent.bytes += bus_factor(kind_from_name(name), group.size()) * std::stod(trace.substr(count, 20)) *
                  size_bytes(dtype_from_name(trace.substr(dtype, trace.find('"', dtype) - dtype)));
  }
  return sent;
}

// --- 200 gradients ---

constexpr std::size_t kGradients = 200;
constexpr std::int64_t kLarge = 64000, kSmall = 1000,
                       kElements = (kLarge + kSmall) * (kGradients / 2);  // 26 MB
std::int64_t count_of(std::size_t i) { return i % 2 == 0 ? kLarge : kSmall; }

class Reduction {
 public:
  Reduction(RankOfBench& rank, const std::string& name, const BucketOptions& options)
      : name_(name), rank_(rank), mesh_(rank.group.duplicate(), {{"dp", rank.spec.ranks}}) {
    const bool reducer = name == "buckets" || name == "bound";
    std::int64_t at = 0;
    if (name != "buckets") {
      if (name == "one" || name == "each")
        flat_ = Tensor(rank.context, {kElements}, DType::f32, Memory::shared);
      else
        foreign_ = allocate_pages(kElements * 4);
    }
    std::byte* const memory = foreign_ ? foreign_.get() : flat_ ? flat_.data() : nullptr;
    if (reducer) {
      std::vector<BucketEntry> entries;
      for (std::size_t i = 0; i < kGradients; ++i) entries.push_back({std::to_string(i), count_of(i)});
      reducer_ = std::make_unique<BucketReducer>(mesh_, std::move(entries), options);
    }
    for (std::size_t i = 0; i < kGradients; ++i) {
      if (memory != nullptr) {
        const TensorView v{memory + 4 * at, DType::f32, {}, Dims::line(count_of(i)), Dims::line(1)};
        if (reducer) reducer_->bind(i, v);
        gradients_.push_back(v);
      } else {
        gradients_.push_back(reducer_->slot(i));
      }
      at += count_of(i);
    }
    whole_ = {memory, DType::f32, {}, Dims::line(kElements), Dims::line(1)};
  }
  void run() {
    if (reducer_) {
      for (std::size_t i = 0; i < kGradients; ++i) reducer_->ready(i);
      reducer_->finish();
    } else if (name_ == "each") {
      for (const TensorView& g : gradients_) mesh_.group().all_reduce(g, g).wait();
    } else {
      mesh_.group().all_reduce(whole_, whole_).wait();
    }
  }
  void reset() {
    for (std::size_t i = 0; i < kGradients; ++i)
      for (float& x : gradients_[i].as<float>())
        x = static_cast<float>((rank_.group.rank() + 1) * static_cast<int>(i % 100 + 1));
  }
  std::string wrong() const {
    const int n = rank_.group.size();
    for (std::size_t i = 0; i < kGradients; ++i)
      for (const float x : gradients_[i].as<float>())
        if (const int want = n * (n + 1) / 2 * static_cast<int>(i % 100 + 1); x != static_cast<float>(want))
          return "gradient " + std::to_string(i) + " has " + std::to_string(x) + "; expected " +
                 std::to_string(want);
    return "";
  }
  ProcessGroup& group() { return mesh_.group(); }
  double theory() const { return bus_factor(Kind::all_reduce, rank_.group.size()) * 4 * kElements; }

 private:
  std::string name_;
  RankOfBench& rank_;
  DeviceMesh mesh_;
  Tensor flat_;
  std::shared_ptr<std::byte> foreign_;
  std::unique_ptr<BucketReducer> reducer_;
  std::vector<TensorView> gradients_;
  TensorView whole_;
};

// --- a step ---

constexpr std::int64_t kDim = 512, kLayers = 24, kRows = 64;

class Step {
 public:
  enum class Form { local, ddp, fully_shard };
  Step(RankOfBench& rank, Form form, const BucketOptions& options = {})
      : rank_(rank),
        form_(form),
        compute_(rank.context, 1),
        mesh_(rank.group.duplicate(), {{"dp", rank.spec.ranks}}) {
    for (std::int64_t i = 0; i < kLayers; ++i) net_.append(std::make_unique<Linear>(kDim, kDim, true));
    if (form != Form::local) replicate(net_, mesh_);
    if (form == Form::fully_shard) sharded_ = fully_shard(net_, mesh_, {.blocks = {"*"}});
    materialise(net_, compute_);
    std::uint32_t stream = kWeights;
    for (Parameter* p : net_.parameters()) {
      const Tensor whole =
          numbers(rank.context, p->global_shape(), stream++, static_cast<float>(3 / std::sqrt(kDim)));
      const Tensor mine = p->layout() == nullptr ? whole : distribute(whole, p->layout());
      std::copy_n(mine.data_ptr<float>(), mine.count(), p->write_master().data_ptr<float>());
    }
    if (form == Form::ddp) reducer_.emplace(net_.parameters(), mesh_, options);
    optimizer_.emplace(compute_, net_.parameters(), SGD::Options{});
    x_ = rows_of(kX, rank.group.rank());
    dy_ = rows_of(kDy, rank.group.rank());
    if (form == Form::local) return;
    const LayoutRef cut = make_layout(mesh_, {Shard{0}}, {kRows * rank.spec.ranks, kDim});
    x_ = x_.with_layout(cut);
    dy_ = dy_.with_layout(cut);
  }

  void run() {
    optimizer_->zero_gradients();
    pass(x_, dy_);
    if (reducer_) reducer_->finish();
    optimizer_->step(0);  // rate 0 needs as much work as any rate, and every step is the same
  }

  /// Compares the gradients with those that this rank computes from the rows of all ranks.
  std::string wrong() {
    Step serial(rank_, Form::local);
    const int first = form_ == Form::local ? rank_.group.rank() : 0,
              last = form_ == Form::local ? first + 1 : rank_.group.size();
    for (int r = first; r < last; ++r) serial.pass(serial.rows_of(kX, r), serial.rows_of(kDy, r));
    const std::vector<Parameter*> mine = net_.parameters(), all = serial.net_.parameters();
    std::string found;
    for (std::size_t i = 0; i < mine.size(); ++i) {
      const Tensor got = whole_gradient(*mine[i]);
      double apart = 0, largest = 0;
      for (std::int64_t k = 0; k < got.count(); ++k) {
        const double want = all[i]->gradient().data_ptr<float>()[k], x = got.data_ptr<float>()[k];
        apart = std::max(apart, std::isfinite(x) ? std::abs(x - want) : 1e30);
        largest = std::max(largest, std::abs(want));
      }
      if (apart > 1e-5 * largest && found.empty())
        found = mine[i]->path() + ": the gradient is " + std::to_string(apart / largest) +
                " of its largest element away from that of one rank";
    }
    return found;
  }
  Numbers checks() {
    Numbers all;
    for (const std::size_t i :
         {std::size_t{0}, static_cast<std::size_t>(kLayers), static_cast<std::size_t>(2 * kLayers - 2)}) {
      const Projection p = project(whole_gradient(*net_.parameters()[i]));
      const std::string name = std::to_string(i);
      all.insert(all.end(), {{"along_dw" + name, p.along}, {"norm_dw" + name, p.norm}});
    }
    return all;
  }
  ProcessGroup& group() { return mesh_.group(); }
  double theory() const {
    const double bytes = 4.0 * kLayers * (kDim * kDim + kDim),
                 once = bytes * (rank_.group.size() - 1) / rank_.group.size();
    return form_ == Form::local ? 0 : form_ == Form::ddp ? 2 * once : 3 * once;
  }

 private:
  Tensor rows_of(std::uint32_t stream, int rank) const {
    return numbers(rank_.context, {kRows, kDim}, stream, 2.0f, rank * kRows * kDim);
  }
  void pass(const Tensor& x, const Tensor& dy) {
    Frame frame(compute_);
    net_.forward(x, frame);
    net_.backward(dy, frame);
  }
  static Tensor whole_gradient(Parameter& p) {
    return p.gradient().layout() == nullptr ? p.gradient() : full(p.gradient());
  }
  RankOfBench& rank_;
  Form form_;
  Compute compute_;
  DeviceMesh mesh_;
  Sequential net_;
  std::unique_ptr<FullySharded> sharded_;
  std::optional<GradientReducer> reducer_;
  std::optional<SGD> optimizer_;
  Tensor x_, dy_;
};

// --- the table ---

template <class Case>
Numbers timed(Case& c, const Prepared& prepared, const Agree& agree, double seconds) {
  for (int i = 0; i < 2; ++i) c.run();                     // the first run makes groups and buckets
  const std::size_t before = sent_by(c.group(), 0).calls;  // at most 1024, as many as the recorder keeps
  c.run();
  const double sent = sent_by(c.group(), before).bytes;
  const Times t = measure(prepared, agree, seconds);
  return {{"median_us", t.median_us},
          {"p99_us", t.p99_us},
          {"samples", static_cast<double>(t.samples)},
          {"sent_bytes", sent},
          {"theory_bytes", c.theory()}};
}

Numbers measured(RankOfBench& rank, const std::string& name, const BucketOptions& options, const Agree& agree,
                 double seconds) {
  const std::string what = name.substr(name.find('/') + 1);
  if (name.starts_with("reduce/")) {
    const auto r = std::make_shared<Reduction>(rank, what, options);
    return timed(*r, {[r] { r->run(); }, [r] { return r->wrong(); }, [r] { r->reset(); }}, agree, seconds);
  }
  using Form = Step::Form;
  const auto s = std::make_shared<Step>(rank,
                                        what == "local" ? Form::local
                                        : what == "ddp" ? Form::ddp
                                                        : Form::fully_shard,
                                        options);
  Numbers all = timed(*s, {[s] { s->run(); }, [s] { return s->wrong(); }}, agree, seconds);
  const Numbers checks = s->checks();
  all.insert(all.end(), checks.begin(), checks.end());
  return all;
}

std::vector<TableRow> table(RankOfBench& rank, const What& what) {
  std::vector<TableRow> rows;
  for (int round = 0; round < what.rounds; ++round)
    for (const std::string& name : what.cases) {
      TableRow row;
      row.name = "data/" + name;
      row.row = {{{"op", "data"}, {"case", name}}, rank.spec.ranks, 0, {}};
      row.measure = [&rank, name, bytes = what.bucket_bytes](const Agree& agree, double seconds) {
        return measured(rank, name, {.bucket_bytes = bytes}, agree, seconds);
      };
      rows.push_back(std::move(row));
    }
  return rows;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  using namespace weft::bench;
  What what;
  const auto take_bucket = [&](const std::string& value) {
    char* end = nullptr;
    what.bucket_bytes = std::strtoll(value.c_str(), &end, 10);
    if (end == value.c_str() || *end != 0 || what.bucket_bytes < 1)
      throw weft::Error(weft::ErrorCode::bad_argument,
                        "bench: --bucket \"" + value + "\"; expected a number of bytes, at least 1");
  };
  return program_main(
      argc, argv,
      {words_flag("--cases", what.cases, kCases), rounds_flag(what.rounds), {"--bucket", take_bucket}},
      [&](RankOfBench& rank) { return table(rank, what); },
      [](const Spec& spec) { return settings_of(spec) + ", one thread a rank"; });
}
