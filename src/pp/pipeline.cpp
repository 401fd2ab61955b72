#include "weft/pp/pipeline.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <deque>
#include <map>
#include <optional>
#include <tuple>

#include "base/hash.hpp"
#include "pp/schedule_table.hpp"
#include "weft/base/clock.hpp"
#include "weft/base/error.hpp"
#include "weft/host/copy.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/init.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {
namespace {

using pp::Kind;

constexpr int kPipelineTag = 0x5050;  // of all messages between stages
constexpr int kTiedTag = 0x5051;      // of gradients of tied weights

[[noreturn]] void bad_pipeline(const std::string& text) {
  throw Error(ErrorCode::bad_argument, "pipeline: " + text);
}

std::string text_of(const Shape& shape, DType dtype) {
  return fmt::format("{} {}", to_string(shape), name(dtype));
}
std::string text_of(const PipelineBorder& b) {
  return text_of(b.shape, b.dtype) + (b.layout == nullptr ? "" : " with a layout");
}

}  // namespace

// A run goes through the list of actions. A receive takes a free slot: memory of the shape of its message,
// with a persistent call. The slot is free again when the pass that keeps the message has ended: B or W,
// because layers keep their inputs, and LeftOvers keep dy. A send keeps its tensor until the transport has
// taken it.
struct Pipeline::Impl {
  // Memory that messages of one shape from one rank arrive in, one after the other.
  struct Slot {
    Tensor memory;
    PersistentCall receive;
    Work arrival{};
    bool free = true;
    bool used = false;  // in the run under way
  };
  using SlotKey = std::tuple<int, DType, std::vector<std::int64_t>>;  // source, dtype, shape
  struct Sending {
    Tensor tensor;
    Work work;
  };
  // One micro-batch in one stage.
  struct Pass {
    std::optional<Frame> frame;
    LeftOver left_over;
    Tensors x, dy;  // handed over by another stage of this rank, or by the loss
    Slot *x_slot = nullptr, *dy_slot = nullptr;
    Tensor y, dx;  // results that wait for their send, or for the next stage on this rank
  };

  Module& model;
  Module* const loss;
  ProcessGroup& group;
  Compute& compute;
  const PipelineOptions options;
  const PipelineSchedule& schedule;
  const pp::ScheduleTable table;
  const bool trains;
  std::vector<std::optional<PipelineStage>> stages;  // by stage; of this rank
  std::map<SlotKey, std::deque<Slot>> slots;
  std::int64_t digest_of_schedule = 0, digest_of_stages = 0;
  std::vector<std::vector<int>> stages_of_uses;  // of each tied weight

  // The state of the run under way.
  std::span<const PipelineMicroBatch> batches;
  weft::Pass pass;
  Tensors dloss;
  std::vector<std::int64_t> first_samples;
  std::vector<std::vector<PipelineBorder>> borders;  // by stage and micro-batch; none in front of stage 0
  std::map<std::pair<int, int>, Pass> passes;        // by stage and micro-batch
  std::deque<Sending> sending;
  std::vector<Tensor> losses;
  std::vector<Tensors> outputs;
  std::vector<PipelineTimeline::Span> spans;
  Clock::time_point began_computing;  // when the pass under way had its message

