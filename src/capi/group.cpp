// Groups in C. Comments in c/group.h say which functions block.
#include <algorithm>
#include <cstddef>
#include <limits>

#include "capi/group_handles.hpp"
#include "group/group_state.hpp"
#include "weft/backends/plugin.hpp"

using weft::ErrorCode;
using weft::Membership;
using weft::Order;
using weft::ProcessGroup;
using weft::Traits;
namespace capi = weft::capi;

namespace {

constexpr std::size_t kGroupOptionsFirstBytes = 40;
static_assert(offsetof(weft_group_options, order) == kGroupOptionsFirstBytes);
constexpr std::size_t kTraitsFirstBytes = 296;
static_assert(sizeof(weft_traits) == kTraitsFirstBytes);

static_assert(static_cast<int>(weft::Progress::caller) == WEFT_PROGRESS_CALLER);
static_assert(static_cast<int>(weft::Progress::thread) == WEFT_PROGRESS_THREAD);
static_assert(static_cast<int>(weft::ProgressStyle::polled) == WEFT_PROGRESS_POLLED);
static_assert(static_cast<int>(weft::ProgressStyle::threaded) == WEFT_PROGRESS_THREADED);
static_assert(static_cast<int>(weft::ProgressStyle::stream) == WEFT_PROGRESS_STREAM);
static_assert(weft::op_bit(weft::Op::scan) == WEFT_OP_BIT(WEFT_OP_SCAN));
static_assert(weft::dtype_bit(weft::DType::c128) == WEFT_DTYPE_BIT(WEFT_C128));
static_assert(weft::kReduceKindCount <= WEFT_TRAITS_REDUCE_OPS);

ProcessGroup& group_of(const char* function, const weft_group* group) {
  return capi::given(function, group, "group").handle->group;
}

// Asks a group for a number.
template <class Ask>
weft_status tell_number(const char* function, const weft_group* group, int32_t* number, const char* what,
                        weft_error* error, const Ask& ask) {
  return capi::guarded(function, error, [&] {
    const ProcessGroup& g = group_of(function, group);
    int32_t& to = capi::given(function, number, what);
    to = ask(g);
  });
}

// Makes a group of a group. An empty one becomes NULL.
template <class Make>
weft_status derive(const char* function, weft_group* from, weft_group** group, const char* what,
                   weft_error* error, const Make& make) {
  return capi::guarded(function, error, [&] {
    ProcessGroup& g = group_of(function, from);
    weft_group*& to = capi::given(function, group, what);
    ProcessGroup made = make(g);
    to = made ? capi::new_group(from->handle->context, std::move(made)) : nullptr;
  });
}

void tell_traits(const char* function, const Traits& t, weft_traits* traits) {
  weft_traits& to = capi::given(function, traits, "traits");
  weft_traits known = WEFT_TRAITS_INIT;
  known.progress_style = static_cast<weft_progress_style>(t.progress);
  known.ops = t.ops;
  known.dtypes = t.dtypes;
  std::copy(t.reduces.begin(), t.reduces.end(), known.reduces);
  known.device = t.device ? WEFT_CUDA(t.device_index) : WEFT_CPU;
  known.native_is_canonical = t.native_is_canonical;
  known.spin = t.spin;
  known.rings = t.rings;
  known.deadline = t.guarantees.deadline;
  known.names_absent = t.guarantees.names_absent;
  known.detects_death = t.guarantees.detects_death;
  known.survives_death = t.guarantees.survives_death;
  known.checks_calls = t.guarantees.checks_calls;
  known.revocable = t.guarantees.revocable;
  known.quiesces = t.guarantees.quiesces;
  capi::answer(function, to, known, kTraitsFirstBytes, "traits", "WEFT_TRAITS_INIT");
}

}  // namespace

