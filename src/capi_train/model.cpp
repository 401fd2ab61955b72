// Models in C. Comments in weft/c_train/model.h say which functions are collective or block.
#include <fmt/ranges.h>

#include <cstddef>
#include <cstring>
#include <optional>

#include "capi/values.hpp"
#include "capi_train/model_handles.hpp"
#include "weft/host/copy.hpp"
#include "weft/models/from_json.hpp"
#include "weft/models/generate.hpp"
#include "weft/models/outputs.hpp"
#include "weft/models/transformer_text.hpp"
#include "weft/train/checkpoint.hpp"

using weft::ErrorCode;
using weft::Parameter;
namespace capi = weft::capi;

namespace weft::capi {

static_assert(sizeof(weft_token_batch) == 40);  // has no struct_size: it stays as it is

ModelState& model_of(const char* function, const weft_model* model) {
  ModelState& state = *given(function, model, "model").state;
  state.compute->context->context.check_fork(function);
  return state;
}

const weft_mesh& whole_mesh_of(const char* function, const weft_mesh* mesh) {
  const weft_mesh& over = given(function, mesh, "mesh");
  if (!over.mesh.is_root())
    refuse(ErrorCode::bad_argument, function,
           fmt::format("mesh is {}, a part of {}; expected a whole mesh", to_string(over.mesh.shape()),
                       to_string(over.mesh.root().shape())));
  return over;
}

TensorView elements(const char* function, const weft_buffer* buffer, const char* which, const Shape& shape,
                    std::string_view whose, const Compute& compute) {
  const Buffer b = buffer_of(function, buffer, which);
  const auto wrong = [&](const std::string& text) {
    refuse(ErrorCode::bad_argument, function, fmt::format("{}->{}", which, text));
  };
  if (b.dtype != DType::f32) wrong(fmt::format("dtype is {}; expected f32", name(b.dtype)));
  if (b.device != compute.device())
    wrong(fmt::format("device is {}; expected {}, the device of the weft_compute", to_string(b.device),
                      to_string(compute.device())));
  if (b.count != shape.count())
    wrong(fmt::format("count is {}; expected {}, of {} {}", b.count, shape.count(), whose, to_string(shape)));
  if (b.data == nullptr && b.count != 0) wrong(fmt::format("data is NULL; expected {} elements", b.count));
  return {static_cast<std::byte*>(b.data), b.dtype, b.device, shape, row_major(shape)};
}

void copy(Compute& compute, const ConstTensorView& from, const TensorView& to) {
  if (from.count() == 0) return;
  weft::copy(compute.context(), from, to, compute.stream());
  compute.wait();
}

TokenBatch batch_of(const weft_token_batch& b) {
  return {b.tokens, b.labels, b.rows, b.sequence, b.global_rows};
}

namespace {

Tensors copies_of(const char* function, Context& context, const weft_tensor* tensors, int32_t count,
                  const char* which) {
  Tensors all;
  for (const MutableNamedView& v : tensors_of(function, tensors, count, which)) {
    if (v.data.device != Device{})
      refuse(ErrorCode::bad_argument, function,
             fmt::format("{}[{}] is on {}; expected memory of the host", which, all.size(),
                         to_string(v.data.device)));
    Tensor& t = all.emplace_back(context, v.data.shape, v.data.dtype);
    if (t.bytes() != 0) std::memcpy(t.data(), v.data.data, static_cast<std::size_t>(t.bytes()));
  }
  return all;
}

}  // namespace

Batch batch_of(const char* function, Context& context, const weft_batch& b) {
  return {.inputs = copies_of(function, context, b.inputs, b.input_count, "inputs"),
          .targets = copies_of(function, context, b.targets, b.target_count, "targets"),
          .global_rows = b.global_rows};
}

}  // namespace weft::capi