  Impl(Module& model_in, Module* loss_in, ProcessGroup& group_in, Compute& compute_in, PipelineOptions given)
      : model(model_in),
        loss(loss_in),
        group(group_in),
        compute(compute_in),
        options(std::move(given)),
        schedule(options.schedule),
        table((check_pipeline_schedule(options.schedule), options.schedule)),
        trains(schedule.trains()) {
    if (group.size() != schedule.ranks)
      bad_pipeline(fmt::format("schedule \"{}\" is for {} ranks; the group has {}", schedule.name,
                               schedule.ranks, group.size()));
    if (options.stages.size() != schedule.rank_of_stage.size())
      bad_pipeline(fmt::format("schedule \"{}\" has {} stages; {} are given", schedule.name,
                               schedule.stages(), options.stages.size()));
    if (trains && loss == nullptr)
      bad_pipeline(fmt::format("schedule \"{}\" has backward passes, and there is no loss", schedule.name));
    if (!options.border && schedule.stages() > 1) bad_pipeline("border is empty; expected a function");
    std::vector<std::string> all;
    for (const std::vector<std::string>& stage : options.stages)
      all.insert(all.end(), stage.begin(), stage.end());
    if (pipeline_path(model, all) != all) bad_pipeline("a path of a stage matches several modules");
    for (int stage = 0; stage < schedule.stages(); ++stage) {
      stages.emplace_back();
      if (schedule.rank_of_stage[static_cast<std::size_t>(stage)] == group.rank())
        stages.back().emplace(model, options.stages[static_cast<std::size_t>(stage)]);
    }
    place_tied_weights();
    Fnv1a of_schedule, of_stages;
    of_schedule.add(to_string(schedule));
    for (const TiedWeight& weight : options.tied)
      for (const std::string& path : weight.modules) of_stages.add(path), of_stages.add("\n");
    for (const std::vector<std::string>& stage : options.stages) {
      of_stages.add(std::uint64_t{stage.size()});
      for (const std::string& path : stage) of_stages.add(path), of_stages.add("\n");
    }
    digest_of_schedule = static_cast<std::int64_t>(of_schedule.value);
    digest_of_stages = static_cast<std::int64_t>(of_stages.value);
  }

  int last() const { return schedule.stages() - 1; }
  int rank_of(int stage) const { return schedule.rank_of_stage[static_cast<std::size_t>(stage)]; }
  bool here(int stage) const { return rank_of(stage) == group.rank(); }
  const std::vector<PipelineAction>& actions() const {
    return schedule.actions[static_cast<std::size_t>(group.rank())];
  }
  const PipelineBorder& border(int stage, int m) const {
    return borders[static_cast<std::size_t>(stage)][static_cast<std::size_t>(m)];
  }
  Pass& pass_of(const PipelineAction& a) { return passes[{a.stage, a.micro_batch}]; }

  // --- tied weights ---

  int stage_of(const std::string& module) const {
    for (std::size_t stage = 0; stage < options.stages.size(); ++stage)
      for (const std::string& path : options.stages[stage])
        if (is_inside(module, path)) return static_cast<int>(stage);
    bad_pipeline(fmt::format("tied: \"{}\" is in no stage", module));
  }
  void place_tied_weights() {
    if (options.after_gradients && !options.tied.empty())
      bad_pipeline("after_gradients with tied weights; expected one of them");
    for (const TiedWeight& weight : options.tied) {
      stages_of_uses.emplace_back();
      for (const std::string& module : weight.modules) stages_of_uses.back().push_back(stage_of(module));
    }
    std::map<const Parameter*, std::string> owners;
    for (const std::vector<std::string>& stage : options.stages)
      for (const std::string& path : stage)
        for (Parameter* p : model.get(path).parameters())
          if (const auto [owner, first] = owners.emplace(p, path); !first)
            bad_pipeline(
                fmt::format("\"{}\" and \"{}\" share the weight \"{}\"; expected untie() and its "
                            "result in `tied`",
                            owner->second, path, p->path()));
  }
  int rank_of_use(std::size_t weight, std::size_t use) const { return rank_of(stages_of_uses[weight][use]); }
  // The Parameter that holds the values on this rank; null: no use is here.
  Parameter* held_here(std::size_t weight) const {
    for (std::size_t use = 0; use < stages_of_uses[weight].size(); ++use)
      if (rank_of_use(weight, use) == group.rank()) return options.tied[weight].uses[use].get();
    return nullptr;
  }
  // Calls `visit` for each Parameter of this rank that reads the memory of another one, that is its second
  // argument.
  template <class Visit>
  void each_reader(const Visit& visit) const {
    for (std::size_t weight = 0; weight < options.tied.size(); ++weight) {
      Parameter* const held = held_here(weight);
      for (std::size_t use = 0; use < stages_of_uses[weight].size(); ++use)
        if (Parameter* const p = options.tied[weight].uses[use].get();
            rank_of_use(weight, use) == group.rank() && p != held)
          visit(*p, *held);
    }
  }

