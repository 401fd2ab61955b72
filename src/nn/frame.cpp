#include "weft/nn/frame.hpp"

#include <fmt/format.h>

#include <utility>

#include "weft/base/error.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/module.hpp"

namespace weft {

namespace {

struct Kernels {
  explicit Kernels(Compute& compute) : context(compute) {}
  kernels::KernelContext context;
};

}  // namespace

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

}  // namespace weft
