#include "weft/models/from_json.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/json_reader.hpp"
#include "base/text/nearest.hpp"
#include "weft/base/error.hpp"
#include "weft/models/moe_transformer.hpp"
#include "weft/nn/activation.hpp"
#include "weft/nn/attention.hpp"
#include "weft/nn/conv.hpp"
#include "weft/nn/dropout.hpp"
#include "weft/nn/embedding.hpp"
#include "weft/nn/feed_forward.hpp"
#include "weft/nn/linear.hpp"
#include "weft/nn/loss.hpp"
#include "weft/nn/maps/conv_transpose.hpp"
#include "weft/nn/maps/resample.hpp"
#include "weft/nn/norm.hpp"
#include "weft/nn/residual.hpp"
#include "weft/tp/own_plan.hpp"

namespace weft {
namespace {

using Json = nlohmann::json;

// The members of one object. Each get() names a key that the object may have; done() refuses all others.
class Fields {
 public:
  Fields(std::string subject, const Json& object, std::string where, const OwnLayers& own = {})
      : subject_(std::move(subject)), object_(object), where_(std::move(where)), own_(own) {
    if (!object.is_object()) wrong_at(where_, fmt::format("is {}; expected an object", shown_json(object)));
  }

  [[noreturn]] void wrong_at(const std::string& where, const std::string& text) const {
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: {} {}", subject_, where.empty() ? std::string("it") : where, text));
  }
  [[noreturn]] void wrong(const char* key, const std::string& expected) const {
    wrong_at(place(key), fmt::format("is {}; expected {}", shown_json(object_.at(key)), expected));
  }
  std::string place(std::string_view key) const {
    return where_.empty() ? std::string(key) : fmt::format("{}.{}", where_, key);
  }
  const std::string& subject() const noexcept { return subject_; }
  const std::string& where() const noexcept { return where_; }
  /// The layers of the program.
  const OwnLayers& own() const noexcept { return own_; }

  /// Null if the object has no such key.
  const Json* find(const char* key) {
    known_.emplace_back(key);
    const auto at = object_.find(key);
    return at == object_.end() ? nullptr : &*at;
  }
  const Json& need(const char* key) {
    const Json* const value = find(key);
    if (value == nullptr) wrong_at(where_, fmt::format("has no \"{}\"; expected one", key));
    return *value;
  }