  // Every use but the first begins with no gradient: that of an earlier run is in the first one's sum.
  void begin_tied_weights() {
    for (std::size_t weight = 0; weight < options.tied.size(); ++weight)
      for (std::size_t use = 1; use < stages_of_uses[weight].size(); ++use)
        options.tied[weight].uses[use]->zero_gradient();
    each_reader([&](Parameter& reader, const Parameter& held) {
      if (!reader.materialised()) reader.materialise(compute);
      reader.set_master(held.master());
    });
  }

  // The rank of the first use adds the gradients of all uses, in their order, and gives the sum to the ranks
  // of the others.
  void add_tied_gradients() {
    for (std::size_t weight = 0; weight < options.tied.size(); ++weight) {
      Parameter* const held = held_here(weight);
      if (held == nullptr || !held->trainable()) continue;
      const int root = rank_of_use(weight, 0);
      std::vector<int> others;
      for (std::size_t use = 1; use < stages_of_uses[weight].size(); ++use) {
        const int rank = rank_of_use(weight, use);
        if (rank != root && std::ranges::count(others, rank) == 0) others.push_back(rank);
        Parameter& p = *options.tied[weight].uses[use];
        if (root == group.rank()) {
          if (rank == root) expect_layout(*held, layout_word(p), weight, use);
          add_gradient(*held, rank == root ? p.gradient() : received_gradient(*held, rank, weight, use));
        }
        if (rank == group.rank() && rank != root) {
          const std::array<std::int64_t, 1> layout{layout_word(p)};
          group.send(view(layout), root, {.tag = kTiedTag}).wait();
          group.send(ConstBuffer(p.gradient()), root, {.tag = kTiedTag}).wait();
        }
      }
      for (const int rank : others)
        if (root == group.rank())
          group.send(ConstBuffer(held->gradient()), rank, {.tag = kTiedTag}).wait();
        else if (rank == group.rank())
          group.recv(Buffer(held->gradient()), root, {.tag = kTiedTag}).wait();
    }
  }
  // A number for the layout of the gradient. Sums of gradients need equal layouts, not only equal shapes.
  static std::int64_t layout_word(const Parameter& p) {
    const LayoutRef layout = p.gradient_layout();
    return layout == nullptr ? 0 : static_cast<std::int64_t>(hash_of(to_string(*layout)));
  }
  void expect_layout(const Parameter& held, std::int64_t other, std::size_t weight, std::size_t use) const {
    if (layout_word(held) == other) return;
    const LayoutRef own = held.gradient_layout();
    throw Error(ErrorCode::layout,
                fmt::format("pipeline: the gradient of \"{}\" has {} in \"{}\" and another layout in \"{}\"; "
                            "expected one layout",
                            held.path(), own == nullptr ? "no layout" : to_string(*own),
                            options.tied[weight].modules[0], options.tied[weight].modules[use]));
  }
  Tensor received_gradient(const Parameter& held, int rank, std::size_t weight, std::size_t use) const {
    std::array<std::int64_t, 1> layout{};
    group.recv(view(layout), rank, {.tag = kTiedTag}).wait();
    expect_layout(held, layout[0], weight, use);
    const Tensor other = compute.make(held.gradient().shape(), held.gradient().dtype(), Memory::shared);
    group.recv(Buffer(other), rank, {.tag = kTiedTag}).wait();
    return other;
  }
  void add_gradient(const Parameter& to, const Tensor& other) const {
    const Tensor sum = to.gradient();
    kernels::add(kernels_of(compute), sum.data_ptr<float>(), other.data_ptr<float>(), sum.data_ptr<float>(),
                 sum.count());
  }

