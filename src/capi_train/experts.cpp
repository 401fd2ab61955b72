// The parts of a mixture of experts in C: each function makes views of its arguments and calls the function
// of weft/ep/.
#include "weft/ep/experts.hpp"

#include <fmt/format.h>

#include <cstddef>

#include "base/hash.hpp"
#include "capi/transfer_handle.hpp"
#include "capi_train/matrices.hpp"
#include "weft/ep/dispatch.hpp"
#include "weft/ep/router.hpp"

struct weft_token_routes : weft::capi::Handle<weft_token_routes> {
  static constexpr const char* kKind = "weft_token_routes";
  weft_token_routes(weft::capi::MeshOwner owner_in, weft::TokenRoutes routes_in)
      : owner(std::move(owner_in)), routes(std::move(routes_in)) {}
  weft::capi::MeshOwner owner;
  const weft::TokenRoutes routes;
};

namespace weft::capi {
namespace {

constexpr std::size_t kRouterOptionsFirstBytes = 20, kExpertMatricesFirstBytes = 40,
                      kExpertActivationsFirstBytes = 32;
static_assert(sizeof(weft_router_options) == kRouterOptionsFirstBytes);
static_assert(sizeof(weft_expert_matrices) == kExpertMatricesFirstBytes);
static_assert(sizeof(weft_expert_activations) == kExpertActivationsFirstBytes);

template <class Enum>
Enum choice(const char* function, std::int32_t value, std::int32_t last, const char* which) {
  if (value < 0 || value > last)
    refuse(ErrorCode::bad_argument, function, fmt::format("{} is {}; expected 0 to {}", which, value, last));
  return static_cast<Enum>(value);
}

RouterOptions router_options(const char* function, const weft_router_options* options) {
  const weft_router_options o = read(function, options, weft_router_options WEFT_ROUTER_OPTIONS_INIT,
                                     kRouterOptionsFirstBytes, "WEFT_ROUTER_OPTIONS_INIT");
  RouterOptions r;
  r.top_k = o.top_k;
  r.scores = choice<RouterScores>(function, o.scores, WEFT_ROUTER_SIGMOID, "options->scores");
  r.bias = choice<RouterBias>(function, o.bias, WEFT_ROUTER_BIAS_WEIGHS, "options->bias");
  r.normalise = o.normalise;
  return r;
}

// A list of numbers of this dtype, and of `count` if that is 0 or more.
template <class T>
std::span<T> list(const char* function, const weft_buffer* v, DType dtype, std::int64_t count,
                  const char* which) {
  const TensorView view = vector(function, v, which);
  if (view.dtype != dtype || (count >= 0 && view.shape[0] != count))
    refuse(ErrorCode::bad_argument, function,
           fmt::format("{} is {} {}; expected {}{}", which, name(view.dtype), to_string(view.shape),
                       name(dtype), count >= 0 ? fmt::format(" ({})", count) : ""));
  if (view.device.kind != DeviceKind::cpu)
    refuse(ErrorCode::unsupported, function,
           fmt::format("{} is on {}; expected memory of the host", which, to_string(view.device)));
  return {reinterpret_cast<T*>(view.data), static_cast<std::size_t>(view.shape[0])};
}

// The matrices of `experts` experts, one below the other, as (experts, rows, columns).
TensorView of_each(const char* function, const weft_matrix* m, std::int64_t experts, const char* which) {
  if (m == nullptr) return {};
  const TensorView v = matrix(function, m, which);
  if (experts < 0 || (experts == 0 ? v.shape[0] != 0 : v.shape[0] % experts != 0))
    refuse(ErrorCode::bad_argument, function,
           fmt::format("{}->rows is {}; expected a multiple of the {} experts", which, v.shape[0], experts));
  const Shape shape{experts, experts == 0 ? 0 : v.shape[0] / experts, v.shape[1]};
  return {v.data, v.dtype, v.device, shape, row_major(shape)};
}

struct Matrices {
  ExpertKind kind;
  TensorView gate, up, down;
};
Matrices matrices(const char* function, const weft_expert_matrices* given_matrices, const char* which) {
  given(function, given_matrices, which);
  const weft_expert_matrices m =
      read(function, given_matrices, weft_expert_matrices WEFT_EXPERT_MATRICES_INIT,
           kExpertMatricesFirstBytes, "WEFT_EXPERT_MATRICES_INIT");
  const std::string of = std::string(which) + "->";
  if (m.kind != WEFT_EXPERT_SWIGLU && m.gate != nullptr)
    refuse(ErrorCode::bad_argument, function,
           fmt::format("{}gate is given; expected NULL unless {}kind is WEFT_EXPERT_SWIGLU", of, of));
  return {choice<ExpertKind>(function, m.kind, WEFT_EXPERT_RELU, (of + "kind").c_str()),
          of_each(function, m.gate, m.experts, (of + "gate").c_str()),
          of_each(function, m.up, m.experts, (of + "up").c_str()),
          of_each(function, m.down, m.experts, (of + "down").c_str())};
}

ExpertActivations activations(const char* function, const weft_expert_activations* kept) {
  given(function, kept, "kept");
  const weft_expert_activations k = read(function, kept, weft_expert_activations WEFT_EXPERT_ACTIVATIONS_INIT,
                                         kExpertActivationsFirstBytes, "WEFT_EXPERT_ACTIVATIONS_INIT");
  return {matrix_or_none(function, k.gate, "kept->gate"), matrix_or_none(function, k.up, "kept->up"),
          matrix_or_none(function, k.hidden, "kept->hidden")};
}

// A rank without experts has nothing to compute; its matrices have no rows that say their sizes.
bool has_none(const Matrices& w, const TensorView& x) {
  return w.up.shape.rank() == 3 && w.up.shape[0] == 0 && x.shape[0] == 0;
}

// Throws mismatch on all ranks unless they have equal lists.
void expect_same_first_experts(const char* function, ProcessGroup& group,
                               std::span<const std::int64_t> first) {
  Fnv1a hash;
  for (const std::int64_t e : first) hash.add(static_cast<std::uint64_t>(e));
  std::vector<std::uint64_t> all(static_cast<std::size_t>(group.size()));
  group.all_gather(std::span<const std::uint64_t>(&hash.value, 1), all).wait();
  for (std::size_t r = 1; r < all.size(); ++r)
    if (all[r] != all[0])
      refuse(ErrorCode::mismatch, function,
             fmt::format(
                 "first_experts on rank {} differs from that on rank 0; expected the same on all ranks", r));
}

ProcessGroup* group_of(const weft_token_routes& routes) {
  return routes.owner.group == nullptr ? nullptr : &routes.owner.group->group;
}

}  // namespace
}  // namespace weft::capi

