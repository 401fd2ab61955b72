#include "weft/nn/frame.hpp"

#include <fmt/format.h>

#include <utility>

#include "mesh/boxes.hpp"
#include "weft/base/error.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/layouts.hpp"
#include "weft/nn/module.hpp"

namespace weft {

namespace {

struct Kernels {
  explicit Kernels(Compute& compute) : context(compute) {}
  kernels::KernelContext context;
};

// One seed for each training step.
std::uint64_t seed_of_step(const Pass& pass) {
  const auto seed = pass.seed, step = static_cast<std::uint64_t>(pass.step);
  const auto word = [](std::uint64_t x, int half) { return static_cast<std::uint32_t>(x >> (32 * half)); };
  const auto mixed = philox({word(step, 0), word(step, 1), 0, 0}, {word(seed, 0), word(seed, 1)});
  return mixed[0] | static_cast<std::uint64_t>(mixed[1]) << 32;
}

// Calls draw(number, to, count) for each stretch of numbers that are contiguous both in the global tensor and
// in `out`.
template <class Draw>
void fill(const PassRandom& random, const Tensor& out, const Draw& draw) {
  layouts::expect_whole("random numbers: out", out, "a tensor of random numbers", false);
  const Shape& whole = layouts::global_shape(out);
  float* const to = out.f32().data();
  each_run(whole, out.layout(), out.shape(), [&](std::int64_t start, std::int64_t place, std::int64_t count) {
    draw(random.first(whole) + static_cast<std::uint64_t>(start), count, to + place);
  });
}

}  // namespace

void PassRandom::uniform(const Tensor& out) const {
  fill(*this, out,
       [&](std::uint64_t first, std::int64_t count, float* to) { stream_.uniform(first, count, to); });
}
void PassRandom::normal(const Tensor& out) const {
  fill(*this, out,
       [&](std::uint64_t first, std::int64_t count, float* to) { stream_.normal(first, count, to); });
}

PassRandom Frame::rng(std::string_view path) const {
  if (pass_.step < 0 || pass_.micro_batch < 0)
    throw Error(ErrorCode::bad_argument,
                fmt::format("\"{}\": random numbers in step {}, micro-batch {}; expected 0 or more of both: "
                            "Frame(compute, {{.seed = …, .step = …}}) says which pass it is",
                            path, pass_.step, pass_.micro_batch));
  return {RandomStream(seed_of_step(pass_), path), pass_};
}

kernels::KernelContext& kernels_of(Compute& compute) { return compute.attached<Kernels>().context; }

void Frame::begin(const Pass& pass) {
  if (!entries_.empty())
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("frame: begin while the backward of \"{}\" has not run; run it, or clear() the Frame",
                    entries_.back().of->path()));
  if (!keeps_ && pass.training)
    throw Error(ErrorCode::bad_argument,
                "frame: begin of a training pass on an inference Frame, which keeps nothing");
  pass_ = pass;
}

void Frame::count_use(const Parameter& parameter) {
  if (keeps_) ++uses_[&parameter];
}

bool Frame::drop_use(const Parameter& parameter) {
  const auto use = uses_.find(&parameter);
  if (use == uses_.end()) return true;  // this backward had no forward: no more uses will come
  if (--use->second > 0) return false;
  uses_.erase(use);
  return true;
}

void Frame::push(const Module& of, Tensors tensors) {
  if (keeps_) entries_.push_back({&of, std::move(tensors)});
}

Tensors Frame::pop(const Module& of) {
  if (!keeps_)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("frame: backward of \"{}\" on an inference Frame, which keeps nothing", of.path()));
  if (entries_.empty())
    throw Error(
        ErrorCode::bad_argument,
        fmt::format(
            "frame: backward of \"{}\", but the Frame is empty: its forward did not run on this Frame, "
            "or its backward already has",
            of.path()));
  Entry& last = entries_.back();
  if (last.of != &of)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format(
            "frame: backward of \"{}\", but the newest entry is of \"{}\": backward must run in the reverse "
            "order of forward",
            of.path(), last.of->path()));
  Tensors tensors = std::move(last.tensors);
  entries_.pop_back();
  return tensors;
}

void LeftOver::run() { run_from(0); }

void LeftOver::run_from(std::size_t first) {
  // The work is taken out before it runs: after an error none of it is left.
  const auto begin = work_.begin() + static_cast<std::ptrdiff_t>(first);
  std::vector<std::pair<Compute*, Work>> work(std::make_move_iterator(begin),
                                              std::make_move_iterator(work_.end()));
  work_.erase(begin, work_.end());
  for (auto& [compute, part] : work) {
    Frame frame(*compute);
    part(frame);
    part = nullptr;  // so that the tensors that it holds go before the next part needs memory
  }
}

}  // namespace weft