  // --- agreement ---

  void state_borders() {
    if (batches.size() != static_cast<std::size_t>(schedule.micro_batches))
      bad_pipeline(fmt::format("{} micro-batches; schedule \"{}\" is for {}", batches.size(), schedule.name,
                               schedule.micro_batches));
    each_reader([&](const Parameter& reader, const Parameter& held) {
      if (reader.trainable() != held.trainable())
        bad_pipeline(fmt::format("the uses of \"{}\" are not frozen alike", held.path()));
    });
    borders.assign(static_cast<std::size_t>(schedule.stages()), {});
    first_samples.assign(1, 0);
    for (const PipelineMicroBatch& b : batches) {
      if (b.inputs.empty()) bad_pipeline("a micro-batch has no inputs; all ranks need their shapes");
      const Shape& whole = layouts::global_shape(b.inputs[0]);
      first_samples.push_back(first_samples.back() + (whole.rank() == 0 ? 1 : whole[0]));
      for (int stage = 1; stage < schedule.stages(); ++stage) {
        PipelineBorder at = options.border(stage, b.inputs);
        for (int axis = 0; at.layout != nullptr && axis < at.layout->mesh_shape().axis_count(); ++axis)
          if (is_partial(at.layout->placements[static_cast<std::size_t>(axis)]) ||
              (at.inside != nullptr && is_partial(at.inside->placements[static_cast<std::size_t>(axis)])))
            bad_pipeline(
                fmt::format("the border in front of stage {} is Partial; expected whole values", stage));
        borders[static_cast<std::size_t>(stage)].push_back(std::move(at));
      }
    }
    if (here(last()) && loss != nullptr)
      for (const PipelineMicroBatch& b : batches)
        if (b.targets.empty()) bad_pipeline("a micro-batch has no targets for the loss");
  }

