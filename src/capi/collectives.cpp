// Operations in C. The row of an operation (weft/backends/op_table.hpp) says which arguments it has.
#include <cstddef>
#include <iterator>
#include <optional>

#include "capi/call_handles.hpp"
#include "weft/backends/op_table.hpp"
#include "weft/group/min_loc.hpp"

using weft::Call;
using weft::CallOptions;
using weft::Counts;
using weft::ErrorCode;
using weft::Op;
using weft::ProcessGroup;
namespace capi = weft::capi;

namespace {

// The arguments of a call, of which its row says what it has.
struct Arguments {
  const weft_buffer* in = nullptr;
  const weft_blocks* in_blocks = nullptr;
  const weft_buffer* out = nullptr;
  const weft_blocks* out_blocks = nullptr;
  std::int32_t rank = -1;  // the root, or the other rank of a message
};

template <Op kOp>
weft_status submit(const char* function, weft_group* group, const Arguments& a,
                   const weft_call_options* options, weft_work** work, weft_error* error) {
  return capi::submitted(
      function, group, options, work, error, [&](const ProcessGroup& g, const CallOptions& o) {
        constexpr weft::OpRow kRow = row(kOp);
        constexpr bool kRooted = kRow.rooted != weft::Rooted::no, kBoth = kRow.counts == Counts::both_blocks;
        const bool at_root = kRooted && g.rank() == a.rank;
        Call call{.op = kOp, .options = o};
        if constexpr (has_in(kOp, true))
          call.in = capi::buffer_where(has_in(kOp, at_root), function, a.in, "in");
        if constexpr (kBoth || kRow.counts == Counts::in_blocks)
          call.in_blocks = capi::blocks_of(function, a.in_blocks, "in_blocks");
        if constexpr (has_out(kOp, true))
          call.out = capi::buffer_where(has_out(kOp, at_root), function, a.out, "out");
        if constexpr (kBoth || kRow.counts == Counts::out_blocks)
          call.out_blocks = capi::blocks_of(function, a.out_blocks, "out_blocks");
        if constexpr (kRooted) call.root = a.rank;
        if constexpr (is_message(kOp)) call.peer = a.rank;
        return call;
      });
}

}  // namespace

weft_status weft_all_reduce(weft_group* group, const weft_buffer* in, const weft_buffer* out,
                            const weft_call_options* options, weft_work** work, weft_error* error) {
  return submit<Op::all_reduce>(__func__, group, {.in = in, .out = out}, options, work, error);
}

weft_status weft_reduce(weft_group* group, const weft_buffer* in, const weft_buffer* out, int32_t root,
                        const weft_call_options* options, weft_work** work, weft_error* error) {
  return submit<Op::reduce>(__func__, group, {.in = in, .out = out, .rank = root}, options, work, error);
}

weft_status weft_broadcast(weft_group* group, const weft_buffer* in, const weft_buffer* out, int32_t root,
                           const weft_call_options* options, weft_work** work, weft_error* error) {
  return submit<Op::broadcast>(__func__, group, {.in = in, .out = out, .rank = root}, options, work, error);
}

weft_status weft_all_gather(weft_group* group, const weft_buffer* in, const weft_buffer* out,
                            const weft_call_options* options, weft_work** work, weft_error* error) {
  return submit<Op::all_gather>(__func__, group, {.in = in, .out = out}, options, work, error);
}

weft_status weft_all_gather_v(weft_group* group, const weft_buffer* in, const weft_buffer* out,
                              const weft_blocks* out_blocks, const weft_call_options* options,
                              weft_work** work, weft_error* error) {
  return submit<Op::all_gather_v>(__func__, group, {.in = in, .out = out, .out_blocks = out_blocks}, options,
                                  work, error);
}

weft_status weft_reduce_scatter(weft_group* group, const weft_buffer* in, const weft_buffer* out,
                                const weft_call_options* options, weft_work** work, weft_error* error) {
  return submit<Op::reduce_scatter>(__func__, group, {.in = in, .out = out}, options, work, error);
}