namespace {

constexpr std::size_t kTransformerOptionsFirstBytes = 136, kParameterFirstBytes = 176;
static_assert(offsetof(weft_transformer_options, data_form) == kTransformerOptionsFirstBytes);
static_assert(sizeof(weft_transformer_options) == 200);
static_assert(sizeof(weft_parameter) == kParameterFirstBytes);
constexpr std::size_t kGenerateOptionsFirstBytes = 64;
static_assert(sizeof(weft_generate_options) == kGenerateOptionsFirstBytes);
constexpr std::size_t kExpertBalanceFirstBytes = 64;
static_assert(sizeof(weft_expert_balance) == kExpertBalanceFirstBytes);
static_assert(sizeof(weft_tokens) == 16);  // has no struct_size: it stays as it is
static_assert(weft::Dims::kMaxDims == WEFT_MAX_DIMS);
static_assert(weft::CrossEntropy::kIgnore == WEFT_IGNORED);

weft::TransformerConfig config_of(const weft_transformer_options& o) {
  weft::TransformerConfig c;
  c.dim = o.dim;
  c.layers = o.layers;
  c.heads = o.heads;
  c.kv_heads = o.kv_heads;
  c.ffn_hidden = o.ffn_hidden;
  c.vocab = o.vocab;
  c.max_seq = o.max_seq;
  c.head_size = o.head_size;
  c.rope_theta = o.rope_theta;
  c.norm_eps = o.norm_eps;
  c.init_std = o.init_std;
  c.tied = o.tied;
  return c;
}

weft::BuildOptions build_options_of(const char* function, const weft_transformer_options& o) {
  weft::BuildOptions build;
  if (o.data_axis != nullptr) build.data_axis = o.data_axis;
  if (o.tensor_axis != nullptr) build.tensor_axis = o.tensor_axis;
  build.seed = o.seed;
  build.tensor.sequence_parallel = o.sequence_parallel;
  if (o.split_vocab) build.tensor.vocab = weft::VocabSplit::shard;
  if (o.weights != WEFT_F32 && o.weights != WEFT_BF16)
    capi::refuse(ErrorCode::bad_argument, function,
                 fmt::format("options->weights is {}; expected {} (WEFT_F32) or {} (WEFT_BF16)", o.weights,
                             static_cast<int>(WEFT_F32), static_cast<int>(WEFT_BF16)));
  build.dtype = static_cast<weft::DType>(o.weights);
  if (o.activations != WEFT_F32 && o.activations != WEFT_BF16)
    capi::refuse(ErrorCode::bad_argument, function,
                 fmt::format("options->activations is {}; expected {} (WEFT_F32) or {} (WEFT_BF16)",
                             o.activations, WEFT_F32, WEFT_BF16));
  build.activations = static_cast<weft::DType>(o.activations);
  if (o.data_form != WEFT_DATA_DDP && o.data_form != WEFT_DATA_FSDP)
    capi::refuse(ErrorCode::bad_argument, function,
                 fmt::format("options->data_form is {}; expected 0 (WEFT_DATA_DDP) or 1 (WEFT_DATA_FSDP)",
                             o.data_form));
  build.data = o.data_form == WEFT_DATA_FSDP ? weft::DataForm::fsdp : weft::DataForm::ddp;
  if (o.replicate_axis != nullptr) build.replicate_axis = o.replicate_axis;
  if (o.reduce != WEFT_F32 && o.reduce != WEFT_BF16)
    capi::refuse(ErrorCode::bad_argument, function,
                 fmt::format("options->reduce is {}; expected {} (WEFT_F32) or {} (WEFT_BF16)", o.reduce,
                             static_cast<int>(WEFT_F32), static_cast<int>(WEFT_BF16)));
  if (o.after_forward < WEFT_KEEP || o.after_forward == 1)
    capi::refuse(
        ErrorCode::bad_argument, function,
        fmt::format("options->after_forward is {}; expected 0 (WEFT_RESHARD), -1 (WEFT_KEEP), or 2 or more",
                    o.after_forward));
  if (build.data == weft::DataForm::ddp && (o.reduce != WEFT_F32 || o.after_forward != WEFT_RESHARD))
    capi::refuse(ErrorCode::bad_argument, function,
                 fmt::format("options->{} is for WEFT_DATA_FSDP; data_form is WEFT_DATA_DDP",
                             o.reduce != WEFT_F32 ? "reduce" : "after_forward"));
  build.sharding.precision.reduce = static_cast<weft::DType>(o.reduce);
  if (o.after_forward == WEFT_KEEP) build.sharding.reshard_after_forward = false;
  if (o.after_forward > 0) build.sharding.reshard_after_forward = static_cast<int>(o.after_forward);
  if (o.float8 < WEFT_FLOAT8_NONE || o.float8 > WEFT_FLOAT8_ROWWISE_GW_HP)
    capi::refuse(ErrorCode::bad_argument, function,
                 fmt::format("options->float8 is {}; expected 0 (WEFT_FLOAT8_NONE) to 3 "
                             "(WEFT_FLOAT8_ROWWISE_GW_HP)",
                             o.float8));
  if (o.float8 == WEFT_FLOAT8_NONE && o.float8_whole_scales)
    capi::refuse(ErrorCode::bad_argument, function,
                 "options->float8_whole_scales is true; expected a recipe in options->float8");
  if (o.float8 != WEFT_FLOAT8_NONE) build.float8 = static_cast<weft::Float8Recipe>(o.float8 - 1);
  if (o.exact) build.exact = weft::Exact::yes;
  if (o.float8_whole_scales) build.float8_options.scales = weft::Float8Scales::whole;
  for (const std::string_view path :
       capi::names_of(function, o.frozen, o.frozen_count, "options->frozen", "options->frozen_count"))
    build.frozen.emplace_back(path);
  if (o.ac_mode < WEFT_AC_NONE || o.ac_mode > WEFT_AC_SELECTIVE)
    capi::refuse(ErrorCode::bad_argument, function,
                 fmt::format("options->ac_mode is {}; expected 0 (WEFT_AC_NONE), 1 (WEFT_AC_FULL) or 2 "
                             "(WEFT_AC_SELECTIVE)",
                             o.ac_mode));
  build.ac.mode = static_cast<weft::AcMode>(o.ac_mode);
  if (o.ac_every != 0) build.ac.every = o.ac_every;
  for (const std::string_view path : capi::names_of(function, o.ac_modules, o.ac_module_count,
                                                    "options->ac_modules", "options->ac_module_count"))
    build.ac.modules.emplace_back(path);
  return build;
}

// Returns whether so many elements are possible.
bool fits(const weft::Shape& shape) {
  std::int64_t bytes = 4;
  for (const std::int64_t extent : shape)
    if (extent < 0 || __builtin_mul_overflow(bytes, extent, &bytes)) return false;
  return true;
}

Parameter& parameter_of(const char* function, const capi::ModelState& model, int32_t index) {
  const auto count = static_cast<int32_t>(model.parameters.size());
  if (index < 0 || index >= count)
    capi::refuse(ErrorCode::bad_argument, function,
                 fmt::format("index is {}; expected 0 to {}", index, count - 1));
  return *model.parameters[static_cast<std::size_t>(index)];
}

void set_extents(std::int64_t* to, const weft::Shape& shape) {
  for (int d = 0; d < shape.rank(); ++d) to[d] = shape[d];
}

weft_parameter described(const Parameter& p) {
  weft_parameter d = WEFT_PARAMETER_INIT;
  const weft::Tensor& master = p.master();
  d.dim_count = p.global_shape().rank();
  d.name = p.path().c_str();
  set_extents(d.extents, p.global_shape());
  set_extents(d.local_extents, master.shape());
  const weft_device device =
      master.device() == weft::Device{} ? WEFT_CPU : WEFT_CUDA(weft_device{master.device().index});
  d.value = {master.data(), master.count(), WEFT_F32, device};
  d.trained = p.trainable();
  return d;
}

// Makes a model for weft_transformer_create, or for its variant with a text (null: none).
weft_model* create(const char* function, const weft_mesh* mesh, weft_compute* compute, const char* text,
                   const weft_transformer_options* options) {
  capi::given(function, mesh, "mesh");
  capi::compute_of(function, compute);
  const weft_transformer_options o =
      capi::read(function, options, weft_transformer_options WEFT_TRANSFORMER_OPTIONS_INIT,
                 kTransformerOptionsFirstBytes, "WEFT_TRANSFORMER_OPTIONS_INIT");
  const weft_mesh& over = capi::whole_mesh_of(function, mesh);
  weft::TransformerConfig config = config_of(o);
  if (text != nullptr) config = weft::transformer_from_text(text, "text", config);
  return new weft_model{std::make_shared<capi::ModelState>(compute->state, over.owner, over.mesh, config,
                                                           build_options_of(function, o))};
}

std::vector<weft::TokenList> lists_of(const char* function, const weft_tokens* lists, std::int32_t count,
                                      const char* name) {
  if (count < 0)
    capi::refuse(ErrorCode::bad_argument, function,
                 fmt::format("the number of {} is {}; expected 0 or more", name, count));
  if (count > 0) capi::given(function, lists, name);
  std::vector<weft::TokenList> of;
  for (std::int32_t i = 0; i < count; ++i) {
    if (lists[i].count < 0 || (lists[i].tokens == nullptr && lists[i].count > 0))
      capi::refuse(ErrorCode::bad_argument, function,
                   fmt::format("{}[{}] has {} tokens{}; expected 0 or more, with memory", name, i,
                               lists[i].count, lists[i].tokens == nullptr ? ", and is NULL" : ""));
    of.emplace_back(lists[i].tokens, lists[i].tokens + lists[i].count);
  }
  return of;
}

// A parameter's memory, for a framework that adopts it.
template <class Managed>
Managed* adopted(const char* function, const weft_model* model, int32_t index) {
  const capi::ModelState& m = capi::model_of(function, model);
  const weft_parameter p = described(parameter_of(function, m, index));
  return capi::hand_out<Managed>(model->state, p.value,
                                 {p.local_extents, static_cast<std::size_t>(p.dim_count)});
}

}  // namespace