  // Every rank gets the digests of every other, so that all throw, or none does.
  void agree() {
    std::optional<Error> own;
    try {
      state_borders();
    } catch (const Error& e) {
      own = e;
    } catch (const std::exception& e) {  // of the program's function `border`
      own = Error(ErrorCode::bad_argument, fmt::format("pipeline: border: {}", e.what()));
    }
    std::vector<std::int64_t> mine{own ? 1 : 0, digest_of_schedule, digest_of_stages, pass.step};
    const std::size_t size = 10;
    Fnv1a of_borders;
    if (!own)
      for (const std::vector<PipelineBorder>& at : borders)
        for (const PipelineBorder& b : at) {
          of_borders.add(static_cast<std::uint64_t>(b.dtype));
          for (int dim = 0; dim < b.shape.rank(); ++dim)
            of_borders.add(static_cast<std::uint64_t>(b.shape[dim]));
          of_borders.add(";");
        }
    mine.push_back(static_cast<std::int64_t>(of_borders.value));
    mine.push_back(loss != nullptr ? 1 : 0);
    mine.push_back(static_cast<std::int64_t>(pass.seed));
    mine.push_back((pass.training ? 1 : 0) + (pass.exact == Exact::yes ? 2 : 0));
    const TiedWords tied = tied_words();
    mine.insert(mine.end(), {tied.held, tied.trained});
    std::vector<std::int64_t> all(size * static_cast<std::size_t>(group.size()));
    group.all_gather(mine, all).wait();
    if (own) throw Error(*own);
    const auto of = [&](int rank, std::size_t word) {
      return all[static_cast<std::size_t>(rank) * size + word];
    };
    for (int rank = 0; rank < group.size(); ++rank)
      if (of(rank, 0) != 0)
        bad_pipeline(
            fmt::format("rank {} was given micro-batches that do not fit; its own error says why", rank));
    constexpr const char* kWhat[] = {"",     "schedule", "list of stages", "step", "list of shapes",
                                     "loss", "seed",     "kind of pass"};
    for (std::size_t word = 1; word < std::size(kWhat); ++word)
      for (int rank = 1; rank < group.size(); ++rank)
        if (of(rank, word) != of(0, word))
          throw Error(Failure{.code = ErrorCode::mismatch,
                              .text = fmt::format("pipeline: rank {} has another {} than rank 0{}", rank,
                                                  kWhat[word], word == 4 ? own_borders() : std::string()),
                              .ranks = {0, rank}});
    for (int rank = 0; rank < group.size(); ++rank)
      for (int other = 0; other < rank; ++other)
        if (const std::int64_t unlike =
                of(rank, size - 2) & of(other, size - 2) & (of(rank, size - 1) ^ of(other, size - 1));
            unlike != 0)
          throw Error(
              Failure{.code = ErrorCode::mismatch,
                      .text = fmt::format("pipeline: the uses of \"{}\" are not frozen alike on ranks {} "
                                          "and {}",
                                          tied_name(unlike), other, rank),
                      .ranks = {other, rank}});
  }
  // A bit for each tied weight of which a use is on this rank, and for each of these that is trained.
  struct TiedWords {
    std::int64_t held = 0, trained = 0;
  };
  static constexpr std::size_t kTiedBits = 62;  // later tied weights are not compared
  TiedWords tied_words() const {
    TiedWords words;
    for (std::size_t weight = 0; weight < options.tied.size() && weight < kTiedBits; ++weight)
      if (const Parameter* const held = held_here(weight)) {
        words.held |= std::int64_t{1} << weight;
        words.trained |= std::int64_t{held->trainable() ? 1 : 0} << weight;
      }
    return words;
  }
  const std::string& tied_name(std::int64_t bits) const {
    return options.tied[static_cast<std::size_t>(std::countr_zero(static_cast<std::uint64_t>(bits)))]
        .uses[0]
        ->path();
  }
  // "; in front of stage 1 this rank has (2, 8) f32, (1, 8) f32"
  std::string own_borders() const {
    std::string text;
    for (std::size_t stage = 1; stage < borders.size(); ++stage) {
      text += fmt::format("; in front of stage {} this rank has", stage);
      for (std::size_t m = 0; m < borders[stage].size(); ++m)
        text += fmt::format("{} {}", m == 0 ? "" : ",",
                            text_of(borders[stage][m].shape, borders[stage][m].dtype));
    }
    return text;
  }

  // --- messages ---

  Slot& free_slot(int source, const PipelineBorder& b) {
    std::vector<std::int64_t> dims;
    for (int dim = 0; dim < b.shape.rank(); ++dim) dims.push_back(b.shape[dim]);
    std::deque<Slot>& all = slots[{source, b.dtype, std::move(dims)}];
    for (Slot& slot : all)
      if (slot.free) return slot;
    const Tensor memory = compute.make(b.shape, b.dtype, Memory::shared);
    all.push_back({memory, group.make_recv(Buffer(memory), source, {.tag = kPipelineTag})});
    return all.back();
  }

  void post(const PipelineAction& a) {
    const bool forward = a.kind == Kind::recv_forward;
    const int other = forward ? a.stage - 1 : a.stage + 1;
    Slot& slot = free_slot(rank_of(other), border(forward ? a.stage : other, a.micro_batch));
    slot.free = false;
    slot.used = true;
    slot.arrival = slot.receive.start();
    (forward ? pass_of(a).x_slot : pass_of(a).dy_slot) = &slot;
  }
  Tensor arrived(Slot* slot, const PipelineBorder& b) {
    slot->arrival.wait();
    const Tensor t = slot->memory.with_layout(b.layout);
    return b.inside == nullptr ? t : redistribute(t, b.inside);
  }
  static Tensor to_send(const Tensor& t, const PipelineBorder& b) {
    return b.inside == nullptr ? t : redistribute(t, b.layout);
  }
  // Other shapes than those of this run may never come again.
  void keep_used_slots() {
    for (auto& [key, all] : slots) {
      std::erase_if(all, [](const Slot& slot) { return !slot.used; });
      for (Slot& slot : all) slot.used = false;
    }
    std::erase_if(slots, [](const auto& of_shape) { return of_shape.second.empty(); });
  }
  static void release(Slot*& slot) {
    if (slot != nullptr) slot->free = true;
    slot = nullptr;
  }