  void get(const char* key, std::int64_t& to) {
    if (const Json* const v = find(key)) to = integer(key, *v);
  }
  void get(const char* key, int& to) {
    if (const Json* const v = find(key)) {
      const std::int64_t n = integer(key, *v);
      if (n < std::numeric_limits<int>::min() || n > std::numeric_limits<int>::max())
        wrong(key, "a smaller number");
      to = static_cast<int>(n);
    }
  }
  void get(const char* key, std::uint64_t& to) {
    if (const Json* const v = find(key)) {
      if (!v->is_number_unsigned()) wrong(key, "an integer from 0 to 2^64 - 1");
      to = v->get<std::uint64_t>();
    }
  }
  void get(const char* key, double& to) {
    if (const Json* const v = find(key)) {
      if (!v->is_number()) wrong(key, "a number");
      to = v->get<double>();
    }
  }
  void get(const char* key, std::optional<double>& to) {
    if (find(key) != nullptr) get(key, to.emplace());
  }
  void get(const char* key, bool& to) {
    if (const Json* const v = find(key)) {
      if (!v->is_boolean()) wrong(key, "true or false");
      to = v->get<bool>();
    }
  }
  void get(const char* key, std::string& to) {
    if (const Json* const v = find(key)) {
      if (!v->is_string()) wrong(key, "a text");
      to = v->get<std::string>();
    }
  }
  void get(const char* key, std::vector<double>& to) {
    if (const Json* const v = find(key)) {
      to.clear();
      if (!v->is_array()) wrong(key, "a list of numbers");
      for (const Json& entry : *v) {
        if (!entry.is_number()) wrong(key, "a list of numbers");
        to.push_back(entry.get<double>());
      }
    }
  }
  void get(const char* key, std::vector<std::string>& to) {
    if (const Json* const v = find(key)) {
      to.clear();
      if (!v->is_array()) wrong(key, "a list of texts");
      for (const Json& entry : *v) {
        if (!entry.is_string()) wrong(key, "a list of texts");
        to.push_back(entry.get<std::string>());
      }
    }
  }
  void get(const char* key, Extent2d& to) {
    if (const Json* const v = find(key)) {
      if (v->is_number_integer()) {
        to = integer(key, *v);
      } else if (v->is_array() && v->size() == 2 && (*v)[0].is_number_integer() &&
                 (*v)[1].is_number_integer()) {
        to = {integer(key, (*v)[0]), integer(key, (*v)[1])};
      } else {
        wrong(key, "a number, or [height, width]");
      }
    }
  }
  void get(const char* key, Init& to) {
    if (const Json* const v = find(key)) {
      if (v->is_number()) {
        to = Normal{v->get<double>()};
      } else if (v->is_object() && v->size() == 1 && v->contains("constant") &&
                 (*v)["constant"].is_number()) {
        to = Constant{(*v)["constant"].get<double>()};
      } else {
        wrong(key, "a standard deviation, or {\"constant\": c}");
      }
    }
  }
  /// One of some words, of which each stands for a value.
  template <class T>
  void choose(const char* key, const std::vector<std::pair<std::string, T>>& words, T& to) {
    const Json* const v = find(key);
    if (v == nullptr) return;
    std::vector<std::string> names;
    for (const auto& [word, value] : words) {
      if (*v == word) {
        to = value;
        return;
      }
      names.push_back(word);
    }
    wrong(key, fmt::format("{}{}", fmt::join(names, ", "),
                           v->is_string() ? is_meant(v->get<std::string>(), names) : ""));
  }
  /// A word that `of` makes a value of; `of` throws for any other.
  template <class T, class Of>
  void word(const char* key, T& to, const Of& of) {
    if (find(key) == nullptr) return;
    std::string text;
    get(key, text);
    try {
      to = of(text);
    } catch (const Error& e) {
      throw Error(e.code(), fmt::format("{}: {}: {}", subject_, place(key), e.what()));
    }
  }
  /// `what`: what the object is.
  void done(std::string_view what) const {
    for (const auto& [key, value] : object_.items())
      if (std::find(known_.begin(), known_.end(), key) == known_.end())
        wrong_at(where_, fmt::format("has no \"{}\" ({}){}", key, what, is_meant(key, known_)));
  }