weft_status weft_transformer_create(const weft_mesh* mesh, weft_compute* compute,
                                    const weft_transformer_options* options, weft_model** model,
                                    weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_model*& to = capi::given(function, model, "model");
    to = create(function, mesh, compute, nullptr, options);
  });
}

weft_status weft_transformer_create_from_text(const weft_mesh* mesh, weft_compute* compute, const char* text,
                                              const weft_transformer_options* options, weft_model** model,
                                              weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_model*& to = capi::given(function, model, "model");
    to = create(function, mesh, compute, &capi::given(function, text, "text"), options);
  });
}

weft_status weft_model_create(const weft_mesh* mesh, weft_compute* compute, const char* recipe,
                              const char* options, weft_model** model, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_mesh& over = capi::whole_mesh_of(function, mesh);
    capi::compute_of(function, compute);
    const weft::Recipe of = weft::recipe_from_json(capi::text_of(function, recipe, "recipe"));
    weft_model*& to = capi::given(function, model, "model");
    const weft::BuildOptions build =
        options == nullptr ? weft::BuildOptions{} : weft::build_options_from_json(options);
    to = new weft_model{std::make_shared<capi::ModelState>(compute->state, over.owner, over.mesh, of, build)};
  });
}

weft_status weft_model_text(const weft_model* model, weft_text** text, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const capi::ModelState& m = capi::model_of(function, model);
    weft_text*& to = capi::given(function, text, "text");
    const weft::Transformer& of = weft::transformer_of(m.parts);
    if (dynamic_cast<const weft::MoETransformer*>(&of) != nullptr)
      capi::refuse(ErrorCode::bad_argument, function,
                   "the model has mixtures of experts; expected a transformer without experts");
    to = new weft_text{weft::transformer_text(of.config())};
  });
}

