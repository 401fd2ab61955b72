#include "weft/nn/frame.hpp"

#include <fmt/format.h>

#include <cstring>
#include <utility>

#include "base/hash.hpp"
#include "mesh/boxes.hpp"
#include "nn/state_hashes.hpp"
#include "weft/base/error.hpp"
#include "weft/host/copy.hpp"
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

// Adds the bits of `t`, wherever it lies.
void add_bits(Fnv1a& hash, Context& context, const Tensor& t) {
  const Tensor here = to_host(context, t);
  hash.add(static_cast<std::uint64_t>(here.bytes()));
  const auto* const at = reinterpret_cast<const char*>(here.view().data);
  std::int64_t i = 0;
  for (std::uint64_t word = 0; i + 8 <= here.bytes(); i += 8) {
    std::memcpy(&word, at + i, 8);
    hash.add_at_once(word);
  }
  hash.add(std::string_view(at + i, static_cast<std::size_t>(here.bytes() - i)));
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
  documents_ = nullptr;
}

void Frame::count_use(const Parameter& parameter) {
  if (outer_ != nullptr || (!keeps_ && checkpoint_ == nullptr)) return;
  if (++uses_[&parameter] > 1 && exact() && parameter.trainable())
    throw Error(ErrorCode::bad_argument,
                fmt::format("exact: \"{}\" is used twice in a pass, and the gradients of both uses are added "
                            "before the ranks add theirs; there is no rule for that",
                            parameter.path()));
}

bool Frame::drop_use(const Parameter& parameter) {
  if (outer_ != nullptr) return outer_->drop_use(parameter);
  const auto use = uses_.find(&parameter);
  if (use == uses_.end()) return true;  // this backward had no forward, so there are no more uses
  if (--use->second > 0) return false;
  uses_.erase(use);
  return true;
}

void Frame::push(const Module& of, Tensors tensors) {
  if (keeps_) entries_.push_back({.of = &of, .tensors = std::move(tensors), .documents = documents_});
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
  documents_ = std::move(last.documents);
  entries_.pop_back();
  return tensors;
}

void Frame::visit_kept(const std::function<void(const Module&, const Tensors&)>& see) const {
  for (const Entry& entry : entries_) {
    Tensors all = entry.tensors;
    for (const Result& r : entry.results) all.insert(all.end(), r.tensors.begin(), r.tensors.end());
    see(*entry.of, all);
  }
}

Frame::Checkpoint::Checkpoint(Frame& frame, const Module& of, Tensors x, bool compares)
    : frame_(frame),
      of_(of),
      before_(std::exchange(frame.checkpoint_, this)),
      x_(std::move(x)),
      compares_(compares) {
  frame.keeps_ = false;
}

Frame::Checkpoint::~Checkpoint() {
  frame_.checkpoint_ = before_;
  frame_.keeps_ = true;  // a Checkpoint is made on Frames that keep only
}

void Frame::Checkpoint::keep() {
  frame_.entries_.push_back({.of = &of_,
                             .tensors = std::move(x_),
                             .checkpoint = true,
                             .compares = compares_,
                             .results = std::move(results_),
                             .documents = frame_.documents_});
}

Frame Frame::pop_checkpoint(Tensors& x) {
  Entry entry = std::move(entries_.back());
  entries_.pop_back();
  x = std::move(entry.tensors);
  Frame scratch(*compute_, pass_);
  documents_ = scratch.documents_ = std::move(entry.documents);
  scratch.outer_ = this;
  scratch.depth_ = depth_;
  scratch.left_over_ = left_over_;
  scratch.recomputing_ = true;
  scratch.compares_ = entry.compares;
  scratch.results_ = std::move(entry.results);
  return scratch;
}

const Frame::Result& Frame::next_result(std::string_view path, bool outputs) {
  if (used_results_ == results_.size() || results_[used_results_].path != path ||
      results_[used_results_].outputs != outputs)
    throw Error(
        ErrorCode::mismatch,
        fmt::format("activation checkpointing: \"{}\" {} while its forward ran again; in the first run {} "
                    "did: expected the same modules in the same order",
                    path, outputs ? "returned" : "called once()",
                    used_results_ == results_.size() ? std::string("no other module")
                                                     : fmt::format("\"{}\"", results_[used_results_].path)));
  return results_[used_results_++];
}

Tensors Frame::once(std::string_view path, const std::function<Tensors()>& work) {
  Tensors tensors = recomputing_ ? next_result(path, false).tensors : work();
  if (checkpoint_ != nullptr) checkpoint_->results_.push_back({std::string(path), tensors});
  return tensors;
}

void Frame::end_recomputing() {
  if (used_results_ != results_.size())
    throw Error(
        ErrorCode::mismatch,
        fmt::format("activation checkpointing: \"{}\" did not run while its forward ran again, but in "
                    "the first run: expected the same modules in the same order",
                    results_[used_results_].path));
  recomputing_ = false;
  results_.clear();
}

void Frame::note_outputs(const Module& of, const Tensors& y) {
  const bool records = checkpoint_ != nullptr && checkpoint_->compares_;
  const bool compares = recomputing_ && compares_;
  if (!records && !compares) return;
  Fnv1a hash;
  for (const Tensor& t : y) add_bits(hash, compute_->context(), t);
  if (compares && next_result(of.path(), true).hash != hash.value)
    throw Error(ErrorCode::mismatch,
                fmt::format("activation checkpointing: \"{}\" returned other values when its forward ran "
                            "again; expected the bits of the first run",
                            of.path()));
  if (records)
    checkpoint_->results_.push_back({.path = of.path(), .tensors = {}, .hash = hash.value, .outputs = true});
}

std::vector<std::pair<std::string, std::uint64_t>> hashes_of_state(Context& context, Module& module) {
  std::vector<std::pair<std::string, std::uint64_t>> all;
  for (const ModuleBuffer* b : module.buffers()) {
    Fnv1a hash;
    if (b->materialised()) add_bits(hash, context, b->tensor());
    all.emplace_back(b->path(), hash.value);
  }
  for (const Parameter* p : module.parameters()) all.emplace_back(p->path(), p->master_version());
  return all;
}

void LeftOver::run() {
  // The work is taken out before it runs: after an error none of it is left.
  gone_ = end();
  std::vector<Part> all = std::exchange(work_, {});
  for (Part& part : all) {
    Frame frame(*part.compute, part.pass);
    part.work(frame);
    part.work = nullptr;  // so that the tensors that it holds go before the next part needs memory
  }
}

}  // namespace weft