namespace weft::capi {

weft_group_options group_options(const char* function, const weft_group_options* options) {
  weft_group_options o = read(function, options, weft_group_options WEFT_GROUP_OPTIONS_INIT,
                              kGroupOptionsFirstBytes, "WEFT_GROUP_OPTIONS_INIT");
  const auto wrong = [&](const char* field, int value, const char* expected) {
    refuse(ErrorCode::bad_argument, function,
           fmt::format("options->{} is {}; expected {}", field, value, expected));
  };
  if (o.backend == nullptr) o.backend = "auto";
  if (o.name == nullptr) o.name = "world";
  limit(function, o.deadline_ns, "options->deadline_ns");
  if (o.progress != WEFT_PROGRESS_CALLER && o.progress != WEFT_PROGRESS_THREAD)
    wrong("progress", o.progress, "0 (WEFT_PROGRESS_CALLER) or 1 (WEFT_PROGRESS_THREAD)");
  if (o.order != WEFT_ORDER_NATIVE && o.order != WEFT_ORDER_CANONICAL)
    wrong("order", o.order, "0 (WEFT_ORDER_NATIVE) or 1 (WEFT_ORDER_CANONICAL)");
  if (o.process_rank < -1) wrong("process_rank", o.process_rank, "-1 or more");
  return o;
}

Membership membership(int rank, int size, int process_rank, const weft_group_options& options) {
  Membership m;
  m.rank = rank;
  m.size = size;
  m.name = options.name;
  if (options.deadline_ns > 0) m.deadline = Duration(options.deadline_ns);
  m.process_rank = options.process_rank >= 0 ? options.process_rank : process_rank;
  m.progress = static_cast<Progress>(options.progress);
  m.order = static_cast<Order>(options.order);
  return m;
}

weft_group* new_group(const std::shared_ptr<ContextState>& context, ProcessGroup group) {
  return new weft_group{std::make_shared<GroupHandle>(context, std::move(group))};
}

}  // namespace weft::capi

weft_status weft_group_from_env(weft_context* context, const weft_group_options* options, weft_group** group,
                                weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const std::shared_ptr<capi::ContextState>& in = capi::given(function, context, "context").state;
    weft_group*& to = capi::given(function, group, "group");
    const weft_group_options o = capi::group_options(function, options);
    in->context.check_fork(function);
    Membership m = capi::membership(0, 1, 0, o);
    const Membership place = Membership::from_env(in->context, m.deadline);
    m.store = place.store;
    m.rank = place.rank;
    m.size = place.size;
    to = capi::new_group(in, ProcessGroup::create(in->context, o.backend, m));
  });
}

weft_status weft_group_create(weft_context* context, weft_store* store, int32_t rank, int32_t size,
                              const weft_group_options* options, weft_group** group, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const std::shared_ptr<capi::ContextState>& in = capi::given(function, context, "context").state;
    weft_group*& to = capi::given(function, group, "group");
    const weft_group_options o = capi::group_options(function, options);
    Membership m = capi::membership(rank, size, -1, o);
    capi::given_or_null(function, store, "store");  // of one rank it is not used
    if (size > 1) m.store = capi::given(function, store, "store").store;
    to = capi::new_group(in, ProcessGroup::create(in->context, o.backend, m));
  });
}

weft_status weft_group_leave(weft_group* group, int64_t deadline_ns, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    group_of(function, group).leave(capi::limit(function, deadline_ns, "deadline_ns"));
  });
}

void weft_group_destroy(weft_group* group) { capi::destroy(__func__, group, "group"); }

weft_status weft_group_subgroup(weft_group* group, const char* name, const int32_t* ranks, size_t rank_count,
                                weft_group** subgroup, weft_error* error) {
  return derive(__func__, group, subgroup, "subgroup", error, [&, function = __func__](ProcessGroup& g) {
    const char* const called = &capi::given(function, name, "name");
    if (rank_count > 0) capi::given(function, ranks, "ranks");
    return g.subgroup(called, {ranks, rank_count});
  });
}

