// Layers whose passes are functions of the program. Comments in weft/c_train/module.h say what these may do.
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "capi/call_out.hpp"
#include "capi_train/model_handles.hpp"
#include "nn/operands.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/models/from_json.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/layouts.hpp"

using weft::Error;
using weft::ErrorCode;
using weft::Frame;
using weft::LayoutRef;
using weft::Shape;
using weft::Tensor;
using weft::Tensors;
namespace capi = weft::capi;

namespace {

constexpr std::size_t kModulePassFirstBytes = 112;
static_assert(sizeof(weft_module_pass) == kModulePassFirstBytes);
// These structs have no struct_size: they stay as they are.
static_assert(sizeof(weft_module) == 56 && sizeof(weft_module_parameter) == 96);

// The functions of one weft_module, which end when no model uses them any more.
struct ProgramFunctions {
  struct OwnParameter {
    std::string name;
    Shape shape;
    int split_dim;
    weft::Init init;
  };
  std::string name;
  std::vector<OwnParameter> parameters;
  weft_module functions;

  ProgramFunctions() = default;
  ProgramFunctions(const ProgramFunctions&) = delete;
  ProgramFunctions& operator=(const ProgramFunctions&) = delete;
  ~ProgramFunctions() {
    const capi::CallOut out;
    if (out && functions.release != nullptr) functions.release(functions.user);
  }
};

// The memory of one pass: behind weft_module_pass::state while it runs.
struct RunningPass {
  weft::Compute& compute;
  bool forward;
  weft::Memory of_outputs;
  std::deque<Tensor> outputs{}, kept{};  // the program has pointers to their extents
};

weft_tensor in_c(const char* name, const Tensor& t) {
  return {name,
          {t ? const_cast<std::byte*>(t.data()) : nullptr, t.count(), static_cast<weft_dtype>(t.dtype()),
           WEFT_CPU},
          nullptr,
          t.shape().begin(),
          t.shape().rank()};
}

Tensor zeros_like(Frame& frame, const Tensor& of, weft::Memory memory = weft::Memory::local) {
  const Tensor made = frame.compute().make(of.shape(), weft::DType::f32, memory);
  weft::kernels::fill(frame.kernels(), made.data_ptr<float>(), 0.0f, made.count());
  return made;
}

bool is_floating(const Tensor& t) { return t.dtype() == weft::DType::f32 || t.dtype() == weft::DType::bf16; }

class ProgramModule : public weft::Module {
 public:
  explicit ProgramModule(std::shared_ptr<const ProgramFunctions> of) : of_(std::move(of)) {
    for (const ProgramFunctions::OwnParameter& p : of_->parameters)
      own_.push_back(add(p.name, std::make_shared<weft::Parameter>(p.shape, p.init)));
  }

  weft::ShardRule shard_rule(weft::Split split) const override {
    weft::ShardRule rule;
    for (std::size_t i = 0; i < own_.size(); ++i)
      if (const int dim = of_->parameters[i].split_dim; dim >= 0) {
        rule.parameters.push_back({own_[i].get(), weft::Shard{dim}});
        rule.whole_units.push_back({"elements of a parameter", own_[i]->global_shape()[dim]});
      }
    if (split == weft::Split::row)
      rule.refused = "the program wrote its passes, which can be split by columns only";
    else if (rule.parameters.empty())
      rule.refused = "the program wrote its passes, and none of its parameters has a split_dim";
    return rule;
  }

 private:
  Tensors do_forward(weft::Inputs inputs, Frame& frame) override {
    if (inputs.empty()) expect_count(inputs, 1, "inputs");
    Tensors x(inputs.begin(), inputs.end());
    for (Tensor& t : x) {
      if (!own_.empty()) t = weft::layouts::beside(*this, "x", t, *own_[0]);
      weft::layouts::expect_whole(weft::layouts::named(*this, "x"), t, "a layer of the program", false);
    }
    RunningPass running{frame.compute(), true, out_memory()};
    weft_module_pass pass = begin(frame, x, running);
    run("forward", of_->functions.forward, pass, frame, x[0], [&] {
      if (running.outputs.empty())
        throw Error(ErrorCode::bad_argument,
                    fmt::format("\"{}\": forward made no output; expected 1 or more", path()));
      for (Tensor& y : running.outputs) {
        y = y.with_layout(layout_of(y.shape(), x[0]));
        y = cast(frame, y, is_floating(x[0]) ? x[0].dtype() : weft::DType::f32);
      }
    });
    frame.push(*this, {running.kept.begin(), running.kept.end()});
    frame.push(*this, x);
    return {running.outputs.begin(), running.outputs.end()};
  }

