#include "dp/shards/transfers.hpp"

#include <fmt/format.h>

#include "base/hash.hpp"
#include "base/mutant.hpp"
#include "dp/history.hpp"
#include "dp/parts.hpp"
#include "mesh/axis_ranks.hpp"
#include "mesh/same_list.hpp"
#include "weft/base/error.hpp"

namespace weft::dp {
namespace {

constexpr std::size_t kOptionWords = 3, kWords = kOptionWords + 1;  // and the history

// How a call on a device is ordered, and who waits for it.
CallOptions options_of(const ShardPlan& plan, ReduceOp op = ReduceOp::sum, int tag = 0) {
  CallOptions options;
  options.op = op;
  options.tag = tag;
  options.stream = stream_of(plan.options.compute);
  return options;
}
void wait(const ShardPlan& plan, Work& work) {
  if (!work.valid()) return;
  if (on_device(plan.options.compute))
    work.wait_on(stream_of(plan.options.compute));
  else
    work.wait();
}

Device device_of(const ShardPlan& plan) { return stream_of(plan.options.compute).device; }

}  // namespace

// Compares, once, the lists and the options of all ranks that take part.
void ShardTransfers::compare() {
  if (compared_) return;
  const auto view_of = [this](std::size_t i) {
    const ShardItem& item = plan_.items[i];
    const Shape& shape = item.entry.layout->local_shape();
    return ConstTensorView{nullptr, item.entry.dtype, Device{}, shape, row_major(shape)};
  };
  const auto digest = [&](std::size_t i) {
    return digest_of_view(plan_.items[i].entry.name, view_of(i), plan_.items[i].entry.layout);
  };
  const auto text = [&](std::size_t i) {
    return text_of_view(plan_.items[i].entry.name, view_of(i), plan_.items[i].entry.layout);
  };
  ListDigest list;
  for (std::size_t i = 0; i < plan_.items.size(); ++i) list.add(digest(i));
  const ShardedParametersOptions& o = plan_.options;
  const std::uint64_t own[kWords] = {static_cast<std::uint64_t>(o.reduce),
                                     static_cast<std::uint64_t>(o.gradient),
                                     static_cast<std::uint64_t>(o.alone_bytes), history_};
  const auto compare_over = [&](const DeviceMesh& axes) {
    if (!axes || axes.size() == 1) return;
    const std::vector<std::uint64_t> all = gather_with_list("sharded_parameters", axes, list, own, [&] {
      return ListEntries{"tensor", plan_.items.size(), digest, text};
    });
    const auto told_by = [&](int rank) { return all.begin() + rank * static_cast<std::ptrdiff_t>(kWords); };
    expect_same_words(
        "sharded_parameters", "the options are ", axes, all, 0, kOptionWords, [](auto told, int) {
          return fmt::format("reduce {}, gradient {}, alone_bytes {}", name(static_cast<DType>(told[0])),
                             name(static_cast<DType>(told[1])), told[2]);
        });
    int first = -1;  // of the values whose history is known
    for (int r = 0; r < axes.size(); ++r) {
      const std::uint64_t history = told_by(r)[kOptionWords];
      if (history == 0 || plan_.items.empty()) continue;
      if (first < 0) first = r;
      if (history == told_by(first)[kOptionWords]) continue;
      throw Error(Failure{
          ErrorCode::mismatch,
          fmt::format("sharded_parameters: the parts of \"{}\"{} were initialised differently on {} and {}; "
                      "expected one seed",
                      plan_.items[0].entry.name,
                      plan_.items.size() > 1 ? fmt::format(" and {} more", plan_.items.size() - 1) : "",
                      name_axis_rank(axes, first), name_axis_rank(axes, r)),
          Op::none,
          kNoCall,
          {first, r}});
    }
  };
  compare_over(plan_.axes);
  compare_over(o.replicate);
  compared_ = true;
}

Tensor ShardTransfers::shared(std::int64_t count, DType dtype) const {
  return Tensor(plan_.axes.context(), {count}, dtype, Memory::shared, stream_of(plan_.options.compute));
}

// This rank copies its part to its place in the whole tensors, or in its block of the packed tensors. Peers
// read it from there.
class ShardTransfers::Gather final : public Transfer::Steps {
 public:
  Gather(std::shared_ptr<ShardTransfers> of, std::span<const ConstTensorView> shards,
         std::vector<std::byte*> to, Tensor keep)
      : of_(std::move(of)),
        plan_(of_->plan()),
        tag_(of_->compared_ ? history_tag(of_->history_) : 0),
        to_(std::move(to)),
        keep_(std::move(keep)) {
    of_->compare();
    if (!plan_.packed.empty()) packed_ = of_->shared(plan_.bytes.total, DType::u8);
    place_own(shards);
    in_history_words("sharded_parameters", [this] { begin(); });
  }