namespace capi = weft::capi;
using weft::DType;
using weft::TensorView;

weft_status weft_route_tokens(const weft_matrix* logits, const weft_buffer* bias,
                              const weft_router_options* options, const weft_matrix* experts,
                              const weft_matrix* weights, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft::route_tokens(capi::matrix(function, logits, "logits"), capi::vector_or_none(function, bias, "bias"),
                       capi::router_options(function, options), capi::matrix(function, experts, "experts"),
                       capi::matrix(function, weights, "weights"));
  });
}

weft_status weft_router_sums(const weft_matrix* logits, const weft_buffer* bias, const weft_matrix* experts,
                             const weft_router_options* options, const weft_buffer* counts,
                             const weft_buffer* scores, double* z, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const TensorView of_logits = capi::matrix(function, logits, "logits");
    const auto to_counts = capi::list<double>(function, counts, DType::f64, of_logits.shape[1], "counts");
    const auto to_scores = capi::list<double>(function, scores, DType::f64, of_logits.shape[1], "scores");
    double& to_z = capi::given(function, z, "z");
    weft::RouterSums sums{{to_counts.begin(), to_counts.end()}, {to_scores.begin(), to_scores.end()}, to_z};
    weft::add_router_sums(of_logits, capi::vector_or_none(function, bias, "bias"),
                          capi::matrix(function, experts, "experts"), capi::router_options(function, options),
                          sums);
    std::copy(sums.counts.begin(), sums.counts.end(), to_counts.begin());
    std::copy(sums.scores.begin(), sums.scores.end(), to_scores.begin());
    to_z = sums.z;
  });
}