weft_status weft_reduce_scatter_v(weft_group* group, const weft_buffer* in, const weft_buffer* out,
                                  const weft_blocks* in_blocks, const weft_call_options* options,
                                  weft_work** work, weft_error* error) {
  return submit<Op::reduce_scatter_v>(__func__, group, {.in = in, .in_blocks = in_blocks, .out = out},
                                      options, work, error);
}

weft_status weft_gather(weft_group* group, const weft_buffer* in, const weft_buffer* out, int32_t root,
                        const weft_call_options* options, weft_work** work, weft_error* error) {
  return submit<Op::gather>(__func__, group, {.in = in, .out = out, .rank = root}, options, work, error);
}

weft_status weft_scatter(weft_group* group, const weft_buffer* in, const weft_buffer* out, int32_t root,
                         const weft_call_options* options, weft_work** work, weft_error* error) {
  return submit<Op::scatter>(__func__, group, {.in = in, .out = out, .rank = root}, options, work, error);
}

weft_status weft_all_to_all(weft_group* group, const weft_buffer* in, const weft_buffer* out,
                            const weft_call_options* options, weft_work** work, weft_error* error) {
  return submit<Op::all_to_all>(__func__, group, {.in = in, .out = out}, options, work, error);
}

weft_status weft_all_to_all_v(weft_group* group, const weft_buffer* in, const weft_buffer* out,
                              const weft_blocks* in_blocks, const weft_blocks* out_blocks,
                              const weft_call_options* options, weft_work** work, weft_error* error) {
  return submit<Op::all_to_all_v>(__func__, group,
                                  {.in = in, .in_blocks = in_blocks, .out = out, .out_blocks = out_blocks},
                                  options, work, error);
}

weft_status weft_scan(weft_group* group, const weft_buffer* in, const weft_buffer* out,
                      const weft_call_options* options, weft_work** work, weft_error* error) {
  return submit<Op::scan>(__func__, group, {.in = in, .out = out}, options, work, error);
}

weft_status weft_exscan(weft_group* group, const weft_buffer* in, const weft_buffer* out,
                        const weft_call_options* options, weft_work** work, weft_error* error) {
  return submit<Op::exscan>(__func__, group, {.in = in, .out = out}, options, work, error);
}

weft_status weft_barrier(weft_group* group, const weft_call_options* options, weft_work** work,
                         weft_error* error) {
  return submit<Op::barrier>(__func__, group, {}, options, work, error);
}

weft_status weft_send(weft_group* group, const weft_buffer* in, int32_t destination,
                      const weft_call_options* options, weft_work** work, weft_error* error) {
  return submit<Op::send>(__func__, group, {.in = in, .rank = destination}, options, work, error);
}

weft_status weft_recv(weft_group* group, const weft_buffer* out, int32_t source,
                      const weft_call_options* options, weft_work** work, weft_error* error) {
  return submit<Op::recv>(__func__, group, {.out = out, .rank = source}, options, work, error);
}

weft_status weft_send_recv(weft_group* group, const weft_buffer* in, int32_t destination,
                           const weft_buffer* out, int32_t source, const weft_call_options* options,
                           weft_work** work, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_group& g = capi::given(function, group, "group");
    const CallOptions o = capi::call_options(function, options);
    const weft::Buffer from = capi::buffer_of(function, in, "in"), to = capi::buffer_of(function, out, "out");
    capi::begin(function, g.handle, {}, work,
                [&] { return g.handle->group.send_recv(from, destination, to, source, o); });
  });
}

namespace {

static_assert(WEFT_ANY_SOURCE == weft::any_source);

void tell_message(const weft::MessageInfo& m, weft_message& to) {
  to = {m.source, m.tag, m.count, static_cast<weft_dtype>(m.dtype)};
}

}  // namespace