  bool done() override {
    return in_history_words("sharded_parameters", [this] { return !work_.valid() || work_.done(); });
  }
  Tensor finish() override {
    in_history_words("sharded_parameters", [this] { wait(plan_, work_); });
    unpack();
    return std::move(keep_);
  }

 private:
  // The first byte of the part that `rank` has of packed tensor k.
  std::byte* block(std::size_t k, std::size_t rank) const {
    return packed_.data() + plan_.bytes.offsets[rank] + plan_.bytes.at[k][rank];
  }
  void place_own(std::span<const ConstTensorView> shards) {
    const std::size_t own = of_->own();
    std::vector<Copied> copies;
    std::size_t k = 0;
    for (std::size_t i = 0; i < plan_.items.size(); ++i) {
      const ShardItem& item = plan_.items[i];
      const std::int64_t size = size_bytes(item.entry.dtype);
      if (item.packed) {
        copies.push_back({shards[i].data, block(k++, own), item.shard_counts[own] * size});
        continue;
      }
      item.for_each_run(own, [&](std::int64_t in_whole, std::int64_t in_part, std::int64_t count) {
        copies.push_back({shards[i].data + in_part * size, to_[i] + in_whole * size, count * size});
      });
    }
    copy_all(plan_.options.compute, copies.size(), [&](std::size_t i) { return copies[i]; });
  }
  void begin() {
    if (plan_.axes.size() == 1) return;
    const std::size_t own = of_->own();
    const Device device = device_of(plan_);
    std::vector<Call> calls;
    const auto add = [&](std::byte* whole, DType dtype, std::int64_t count,
                         const std::vector<std::int64_t>& counts, const std::vector<std::int64_t>& offsets,
                         bool even) {
      if (count == 0) return;
      const ConstBuffer in(whole + offsets[own] * size_bytes(dtype), counts[own], dtype, device);
      const Buffer out(whole, count, dtype, device);
      const CallOptions options = options_of(plan_, ReduceOp::sum, tag_);
      calls.push_back(even ? call::all_gather(in, out, options)
                           : call::all_gather_v(in, out, Blocks{counts, offsets}, options));
    };
    for (std::size_t i = 0; i < plan_.items.size(); ++i)
      if (const ShardItem& item = plan_.items[i]; !item.packed)
        for (const ShardSegment& s : item.segments)
          add(to_[i] + s.begin * size_bytes(item.entry.dtype), item.entry.dtype, s.count, s.counts, s.offsets,
              s.even);
    add(packed_.data(), DType::u8, plan_.bytes.total, plan_.bytes.counts, plan_.bytes.offsets, false);
    if (!calls.empty()) work_ = plan_.axes.group().coalesced(calls);
  }
  void unpack() {
    std::vector<Copied> copies;
    for (std::size_t k = 0; k < plan_.packed.size(); ++k) {
      const std::size_t i = plan_.packed[k];
      const ShardItem& item = plan_.items[i];
      const std::int64_t size = size_bytes(item.entry.dtype);
      for (std::size_t r = 0; r < item.shard_counts.size(); ++r)
        item.for_each_run(r, [&](std::int64_t in_whole, std::int64_t in_part, std::int64_t count) {
          copies.push_back({block(k, r) + in_part * size, to_[i] + in_whole * size, count * size});
        });
    }
    copy_all(plan_.options.compute, copies.size(), [&](std::size_t i) { return copies[i]; });
  }

  const std::shared_ptr<ShardTransfers> of_;
  const ShardPlan& plan_;
  const int tag_;
  std::vector<std::byte*> to_;
  Tensor keep_, packed_;
  Work work_;  // last: it ends before the memory goes
};

// Each rank finds its part of the sum at the place of that part in its own gradients.
class ShardTransfers::Reduce final : public Transfer::Steps {
 public:
  Reduce(std::shared_ptr<ShardTransfers> of, Tensor gradients, ReduceOp op)
      : of_(std::move(of)), plan_(of_->plan()), op_(op), gradients_(std::move(gradients)) {
    of_->compare();
    if (!plan_.packed.empty()) packed_ = of_->shared(plan_.elements.total, plan_.options.reduce);
    pack();
    begin();
  }

