// A transformer that trains on the late device of the tests has the losses and the weights of the CPU, bit
// for bit.
#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "support/errors.hpp"
#include "support/late_backend.hpp"
#include "support/late_kernels.hpp"
#include "support/run_ranks.hpp"
#include "support/temporary_folder.hpp"
#include "weft/host/copy.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/models/build.hpp"
#include "weft/nn/layouts.hpp"
#include "weft/nn/linear.hpp"
#include "weft/nn/loss.hpp"
#include "weft/nn/optimizer.hpp"
#include "weft/train/checkpoint.hpp"
#include "weft/train/gradients.hpp"
#include "weft/train/replicas.hpp"

namespace weft::device_test {
namespace {

struct Trained {
  std::vector<double> losses;
  std::vector<std::vector<float>> weights;
};

// `packed`: documents of four and two tokens are in each sequence.
Trained train(Compute& compute, bool tied, bool packed = false) {
  Context& context = compute.context();
  Transformer model({.dim = 16,
                     .layers = 2,
                     .heads = 2,
                     .kv_heads = 1,
                     .ffn_hidden = 24,
                     .vocab = 13,
                     .max_seq = 8,
                     .tied = tied,
                     .init_std = 0.2});
  materialise(model, compute);
  initialise(model, 3);
  AdamW optimizer(compute, model.parameters(), {});
  CrossEntropy loss;
  Trained result;
  for (int step = 0; step < 3; ++step) {
    const Tensor tokens(context, {4, 6}, DType::i64), labels(context, {4, 6}, DType::i64),
        documents(context, {4, 6}, DType::i64);
    for (std::size_t i = 0; i < 24; ++i) {
      documents.as<std::int64_t>()[i] = static_cast<std::int64_t>(i % 6 / 4);
      const std::size_t n = i + 24 * static_cast<std::size_t>(step);
      tokens.as<std::int64_t>()[i] = static_cast<std::int64_t>(n * 7 % 13);
      labels.as<std::int64_t>()[i] =
          i % 5 == 0 ? CrossEntropy::kIgnore : static_cast<std::int64_t>(n * 5 % 13);
    }
    Frame frame(compute);
    const Tensor labels_there = to_device(context, labels, compute.stream());
    Tensors inputs{to_device(context, tokens, compute.stream())};
    if (packed) inputs.push_back(to_device(context, documents, compute.stream()));
    const Tensor logits = model.forward(inputs, frame)[0];
    const Tensor sum = loss.forward({logits, labels_there, global_valid(compute, labels_there)}, frame)[0];
    model.backward(loss.backward({}, frame), frame);
    optimizer.step(0.01);
    optimizer.zero_gradients();
    result.losses.push_back(to_host(context, sum).as<double>()[0]);
  }
  for (const Parameter* p : model.parameters()) {
    const Tensor home = to_host(context, p->master());
    result.weights.emplace_back(home.f32().begin(), home.f32().end());
  }
  return result;
}

TEST(TransformerOnADevice, TrainsToTheSameBits) {
  Context context;
  test::LateDevice& late = test::add_late_device(context);
  for (const bool tied : {false, true}) {
    Compute here(context, 2), there(context, 2, late.device());
    const Trained want = train(here, tied), got = train(there, tied);
    EXPECT_EQ(got.losses, want.losses);
    EXPECT_LT(got.losses[2], got.losses[0]);
    EXPECT_EQ(got.weights, want.weights);
    const Trained packed = train(there, tied, true);
    EXPECT_EQ(packed.weights, train(here, tied, true).weights);
    EXPECT_NE(packed.weights, want.weights);
  }
  EXPECT_EQ(late.blocks(), 0u) << "all memory was given back";
}

// A device that has every second kernel of the list: the first, third, …, or the others.
kernels::KernelTable half(std::size_t first) {
  kernels::KernelTable table = test::late::table();
  kernels::for_each_kernel([&]<auto Member>() {
    if (kernels::Row<Member>::number % 2 != first) table.*Member = nullptr;
  });
  return table;
}

// The name of a kernel in a warning or an error: `… cuda:0 has no <name>: …`.
std::string kernel_in(const std::string& text) {
  const std::size_t begin = text.find("has no ") + 7;
  return text.substr(begin, text.find_first_of(":;", begin) - begin);
}

TEST(TransformerOnHalfADevice, TrainsWithTheHostsKernels) {
  Context whole;
  Compute everything(whole, 2, test::add_late_device(whole).device());
  const Trained want = train(everything, false);
  std::set<std::string> on_host;
  for (const std::size_t first : {std::size_t{0}, std::size_t{1}}) {
    const kernels::KernelTable table = half(first);
    std::vector<std::string> warnings;
    ContextOptions options;
    options.log_sink = [&](LogLevel level, std::string_view line) {
      if (level == LogLevel::warning) warnings.emplace_back(line);
    };
    Context context(options);
    ::setenv("WEFT_HOST_KERNELS", "1", 1);
    test::LateDevice& late = test::add_late_device(context, 0, table);
    ::unsetenv("WEFT_HOST_KERNELS");
    {
      Compute compute(context, 2, late.device());
      const Trained got = train(compute, false);
      EXPECT_EQ(got.losses, want.losses);
      EXPECT_EQ(got.weights, want.weights);
    }
    EXPECT_EQ(late.blocks(), 0u) << "all memory was given back";

    // One warning for each kernel that is missing, and needed.
    std::set<std::string> missing, named;
    kernels::for_each_kernel([&]<auto Member>() {
      if (table.*Member == nullptr) missing.emplace(kernels::Row<Member>::name);
    });
    for (const std::string& line : warnings) {
      const std::string kernel = kernel_in(line);
      EXPECT_EQ(line, "[program] kernels: cuda:0 has no " + kernel +
                          ": it runs on the host, on copies of its operands (WEFT_HOST_KERNELS=1)");
      EXPECT_EQ(missing.count(kernel), 1u) << kernel;
      EXPECT_TRUE(named.insert(kernel).second) << kernel << " is named again";
    }
    on_host.insert(named.begin(), named.end());

    // Without the variable the first of them is an error.
    Context strict;
    Compute compute(strict, 2, test::add_late_device(strict, 0, table).device());
    ASSERT_FALSE(warnings.empty());
    EXPECT_EQ(
        test::error_text(ErrorCode::unsupported, [&] { return train(compute, false).losses; }),
        "kernels: cuda:0 has no " + kernel_in(warnings[0]) +
            "; give it to add_kernels(), or set WEFT_HOST_KERNELS=1 to run it on the host, on copies of its "
            "operands");
  }
  EXPECT_EQ(on_host,
            (std::set<std::string>{"adamw_step", "add", "attention_backward", "attention_forward",
                                   "count_valid", "cross_entropy_backward", "cross_entropy_sum",
                                   "cross_entropy_terms", "embedding_backward", "embedding_forward", "fill",
                                   "linear_forward", "matmul", "rms_norm_backward", "rms_norm_forward",
                                   "rope_backward", "rope_forward", "swiglu_backward", "swiglu_forward"}))
      << "every kernel that this transformer calls";
}

// Two steps of two micro-batches on ranks of dp=2 and tp=2, with everything that a step has: losses, norms
// and weights.
Trained train_in_parallel(Compute& compute, ProcessGroup& group, DType dtype) {
  Context& context = compute.context();
  const DeviceMesh mesh(group, {{"dp", 2}, {"tp", 2}});
  ParallelModel built =
      build_parallel_model({.dim = 16,
                            .layers = 2,
                            .heads = 4,
                            .kv_heads = 2,
                            .ffn_hidden = 24,
                            .vocab = 12,
                            .max_seq = 8,
                            .init_std = 0.2},
                           mesh, compute, {.seed = 5, .dtype = dtype, .reducer = {.bucket_bytes = 2048}});
  AdamW optimizer(compute, built.parameters(), {});
  CrossEntropy loss;
  Trained result;
  for (int step = 0; step < 3; ++step) {
    for (int micro = 0; micro < 2; ++micro) {
      const Tensor tokens(context, {2, 6}, DType::i64), labels(context, {2, 6}, DType::i64);
      for (std::size_t i = 0; i < 12; ++i) {
        const std::size_t n = i + 12 * static_cast<std::size_t>(4 * step + 2 * micro + built.data.rank());
        tokens.as<std::int64_t>()[i] = static_cast<std::int64_t>(n * 7 % 12);
        labels.as<std::int64_t>()[i] =
            n % 5 == 0 ? CrossEntropy::kIgnore : static_cast<std::int64_t>(n * 5 % 12);
      }
      const auto place = [&](const Tensor& rows) {
        return built.place(to_device(context, rows, compute.stream()), 4);
      };
      std::optional<NoSync> off;
      if (micro == 0) off.emplace(built.reducer->no_sync());
      Frame frame(compute);
      const Tensor labels_there = place(labels);
      const Tensor logits = built.model->forward(place(tokens), frame)[0];
      const Tensor sum = loss.forward({logits, labels_there, global_valid(compute, labels_there)}, frame)[0];
      built.model->backward(loss.backward({}, frame), frame);
      result.losses.push_back(to_host(context, full(sum)).as<double>()[0]);
    }
    built.reducer->finish();
    sync_replicated_gradients(built.parameters(), built.tensor);
    result.losses.push_back(grad_norm(built.parameters()));
    result.losses.push_back(clip_grad_norm(built.parameters(), 0.5));
    optimizer.step(0.01);
    optimizer.zero_gradients();
    check_replicas(built.parameters(), mesh);
  }
  for (const Parameter* p : built.parameters()) {
    const Tensor home = to_host(context, p->master());
    result.weights.emplace_back(home.f32().begin(), home.f32().end());
  }
  return result;
}

TEST(TransformerOnDevices, TrainsInParallelToTheSameBits) {
  for (const DType dtype : {DType::f32, DType::bf16})
    test::run_ranks(test::Ranks::threads, 4, [&](test::Rank& r) {
      const test::LateDevice& late = test::add_late_device(r.context, r.rank);
      Trained want, got;
      {
        Compute here(r.context);
        want = train_in_parallel(here, r.group(), dtype);
      }
      {
        Compute there(r.context, 1, late.device());
        ProcessGroup group =
            ProcessGroup::create(r.context, test::late_collectives(), r.membership("on devices"));
        got = train_in_parallel(there, group, dtype);
      }
      EXPECT_EQ(got.losses, want.losses);
      EXPECT_LT(got.losses[4 * 2], got.losses[0]);
      EXPECT_EQ(got.weights, want.weights);
      EXPECT_EQ(late.blocks(), 0u) << "all memory was given back";
    });
}

// If a replica of a model drifts on its device, it is detected.
TEST(TransformerOnDevices, ADriftingReplicaIsNamed) {
  test::run_ranks(test::Ranks::threads, 2, [](test::Rank& r) {
    const test::LateDevice& late = test::add_late_device(r.context, r.rank);
    Compute there(r.context, 1, late.device()), other(r.context, 1, late.device());
    ProcessGroup group =
        ProcessGroup::create(r.context, test::late_collectives(), r.membership("on devices"));
    const DeviceMesh mesh(group, {{"dp", 2}});
    Linear layer(3, 2);
    replicate(layer, mesh);
    materialise(layer, there);
    initialise(layer, 1);
    check_replicas(layer.parameters(), mesh);
    const Tensor& weight = layer.parameters()[0]->write_master();
    if (r.rank == 1) kernels::fill(kernels_of(there), weight.data_ptr<float>(), 0.25f, 1);
    EXPECT_EQ(
        test::error_text([&] { check_replicas(layer.parameters(), mesh); }),
        "mismatch: check_replicas: \"weight\" is Replicate on dp=2, but on dp ranks 0, 1 it has other bits");

    // Buckets on another stream than the gradients would read values that are not written yet.
    GradientReducer reducer(layer.parameters(), mesh, {.compute = &other});
    Frame frame(there);
    const Tensor x = there.zeros({4, 3}).with_layout(make_layout(mesh, {{"dp", Shard{0}}}, {8, 3}));
    const Tensor y = layer.forward(x, frame)[0];
    layer.backward(y, frame);
    EXPECT_EQ(test::error_text([&] { reducer.finish(); }),
              "bad_argument: gradient_reducer: \"weight\" was materialised with another Compute of cuda:" +
                  std::to_string(r.rank) + " than options.compute");
  });
}

// A checkpoint of a device's tensors goes through the host: what is saved from the device is loaded on the
// CPU, and back.
TEST(TransformerOnADevice, IsSavedAndLoaded) {
  const test::TemporaryFolder folder;
  Context context;
  Compute there(context, 1, test::add_late_device(context).device()), here(context);
  const auto make = [](Compute& compute, std::uint64_t seed) {
    auto layer = std::make_unique<Linear>(3, 2, true);
    materialise(*layer, compute);
    initialise(*layer, seed);
    return layer;
  };
  const auto away = make(there, 1), home = make(here, 2), again = make(there, 3);
  const SGD::Options options{0.5, 0};
  SGD of_away(there, away->parameters(), options), of_home(here, home->parameters(), options),
      of_again(there, again->parameters(), options);
  save_checkpoint(folder.path() / "a", {}, 1, *away, &of_away);
  load_checkpoint(folder.path() / "a", {}, *home, &of_home);
  save_checkpoint(folder.path() / "b", {}, 2, *home, &of_home);
  load_checkpoint(folder.path() / "b", {}, *again, &of_again);
  const auto floats = [&](const Module& m) {
    const Tensor w = to_host(context, m.parameters()[0]->master());
    return std::vector<float>(w.f32().begin(), w.f32().end());
  };
  EXPECT_EQ(floats(*home), floats(*away));
  EXPECT_EQ(floats(*again), floats(*away));
}

}  // namespace
}  // namespace weft::device_test