  void send(const PipelineAction& a) {
    const bool forward = a.kind == Kind::send_forward;
    Pass& p = pass_of(a);
    while (sending.size() >= static_cast<std::size_t>(kPipelineSendsInFlight)) take_oldest_send();
    for (; !sending.empty() && sending.front().work.done(); sending.pop_front()) {}
    Tensor t = std::move(forward ? p.y : p.dx);
    const int to = rank_of(forward ? a.stage + 1 : a.stage - 1);
    Work work = group.send(ConstBuffer(t), to, {.tag = kPipelineTag});
    sending.push_back({std::move(t), std::move(work)});
    if (!trains) passes.erase({a.stage, a.micro_batch});
  }
  void take_oldest_send() {
    sending.front().work.wait();
    sending.pop_front();
  }

  // The result of a stage must be what all ranks have agreed on.
  void expect_border(const char* what, const PipelineAction& a, int stage, const Tensor& t) const {
    const PipelineBorder& b = border(stage, a.micro_batch);
    const LayoutRef layout = b.inside == nullptr ? b.layout : b.inside;
    const bool same_shape = t.shape() == (b.inside == nullptr ? b.shape : b.inside->local_shape());
    if (same_shape && t.dtype() == b.dtype && layouts::same(t.layout(), layout)) return;
    throw Error(
        ErrorCode::mismatch,
        fmt::format("pipeline: {} of stage {} for micro-batch {} is {}; the border in front of stage {} "
                    "is {}{}",
                    what, a.stage, a.micro_batch, text_of({t.shape(), t.dtype(), t.layout()}), stage,
                    text_of(b), same_shape && t.dtype() == b.dtype ? ", another one" : ""));
  }
  // Slots are written again while a send may still read: a stage that hands its input on gives a copy.
  Tensor own_memory(const Tensor& t, const Slot* slot) const {
    if (slot == nullptr || t.data() < slot->memory.data() ||
        t.data() >= slot->memory.data() + slot->memory.bytes())
      return t;
    const Tensor copied = compute.make(t.shape(), t.dtype());
    copy(compute.context(), t, copied, compute.stream());
    return copied.with_layout(t.layout());
  }

  // --- passes ---

  void forward(const PipelineAction& a) {
    Pass& p = pass_of(a);
    const auto m = static_cast<std::size_t>(a.micro_batch);
    weft::Pass of = pass;
    of.micro_batch = a.micro_batch;
    of.first_sample = first_samples[m];
    of.documents = batches[m].documents;
    if (trains) {
      p.frame.emplace(compute, of);
    } else {
      of.training = false;
      p.frame.emplace(Frame::inference(compute));
      p.frame->begin(of);
    }
    Tensors x = a.stage == 0 ? batches[m].inputs
                : p.x_slot   ? Tensors{arrived(p.x_slot, border(a.stage, a.micro_batch))}
                             : std::move(p.x);
    began_computing = Clock::now();
    const Tensors y = stages[static_cast<std::size_t>(a.stage)]->forward(x, *p.frame);
    x.clear();
    if (a.stage == last()) {
      end_forward(p, m, y);
    } else {
      if (y.size() != 1)
        throw Error(ErrorCode::mismatch,
                    fmt::format("pipeline: stage {} has {} outputs; expected 1", a.stage, y.size()));
      expect_border("the output", a, a.stage + 1, y[0]);
      if (here(a.stage + 1))
        passes[{a.stage + 1, a.micro_batch}].x = {own_memory(y[0], p.x_slot)};
      else
        p.y = own_memory(to_send(y[0], border(a.stage + 1, a.micro_batch)), p.x_slot);
    }
    if (trains) return;
    release(p.x_slot);
    if (a.stage == last() || here(a.stage + 1)) passes.erase({a.stage, a.micro_batch});
  }
  void end_forward(Pass& p, std::size_t m, const Tensors& y) {
    if (loss != nullptr) {
      Tensors of_loss = y;
      of_loss.insert(of_loss.end(), batches[m].targets.begin(), batches[m].targets.end());
      losses[m] = loss->forward(of_loss, *p.frame)[0];
    }
    if (trains) return;
    for (const Tensor& t : y) outputs[m].push_back(own_memory(t, p.x_slot));
  }