  Tensors do_backward(weft::Inputs dy, Frame& frame) override {
    const Tensors x = frame.pop(*this), kept = frame.pop(*this);
    RunningPass running{frame.compute(), false, weft::Memory::local};
    weft_module_pass pass = begin(frame, x, running);
    Tensors gradients, of_inputs, of_parameters;
    std::vector<weft_tensor> in_gradients, in_of_inputs, in_of_parameters, in_kept;
    for (const Tensor& g : dy) {
      weft::layouts::expect_whole(weft::layouts::named(*this, "dy"), g, "a layer of the program", false);
      gradients.push_back(widened(frame, g));
      in_gradients.push_back(in_c("gradient", gradients.back()));
    }
    for (const Tensor& t : x) {
      of_inputs.push_back(is_floating(t) ? zeros_like(frame, t, dx_memory()) : Tensor());
      in_of_inputs.push_back(in_c("input_gradient", of_inputs.back()));
    }
    for (const auto& p : own_) {
      of_parameters.push_back(p->trainable() ? zeros_like(frame, p->weight()) : Tensor());
      in_of_parameters.push_back(in_c(p->path().c_str(), of_parameters.back()));
    }
    for (const Tensor& t : kept) in_kept.push_back(in_c("kept", t));
    pass.backward = true;
    pass.output_count = static_cast<std::int32_t>(gradients.size());
    pass.gradients = in_gradients.data();
    pass.input_gradients = in_of_inputs.data();
    pass.parameter_gradients = in_of_parameters.data();
    pass.kept = in_kept.data();
    pass.kept_count = static_cast<std::int32_t>(in_kept.size());
    run("backward", of_->functions.backward, pass, frame, x[0], [] {});
    for (std::size_t i = 0; i < own_.size(); ++i)
      if (of_parameters[i]) {
        const LayoutRef layout = layout_of_gradient(own_[i]->weight().layout(), dy[0].layout());
        own_[i]->accumulate(of_parameters[i].with_layout(layout));
      }
    Tensors dx;
    for (std::size_t i = 0; i < x.size(); ++i)
      if (of_inputs[i])
        dx.push_back(
            cast(frame, of_inputs[i].with_layout(layout_of_input_gradient(x[i].layout())), x[i].dtype()));
    return dx;
  }

  // The pass as the program gets it: x and the weights in f32.
  weft_module_pass begin(Frame& frame, const Tensors& x, RunningPass& running) {
    if (frame.compute().device() != weft::Device{})
      throw Error(
          ErrorCode::unsupported,
          fmt::format("\"{}\": the program wrote its passes, for memory of the host; the model is on {}",
                      path(), to_string(frame.compute().device())));
    inputs_.clear(), weights_.clear(), held_.clear();
    held_.reserve(x.size() + own_.size());
    for (const Tensor& t : x) inputs_.push_back(in_c("input", held_.emplace_back(widened(frame, t))));
    for (const auto& p : own_)
      weights_.push_back(in_c(p->path().c_str(), held_.emplace_back(widened(frame, p->weight()))));
    weft_module_pass pass = {};
    pass.struct_size = sizeof pass;
    pass.training = frame.pass().training;
    pass.input_count = static_cast<std::int32_t>(x.size());
    pass.inputs = inputs_.data();
    pass.parameter_count = static_cast<std::int32_t>(own_.size());
    pass.parameters = weights_.data();
    pass.seed = frame.pass().seed;
    pass.step = frame.pass().step;
    pass.micro_batch = frame.pass().micro_batch;
    pass.state = &running;
    return pass;
  }

  // Calls a function of the program, then `finish`. If either fails on a rank, all ranks that run this pass
  // throw: in training those of the mesh, otherwise those with the same rows.
  template <class Function, class Finish>
  void run(const char* what, Function function, const weft_module_pass& pass, Frame& frame, const Tensor& x,
           const Finish& finish) {
    std::optional<Error> own;
    try {
      const capi::CallOut out;
      if (!out) throw Error(ErrorCode::system, fmt::format("\"{}\": {}", path(), capi::kEnded));
      weft_error error = WEFT_ERROR_INIT;
      const weft_status status = function(of_->functions.user, &pass, &error);
      if (status != WEFT_OK)
        throw Error(weft::error_code(status),
                    fmt::format("\"{}\": {} failed{}{}", path(), what, error.text[0] != 0 ? ": " : "",
                                error.text[0] != 0 ? error.text : ", and says nothing more"));
      finish();
    } catch (const Error& e) {
      own = e;
    }
    held_.clear();
    const LayoutRef& layout = x.layout();
    if (layout != nullptr && layout->mesh_shape().size() > 1) {
      const Tensor failed = frame.compute().make({1}, weft::DType::f32, weft::Memory::shared);
      failed.f32()[0] = own ? 1 : 0;
      weft::Placements from(layout->placements.size(), weft::Replicate{}), to = from;
      for (std::size_t axis = 0; axis < from.size(); ++axis)
        if (frame.pass().training || !is_shard(layout->placements[axis], 0)) from[axis] = weft::Partial{};
      const Tensor all = redistribute(failed.with_layout(make_layout(layout->mesh(), from, Shape{1})), to);
      if (!own && all.f32()[0] > 0)
        throw Error(ErrorCode::bad_argument,
                    fmt::format("\"{}\": {} failed on another rank of {}; its own error says why", path(),
                                what, to_string(layout->mesh_shape())));
    }
    if (own) throw Error(*own);
  }