weft_status weft_route_tokens_backward(const weft_matrix* logits, const weft_buffer* bias,
                                       const weft_matrix* experts, const weft_matrix* weights,
                                       const weft_matrix* dweights, const weft_router_options* options,
                                       const weft_buffer* shares, double aux, double z,
                                       const weft_matrix* dlogits, const weft_buffer* dbias,
                                       weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft::RouterLossTerms losses;
    if (shares != nullptr)
      losses.shares = capi::list<const double>(function, shares, DType::f64, -1, "shares");
    losses.aux = aux;
    losses.z = z;
    weft::route_tokens_backward(
        capi::matrix(function, logits, "logits"), capi::vector_or_none(function, bias, "bias"),
        capi::matrix(function, experts, "experts"), capi::matrix(function, weights, "weights"),
        capi::matrix(function, dweights, "dweights"), capi::router_options(function, options), losses,
        capi::matrix(function, dlogits, "dlogits"), capi::vector_or_none(function, dbias, "dbias"));
  });
}

weft_status weft_token_routes_create(weft_compute* compute, weft_group* group, const weft_matrix* experts,
                                     const weft_matrix* weights, const weft_buffer* first_experts,
                                     weft_token_routes** routes, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft::Compute& with = capi::compute_of(function, compute);
    const TensorView chosen = capi::matrix(function, experts, "experts"),
                     of_weights = capi::matrix(function, weights, "weights");
    const auto first =
        capi::list<const std::int64_t>(function, first_experts, DType::i64, -1, "first_experts");
    weft_token_routes*& to = capi::given(function, routes, "routes");
    capi::MeshOwner owner{compute->state->context, nullptr};
    if (group != nullptr) owner.group = capi::given(function, group, "group").handle;
    weft::ExpertChoices choices;
    int rank = 0;
    if (owner.group != nullptr) {
      rank = owner.group->group.rank();
      choices = weft::gather_choices(with, owner.group->group, chosen, of_weights);
      capi::expect_same_first_experts(function, owner.group->group, first);
    } else {
      choices = weft::own_choices(with, chosen, of_weights);
    }
    to = new weft_token_routes(owner,
                               weft::TokenRoutes(choices, rank, static_cast<int>(chosen.shape[1]), first));
  });
}

void weft_token_routes_destroy(weft_token_routes* routes) { capi::destroy(__func__, routes, "routes"); }

weft_status weft_token_routes_sizes(const weft_token_routes* routes, int64_t* experts, int64_t* rows,
                                    int64_t* results, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft::TokenRoutes& of = capi::given(function, routes, "routes").routes;
    if (experts != nullptr) *experts = static_cast<std::int64_t>(of.offsets().size()) - 1;
    if (rows != nullptr) *rows = of.rows();
    if (results != nullptr) *results = of.results();
  });
}

weft_status weft_token_routes_rows(const weft_token_routes* routes, const weft_buffer* offsets,
                                   const weft_buffer* row_weights, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft::TokenRoutes& of = capi::given(function, routes, "routes").routes;
    const auto to_offsets = capi::list<std::int64_t>(
        function, offsets, DType::i64, static_cast<std::int64_t>(of.offsets().size()), "offsets");
    std::span<float> to_weights;
    if (row_weights != nullptr)
      to_weights = capi::list<float>(function, row_weights, DType::f32, of.rows(), "row_weights");
    std::copy(of.offsets().begin(), of.offsets().end(), to_offsets.begin());
    if (row_weights != nullptr)
      std::copy(of.row_weights().begin(), of.row_weights().end(), to_weights.begin());
  });
}

weft_status weft_dispatch_rows(const weft_token_routes* routes, const weft_matrix* x, const weft_matrix* rows,
                               weft_transfer** transfer, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_token_routes& of = capi::given(function, routes, "routes");
    const TensorView from = capi::matrix(function, x, "x"), to = capi::matrix(function, rows, "rows");
    capi::finish_or_give(of.owner, transfer,
                         [&] { return of.routes.start_dispatch(capi::group_of(of), from, to); });
  });
}