  void backward(const PipelineAction& a) {
    Pass& p = pass_of(a);
    const PipelineStage& stage = *stages[static_cast<std::size_t>(a.stage)];
    Tensors dy = a.stage == last() ? loss->backward(dloss, *p.frame)
                 : p.dy_slot       ? Tensors{arrived(p.dy_slot, border(a.stage + 1, a.micro_batch))}
                                   : std::move(p.dy);
    if (a.stage != last()) began_computing = Clock::now();
    const Tensors dx =
        a.kind == Kind::input ? stage.backward(dy, *p.frame, p.left_over) : stage.backward(dy, *p.frame);
    dy.clear();
    if (a.stage > 0) {
      if (dx.size() != 1)
        throw Error(
            ErrorCode::mismatch,
            fmt::format("pipeline: stage {} gives {} gradients of inputs; expected 1", a.stage, dx.size()));
      expect_border("the gradient of the input", a, a.stage, dx[0]);
      if (here(a.stage - 1))
        passes[{a.stage - 1, a.micro_batch}].dy = {own_memory(dx[0], p.dy_slot)};
      else
        p.dx = own_memory(to_send(dx[0], border(a.stage, a.micro_batch)), p.dy_slot);
    }
    notify_gradients(a);
    if (a.kind == Kind::backward) end_backward(p);
  }
  void notify_gradients(const PipelineAction& a) const {
    if (options.after_gradients)
      options.after_gradients(stages[static_cast<std::size_t>(a.stage)]->parameters(), a.micro_batch);
  }
  static void end_backward(Pass& p) {
    p.frame.reset();
    p.x.clear(), p.dy.clear();
    p.y = Tensor();
    release(p.x_slot);
    release(p.dy_slot);
  }

  void perform(const PipelineAction& a, Clock::time_point began) {
    if (pp::sends(a.kind)) return send(a);
    if (pp::receives(a.kind)) return post(a);
    began_computing = Clock::now();
    if (a.kind == Kind::forward) {
      forward(a);
    } else if (a.kind == Kind::weight) {
      Pass& p = pass_of(a);
      p.left_over.run();
      notify_gradients(a);
      end_backward(p);
    } else {
      backward(a);
    }
    const auto seconds = [&](Clock::time_point at) {
      return std::chrono::duration<double>(at - began).count();
    };
    spans.push_back({a, seconds(began_computing), seconds(Clock::now())});
  }

  // Every error that is not the group's own becomes the group's: nobody waits for this rank.
  void perform_all() {
    const Clock::time_point began = Clock::now();
    for (std::size_t i = 0; i < actions().size(); ++i) {
      try {
        if (options.before_action) options.before_action(actions()[i]);
        perform(actions()[i], began);
      } catch (const Error& e) {
        if (!group.failed()) abort(i, e.what());
        throw;
      } catch (const std::exception& e) {
        abort(i, e.what());
        throw;
      }
    }
    while (!sending.empty()) take_oldest_send();
    try {
      if (trains) add_tied_gradients();
    } catch (const std::exception& e) {
      if (!group.failed()) group.abort(fmt::format("pipeline: the gradients of tied weights: {}", e.what()));
      throw;
    }
  }
  void abort(std::size_t action, const char* why) const {
    group.abort(fmt::format("pipeline: {}: {}",
                            pp::text_of(schedule, {group.rank(), static_cast<int>(action)}), why));
  }

