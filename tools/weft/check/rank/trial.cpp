#include "rank/trial.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>

namespace weft::check {
Trial::Trial(Context& context, const Step& s, int me, int n, Duration deadline, Pool* pool)
    : s_(s), me_(me), n_(n), size_(size_bytes(s.dtype)), buffers_(context, s_, pool) {
  Dice habits(mix(s.salt, static_cast<std::uint64_t>(me) + 1000));
  const bool at_root = me == s.root;
  const bool sends = s.op != Op::send || at_root, receives = s.op != Op::send || me == s.peer;
  const bool in = s.op != Op::barrier && sends && (at_root || (s.op != Op::broadcast && s.op != Op::scatter));
  const bool out =
      s.op != Op::barrier && receives && (at_root || s.op != Op::reduce) && (at_root || s.op != Op::gather);
  in_ = side(habits, s.in_parted(), in, [&](int to) { return s.elements(me, to, n); });
  out_ = side(habits, s.out_parted(), out, [&](int from) { return s.elements(from, me, n); });
  in_place_ = in && out && !s.plain && habits.one_in(2) && s.op != Op::all_to_all &&
              s.op != Op::all_to_all_v && s.op != Op::send && s.op != Op::recv;
  lay_out(habits, in, out);
  make_calls(deadline, in, out);
}

// Takes memory for both sides, and fills `in`.
void Trial::lay_out(Dice& habits, bool in, bool out) {
  const Step& s = s_;
  const auto own = static_cast<std::size_t>(me_);
  if (in_place_ && s.out_parted()) {
    out_.data = buffers_.room(habits, out_.total);
    in_.data = out_.data + out_.offsets[own] * size_;
  } else if (in_place_ && s.in_parted()) {
    in_.data = buffers_.room(habits, in_.total);
    out_.data = in_.data + in_.offsets[own] * size_;
  } else {
    if (in) in_.data = buffers_.room(habits, in_.total);
    if (out) out_.data = in_place_ ? in_.data : buffers_.room(habits, out_.total);
  }
  give();
}

void Trial::give() {
  for (std::size_t b = 0; in_.there && b < in_.counts.size(); ++b) {
    const std::vector<std::byte> bytes = input(s_, me_, static_cast<int>(b), n_);
    if (!bytes.empty()) std::memcpy(in_.data + in_.offsets[b] * size_, bytes.data(), bytes.size());
  }
}

void Trial::renew() {
  for (std::size_t b = 0; out_.there && b < out_.counts.size(); ++b)
    if (const std::int64_t bytes = out_.counts[b] * size_; bytes > 0)
      std::memset(out_.data + out_.offsets[b] * size_, static_cast<int>(kUntouched),
                  static_cast<std::size_t>(bytes));
  give();
}

void Trial::make_calls(Duration deadline, bool in, bool out) {
  const Step& s = s_;
  CallOptions o{.deadline = deadline};
  if (s.reduces()) {
    o.op = s.reduce == ReduceOp::Kind::user ? ReduceOp::of(user_reduction()) : ReduceOp{s.reduce, s.scale};
    o.order = s.order;
  }
  CallOptions tagged = o;
  tagged.tag = s.tag;
  const ConstTensorView from = in_view();
  const TensorView to = out_view();
  switch (s.op) {
    case Op::all_reduce: calls_ = {call::all_reduce(from, to, o)}; break;
    case Op::scan: calls_ = {call::scan(from, to, o)}; break;
    case Op::exscan: calls_ = {call::exscan(from, to, o)}; break;
    case Op::reduce: calls_ = {call::reduce(from, to, s.root, o)}; break;
    case Op::broadcast: calls_ = {call::broadcast(from, to, s.root, o)}; break;
    case Op::all_gather: calls_ = {call::all_gather(from, to, o)}; break;
    case Op::all_gather_v: calls_ = {call::all_gather_v(from, to, out_.blocks(), o)}; break;
    case Op::reduce_scatter: calls_ = {call::reduce_scatter(from, to, o)}; break;
    case Op::reduce_scatter_v: calls_ = {call::reduce_scatter_v(from, to, in_.blocks(), o)}; break;
    case Op::gather: calls_ = {call::gather(from, to, s.root, o)}; break;
    case Op::scatter: calls_ = {call::scatter(from, to, s.root, o)}; break;
    case Op::all_to_all: calls_ = {call::all_to_all(from, to, o)}; break;
    case Op::all_to_all_v: calls_ = {call::all_to_all_v(from, to, in_.blocks(), out_.blocks(), o)}; break;
    case Op::barrier: calls_ = {call::barrier(o)}; break;
    case Op::send:
      if (in) calls_.push_back(call::send(from, s.peer, tagged));
      if (out) calls_.push_back(call::recv(to, s.root, tagged));
      break;
    case Op::recv:
      calls_ = {call::send(from, (me_ + s.peer) % n_, tagged),
                call::recv(to, (me_ + n_ - s.peer % n_) % n_, tagged)};
      break;
    case Op::exchange:
    case Op::wait_message:
    case Op::none: break;
  }
}

// Places blocks one after the other or, for v-forms, in any order and with gaps.
template <class Elements>
Trial::Side Trial::side(Dice& habits, bool parted, bool there, const Elements& elements) const {
  Side side;
  side.there = there;
  std::vector<std::size_t> order(parted ? static_cast<std::size_t>(n_) : 1);
  std::iota(order.begin(), order.end(), std::size_t{0});
  side.loose = parted && !s_.counts.empty() && !s_.plain && habits.one_in(2);
  if (side.loose)
    for (std::size_t i = order.size(); i > 1; --i)
      std::swap(order[i - 1], order[static_cast<std::size_t>(habits.below(i))]);
  side.counts.resize(order.size());
  side.offsets.resize(order.size());
  for (const std::size_t b : order) {
    side.counts[b] = elements(static_cast<int>(b));
    side.offsets[b] = side.total + (side.loose ? habits.below(3) : 0);
    side.total = side.offsets[b] + side.counts[b];
  }
  return side;
}

ConstTensorView Trial::in_view() const {
  if (!in_.there) return {};
  return {in_.data, s_.dtype, {}, Dims::line(in_.total), Dims::line(1)};
}
TensorView Trial::out_view() const {
  if (!out_.there) return {};
  return {out_.data, s_.dtype, {}, Dims::line(out_.total), Dims::line(1)};
}

// The rank from which block `block` of `out` comes.
int Trial::source(int block) const {
  if (s_.out_parted()) return block;
  if (s_.op == Op::recv) return (me_ + n_ - s_.peer % n_) % n_;
  return s_.root;
}

std::string Trial::complaint(bool exact) const {
  // Every byte must either be part of a block or be unchanged.
  Buffers::Marks marks(buffers_);
  for (std::size_t b = 0; out_.there && b < out_.counts.size(); ++b) {
    Expected e = expected(s_, source(static_cast<int>(b)), me_, n_, exact);
    const bool stays = e.bytes.empty() && s_.op == Op::exscan;
    if (stays && in_place_)
      e.bytes = input(s_, me_, static_cast<int>(b), n_);
    else if (stays)
      e.bytes.assign(static_cast<std::size_t>(out_.counts[b] * size_), kUntouched);
    const std::byte* const got = out_.data + out_.offsets[b] * size_;
    if (const std::string wrong = compare(s_, e, got); !wrong.empty())
      return fmt::format("out, block {}{}: {}", b, in_place_ ? ", in place" : "", wrong);
    marks.mark(got, out_.counts[b] * size_);
  }
  for (std::size_t b = 0; in_.there && b < in_.counts.size(); ++b) {
    const std::byte* const at = in_.data + in_.offsets[b] * size_;
    if (!in_place_) {
      const std::vector<std::byte> bytes = input(s_, me_, static_cast<int>(b), n_);
      if (!bytes.empty() && std::memcmp(at, bytes.data(), bytes.size()) != 0)
        return fmt::format("in, block {}, was changed", b);
    }
    marks.mark(at, in_.counts[b] * size_);
  }
  return marks.stray();
}

}  // namespace weft::check
