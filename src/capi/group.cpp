// Stores and groups in C. What blocks says so in weft.h.
#include "capi/handles.hpp"

using weft::ErrorCode;
using weft::Membership;
using weft::ProcessGroup;
namespace capi = weft::capi;

namespace {

constexpr std::size_t kGroupOptionsFirstBytes = 32;
static_assert(sizeof(weft_group_options) == kGroupOptionsFirstBytes);

weft_group_options group_options(const char* function, const weft_group_options* options) {
  weft_group_options o = capi::read(function, options, weft_group_options WEFT_GROUP_OPTIONS_INIT,
                                    kGroupOptionsFirstBytes, "WEFT_GROUP_OPTIONS_INIT");
  if (o.backend == nullptr) o.backend = "shm";
  if (o.name == nullptr) o.name = "world";
  capi::limit(function, o.deadline_ns, "options->deadline_ns");
  return o;
}

weft_group* create(const weft_context& context, Membership m, const weft_group_options& o) {
  m.name = o.name;
  if (o.deadline_ns > 0) m.deadline = weft::Duration(o.deadline_ns);
  ProcessGroup group = ProcessGroup::create(context.state->context, o.backend, m);
  return new weft_group{
      std::make_shared<capi::GroupHandle>(capi::GroupHandle{context.state, std::move(group)})};
}

ProcessGroup& group_of(const char* function, const weft_group* group) {
  return capi::given(function, group, "group").handle->group;
}

}  // namespace

weft_status weft_store_create_local(weft_store** store, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_store*& to = capi::given(function, store, "store");
    to = new weft_store{weft::make_local_store()};
  });
}

void weft_store_destroy(weft_store* store) { delete store; }

weft_status weft_group_from_env(weft_context* context, const weft_group_options* options, weft_group** group,
                                weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_context& in = capi::given(function, context, "context");
    weft_group*& to = capi::given(function, group, "group");
    const weft_group_options o = group_options(function, options);
    in.state->context.check_fork(function);
    to = create(in, Membership::from_env(in.state->context), o);
  });
}

weft_status weft_group_create(weft_context* context, weft_store* store, int32_t rank, int32_t size,
                              const weft_group_options* options, weft_group** group, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_context& in = capi::given(function, context, "context");
    weft_group*& to = capi::given(function, group, "group");
    Membership m;
    m.rank = rank;
    m.size = size;
    if (size > 1) m.store = capi::given(function, store, "store").store;
    to = create(in, std::move(m), group_options(function, options));
  });
}

void weft_group_destroy(weft_group* group) { delete group; }

weft_status weft_group_rank(const weft_group* group, int32_t* rank, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const ProcessGroup& g = group_of(function, group);
    capi::given(function, rank, "rank") = g.rank();
  });
}

weft_status weft_group_size(const weft_group* group, int32_t* size, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const ProcessGroup& g = group_of(function, group);
    capi::given(function, size, "size") = g.size();
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

weft_status weft_group_shrink(weft_group* group, int64_t limit_ns, weft_group** survivors,
                              weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    ProcessGroup& g = group_of(function, group);
    weft_group*& to = capi::given(function, survivors, "survivors");
    ProcessGroup rest = g.shrink(capi::limit(function, limit_ns, "limit_ns"));
    to = new weft_group{
        std::make_shared<capi::GroupHandle>(capi::GroupHandle{group->handle->context, std::move(rest)})};
  });
}

weft_status weft_group_parent_rank(const weft_group* group, int32_t rank, int32_t* parent_rank,
                                   weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const ProcessGroup& g = group_of(function, group);
    int32_t& to = capi::given(function, parent_rank, "parent_rank");
    if (rank < 0 || rank >= g.size())
      capi::refuse(ErrorCode::bad_argument, function,
                   fmt::format("rank is {}; expected 0 to {}", rank, g.size() - 1));
    to = g.parent_ranks().empty() ? -1 : g.parent_ranks()[static_cast<std::size_t>(rank)];
  });
}