  void tell_losses(Result& result) {
    if (loss == nullptr) return;
    result.losses.resize(batches.size());
    try {
      for (std::size_t m = 0; here(last()) && m < losses.size(); ++m)
        result.losses[m] = options.total_loss ? options.total_loss(losses[m])
                                              : to_host(compute.context(), full(losses[m])).as<double>()[0];
    } catch (const std::exception& e) {
      if (!group.failed()) group.abort(fmt::format("pipeline: the losses: {}", e.what()));
      throw;
    }
    group.broadcast(result.losses, rank_of(last())).wait();
  }

  void drop() noexcept {
    passes.clear();
    losses.clear();
    outputs.clear();
    dloss.clear();
    batches = {};
    sending.clear();
    for (auto& [key, all] : slots)
      for (Slot& slot : all) slot.free = true;
  }
};

Pipeline::Pipeline(Module& model, Module* loss, ProcessGroup& group, Compute& compute,
                   PipelineOptions options)
    : impl_(std::make_unique<Impl>(model, loss, group, compute, std::move(options))) {}
Pipeline::~Pipeline() = default;

const PipelineSchedule& Pipeline::schedule() const noexcept { return impl_->schedule; }
int Pipeline::rank() const noexcept { return impl_->group.rank(); }

std::vector<int> Pipeline::stages() const {
  std::vector<int> all;
  for (int stage = 0; stage < impl_->schedule.stages(); ++stage)
    if (impl_->here(stage)) all.push_back(stage);
  return all;
}

std::vector<Parameter*> Pipeline::parameters() const {
  std::vector<Parameter*> own, all;
  for (const auto& stage : impl_->stages)
    if (stage)
      for (Parameter* p : stage->parameters()) own.push_back(p);
  impl_->each_reader([&](Parameter& reader, Parameter&) { std::erase(own, &reader); });
  for (Parameter* p : impl_->model.parameters())
    if (std::ranges::count(own, p) > 0) all.push_back(p);
  return all;
}

void Pipeline::materialise(std::uint64_t seed, Memory memory) {
  for (const auto& stage : impl_->stages) {
    if (!stage) continue;
    for (Module* module : stage->modules()) {
      weft::materialise(*module, impl_->compute, memory);
      initialise(*module, seed);
    }
  }
}

Pipeline::Result Pipeline::run(std::span<const PipelineMicroBatch> micro_batches, const Pass& pass,
                               Inputs dloss) {
  Impl& i = *impl_;
  struct Drop {
    Impl& impl;
    ~Drop() { impl.drop(); }
  } const drop{i};
  i.batches = micro_batches;
  i.pass = pass;
  i.dloss.assign(dloss.begin(), dloss.end());
  i.spans.clear();
  i.agree();
  try {
    i.begin_tied_weights();
  } catch (const std::exception& e) {
    if (!i.group.failed()) i.group.abort(fmt::format("pipeline: tied weights: {}", e.what()));
    throw;
  }
  i.losses.assign(micro_batches.size(), {});
  i.outputs.assign(micro_batches.size(), {});
  i.perform_all();
  Result result;
  i.tell_losses(result);
  i.group.barrier().wait();  // an error of the last passes of another rank is an error of all
  i.keep_used_slots();
  if (!i.trains && i.here(i.last())) result.outputs = std::move(i.outputs);
  return result;
}

const std::vector<PipelineTimeline::Span>& Pipeline::spans() const noexcept { return impl_->spans; }

std::int64_t Pipeline::message_bytes() const noexcept {
  std::int64_t bytes = 0;
  for (const auto& [key, all] : impl_->slots)
    for (const Impl::Slot& slot : all) bytes += slot.memory.bytes();
  return bytes;
}

}  // namespace weft