void weft_model_destroy(weft_model* model) { capi::destroy(__func__, model, "model"); }

weft_status weft_model_parameter_count(const weft_model* model, int32_t* count, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const capi::ModelState& m = capi::model_of(function, model);
    capi::given(function, count, "count") = static_cast<int32_t>(m.parameters.size());
  });
}

weft_status weft_model_get_parameter(const weft_model* model, int32_t index, weft_parameter* parameter,
                                     weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const capi::ModelState& m = capi::model_of(function, model);
    weft_parameter& to = capi::given(function, parameter, "parameter");
    capi::answer(function, to, described(parameter_of(function, m, index)), kParameterFirstBytes, "parameter",
                 "WEFT_PARAMETER_INIT");
  });
}

weft_status weft_model_find_parameter(const weft_model* model, const char* name, int32_t* index,
                                      weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const capi::ModelState& m = capi::model_of(function, model);
    const std::string_view wanted = &capi::given(function, name, "name");
    int32_t& to = capi::given(function, index, "index");
    const auto found = std::find_if(m.parameters.begin(), m.parameters.end(),
                                    [&](const Parameter* p) { return p->path() == wanted; });
    to = found == m.parameters.end() ? -1 : static_cast<int32_t>(found - m.parameters.begin());
  });
}

weft_status weft_model_parameter_layout(const weft_model* model, int32_t index, weft_layout** layout,
                                        weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const capi::ModelState& m = capi::model_of(function, model);
    weft_layout*& to = capi::given(function, layout, "layout");
    to = new weft_layout{m.owner, parameter_of(function, m, index).layout()};
  });
}