 private:
  std::int64_t integer(const char* key, const Json& v) const {
    if (!v.is_number_integer() ||
        (v.is_number_unsigned() && v.get<std::uint64_t>() > std::uint64_t{INT64_MAX}))
      wrong(key, "an integer");
    return v.get<std::int64_t>();
  }
  const std::string subject_;
  const Json& object_;
  const std::string where_;
  const OwnLayers own_;
  std::vector<std::string> known_;
};

// --- layers ---

using Made = std::unique_ptr<Module>;
Made layer_of(const Fields& around, const Json& object, const std::string& where);

std::int64_t size(Fields& f, const char* key) {
  std::int64_t n = 0;
  f.need(key);
  f.get(key, n);
  return n;
}

std::vector<std::pair<std::string, kernels::Padding>> paddings() {
  return {{"zeros", kernels::Padding::zeros},
          {"reflect", kernels::Padding::reflect},
          {"replicate", kernels::Padding::replicate},
          {"circular", kernels::Padding::circular}};
}

Made sequential(Fields& f) {
  auto made = std::make_unique<Sequential>();
  const Json& children = f.need("children");
  if (!children.is_array()) f.wrong("children", "a list of [name, layer]");
  for (const Json& child : children) {
    if (!child.is_array() || child.size() != 2 || !child[0].is_string())
      f.wrong_at(f.place("children"), fmt::format("has {}; expected [name, layer]", shown_json(child)));
    const auto name = child[0].get<std::string>();
    made->append(name, layer_of(f, child[1], f.place(name)));
  }
  return made;
}

Made linear(Fields& f) {
  const std::int64_t in = size(f, "in"), out = size(f, "out");
  bool bias = false;
  Init init = Normal{0.02};
  f.get("bias", bias);
  f.get("init", init);
  return std::make_unique<Linear>(in, out, bias, init);
}

template <class Config>
void common_of_convolutions(Fields& f, Config& c) {
  c.in = size(f, "in");
  c.out = size(f, "out");
  f.get("kernel", c.kernel);
  f.get("stride", c.stride);
  f.get("padding", c.padding);
  f.get("dilation", c.dilation);
  f.get("groups", c.groups);
  f.get("bias", c.bias);
  f.get("init", c.init);
}
Made conv2d(Fields& f) {
  Conv2dConfig c;
  common_of_convolutions(f, c);
  f.choose("padding_mode", paddings(), c.padding_mode);
  return std::make_unique<Conv2d>(c);
}
Made conv_transpose2d(Fields& f) {
  ConvTranspose2dConfig c;
  common_of_convolutions(f, c);
  f.get("output_padding", c.output_padding);
  return std::make_unique<ConvTranspose2d>(c);
}
Made pixel_shuffle(Fields& f) { return std::make_unique<PixelShuffle>(size(f, "factor")); }

Made embedding(Fields& f) {
  const std::int64_t count = size(f, "count"), dim = size(f, "dim");
  Init init = Normal{0.02};
  f.get("init", init);
  return std::make_unique<Embedding>(count, dim, init);
}

double eps_of(Fields& f) {
  double eps = 1e-5;
  f.get("eps", eps);
  return eps;
}
Made rms_norm(Fields& f) { return std::make_unique<RMSNorm>(size(f, "dim"), eps_of(f)); }
Made layer_norm(Fields& f) {
  const Json& dim = f.need("dim");
  if (!dim.is_array()) return std::make_unique<LayerNorm>(size(f, "dim"), eps_of(f));
  Shape dims;
  for (const Json& d : dim) {
    if (!d.is_number_integer() || dims.rank() == Dims::kMaxDims)
      f.wrong("dim", "a number, or a list of sizes");
    dims.push_back(d.get<std::int64_t>());
  }
  return std::make_unique<LayerNorm>(dims, eps_of(f));
}
Made channel_norm(Fields& f) { return std::make_unique<ChannelNorm>(size(f, "channels"), eps_of(f)); }
Made group_norm(Fields& f) {
  const std::int64_t groups = size(f, "groups"), channels = size(f, "channels");
  return std::make_unique<GroupNorm>(groups, channels, eps_of(f));
}
Made batch_norm(Fields& f) {
  const std::int64_t channels = size(f, "channels");
  BatchNormConfig c;
  f.get("eps", c.eps);
  f.get("momentum", c.momentum);
  if (f.find("axes") != nullptr) f.get("axes", c.axes.emplace());
  return std::make_unique<BatchNorm>(channels, c);
}

Made gelu(Fields& f) {
  GELU::Form form = GELU::Form::erf;
  f.choose<GELU::Form>("form", {{"erf", GELU::Form::erf}, {"tanh", GELU::Form::tanh}}, form);
  return std::make_unique<GELU>(form);
}
Made relu(Fields&) { return std::make_unique<ReLU>(); }
Made dropout(Fields& f) {
  double p = 0;
  f.need("p");
  f.get("p", p);
  return std::make_unique<Dropout>(p);
}
Made swiglu(Fields& f) {
  const std::int64_t dim = size(f, "dim"), hidden = size(f, "hidden");
  Init init = Normal{0.02}, down = Normal{0.02};
  f.get("init", init);
  f.get("down_init", down);
  return std::make_unique<SwiGLU>(dim, hidden, init, down);
}
Made channel_feed_forward(Fields& f) {
  const std::int64_t dim = size(f, "dim"), hidden = size(f, "hidden");
  double p = 0;
  Init init = Normal{0.02}, down = Normal{0.02};
  f.get("dropout", p);
  f.get("init", init);
  f.get("down_init", down);
  return std::make_unique<ChannelFeedForward>(dim, hidden, p, init, down);
}
Made residual(Fields& f) {
  return std::make_unique<Residual>(layer_of(f, f.need("branch"), f.place("branch")));
}

void transformer_sizes(Fields& f, TransformerConfig& c) {
  f.get("dim", c.dim);
  f.get("heads", c.heads);
  c.kv_heads = c.heads;
  f.get("kv_heads", c.kv_heads);
  c.ffn_hidden = TransformerConfig::usual_ffn_hidden(c.dim);
  f.get("ffn_hidden", c.ffn_hidden);
  f.get("max_seq", c.max_seq);
  f.get("head_size", c.head_size);
  f.get("rope_theta", c.rope_theta);
  f.get("norm_eps", c.norm_eps);
  f.get("init_std", c.init_std);
  f.get("layers", c.layers);
}
Made transformer_block(Fields& f) {
  TransformerConfig c;
  c.layers = 1;
  transformer_sizes(f, c);
  c.check();
  return std::make_unique<TransformerBlock>(c, RopeTables::make(c.max_seq, c.head_dim(), c.rope_theta));
}

RouterOptions router_of(const std::string& subject, const Json& object, const std::string& where) {
  Fields f(subject, object, where);
  RouterOptions o;
  f.get("top_k", o.top_k);
  f.choose<RouterScores>("scores", {{"softmax", RouterScores::softmax}, {"sigmoid", RouterScores::sigmoid}},
                         o.scores);
  f.get("normalise", o.normalise);
  f.choose<RouterBias>(
      "bias", {{"none", RouterBias::none}, {"selects", RouterBias::selects}, {"weighs", RouterBias::weighs}},
      o.bias);
  f.get("noise", o.noise);
  f.choose<Capacity>("capacity",
                     {{"none", Capacity::none},
                      {"by_weight", Capacity::by_weight},
                      {"by_position", Capacity::by_position},
                      {"per_choice_and_rank", Capacity::per_choice_and_rank}},
                     o.capacity);
  f.get("capacity_factor", o.capacity_factor);
  f.choose<Balance>(
      "balance",
      {{"micro_batch", Balance::micro_batch}, {"sequence", Balance::sequence}, {"step", Balance::step}},
      o.balance);
  f.get("aux_loss", o.aux_loss);
  f.get("z_loss", o.z_loss);
  f.done("a router");
  return o;
}
// The members that MoEConfig and MoETransformerConfig have alike.
void mixture_fields(Fields& f, auto& c) {
  f.get("experts", c.experts);
  f.choose<ExpertKind>("kind",
                       {{"swiglu", ExpertKind::swiglu},
                        {"silu", ExpertKind::silu},
                        {"gelu", ExpertKind::gelu},
                        {"relu", ExpertKind::relu}},
                       c.kind);
  if (const Json* const router = f.find("router"))
    c.router = router_of(f.subject(), *router, f.place("router"));
  f.get("shared_hidden", c.shared_hidden);
  f.get("scale_outputs_by_load", c.scale_outputs_by_load);
  f.get("float8_dispatch", c.float8_dispatch);
}
Made moe(Fields& f) {
  MoEConfig c;
  c.dim = size(f, "dim");
  f.need("experts");
  const Json* const expert = f.find("expert");  // a layer, which is each expert
  if (expert == nullptr) c.hidden = size(f, "hidden");
  mixture_fields(f, c);
  f.get("init", c.init);
  if (expert != nullptr) {
    for (const char* key : {"hidden", "kind", "down_init"})
      if (f.find(key) != nullptr) f.wrong(key, "none beside expert, whose layers know it");
    return std::make_unique<MoE>(
        c, [subject = f.subject(), layer = *expert, where = f.place("expert"), own = f.own()] {
          return layer_of(Fields(subject, layer, where, own), layer, where);
        });
  }
  f.get("down_init", c.down_init);
  return std::make_unique<MoE>(c);
}
void moe_transformer_fields(Fields& f, MoETransformerConfig& c) {
  transformer_sizes(f, c.transformer);
  mixture_fields(f, c);
  f.get("expert_hidden", c.expert_hidden);
}
Made moe_block(Fields& f) {
  MoETransformerConfig c;
  c.transformer.layers = 1;
  moe_transformer_fields(f, c);
  c.check();
  const TransformerConfig& t = c.transformer;
  return std::make_unique<MoEBlock>(c, RopeTables::make(t.max_seq, t.head_dim(), t.rope_theta));
}

Pool2dConfig pool_of(Fields& f) {
  Pool2dConfig c;
  f.get("kernel", c.kernel);
  c.stride = c.kernel;
  f.get("stride", c.stride);
  f.get("padding", c.padding);
  return c;
}
Made avg_pool(Fields& f) {
  Pool2dConfig c = pool_of(f);
  f.get("count_padding", c.count_padding);
  return std::make_unique<AvgPool2d>(c);
}
Made max_pool(Fields& f) {
  Pool2dConfig c = pool_of(f);
  f.get("dilation", c.dilation);
  return std::make_unique<MaxPool2d>(c);
}
Made adaptive_avg_pool(Fields& f) {
  Extent2d out = 1;
  f.get("out", out);
  return std::make_unique<AdaptiveAvgPool2d>(out);
}
Made resize(Fields& f) {
  Resize2dConfig c;
  f.choose<Resizing>("mode", {{"nearest", Resizing::nearest}, {"bilinear", Resizing::bilinear}}, c.mode);
  f.get("out", c.out);
  f.get("scale", c.scale);
  f.get("align_corners", c.align_corners);
  return std::make_unique<Resize2d>(c);
}
Made pad(Fields& f) {
  Pad2dConfig c;
  f.get("top", c.top);
  f.get("bottom", c.bottom);
  f.get("left", c.left);
  f.get("right", c.right);
  f.choose("rows", paddings(), c.rows);
  f.choose("columns", paddings(), c.columns);
  return std::make_unique<Pad2d>(c);
}

struct Kind {
  const char* name;
  Made (*make)(Fields&);
};
constexpr Kind kKinds[] = {{"AdaptiveAvgPool2d", adaptive_avg_pool},
                           {"AvgPool2d", avg_pool},
                           {"BatchNorm", batch_norm},
                           {"ChannelFeedForward", channel_feed_forward},
                           {"ChannelNorm", channel_norm},
                           {"Conv2d", conv2d},
                           {"ConvTranspose2d", conv_transpose2d},
                           {"Dropout", dropout},
                           {"Embedding", embedding},
                           {"GELU", gelu},
                           {"GroupNorm", group_norm},
                           {"LayerNorm", layer_norm},
                           {"Linear", linear},
                           {"MaxPool2d", max_pool},
                           {"MoE", moe},
                           {"MoEBlock", moe_block},
                           {"Pad2d", pad},
                           {"PixelShuffle", pixel_shuffle},
                           {"RMSNorm", rms_norm},
                           {"ReLU", relu},
                           {"Residual", residual},
                           {"Resize2d", resize},
                           {"Sequential", sequential},
                           {"SwiGLU", swiglu},
                           {"TransformerBlock", transformer_block}};

Made layer_of(const Fields& around, const Json& object, const std::string& where) {
  const std::string& subject = around.subject();
  Fields f(subject, object, where, around.own());
  std::string name;
  f.need("layer");
  f.get("layer", name);
  std::vector<std::string> names;
  for (const OwnLayer& own : f.own()) {
    names.push_back(own.name);
    if (name != own.name) continue;
    f.done(name);
    return own.make();
  }
  for (const Kind& kind : kKinds) {
    names.emplace_back(kind.name);
    if (name != kind.name) continue;
    Made made;
    try {
      made = kind.make(f);
    } catch (const Error& e) {
      // The constructor does not know the place.
      if (std::string_view(e.what()).starts_with(subject)) throw;
      throw Error(e.code(), fmt::format("{}: {}: {}", subject, where, e.what()));
    }
    f.done(name);
    return made;
  }
  f.wrong("layer", fmt::format("one of {}{}", fmt::join(names, ", "), is_meant(name, names)));
}

std::function<std::unique_ptr<Module>()> loss_of(Fields& f) {
  std::function<std::unique_ptr<Module>()> loss;
  f.choose<std::function<std::unique_ptr<Module>()>>(
      "loss",
      {{"cross_entropy", [] { return std::make_unique<CrossEntropy>(); }},
       {"mean_squared_error", [] { return std::make_unique<MeanSquaredError>(); }},
       {"binary_cross_entropy", [] { return std::make_unique<BinaryCrossEntropy>(); }}},
      loss);
  return loss;
}

// --- optimizers ---

void betas(Fields& f, auto& o) {
  f.get("beta1", o.beta1);
  f.get("beta2", o.beta2);
  f.get("weight_decay", o.weight_decay);
}

OptimizerOptions optimizer_of(const std::string& subject, const Json& given) {
  const Json object = given.is_string() ? Json{{"name", given}} : given;
  Fields f(subject, object, "optimizer");
  OptimizerOptions options = AdamW::Options{};
  f.need("name");
  f.choose<OptimizerOptions>("name",
                             {{"adamw", AdamW::Options{}},
                              {"sgd", SGD::Options{}},
                              {"lion", Lion::Options{}},
                              {"schedule_free_adamw", ScheduleFreeAdamW::Options{}},
                              {"muon", Muon::Options{}}},
                             options);
  if (auto* const adamw = std::get_if<AdamW::Options>(&options)) {
    betas(f, *adamw);
    f.get("eps", adamw->eps);
  } else if (auto* const sgd = std::get_if<SGD::Options>(&options)) {
    f.get("momentum", sgd->momentum);
    f.get("weight_decay", sgd->weight_decay);
  } else if (auto* const lion = std::get_if<Lion::Options>(&options)) {
    betas(f, *lion);
  } else if (auto* const free = std::get_if<ScheduleFreeAdamW::Options>(&options)) {
    betas(f, *free);
    f.get("eps", free->eps);
  } else if (auto* const muon = std::get_if<Muon::Options>(&options)) {
    f.get("momentum", muon->momentum);
    f.get("nesterov", muon->nesterov);
    f.get("weight_decay", muon->weight_decay);
    f.get("eps", muon->eps);
    f.get("iterations", muon->iterations);
    f.choose<Muon::Scale>(
        "scale", {{"like_adamw", Muon::Scale::like_adamw}, {"original", Muon::Scale::original}}, muon->scale);
    f.get("adamw_for", muon->adamw_for);
    f.get("adamw_beta1", muon->adamw_beta1);
    f.get("adamw_beta2", muon->adamw_beta2);
    f.get("adamw_eps", muon->adamw_eps);
  }
  f.done(object.at("name").get<std::string>());
  return options;
}

// Recipe::border from a list of extents; "input.1" is an extent of the first input.
std::function<Shape(const Shape&)> border_of(Fields& f) {
  constexpr const char* kExpected = "a list of extents, of 1 or more, or \"input.0\" to \"input.7\"";
  const Json* const list = f.find("border");
  if (list == nullptr) return {};
  if (!list->is_array() || list->size() > Shape::kMaxDims) f.wrong("border", kExpected);
  std::vector<std::int64_t> extents;  // below 0: -1 - the dimension of the input
  for (const Json& entry : *list) {
    const std::string text = entry.is_string() ? entry.get<std::string>() : std::string();
    if (entry.is_number_integer() && entry.get<std::int64_t>() >= 1)
      extents.push_back(entry.get<std::int64_t>());
    else if (text.size() == 7 && text.starts_with("input.") && text[6] >= '0' && text[6] <= '7')
      extents.push_back(-1 - (text[6] - '0'));
    else
      f.wrong("border", kExpected);
  }
  return [extents](const Shape& input) {
    std::vector<std::int64_t> dims = extents;
    for (std::int64_t& extent : dims) {
      if (extent >= 0) continue;
      const auto dim = static_cast<int>(-1 - extent);
      if (dim >= input.rank())
        throw Error(ErrorCode::bad_argument,
                    fmt::format("recipe: border: input.{} of an input of shape {}", dim, to_string(input)));
      extent = input[dim];
    }
    return Shape(dims);
  };
}

// The plan of the whole model: styles by paths.
OwnPlan own_plan_in(Fields& f) {
  OwnPlan plan;
  const Json* const styles = f.find("plan");
  if (styles == nullptr) return plan;
  if (!styles->is_object()) f.wrong("plan", "an object with styles by paths");
  for (const auto& [path, style] : styles->items()) {
    if (!style.is_string()) f.wrong("plan", "an object with styles by paths");
    try {
      style_named(style.get<std::string>());
    } catch (const Error& e) {
      throw Error(e.code(), fmt::format("{}: plan: \"{}\": {}", f.subject(), path, e.what()));
    }
    plan.styles.push_back({path, style.get<std::string>()});
  }
  return plan;
}

// Layers of the program must have names of their own.
void expect_new_names(const OwnLayers& own) {
  for (auto layer = own.begin(); layer != own.end(); ++layer) {
    const auto is_named = [&](const auto& other) { return other.name == layer->name; };
    if (layer->name.empty() || std::any_of(std::begin(kKinds), std::end(kKinds), is_named) ||
        std::any_of(own.begin(), layer, is_named))
      throw Error(
          ErrorCode::bad_argument,
          fmt::format("recipe: a layer of the program is called \"{}\"; expected a name that no layer "
                      "of the library and no other of these has",
                      layer->name));
    if (!layer->make)
      throw Error(ErrorCode::bad_argument,
                  fmt::format("recipe: the layer \"{}\" has no make; expected a function", layer->name));
  }
}

}  // namespace

Recipe recipe_from_json(std::string_view text) { return recipe_from_json(text, {}); }

Recipe recipe_from_json(std::string_view text, const OwnLayers& own) {
  const std::string subject = "recipe";
  expect_new_names(own);
  const auto all = std::make_shared<const Json>(parse_json(text, subject));
  Fields f(subject, *all, "", own);
  if (const Json* const sizes = f.find("transformer")) {
    f.done("a recipe of a transformer");
    Fields of(subject, *sizes, "transformer");
    TransformerConfig c;
    transformer_sizes(of, c);
    of.get("vocab", c.vocab);
    of.get("tied", c.tied);
    of.done("a transformer");
    return transformer_recipe(c);
  }
  if (const Json* const sizes = f.find("moe")) {
    f.done("a recipe of a mixture of experts");
    Fields of(subject, *sizes, "moe");
    MoETransformerConfig c;
    moe_transformer_fields(of, c);
    of.get("vocab", c.transformer.vocab);
    of.get("tied", c.transformer.tied);
    of.get("every", c.every);
    of.done("a mixture of experts");
    return moe_recipe(c);
  }
  if (const Json* const sizes = f.find("weather")) {
    f.done("a recipe of a weather model");
    Fields of(subject, *sizes, "weather");
    WeatherStageConfig c;
    of.get("dim", c.dim);
    of.get("depth", c.depth);
    of.get("head_dim", c.head_dim);
    of.get("local_window", c.local_window);
    of.get("global_window", c.global_window);
    of.get("mult", c.mult);
    of.get("dropout", c.dropout);
    of.get("init_std", c.init_std);
    of.get("attention_dropout", c.attention_dropout);
    of.done("a weather model");
    return weather_recipe(c);
  }
  Recipe recipe;
  recipe.name = "model";
  recipe.description = all->dump();
  f.get("name", recipe.name);
  f.get("blocks", recipe.blocks);
  f.get("head", recipe.head);
  f.get("pipeline", recipe.pipeline);
  recipe.border = border_of(f);
  recipe.loss = loss_of(f);
  const OwnPlan plan = own_plan_in(f);
  const Json& model = f.need("model");
  f.done("a recipe");
  layer_of(f, model, "model");  // for its errors; without memory
  recipe.build = [all, subject, own, plan] {
    Made made = layer_of(Fields(subject, *all, "", own), all->at("model"), "model");
    if (!plan.empty()) made->set_own_plan(plan);
    return made;
  };
  return recipe;
}

BuildOptions build_options_from_json(std::string_view text) {
  const Json all = parse_json(text, "options");
  Fields f("options", all, "");
  BuildOptions o;
  f.get("data_axis", o.data_axis);
  f.get("tensor_axis", o.tensor_axis);
  f.get("replicate_axis", o.replicate_axis);
  f.get("expert_axis", o.expert_axis);
  f.get("uneven_experts", o.experts.uneven);
  f.get("domain_axes", o.domain_axes);
  f.choose<DataForm>("data", {{"ddp", DataForm::ddp}, {"fsdp", DataForm::fsdp}}, o.data);
  if (const Json* const after = f.find("reshard_after_forward")) {
    int ranks = 0;
    bool flag = true;
    if (after->is_boolean()) {
      f.get("reshard_after_forward", flag);
      o.sharding.reshard_after_forward = flag;
    } else {
      f.get("reshard_after_forward", ranks);
      o.sharding.reshard_after_forward = ranks;
    }
  }
  f.word("reduce", o.sharding.precision.reduce, dtype_from_name);
  f.get("seed", o.seed);
  f.word("dtype", o.dtype, dtype_from_name);
  f.word("activations", o.activations, dtype_from_name);
  f.get("frozen", o.frozen);
  f.word("float8", o.float8, float8_recipe_from_name);
  f.choose<Float8Scales>("float8_scales", {{"own", Float8Scales::own}, {"whole", Float8Scales::whole}},
                         o.float8_options.scales);
  if (!o.float8 && o.float8_options.scales == Float8Scales::whole)
    f.wrong("float8_scales", "a recipe in float8");
  f.word("ac", o.ac.mode, ac_mode_of);
  f.get("ac_modules", o.ac.modules);
  f.get("ac_every", o.ac.every);
  f.get("sequence_parallel", o.tensor.sequence_parallel);
  bool split = false;
  f.get("split_vocab", split);
  if (split) o.tensor.vocab = VocabSplit::shard;
  f.get("loss_chunk", o.loss_chunk);
  f.get("pipeline_axis", o.pipeline_axis);
  f.word("pipeline", o.pipeline.kind, pipeline_kind);
  f.get("stages_per_rank", o.pipeline.stages_per_rank);
  std::string schedule;
  f.get("pipeline_file", schedule);
  if (!schedule.empty()) o.pipeline.schedule = read_pipeline_schedule(schedule);
  f.get("stage_weights", o.pipeline.weights);
  f.get("keep_weights", o.pipeline.keep_weights);
  bool exact = false;
  f.get("exact", exact);
  if (exact) o.exact = Exact::yes;
  f.get("compile_model", o.compile_model);
  f.done("build options");
  return o;
}

Trainer::Options trainer_options_from_json(std::string_view text) {
  const Json all = parse_json(text, "options");
  Fields f("options", all, "");
  Trainer::Options o;
  if (const Json* const optimizer = f.find("optimizer")) o.optimizer = optimizer_of("options", *optimizer);
  if (const Json* const groups = f.find("groups")) {
    if (!groups->is_array()) f.wrong("groups", "a list of groups");
    for (std::size_t i = 0; i < groups->size(); ++i) {
      Fields of("options", (*groups)[i], fmt::format("groups[{}]", i));
      ParameterGroup group;
      of.need("patterns");
      of.get("patterns", group.patterns);
      of.get("rate", group.rate);
      of.get("weight_decay", group.weight_decay);
      of.done("a group of parameters");
      o.groups.push_back(std::move(group));
    }
  }
  f.get("max_norm", o.max_norm);
  f.choose<NonFinite>("non_finite", {{"error", NonFinite::error}, {"skip", NonFinite::skip}}, o.non_finite);
  f.get("seed", o.seed);
  if (f.find("loss_scale") != nullptr) f.get("loss_scale", o.loss_scale.emplace().scale);
  f.get("label_smoothing", o.label_smoothing);
  f.get("z_loss", o.z_loss);
  std::string freeze;
  f.get("freeze", freeze);
  if (!freeze.empty()) o.freeze = FreezeSchedule::from_text(freeze);
  bool warm_up = false;
  f.get("ema_warm_up", warm_up);
  if (f.find("ema") != nullptr) {
    o.ema.emplace().warm_up = warm_up;
    f.get("ema", o.ema->decay);
  } else if (warm_up) {
    f.wrong("ema_warm_up", "a decay in ema");
  }
  f.done("options of a trainer");
  return o;
}

}  // namespace weft
