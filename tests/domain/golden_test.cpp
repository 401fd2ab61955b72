// Convolutions of maps that are cut in rows, against the reference data of another program: what each of 2, 3
// and 4 ranks has.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "domain/as_serial.hpp"
#include "support/golden.hpp"
#include "weft/checkpoint/safetensors.hpp"
#include "weft/mesh/window.hpp"
#include "weft/nn/maps/resample.hpp"

namespace weft::domain_golden_test {
namespace {

using kernels::Padding;
using test::Rank;

class Golden {
 public:
  Golden(Context& context, const std::filesystem::path& path)
      : context_(context),
        file_(SafetensorsFile::open(path)),
        info_(nlohmann::json::parse(file_.metadata("case"))) {}
  const nlohmann::json& config() const { return info_.at("config"); }
  Tensor tensor(const std::string& name) { return file_.read(context_, name); }
  bool has(const std::string& name) const { return std::ranges::count(file_.names(), name) > 0; }
  // Within the limit of the folder's README for `like`, one of the whole's names.
  void compare(const std::string& name, const std::string& like, const Tensor& mine) {
    const double limit = 4 * info_.at("torch_f32_max_abs_err").at(like).get<double>() +
                         16 * 0x1p-23 * info_.at("ref_max_abs").at(like).get<double>();
    const Tensor theirs = tensor(name);
    ASSERT_EQ(mine.count(), theirs.count()) << name;
    for (std::size_t i = 0; i < mine.f32().size(); ++i)
      ASSERT_NEAR(static_cast<double>(mine.f32()[i]), theirs.as<double>()[i], limit)
          << name << " [" << i << "]";
  }

 private:
  Context& context_;
  SafetensorsFile file_;
  nlohmann::json info_;
};

// `rows`: what is beyond the first and last one.
std::unique_ptr<Module> model_of(const nlohmann::json& config, Padding rows) {
  const std::int64_t k = config.at("kernel"), p = config.at("padding");
  const bool periodic = config.at("mode") == "periodic";
  auto model = std::make_unique<Sequential>();
  model->append(
      "pad", std::make_unique<Pad2d>(Pad2dConfig{.top = p,
                                                 .bottom = p,
                                                 .left = p,
                                                 .right = p,
                                                 .rows = rows,
                                                 .columns = periodic ? Padding::circular : Padding::zeros}));
  model->append("conv", std::make_unique<Conv2d>(
                            Conv2dConfig{.in = config.at("C_in"), .out = config.at("C_out"), .kernel = k}));
  return model;
}

void expect_the_files_numbers(Rank& rank, const std::filesystem::path& path) {
  Golden golden(rank.context, path);
  Compute compute(rank.context, 1);
  const DeviceMesh mesh(rank.group(), {{"h", -1}});
  const Tensor x = golden.tensor("in.x");
  const std::string mine = "shard.n" + std::to_string(rank.size) + ".r" + std::to_string(rank.rank) + ".";
  for (const bool reflect : {false, true}) {
    const std::string whole = reflect ? "serial_reflect." : "";
    if (reflect && !golden.has("serial_reflect.out.y")) continue;
    const std::unique_ptr<Module> model =
        model_of(golden.config(), reflect ? Padding::reflect : Padding::zeros);
    const DomainManager manager = apply_domain_parallel(*model, mesh);
    replicate(*model, mesh);
    materialise(*model, compute);
    model->parameter("conv.weight")
        ->set_master(golden.tensor("param.weight").with_layout(model->parameter("conv.weight")->layout()));
    model->parameter("conv.bias")
        ->set_master(golden.tensor("param.bias").with_layout(model->parameter("conv.bias")->layout()));
    const Tensor part = shard_spatial(x, manager);
    Frame frame(compute);
    const Tensor y = model->forward(part, frame)[0];
    const Tensor dx = model->backward(distribute(golden.tensor("in.cotangent"), y.layout()), frame)[0];
    golden.compare(whole + "out.y", "out.y", full(y));
    golden.compare(whole + "grad.in.x", "grad.in.x", full(dx));
    if (!reflect && rank.size > 1) {
      ASSERT_TRUE(test::same_bits(part, golden.tensor(mine + "in.x")));
      const std::int64_t p = golden.config().at("padding");
      const Tensor halo = fetch_window(part, {WindowDim::halo(part.layout(), 2, p, p, Edge::zero())});
      ASSERT_TRUE(test::same_bits(halo, golden.tensor(mine + "halo_x")));
      golden.compare(mine + "out.y", "out.y", y);
      golden.compare(mine + "grad.in.x", "grad.in.x", dx);
      for (const char* name : {"weight", "bias"}) {  // this rank's contribution
        const Parameter& parameter = *model->parameter(std::string("conv.") + name);
        EXPECT_EQ(to_string(parameter.gradient_layout()->on("h")), "Partial(sum)");
        golden.compare(mine + "grad.param." + name, std::string("grad.param.") + name, parameter.gradient());
      }
    }
    sync_domain_gradients(*model, manager);
    for (const char* name : {"weight", "bias"})
      golden.compare(whole + "grad.param." + name, std::string("grad.param.") + name,
                     model->parameter(std::string("conv.") + name)->gradient());
  }
}

TEST(DomainGolden, WhatEachRankHas) {
  const std::vector<std::filesystem::path> files = test::golden_files("halo_");
  if (files.empty()) GTEST_SKIP() << "no reference data in " << test::golden_dir();
  EXPECT_EQ(files.size(), 3U);
  for (const std::filesystem::path& file : files)
    for (const int n : {1, 2, 3, 4}) {
      SCOPED_TRACE(file.stem().string() + " on " + std::to_string(n));
      test::run_ranks(test::Ranks::threads, n, [&](Rank& rank) { expect_the_files_numbers(rank, file); });
    }
}

}  // namespace
}  // namespace weft::domain_golden_test