weft_status weft_probe(weft_group* group, int32_t source, const weft_call_options* options, bool* found,
                       weft_message* message, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_group& g = capi::given(function, group, "group");
    const CallOptions o = capi::call_options(function, options);
    bool& there = capi::given(function, found, "found");
    weft_message& to = capi::given(function, message, "message");
    const std::optional<weft::MessageInfo> m = g.handle->group.probe(source, o);
    there = m.has_value();
    if (m) tell_message(*m, to);
  });
}

weft_status weft_wait_message(weft_group* group, int32_t source, const weft_call_options* options,
                              weft_message* message, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_group& g = capi::given(function, group, "group");
    const CallOptions o = capi::call_options(function, options);
    weft_message& to = capi::given(function, message, "message");
    tell_message(g.handle->group.wait_message(source, o), to);
  });
}

namespace {

constexpr std::size_t kCallFirstBytes = 120;
static_assert(sizeof(weft_call) == kCallFirstBytes);

// A weft_call as a Call. Its user-defined reduction, if it has one, goes into `reductions`. The result
// borrows from `c` and the data to which that points.
Call call_of(const char* function, const weft_call& c, capi::Reductions& reductions) {
  constexpr weft_op last = WEFT_OP_EXSCAN;
  static_assert(WEFT_OP_EXSCAN + 1 == WEFT_OP_WAIT_MESSAGE && WEFT_OP_EXCHANGE == WEFT_OP_WAIT_MESSAGE + 1 &&
                WEFT_OP_EXCHANGE + 1 == weft::kOpCount);
  if (c.op == WEFT_OP_WAIT_MESSAGE)
    capi::refuse(ErrorCode::bad_argument, function,
                 "op is wait_message, and a weft_call cannot hold its answer; call weft_wait_message");
  if (c.op <= WEFT_OP_NONE || c.op > last)
    capi::refuse(ErrorCode::bad_argument, function,
                 fmt::format("op is {}; expected 1 (all_reduce) to {} ({})", c.op, last,
                             weft::name(static_cast<weft::Op>(last))));
  Call to{.op = static_cast<weft::Op>(c.op),
          .in = capi::buffer_of(function, c.in, "in"),
          .out = capi::buffer_of(function, c.out, "out"),
          .root = c.root,
          .peer = c.peer,
          .in_blocks = capi::blocks_of(function, c.in_blocks, "in_blocks"),
          .out_blocks = capi::blocks_of(function, c.out_blocks, "out_blocks"),
          .options = capi::call_options(function, c.options)};
  if (to.options.op.user != nullptr) reductions.push_back(c.options->reduction->reduction);
  return to;
}

weft_call read_call(const char* function, const weft_call* c) {
  return capi::read(function, c, weft_call WEFT_CALL_INIT, kCallFirstBytes, "WEFT_CALL_INIT", "call");
}

}  // namespace

weft_status weft_submit(weft_group* group, const weft_call* call, weft_work** work, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_group& g = capi::given(function, group, "group");
    capi::given(function, call, "call");
    capi::Reductions reductions;
    const weft_call read = read_call("weft_submit", call);
    const Call c = call_of("weft_submit: call", read, reductions);
    capi::begin(function, g.handle, std::move(reductions), work, [&] { return g.handle->group.submit(c); });
  });
}

weft_status weft_persistent_create(weft_group* group, const weft_call* call, weft_persistent** persistent,
                                   weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_group& g = capi::given(function, group, "group");
    capi::given(function, call, "call");
    weft_persistent*& to = capi::given(function, persistent, "persistent");
    const weft_call read = read_call("weft_persistent_create", call);
    auto made = std::make_unique<weft_persistent>();
    const Call c = call_of("weft_persistent_create: call", read, made->reductions);
    for (const auto& r : made->reductions) r->check(function);
    made->call = g.handle->group.make(c);
    made->group = g.handle;
    to = made.release();
  });
}

static std::shared_ptr<capi::GroupHandle> group_of(const char* function, const weft_persistent& p,
                                                   const char* which) {
  std::shared_ptr<capi::GroupHandle> group = p.group.lock();
  if (group == nullptr || group->destroyed)
    capi::refuse(
        ErrorCode::bad_argument, function,
        fmt::format("the weft_group that {} was made for was destroyed; expected one that exists", which));
  return group;
}