weft_status weft_combine_rows(const weft_token_routes* routes, const weft_matrix* rows,
                              const weft_matrix* results, weft_transfer** transfer, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_token_routes& of = capi::given(function, routes, "routes");
    const TensorView from = capi::matrix(function, rows, "rows"),
                     to = capi::matrix(function, results, "results");
    capi::finish_or_give(of.owner, transfer,
                         [&] { return of.routes.start_combine(capi::group_of(of), from, to); });
  });
}

weft_status weft_weighted_sum(const weft_token_routes* routes, const weft_matrix* results,
                              const weft_matrix* weights, const weft_matrix* y, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    capi::given(function, routes, "routes")
        .routes.weighted_sum(capi::matrix(function, results, "results"),
                             capi::matrix_or_none(function, weights, "weights"),
                             capi::matrix(function, y, "y"));
  });
}

weft_status weft_row_products(const weft_token_routes* routes, const weft_matrix* results,
                              const weft_matrix* dy, const weft_matrix* dweights, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    capi::given(function, routes, "routes")
        .routes.row_products(capi::matrix(function, results, "results"), capi::matrix(function, dy, "dy"),
                             capi::matrix(function, dweights, "dweights"));
  });
}

weft_status weft_experts_forward(weft_compute* compute, const weft_matrix* x, const weft_buffer* offsets,
                                 const weft_expert_matrices* weights, const weft_expert_activations* kept,
                                 const weft_matrix* y, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft::Compute& with = capi::compute_of(function, compute);
    const capi::Matrices w = capi::matrices(function, weights, "weights");
    if (capi::has_none(w, capi::matrix(function, x, "x"))) return;
    weft::experts_forward(weft::kernels_of(with), w.kind, capi::matrix(function, x, "x"),
                          capi::list<const std::int64_t>(function, offsets, DType::i64, -1, "offsets"),
                          {w.gate, w.up, w.down}, capi::activations(function, kept),
                          capi::matrix(function, y, "y"));
  });
}

weft_status weft_experts_backward(weft_compute* compute, const weft_matrix* dy, const weft_matrix* x,
                                  const weft_buffer* offsets, const weft_expert_matrices* weights,
                                  const weft_expert_activations* kept, const weft_matrix* dx,
                                  weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft::Compute& with = capi::compute_of(function, compute);
    const capi::Matrices w = capi::matrices(function, weights, "weights");
    if (capi::has_none(w, capi::matrix(function, x, "x"))) return;
    weft::experts_backward(
        weft::kernels_of(with), w.kind, capi::matrix(function, dy, "dy"), capi::matrix(function, x, "x"),
        capi::list<const std::int64_t>(function, offsets, DType::i64, -1, "offsets"), {w.gate, w.up, w.down},
        capi::activations(function, kept), capi::matrix(function, dx, "dx"));
  });
}

weft_status weft_experts_weight_gradients(weft_compute* compute, const weft_matrix* dy, const weft_matrix* x,
                                          const weft_buffer* offsets, weft_dtype weights_dtype,
                                          const weft_expert_activations* kept,
                                          const weft_expert_matrices* gradients, bool accumulate,
                                          weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft::Compute& with = capi::compute_of(function, compute);
    const capi::Matrices d = capi::matrices(function, gradients, "gradients");
    weft::ExpertGradients to;
    to.gate = d.gate, to.up = d.up, to.down = d.down;
    to.add_gate = to.add_up = to.add_down = accumulate;
    if (capi::has_none(d, capi::matrix(function, x, "x"))) return;
    weft::experts_weight_gradients(
        weft::kernels_of(with), d.kind, capi::matrix(function, dy, "dy"), capi::matrix(function, x, "x"),
        capi::list<const std::int64_t>(function, offsets, DType::i64, -1, "offsets"),
        capi::dtype_of(function, weights_dtype, "weights_dtype"), capi::activations(function, kept), to);
  });
}
