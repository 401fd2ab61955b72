// Measures layers of a model over 1, 2 and more ranks (tensor parallel), and the same layers in torch
// (peers/torch_layers.py): an MLP 1024-4096-1024 with GELU and without, attention (causal, 16 heads of 64), a
// pair of 1x1 convolutions 512-2048-512 with GELU between, a vocabulary head 1024-32000. One thread per rank.
//
//   layers_bench --layers mlp,attention --tokens 128,512 --passes forward,both --dtype f32,bf16 --ranks 2
//   layers_bench --rounds 2                  every case twice, round by round
//   layers_bench --independent --ranks 2     the layer of one rank, on each rank by itself: what the cores have together
//
// f8e4m3: the linear layers are float8 layers of the recipe rowwise, with weights in bf16.
//
// Inputs and weights are the same numbers on every mesh and in torch: hashes of their index. Every rank
// compares the first two tokens of y with plain loops in f64. The program reports random projections and
// norms of y, dx and all gradients, and `weft bench layers` compares them across programs.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <optional>

#include "base/cpu/peak.hpp"
#include "harness.hpp"
#include "inputs.hpp"
#include "program.hpp"
#include "weft/base/error.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/activation.hpp"
#include "weft/nn/attention.hpp"
#include "weft/nn/conv.hpp"
#include "weft/nn/init.hpp"
#include "weft/nn/linear.hpp"
#include "weft/tp/parallelize.hpp"
#include "weft/train/float8.hpp"

namespace weft::bench {
namespace {

struct What {
  std::vector<std::string> layers = {"mlp"}, passes = {"both"};
  std::vector<std::int64_t> tokens = {512};
  int rounds = 1;
  bool independent = false;
};

struct LayerCase {
  std::string layer, pass;
  DType dtype;
  std::int64_t tokens;
  std::string name() const {
    return layer + "/" + std::string(weft::name(dtype)) + "/" + std::to_string(tokens) + "/" + pass;
  }
};

constexpr std::int64_t kDim = 1024, kHidden = 4096, kHeads = 16, kHeadDim = 64, kVocab = 32000;
constexpr std::int64_t kChannels = 512, kHiddenChannels = 2048;

std::unique_ptr<Module> make_layer(const LayerCase& c, Plan& plan) {
  if (c.layer == "head") {
    plan = {{"", Style::column}};
    return std::make_unique<Linear>(kDim, kVocab, false);
  }
  if (c.layer == "attention") {
    plan = {{"", Style::enter},
            {"q_proj", Style::column},
            {"k_proj", Style::column},
            {"v_proj", Style::column},
            {"o_proj", Style::row}};
    auto none = std::make_shared<RopeTables>();  // angles of 0, as torch's layer has no rotary positions
    none->positions = c.tokens;
    none->half = kHeadDim / 2;
    none->cos.assign(static_cast<std::size_t>(c.tokens * none->half), 1.0f);
    none->sin.assign(none->cos.size(), 0.0f);
    return std::make_unique<Attention>(AttentionConfig{kDim, kHeads, kHeads, kHeadDim}, none);
  }
  auto all = std::make_unique<Sequential>();
  if (c.layer == "conv") {
    plan = {{"up", Style::column}, {"down", Style::row}};
    all->append("up", std::make_unique<Conv2d>(Conv2dConfig{.in = kChannels, .out = kHiddenChannels}));
    all->append("gelu", std::make_unique<GELU>(kernels::GeluForm::erf));
    all->append("down", std::make_unique<Conv2d>(Conv2dConfig{.in = kHiddenChannels, .out = kChannels}));
    return all;
  }
  plan = {{"up", Style::column}, {"down", Style::row}};
  all->append("up", std::make_unique<Linear>(kDim, kHidden, true));
  if (c.layer == "mlp") all->append("gelu", std::make_unique<GELU>(kernels::GeluForm::erf));
  all->append("down", std::make_unique<Linear>(kHidden, kDim, true));
  return all;
}

Shape shape_of_x(const LayerCase& c) {
  if (c.layer == "attention") return {1, c.tokens, kDim};
  if (c.layer != "conv") return {c.tokens, kDim};
  std::int64_t height = 1;
  while (4 * height * height <= c.tokens) height *= 2;
  return {1, kChannels, height, c.tokens / height};
}
Shape shape_of_y(const LayerCase& c) { return c.layer == "head" ? Shape{c.tokens, kVocab} : shape_of_x(c); }

double flops(const LayerCase& c) {
  const double t = static_cast<double>(c.tokens), passes = c.pass == "both" ? 3 : 1;
  if (c.layer == "head") return passes * 2 * t * kDim * kVocab;
  if (c.layer == "conv") return passes * 4 * t * kChannels * kHiddenChannels;
  if (c.layer == "attention")  // causal: half of the scores; backward makes them again
    return passes * 8 * t * kDim * kDim + (c.pass == "both" ? 7 : 2) * t * t * kDim;
  return passes * 4 * t * kDim * kHidden;
}

// One rank's layer and the data that a run needs.
class Layer {
 public:
  Layer(Context& context, const LayerCase& c, const DeviceMesh* mesh)
      : case_(c), context_(context), compute_(context, 1), mesh_(mesh) {
    Plan plan;
    module_ = make_layer(c, plan);
    if (mesh != nullptr) {
      parallelize(*module_, (*mesh)["tp"], plan);
      replicate(*module_, *mesh);
    }
    if (c.dtype != DType::f32)
      for (Parameter* p : module_->parameters()) p->set_dtype(DType::bf16);
    if (c.dtype == DType::f8e4m3)
      float8_ = apply_float8(*module_, Float8Recipe::rowwise, {.filter = {.left_out = {}}});
    materialise(*module_, compute_);
    std::uint32_t stream = kWeights;
    for (Parameter* p : module_->parameters()) {
      const Shape& shape = p->global_shape();
      const double in = static_cast<double>(shape.rank() > 1 ? shape[1] : shape[0]);
      const Tensor whole = numbers(context, shape, stream++, static_cast<float>(3 / std::sqrt(in)));
      const Tensor mine = p->layout() == nullptr ? whole : distribute(whole, p->layout());
      std::copy_n(mine.data_ptr<float>(), mine.count(), p->write_master().data_ptr<float>());
    }
    const Shape of_y = shape_of_y(c);
    x_ = numbers(context, shape_of_x(c), kX, 2.0f);
    dy_ = numbers(context, of_y, kDy, 2.0f);
    if (mesh == nullptr) return;
    x_ = x_.with_layout(replicated_layout(*mesh, x_.shape()));
    dy_ = c.layer == "head" ? distribute(dy_, make_layout(*mesh, {{"tp", Shard{1}}}, of_y))
                            : dy_.with_layout(replicated_layout(*mesh, of_y));
  }