  bool done() override { return !work_.valid() || work_.done(); }
  Tensor finish() override {
    wait(plan_, work_);
    const ShardedParametersOptions& o = plan_.options;
    const bool again = o.replicate && o.replicate.size() > 1;
    Tensor shard = Tensor::zeros(plan_.axes.context(), {plan_.shard_count}, again ? o.reduce : o.gradient,
                                 again ? Memory::shared : Memory::local, stream_of(o.compute));
    take_own(shard);
    gradients_ = packed_ = {};
    if (!again) return shard;
    if (shard.count() > 0) {  // as many on the other replicas of this part
      work_ = o.replicate.group().all_reduce(shard.view(), shard.view(), options_of(plan_, op_));
      wait(plan_, work_);
    }
    if (o.reduce == o.gradient) return shard;
    const Tensor out =
        Tensor(plan_.axes.context(), {plan_.shard_count}, o.gradient, Memory::local, stream_of(o.compute));
    convert_all(o.compute, {{shard.data(), out.data(), shard.count()}}, o.reduce, o.gradient);
    return out;
  }

 private:
  std::int64_t element() const { return size_bytes(plan_.options.reduce); }
  std::byte* block(std::size_t k, std::size_t rank) const {
    return packed_.data() + (plan_.elements.offsets[rank] + plan_.elements.at[k][rank]) * element();
  }
  std::byte* gradient(const ShardItem& item) const {
    return gradients_.data() + item.gradient_at * element();
  }

  void pack() {
    std::vector<Copied> copies;
    for (std::size_t k = 0; k < plan_.packed.size(); ++k) {
      const ShardItem& item = plan_.items[plan_.packed[k]];
      for (std::size_t r = 0; r < item.shard_counts.size(); ++r)
        item.for_each_run(r, [&](std::int64_t in_whole, std::int64_t in_part, std::int64_t count) {
          copies.push_back(
              {gradient(item) + in_whole * element(), block(k, r) + in_part * element(), count * element()});
        });
    }
    copy_all(plan_.options.compute, copies.size(), [&](std::size_t i) { return copies[i]; });
  }
  void begin() {
    if (plan_.axes.size() == 1) return;
    const DType dtype = plan_.options.reduce;
    const Device device = device_of(plan_);
    const std::size_t own = of_->own();
    std::vector<Call> calls;
    const auto add = [&](std::byte* whole, std::int64_t count, const std::vector<std::int64_t>& counts,
                         const std::vector<std::int64_t>& offsets, bool even) {
      if (count == 0) return;
      const ConstBuffer in(whole, count, dtype, device);
      const Buffer out(whole + offsets[own] * element(), counts[own], dtype, device);
      calls.push_back(even
                          ? call::reduce_scatter(in, out, options_of(plan_, op_))
                          : call::reduce_scatter_v(in, out, Blocks{counts, offsets}, options_of(plan_, op_)));
    };
    for (const ShardItem& item : plan_.items)
      if (!item.packed)
        for (const ShardSegment& s : item.segments)
          add(gradient(item) + s.begin * element(), s.count, s.counts, s.offsets, s.even);
    add(packed_.data(), plan_.elements.total, plan_.elements.counts, plan_.elements.offsets, false);
    if (!calls.empty()) work_ = plan_.axes.group().coalesced(calls);
  }
  // Into a buffer of shards.
  void take_own(const Tensor& shard) const {
    const std::size_t own = of_->own();
    std::vector<Converted> all;
    std::size_t k = 0;
    for (const ShardItem& item : plan_.items) {
      std::byte* to = shard.data() + item.shard_at * size_bytes(shard.dtype());
      if (item.packed) {
        all.push_back({block(WEFT_MUTANT("first_packed") ? 0 : k++, own), to, item.shard_counts[own]});
        continue;
      }
      item.for_each_run(own, [&](std::int64_t in_whole, std::int64_t in_part, std::int64_t count) {
        all.push_back(
            {gradient(item) + in_whole * element(), to + in_part * size_bytes(shard.dtype()), count});
      });
    }
    convert_all(plan_.options.compute, all, plan_.options.reduce, shard.dtype());
  }

  const std::shared_ptr<ShardTransfers> of_;
  const ShardPlan& plan_;
  const ReduceOp op_;
  Tensor gradients_, packed_;
  Work work_;
};

Transfer ShardTransfers::gather(const std::shared_ptr<ShardTransfers>& self,
                                std::span<const ConstTensorView> shards, std::vector<std::byte*> to,
                                Tensor keep) {
  return Transfer(std::make_unique<Gather>(self, shards, std::move(to), std::move(keep)));
}

Transfer ShardTransfers::reduce(const std::shared_ptr<ShardTransfers>& self, Tensor gradients, ReduceOp op) {
  return Transfer(std::make_unique<Reduce>(self, std::move(gradients), op));
}

Tensor IntoShards::finish() {
  const Tensor reduced = transfer_.finish();
  const ShardPlan& plan = of_->plan();
  const std::int64_t size = size_bytes(plan.options.gradient);
  copy_all(plan.options.compute, shards_.size(), [&](std::size_t i) {
    return Copied{reduced.data() + plan.items[i].shard_at * size, shards_[i].data, shards_[i].count() * size};
  });
  return {};
}

}  // namespace weft::dp