weft_status weft_persistent_start(weft_persistent* persistent, weft_work** work, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_persistent& p = capi::given(function, persistent, "persistent");
    capi::begin(function, group_of(function, p, "persistent"), p.reductions, work,
                [&] { return p.call.start(); });
  });
}

weft_status weft_persistent_start_all(weft_persistent* const* calls, size_t count, weft_work** work,
                                      weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    if (count == 0) capi::refuse(ErrorCode::bad_argument, function, "count is 0; expected 1 or more");
    capi::given(function, calls, "calls");
    std::vector<weft::PersistentCall*> all;
    capi::Reductions reductions;
    std::shared_ptr<capi::GroupHandle> group;
    for (std::size_t k = 0; k < count; ++k) {
      const std::string which = fmt::format("calls[{}]", k);
      weft_persistent& p = capi::given(function, calls[k], which.c_str());
      std::shared_ptr<capi::GroupHandle> of = group_of(function, p, which.c_str());
      if (k == 0) group = std::move(of);
      reductions.insert(reductions.end(), p.reductions.begin(), p.reductions.end());
      all.push_back(&p.call);
    }
    capi::begin(function, group, std::move(reductions), work, [&] { return weft::detail::start_all(all); });
  });
}

void weft_persistent_destroy(weft_persistent* persistent) {
  capi::destroy(__func__, persistent, "persistent");
}

weft_status weft_coalesced(weft_group* group, const weft_call* calls, size_t count, weft_work** work,
                           weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_group& g = capi::given(function, group, "group");
    if (count > 0) capi::given(function, calls, "calls");
    std::vector<Call> all;
    capi::Reductions reductions;
    // Calls of another version of weft.h are of another size.
    const auto* at = reinterpret_cast<const std::byte*>(calls);
    for (std::size_t k = 0; k < count; ++k, at += calls->struct_size) {
      const auto& c = *reinterpret_cast<const weft_call*>(at);
      const std::string where = fmt::format("{}: calls[{}]", function, k);
      if (c.struct_size != calls->struct_size)
        capi::refuse(
            ErrorCode::bad_argument, where.c_str(),
            fmt::format("struct_size is {}; expected {} (calls[0])", c.struct_size, calls->struct_size));
      all.push_back(call_of(where.c_str(), read_call(where.c_str(), &c), reductions));
    }
    capi::begin(function, g.handle, std::move(reductions), work,
                [&] { return g.handle->group.coalesced(all); });
  });
}

namespace {

using Locate = void (*)(ProcessGroup&, const weft::ConstBuffer&, const weft::ConstBuffer&,
                        const weft::Buffer&, const weft::Buffer&, const CallOptions&);

weft_status locate(const char* function, Locate locate, weft_group* group, const weft_buffer* values,
                   const weft_buffer* indices, const weft_buffer* found, const char* which,
                   const weft_buffer* where, const weft_call_options* options, weft_error* error) {
  return capi::guarded(function, error, [&] {
    locate(capi::given(function, group, "group").handle->group, capi::buffer_of(function, values, "values"),
           capi::buffer_of(function, indices, "indices"), capi::buffer_of(function, found, which),
           capi::buffer_of(function, where, "where"), capi::call_options(function, options));
  });
}

}  // namespace

weft_status weft_min_loc(weft_group* group, const weft_buffer* values, const weft_buffer* indices,
                         const weft_buffer* least, const weft_buffer* where, const weft_call_options* options,
                         weft_error* error) {
  return locate(__func__, weft::min_loc, group, values, indices, least, "least", where, options, error);
}

weft_status weft_max_loc(weft_group* group, const weft_buffer* values, const weft_buffer* indices,
                         const weft_buffer* largest, const weft_buffer* where,
                         const weft_call_options* options, weft_error* error) {
  return locate(__func__, weft::max_loc, group, values, indices, largest, "largest", where, options, error);
}