weft_status weft_model_set_parameter(weft_model* model, int32_t index, const weft_buffer* value,
                                     weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const capi::ModelState& m = capi::model_of(function, model);
    Parameter& p = parameter_of(function, m, index);
    const weft::Tensor& to = p.master();
    capi::copy(m.compute->compute,
               capi::elements(function, value, "value", to.shape(), p.path(), m.compute->compute), to.view());
    p.write_master();
  });
}

weft_status weft_model_set_parameter_from_dltensor(weft_model* model, int32_t index, const void* tensor,
                                                   weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const capi::ModelState& m = capi::model_of(function, model);
    Parameter& p = parameter_of(function, m, index);
    const weft_dl_tensor& t = capi::dl_tensor_of(function, tensor, "tensor");
    const weft_buffer value = capi::dl_buffer_of(function, t);
    const weft::Shape& expected = p.master().shape();
    if (!std::equal(expected.begin(), expected.end(), t.shape, t.shape + t.ndim))
      capi::refuse(
          ErrorCode::bad_argument, function,
          fmt::format("the tensor has shape ({}); expected {}, what this rank holds of {}",
                      fmt::join(t.shape, t.shape + t.ndim, ", "), weft::to_string(expected), p.path()));
    const weft::Tensor& to = p.master();
    capi::copy(m.compute->compute,
               capi::elements(function, &value, "tensor", expected, p.path(), m.compute->compute), to.view());
    p.write_master();
  });
}

weft_status weft_model_parameter_dlpack(const weft_model* model, int32_t index, DLManagedTensor** managed,
                                        weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    DLManagedTensor*& to = capi::given(function, managed, "managed");
    to = reinterpret_cast<DLManagedTensor*>(adopted<weft_dl_managed_tensor>(function, model, index));
  });
}

weft_status weft_model_parameter_dlpack_versioned(const weft_model* model, int32_t index,
                                                  DLManagedTensorVersioned** managed, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    DLManagedTensorVersioned*& to = capi::given(function, managed, "managed");
    weft_dl_managed_tensor_versioned* const m =
        adopted<weft_dl_managed_tensor_versioned>(function, model, index);
    m->flags = WEFT_DL_READ_ONLY;
    to = reinterpret_cast<DLManagedTensorVersioned*>(m);
  });
}