weft_status weft_group_split(weft_group* group, int32_t color, int32_t key, weft_group** part,
                             weft_error* error) {
  return derive(__func__, group, part, "part", error, [&](ProcessGroup& g) { return g.split(color, key); });
}

weft_status weft_group_split_by_host(weft_group* group, weft_group** part, weft_error* error) {
  return derive(__func__, group, part, "part", error, [](ProcessGroup& g) { return g.split_by_host(); });
}

weft_status weft_group_duplicate(weft_group* group, weft_group** duplicate, weft_error* error) {
  return derive(__func__, group, duplicate, "duplicate", error,
                [](ProcessGroup& g) { return g.duplicate(); });
}

weft_status weft_group_shrink(weft_group* group, int64_t limit_ns, weft_group** survivors,
                              weft_error* error) {
  return derive(__func__, group, survivors, "survivors", error, [&, function = __func__](ProcessGroup& g) {
    return g.shrink(capi::limit(function, limit_ns, "limit_ns"));
  });
}

weft_status weft_group_parent_rank(const weft_group* group, int32_t rank, int32_t* parent_rank,
                                   weft_error* error) {
  return tell_number(__func__, group, parent_rank, "parent_rank", error,
                     [&, function = __func__](const ProcessGroup& g) {
                       if (rank < 0 || rank >= g.size())
                         capi::refuse(ErrorCode::bad_argument, function,
                                      fmt::format("rank is {}; expected 0 to {}", rank, g.size() - 1));
                       const auto ranks = g.parent_ranks();
                       return ranks.empty() ? -1 : ranks[static_cast<std::size_t>(rank)];
                     });
}

weft_status weft_group_rank(const weft_group* group, int32_t* rank, weft_error* error) {
  return tell_number(__func__, group, rank, "rank", error, [](const ProcessGroup& g) { return g.rank(); });
}
weft_status weft_group_size(const weft_group* group, int32_t* size, weft_error* error) {
  return tell_number(__func__, group, size, "size", error, [](const ProcessGroup& g) { return g.size(); });
}
weft_status weft_group_local_rank(const weft_group* group, int32_t* local_rank, weft_error* error) {
  return tell_number(__func__, group, local_rank, "local_rank", error,
                     [](const ProcessGroup& g) { return g.local_rank(); });
}
weft_status weft_group_local_size(const weft_group* group, int32_t* local_size, weft_error* error) {
  return tell_number(__func__, group, local_size, "local_size", error,
                     [](const ProcessGroup& g) { return g.local_size(); });
}

weft_status weft_group_name(const weft_group* group, const char** name, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const ProcessGroup& g = group_of(function, group);
    capi::given(function, name, "name") = g.name().c_str();
  });
}
weft_status weft_group_backend(const weft_group* group, const char** backend, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_group& g = capi::given(function, group, "group");
    capi::given(function, backend, "backend") = g.handle->backend.c_str();
  });
}

weft_status weft_group_traits(const weft_group* group, weft_traits* traits, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const ProcessGroup& g = group_of(function, group);
    tell_traits(function, g.traits(), traits);
  });
}
weft_status weft_backend_traits(weft_context* context, const char* backend, weft_traits* traits,
                                weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_context& in = capi::given(function, context, "context");
    const char* const name = &capi::given(function, backend, "backend");
    in.state->context.check_fork(function);
    tell_traits(function, weft::backend_traits(in.state->context, name), traits);
  });
}

weft_status weft_group_abort(weft_group* group, const char* why, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    ProcessGroup& g = group_of(function, group);
    g.abort(&capi::given(function, why, "why"));
  });
}

weft_status weft_group_quiesce(weft_group* group, int64_t limit_ns, bool* quiet, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    ProcessGroup& g = group_of(function, group);
    bool& to = capi::given(function, quiet, "quiet");
    to = g.quiesce(capi::limit(function, limit_ns, "limit_ns"));
  });
}