  bool is_split_on(std::size_t axis) const {
    return std::any_of(own_.begin(), own_.end(), [&](const auto& p) {
      const LayoutRef& of = p->weight().layout();
      return of != nullptr && of->mesh_shape().size(static_cast<int>(axis)) > 1 &&
             is_shard(of->placements[axis]);
    });
  }

  // An output has x's rows, and is cut where x is; along axes that split the layer its features are cut.
  LayoutRef layout_of(const Shape& y, const Tensor& x) const {
    const LayoutRef& in = x.layout();
    if (in == nullptr) return nullptr;
    weft::Placements placements = in->placements;
    Shape global = y;
    const int last = y.rank() - 1, last_of_x = x.shape().rank() - 1;
    for (std::size_t axis = 0; axis < placements.size(); ++axis) {
      const std::int64_t ranks = in->mesh_shape().size(static_cast<int>(axis));
      weft::Placement& p = placements[axis];
      if (const auto* const cut = std::get_if<weft::Shard>(&p)) {
        const int from = cut->dim, dim = from == last_of_x && from > 0 ? last : from;
        if (dim > last || y[dim] != x.shape()[from])
          throw Error(
              ErrorCode::layout,
              fmt::format("\"{}\": an output is {}; expected {} of dimension {}, as the input {}, which "
                          "is cut there",
                          path(), to_string(y), x.shape()[from], dim, to_string(x.shape())));
        global[dim] = in->global[from];
        p = weft::Shard{dim};
      } else if (ranks > 1 && is_split_on(axis)) {
        if (last < 1)
          throw Error(ErrorCode::layout,
                      fmt::format("\"{}\": an output is {}; expected rows and features, since "
                                  "a plan splits the layer",
                                  path(), to_string(y)));
        global[last] *= ranks;
        p = weft::Shard{last};
      }
    }
    return in->with_global(global)->with(placements);
  }

  // Contributions along axes that split the layer and not x.
  LayoutRef layout_of_input_gradient(const LayoutRef& x) const {
    if (x == nullptr) return nullptr;
    weft::Placements placements = x->placements;
    for (std::size_t axis = 0; axis < placements.size(); ++axis)
      if (is_replicate(placements[axis]) && is_split_on(axis)) placements[axis] = weft::Partial{};
    return x->with(placements);
  }

  // Contributions along all axes that cut y and not the parameter.
  static LayoutRef layout_of_gradient(const LayoutRef& weight, const LayoutRef& y) {
    if (weight == nullptr || y == nullptr) return weight;
    weft::Placements placements = weight->placements;
    for (std::size_t axis = 0; axis < placements.size(); ++axis)
      if (weight->mesh_shape().size(static_cast<int>(axis)) > 1 && !is_shard(placements[axis]) &&
          is_shard(y->placements[axis]))
        placements[axis] = weft::Partial{};
    return weight->with(placements);
  }