weft_status weft_model_logits(weft_model* model, const weft_token_batch* batch, const weft_buffer* logits,
                              weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    capi::ModelState& m = capi::model_of(function, model);
    weft::Compute& compute = m.compute->compute;
    weft::TokenBatch of;
    weft::TensorView to;
    std::optional<weft::Error> fault;  // reported to the other ranks of the tensor axis, which would wait
    try {
      of = capi::batch_of(capi::given(function, batch, "batch"));
      if (!m.parts.tokens)
        capi::refuse(ErrorCode::bad_argument, function,
                     "the model has no vocabulary; expected a model of tokens");
      weft::Shape expected{of.rows, of.sequence, m.parts.tokens->vocab};
      if (!fits(expected)) expected = {0};  // compute_logits() says what is wrong with them
      to = capi::elements(function, logits, "logits", expected, "the scores", compute);
    } catch (const weft::Error& e) {
      fault = e;
    }
    capi::copy(compute, weft::compute_logits(m.parts, compute, of, fault).view(), to);
  });
}

weft_status weft_model_forward(weft_model* model, const weft_batch* batch, int32_t* count,
                               weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    capi::ModelState& m = capi::model_of(function, model);
    weft::Compute& compute = m.compute->compute;
    weft::Batch of;
    std::optional<weft::Error> fault;  // reported to the other ranks, which would wait
    try {
      of = capi::batch_of(function, m.compute->context->context, capi::given(function, batch, "batch"));
    } catch (const weft::Error& e) {
      fault = e;
    }
    m.outputs = weft::compute_outputs(m.parts, compute, of, fault);
    if (count != nullptr) *count = static_cast<int32_t>(m.outputs.size());
  });
}

weft_status weft_model_get_output(const weft_model* model, int32_t index, weft_tensor* output,
                                  weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const capi::ModelState& m = capi::model_of(function, model);
    weft_tensor& to = capi::given(function, output, "output");
    const auto count = static_cast<int32_t>(m.outputs.size());
    if (index < 0 || index >= count)
      capi::refuse(
          ErrorCode::bad_argument, function,
          count == 0
              ? fmt::format("index is {}; there is no output: expected weft_model_forward first", index)
              : fmt::format("index is {}; expected 0 to {}", index, count - 1));
    const weft::Tensor& y = m.outputs[static_cast<std::size_t>(index)];
    to = {"output",
          {const_cast<std::byte*>(y.data()), y.count(), static_cast<weft_dtype>(y.dtype()), WEFT_CPU},
          nullptr,
          y.shape().begin(),
          y.shape().rank()};
  });
}

weft_status weft_model_expert_balance(weft_model* model, int32_t* count, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    capi::ModelState& m = capi::model_of(function, model);
    int32_t& to = capi::given(function, count, "count");
    m.balance = weft::expert_balance(m.parts);
    to = static_cast<int32_t>(m.balance.size());
  });
}

weft_status weft_model_get_expert_balance(const weft_model* model, int32_t index,
                                          weft_expert_balance* balance, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const capi::ModelState& m = capi::model_of(function, model);
    weft_expert_balance& to = capi::given(function, balance, "balance");
    capi::expect_initialised(function, to, kExpertBalanceFirstBytes, "balance", "WEFT_EXPERT_BALANCE_INIT");
    const auto count = static_cast<int32_t>(m.balance.size());
    if (index < 0 || index >= count)
      capi::refuse(
          ErrorCode::bad_argument, function,
          count == 0 ? fmt::format(
                           "index is {}; there is no report: expected weft_model_expert_balance first", index)
                     : fmt::format("index is {}; expected 0 to {}", index, count - 1));
    const weft::LayerBalance& layer = m.balance[static_cast<std::size_t>(index)];
    const weft::RouterReport& r = layer.report;
    weft_expert_balance of = WEFT_EXPERT_BALANCE_INIT;
    of.expert_count = static_cast<int32_t>(r.counts.size());
    of.path = layer.path.c_str();
    of.counts = r.counts.data();
    of.tokens = r.tokens, of.assignments = r.assignments, of.dropped = r.dropped;
    of.aux_loss = r.aux_loss, of.z_loss = r.z_loss;
    capi::answer(function, to, of, kExpertBalanceFirstBytes, "balance", "WEFT_EXPERT_BALANCE_INIT");
  });
}