  void run() {
    if (case_.pass == "forward") {
      Frame frame = Frame::inference(compute_);
      y_ = module_->forward(x_, frame)[0];
      return;
    }
    for (Parameter* p : module_->parameters()) p->zero_gradient();
    Frame frame(compute_);
    y_ = module_->forward(x_, frame)[0];
    dx_ = module_->backward(dy_, frame)[0];
  }

  /// Returns an empty string, or the error in the first two tokens of y.
  std::string wrong() const;

  /// Projections and norms of y, dx and the gradients. Collective.
  Numbers checks() const {
    Numbers all;
    const auto add = [&](const std::string& what, const Tensor& t) {
      const Tensor whole = t.layout() == nullptr ? t : full(t);
      const Projection p = project(whole);
      all.emplace_back("along_" + what, p.along);
      all.emplace_back("norm_" + what, p.norm);
    };
    add("y", y_);
    if (case_.pass == "forward") return all;
    add("dx", dx_);
    int k = 0;
    for (Parameter* p : module_->parameters()) add("dw" + std::to_string(k++), p->gradient());
    return all;
  }

 private:
  std::vector<double> plain_first_tokens(const std::vector<Tensor>& weights) const;
  LayerCase case_;
  Context& context_;
  Compute compute_;
  const DeviceMesh* mesh_;
  std::unique_ptr<Module> module_;
  std::unique_ptr<Float8Model> float8_;
  Tensor x_, dy_, y_, dx_;
};

constexpr std::int64_t kChecked = 2;  // tokens

// y = x wᵀ + b. x: (2, in), w: (out, in)
std::vector<double> plain_linear(const std::vector<double>& x, const Tensor& w, const Tensor* b) {
  const std::int64_t out = w.size(0), in = w.count() / out;
  std::vector<double> y(static_cast<std::size_t>(kChecked * out));
  for (std::int64_t t = 0; t < kChecked; ++t)
    for (std::int64_t o = 0; o < out; ++o) {
      double sum = b == nullptr ? 0.0 : static_cast<double>(b->data_ptr<float>()[o]);
      for (std::int64_t i = 0; i < in; ++i)
        sum += x[static_cast<std::size_t>(t * in + i)] * static_cast<double>(w.data_ptr<float>()[o * in + i]);
      y[static_cast<std::size_t>(t * out + o)] = sum;
    }
  return y;
}

// Causal attention: the first token sees itself, and the second token sees both. q, k, v: (2, dim)
std::vector<double> plain_attention(const std::vector<double>& q, const std::vector<double>& k,
                                    const std::vector<double>& v) {
  std::vector<double> out = v;
  for (std::size_t head = 0; head < kHeads; ++head) {
    double score[2] = {};
    for (std::size_t i = head * kHeadDim; i < (head + 1) * kHeadDim; ++i)
      for (std::size_t key = 0; key < 2; ++key) score[key] += q[kDim + i] * k[key * kDim + i] / 8;
    const double second = 1 / (1 + std::exp(score[0] - score[1]));
    for (std::size_t i = head * kHeadDim; i < (head + 1) * kHeadDim; ++i)
      out[kDim + i] = (1 - second) * v[i] + second * v[kDim + i];
  }
  return out;
}

std::vector<double> Layer::plain_first_tokens(const std::vector<Tensor>& w) const {
  const bool maps = case_.layer == "conv";
  const std::int64_t features = maps ? kChannels : kDim;
  std::vector<double> x;
  for (std::int64_t t = 0; t < kChecked; ++t)
    for (std::int64_t i = 0; i < features; ++i)
      x.push_back(static_cast<double>(x_.data_ptr<float>()[maps ? i * case_.tokens + t : t * features + i]));
  if (case_.layer == "head") return plain_linear(x, w[0], nullptr);
  if (case_.layer == "attention")
    return plain_linear(plain_attention(plain_linear(x, w[0], nullptr), plain_linear(x, w[1], nullptr),
                                        plain_linear(x, w[2], nullptr)),
                        w[3], nullptr);
  std::vector<double> hidden = plain_linear(x, w[0], &w[1]);
  if (case_.layer != "linear2")
    for (double& h : hidden) h *= 0.5 * std::erfc(-h * std::sqrt(0.5));
  return plain_linear(hidden, w[2], &w[3]);
}

std::string Layer::wrong() const {
  std::vector<Tensor> weights;
  for (Parameter* p : module_->parameters())
    weights.push_back(p->layout() == nullptr ? p->master() : full(p->master()));
  const std::vector<double> want = plain_first_tokens(weights);
  const Tensor y = y_.layout() == nullptr ? y_ : full(y_);
  const std::int64_t features = static_cast<std::int64_t>(want.size()) / kChecked;
  double largest = 0, worst = 0;
  for (std::int64_t t = 0; t < kChecked; ++t)
    for (std::int64_t i = 0; i < features; ++i) {
      const double w = want[static_cast<std::size_t>(t * features + i)];
      const double got = y.data_ptr<float>()[case_.layer == "conv" ? i * case_.tokens + t : t * features + i];
      largest = std::max(largest, std::abs(w));
      worst = std::max(worst, std::isfinite(got) ? std::abs(got - w) : 1e30);
    }
  // The results are sums of up to 4096 products, through several layers; bf16 operands have 8 bits,
  // f8e4m3 operands 4 bits.
  const double limit = case_.dtype == DType::f8e4m3 ? 2e-1 : case_.dtype == DType::bf16 ? 2e-2 : 2e-5;
  if (worst <= limit * largest) return "";
  char text[200];
  std::snprintf(text, sizeof text, "%s: y is off by %.3g in the first two tokens; expected at most %.3g",
                case_.name().c_str(), worst, limit * largest);
  return text;
}

// The peak of this rank's core while all ranks keep their cores busy.
double peak_beside(const Agree& agree, DType dtype) {
  agree(0);  // all ranks begin together
  return peak_gflops(dtype);
}

std::vector<TableRow> table(RankOfBench& rank, const What& what) {
  std::vector<TableRow> rows;
  const std::shared_ptr<DeviceMesh> mesh =
      rank.spec.ranks == 1 || what.independent
          ? nullptr
          : std::make_shared<DeviceMesh>(rank.group, MeshShape{{"tp", rank.spec.ranks}});
  std::vector<LayerCase> cases;
  for (const std::string& layer : what.layers)
    for (const DType dtype : rank.spec.dtypes)
      for (const std::int64_t tokens : what.tokens)
        for (const std::string& pass : what.passes) cases.push_back({layer, pass, dtype, tokens});
  for (int round = 0; round < what.rounds; ++round)
    for (const LayerCase& c : cases) {
      TableRow row;
      row.name = "layers/" + c.name();
      row.row = {{{"op", "layers"}, {"case", c.name()}}, rank.spec.ranks, 0, {}};
      row.measure = [&rank, mesh, c](const Agree& agree, double seconds) {
        const auto l = std::make_shared<Layer>(rank.context, c, mesh.get());
        const Times t = measure({[l] { l->run(); }, [l] { return l->wrong(); }}, agree, seconds);
        Numbers all = {
            {"median_us", t.median_us},
            {"p99_us", t.p99_us},
            {"GFLOPs", flops(c) / t.median_us * 1e-3},
            {"peak_GFLOPs",
             peak_beside(agree, c.dtype == DType::f32
                                    ? DType::f32
                                    : DType::bf16)},  // of one core, while all ranks measure theirs
            {"samples", static_cast<double>(t.samples)}};
        const Numbers checks = l->checks();
        all.insert(all.end(), checks.begin(), checks.end());
        return all;
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
  return program_main(
      argc, argv,
      {words_flag("--layers", what.layers, {"linear2", "mlp", "attention", "conv", "head"}),
       words_flag("--passes", what.passes, {"forward", "both"}),
       tokens_flag(what.tokens),
       rounds_flag(what.rounds),
       {"--independent", [&](const std::string&) { what.independent = true; }, false}},
      [&](RankOfBench& rank) { return table(rank, what); },
      [&](const Spec& spec) {
        return settings_of(spec) + ", one thread a rank" + (what.independent ? ", each by itself" : "");
      });
}