  std::shared_ptr<const ProgramFunctions> of_;
  std::vector<weft::ParameterRef> own_;
  // These belong to the pass that runs.
  std::vector<weft_tensor> inputs_, weights_;
  Tensors held_;
};

std::shared_ptr<ProgramFunctions> functions_of(const weft_module& m) {
  auto made = std::make_shared<ProgramFunctions>();
  made->functions = m;
  return made;
}

// Checks and copies what the program says of its layer.
void describe(const char* function, ProgramFunctions& to, std::int32_t number) {
  const weft_module& m = to.functions;
  const auto field = [&](const char* name) { return fmt::format("modules[{}].{}", number, name); };
  to.name = capi::text_of(function, m.name, field("name").c_str());
  if (m.forward == nullptr || m.backward == nullptr)
    capi::refuse(
        ErrorCode::bad_argument, function,
        fmt::format("{} is NULL; expected a function", field(m.forward == nullptr ? "forward" : "backward")));
  for (const weft_module_parameter& p :
       capi::list_of(function, m.parameters, m.parameter_count, field("parameters").c_str(),
                     field("parameter_count").c_str())) {
    const std::string name = capi::text_of(function, p.name, field("parameters[].name").c_str());
    const auto wrong = [&](const std::string& text) {
      capi::refuse(ErrorCode::bad_argument, function,
                   fmt::format("{} of \"{}\" {}", field("parameters"), name, text));
    };
    const Shape shape =
        capi::shape_of(function, p.extents, p.dim_count, field("parameters[].extents").c_str());
    if (p.split_dim >= shape.rank())
      wrong(fmt::format("has split_dim {}; expected less than {}, or -1", p.split_dim, shape.rank()));
    if (!(p.std >= 0)) wrong(fmt::format("has std {}; expected 0 or more", p.std));
    const weft::Init init =
        p.std == 0 ? weft::Init(weft::Constant{p.mean}) : weft::Init(weft::Normal{p.std, p.mean});
    to.parameters.push_back({name, shape, p.split_dim < 0 ? -1 : p.split_dim, init});
  }
}

// Memory for a running forward pass, in one of its lists.
void make(const char* function, const weft_module_pass* pass, std::int32_t dim_count,
          const std::int64_t* extents, weft_tensor* tensor, const char* which,
          std::deque<Tensor> RunningPass::*list) {
  const weft_module_pass& of = capi::given(function, pass, "pass");
  capi::expect_initialised(function, of, kModulePassFirstBytes, "pass", "the pass that the function got");
  const Shape shape = capi::shape_of(function, extents, dim_count, "extents");
  for (const std::int64_t extent : shape)
    if (extent < 0)
      capi::refuse(ErrorCode::bad_argument, function,
                   fmt::format("extents are {}; expected 0 or more", to_string(shape)));
  weft_tensor& to = capi::given(function, tensor, which);
  auto* const running = static_cast<RunningPass*>(of.state);
  if (running == nullptr || !running->forward)
    capi::refuse(ErrorCode::bad_argument, function,
                 "pass is not a forward pass that runs; expected the one that the function got");
  const weft::Memory memory = list == &RunningPass::outputs ? running->of_outputs : weft::Memory::local;
  to = in_c(which, (running->*list).emplace_back(running->compute.make(shape, weft::DType::f32, memory)));
}

}  // namespace

weft_status weft_module_output(const weft_module_pass* pass, int32_t dim_count, const int64_t* extents,
                               weft_tensor* output, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    make(function, pass, dim_count, extents, output, "output", &RunningPass::outputs);
  });
}

weft_status weft_module_keep(const weft_module_pass* pass, int32_t dim_count, const int64_t* extents,
                             weft_tensor* kept, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    make(function, pass, dim_count, extents, kept, "kept", &RunningPass::kept);
  });
}

weft_status weft_model_create_with_modules(const weft_mesh* mesh, weft_compute* compute, const char* recipe,
                                           const char* options, const weft_module* modules,
                                           int32_t module_count, weft_model** model, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    // Made first, so that each is released whatever follows.
    std::vector<std::shared_ptr<ProgramFunctions>> all;
    for (const weft_module& m : capi::list_of(function, modules, module_count, "modules", "module_count"))
      all.push_back(functions_of(m));
    const weft_mesh& over = capi::whole_mesh_of(function, mesh);
    capi::compute_of(function, compute);
    weft::OwnLayers own;
    for (std::size_t i = 0; i < all.size(); ++i) {
      describe(function, *all[i], static_cast<std::int32_t>(i));
      own.push_back({all[i]->name, [of = all[i]] { return std::make_unique<ProgramModule>(of); }});
    }
    const weft::Recipe of = weft::recipe_from_json(capi::text_of(function, recipe, "recipe"), own);
    weft_model*& to = capi::given(function, model, "model");
    const weft::BuildOptions build =
        options == nullptr ? weft::BuildOptions{} : weft::build_options_from_json(options);
    if (!build.pipeline_axis.empty() && !all.empty())
      capi::refuse(
          ErrorCode::unsupported, function,
          fmt::format("pipeline_axis is \"{}\" with modules; expected none: in each pass of a layer of "
                      "the program all ranks of the mesh exchange a number, and stages pass at "
                      "different times",
                      build.pipeline_axis));
    to = new weft_model{std::make_shared<capi::ModelState>(compute->state, over.owner, over.mesh, of, build)};
  });
}