weft_status weft_model_generate(weft_model* model, const weft_tokens* prompts, int32_t prompt_count,
                                const weft_generate_options* options, int64_t* tokens, int64_t* counts,
                                weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    capi::ModelState& m = capi::model_of(function, model);
    weft::GenerateOptions o;
    std::vector<weft::TokenList> lists;
    std::optional<weft::Error> fault;  // reported to the other ranks, which would wait
    try {
      const weft_generate_options given =
          capi::read(function, options, weft_generate_options WEFT_GENERATE_OPTIONS_INIT,
                     kGenerateOptionsFirstBytes, "WEFT_GENERATE_OPTIONS_INIT");
      o = {.new_tokens = given.new_tokens,
           .temperature = given.temperature,
           .top_k = given.top_k,
           .top_p = given.top_p,
           .seed = given.seed,
           .stops = lists_of(function, given.stops, given.stop_count, "options->stops"),
           .cache = !given.no_cache};
      lists = lists_of(function, prompts, prompt_count, "prompts");
      capi::given(function, tokens, "tokens");
      capi::given(function, counts, "counts");
    } catch (const weft::Error& e) {
      fault = e;
    }
    const std::vector<weft::Generated> made = weft::generate(m.parts, m.compute->compute, lists, o, fault);
    for (std::size_t i = 0; i < made.size(); ++i) {
      std::copy(made[i].tokens.begin(), made[i].tokens.end(),
                tokens + static_cast<std::int64_t>(i) * o.new_tokens);
      counts[i] = static_cast<std::int64_t>(made[i].tokens.size());
    }
  });
}

weft_status weft_model_save(const weft_model* model, const char* directory, int64_t step, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const capi::ModelState& m = capi::model_of(function, model);
    const char* const to = &capi::given(function, directory, "directory");
    if (m.parts.stages)
      return weft::save_stages(to, m.parts.stages, step, m.parts.parameters(), m.parts.buffers(), nullptr);
    weft::save_checkpoint(to, m.parts.mesh, step, *m.parts.model, nullptr);
  });
}

weft_status weft_model_load(weft_model* model, const char* directory, int64_t* step, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const capi::ModelState& m = capi::model_of(function, model);
    const char* const from = &capi::given(function, directory, "directory");
    const weft::CheckpointInfo info =
        m.parts.stages
            ? weft::load_stages(from, m.parts.stages, m.parts.parameters(), m.parts.buffers(), nullptr)
            : weft::load_checkpoint(from, m.parts.mesh, *m.parts.model, nullptr);
    if (step != nullptr) *step = info.step;
  });
}

weft_status weft_model_init_from(weft_model* model, const char* directory, const char* const* except,
                                 int32_t except_count, const char* const* left_out, int32_t left_out_count,
                                 int64_t* step, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const capi::ModelState& m = capi::model_of(function, model);
    weft::InitOptions options;
    for (const std::string_view p : capi::names_of(function, except, except_count, "except", "except_count"))
      options.except.emplace_back(p);
    for (const std::string_view p :
         capi::names_of(function, left_out, left_out_count, "left_out", "left_out_count"))
      options.left_out.emplace_back(p);
    const char* const from = &capi::given(function, directory, "directory");
    const weft::CheckpointInfo info =
        m.parts.stages ? weft::init_stages_from(from, m.parts.stages, *m.parts.model, m.parts.parameters(),
                                                m.parts.buffers(), options)
                       : weft::init_from(from, m.parts.mesh, *m.parts.model, options);
    if (step != nullptr) *step = info.step;
  });
}
