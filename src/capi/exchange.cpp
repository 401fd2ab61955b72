// Exchanges between neighbours in C.
#include <algorithm>
#include <cstddef>

#include "capi/call_handles.hpp"
#include "capi/mesh_handles.hpp"

using weft::DType;
using weft::ErrorCode;
using weft::ExchangeField;
using weft::ExchangePlan;
namespace capi = weft::capi;

namespace {

constexpr std::size_t kPlanFirstBytes = 56;
static_assert(sizeof(weft_exchange_plan) == kPlanFirstBytes);
static_assert(sizeof(weft_exchange_box) == 40);  // have no struct_size: they stay as they are
static_assert(sizeof(weft_exchange_part) == 16);
static_assert(static_cast<int>(ExchangePlan::Kind::copy) == WEFT_EXCHANGE_COPY);
static_assert(static_cast<int>(ExchangePlan::Kind::add) == WEFT_EXCHANGE_ADD);

weft::ExchangeBox box_of(const char* function, const weft_exchange_box& box, const std::string& which) {
  if (box.dim_count < 0 || box.dim_count > weft::Dims::kMaxDims)
    capi::refuse(
        ErrorCode::bad_argument, function,
        fmt::format("{}.dim_count is {}; expected 0 to {}", which, box.dim_count, weft::Dims::kMaxDims));
  weft::ExchangeBox to{box.field, box.offset, {}, {}, {}};
  if (box.dim_count > 0) capi::given(function, box.counts, (which + ".counts").c_str());
  for (int d = 0; d < box.dim_count; ++d) to.counts.push_back(box.counts[d]);
  if (box.strides == nullptr) to.strides = weft::row_major(to.counts);
  for (int d = 0; d < box.dim_count && box.strides != nullptr; ++d) to.strides.push_back(box.strides[d]);
  if (box.indices != nullptr) {
    if (box.dim_count == 0 || box.counts[0] < 0)
      capi::refuse(ErrorCode::bad_argument, function,
                   fmt::format("{} has indices, and counts {}; expected a number of them, 0 or more", which,
                               weft::to_string(to.counts)));
    to.indices.assign(box.indices, box.indices + box.counts[0]);
  }
  return to;
}

std::vector<weft::ExchangePart> parts_of(const char* function, const weft_exchange_part* parts,
                                         std::int32_t count, const std::string& which,
                                         const char* count_name) {
  std::vector<weft::ExchangePart> to;
  for (const weft_exchange_part& p : capi::list_of(function, parts, count, which.c_str(), count_name)) {
    const std::string part = fmt::format("{}[{}]", which, to.size());
    to.push_back({p.peer, {}});
    const auto boxes = capi::list_of(function, p.boxes, p.box_count, (part + ".boxes").c_str(),
                                     (part + ".box_count").c_str());
    for (std::size_t b = 0; b < boxes.size(); ++b)
      to.back().boxes.push_back(box_of(function, boxes[b], fmt::format("{}.boxes[{}]", part, b)));
  }
  return to;
}

ExchangePlan plan_of(const char* function, const weft_exchange_plan* plan) {
  capi::given(function, plan, "plan");
  const weft_exchange_plan read = capi::read(function, plan, weft_exchange_plan WEFT_EXCHANGE_PLAN_INIT,
                                             kPlanFirstBytes, "WEFT_EXCHANGE_PLAN_INIT", "plan");
  if (read.kind < WEFT_EXCHANGE_COPY || read.kind > WEFT_EXCHANGE_ADD)
    capi::refuse(
        ErrorCode::bad_argument, function,
        fmt::format("plan->kind is {}; expected 0 (WEFT_EXCHANGE_COPY) or 1 (WEFT_EXCHANGE_ADD)", read.kind));
  if (read.reserved != 0)
    capi::refuse(ErrorCode::unsupported, function,
                 fmt::format("plan->reserved is {}; expected 0", read.reserved));
  ExchangePlan to;
  to.kind = static_cast<ExchangePlan::Kind>(read.kind);
  for (const weft_dtype dtype :
       capi::list_of(function, read.fields, read.field_count, "plan->fields", "plan->field_count"))
    to.fields.push_back(
        capi::dtype_of(function, dtype, fmt::format("plan->fields[{}]", to.fields.size()).c_str()));
  to.sends = parts_of(function, read.sends, read.send_count, "plan->sends", "plan->send_count");
  to.receives =
      parts_of(function, read.receives, read.receive_count, "plan->receives", "plan->receive_count");
  if (read.name != nullptr) to.name = read.name;
  return to;
}

// The elements low to high - 1, from where a field begins, that its boxes reach.
struct Reach {
  std::int64_t low = 0, high = 0;
};

// The elements of each field that boxes use: the first and the last. The plan was checked, so no number here
// overflows.
std::vector<Reach> reach_of(const ExchangePlan& plan, const std::vector<weft::ExchangePart>& parts) {
  std::vector<Reach> reach(plan.fields.size());
  for (const weft::ExchangePart& part : parts)
    for (const weft::ExchangeBox& b : part.boxes) {
      if (b.counts.count() == 0) continue;
      Reach box{b.offset, b.offset + 1};
      for (int d = 0; d < b.counts.rank(); ++d) {
        std::int64_t first = 0, last = b.counts[d] - 1;
        if (d == 0 && !b.indices.empty()) {
          const auto [least, most] = std::minmax_element(b.indices.begin(), b.indices.end());
          first = *least;
          last = *most;
        }
        box.low += std::min(first * b.strides[d], last * b.strides[d]);
        box.high += std::max(first * b.strides[d], last * b.strides[d]);
      }
      Reach& all = reach[static_cast<std::size_t>(b.field)];
      all = all.low == all.high ? box : Reach{std::min(all.low, box.low), std::max(all.high, box.high)};
    }
  return reach;
}

}  // namespace

struct weft_persistent_exchange : capi::Handle<weft_persistent_exchange> {
  static constexpr const char* kKind = "weft_persistent_exchange";
  weft_persistent_exchange(const std::shared_ptr<capi::GroupHandle>& group_in, const ExchangePlan& plan)
      : group(group_in),
        exchange(group_in->group.make_exchange(plan)),
        dtypes(plan.fields),
        sent(reach_of(plan, plan.sends)),
        received(reach_of(plan, plan.receives)),
        device(group_in->group.traits().device ? WEFT_CUDA(group_in->group.traits().device_index)
                                               : WEFT_CPU) {}

  weft::Work start(const char* function, const weft_buffer* in, const weft_buffer* out,
                   std::int32_t field_count, const weft::CallOptions& options) {
    const auto from = capi::list_of(function, in, field_count, "in", "field_count");
    const auto to = capi::list_of(function, out, field_count, "out", "field_count");
    if (from.size() != dtypes.size())
      capi::refuse(
          ErrorCode::bad_argument, function,
          fmt::format("field_count is {}; expected {}, as the plan has", field_count, dtypes.size()));
    fields.clear();
    for (std::size_t f = 0; f < dtypes.size(); ++f) {
      if (!fits(from[f], dtypes[f], sent[f]))
        refuse_unless_unused(function, from[f], f, sent[f], "in", "sent");
      if (!fits(to[f], dtypes[f], received[f]))
        refuse_unless_unused(function, to[f], f, received[f], "out", "received");
      fields.push_back({from[f].data, to[f].data});
    }
    return exchange.start(fields, options);
  }

  // Whether all boxes of the field lie in the buffer.
  bool fits(const weft_buffer& b, DType dtype, Reach reach) const {
    return b.dtype == static_cast<weft_dtype>(dtype) && b.device == device && b.count >= reach.high &&
           reach.low >= 0;
  }
  // Throws for a buffer that does not fit, unless no box lies in it.
  void refuse_unless_unused(const char* function, const weft_buffer& buffer, std::size_t f, Reach reach,
                            const char* which, const char* verb) const {
    const bool one = dtypes.size() == 1;
    const std::string name = one ? which : fmt::format("{}[{}]", which, f);
    const weft::Buffer b = capi::buffer_of(function, buffer, name.c_str(), one ? "->" : ".");
    if (reach.low == reach.high) return;
    if (b.dtype != dtypes[f])
      capi::refuse(ErrorCode::bad_argument, function,
                   fmt::format("{} is {}; expected {}, as the plan has", name, weft::name(b.dtype),
                               weft::name(dtypes[f])));
    if (buffer.device != device)
      capi::refuse(
          ErrorCode::bad_argument, function,
          fmt::format("{} is on {}; expected {} (the device of the group)", name, weft::to_string(b.device),
                      weft::to_string(capi::device_of(function, device, "device"))));
    capi::refuse(ErrorCode::bad_argument, function,
                 fmt::format("{} has {} elements; boxes of it that are {} reach from {} to {}", name, b.count,
                             verb, reach.low, reach.high - 1));
  }

  std::weak_ptr<capi::GroupHandle> group;  // whose end it does not put off
  weft::PersistentExchange exchange;
  std::vector<DType> dtypes;
  std::vector<Reach> sent, received;
  const weft_device device;
  std::vector<ExchangeField> fields{};  // the fields of a start; their memory is kept
};

weft_status weft_persistent_exchange_create(weft_group* group, const weft_exchange_plan* plan,
                                            weft_persistent_exchange** exchange, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_group& g = capi::given(function, group, "group");
    const ExchangePlan read = plan_of(function, plan);
    weft_persistent_exchange*& to = capi::given(function, exchange, "exchange");
    to = std::make_unique<weft_persistent_exchange>(g.handle, read).release();
  });
}

weft_status weft_persistent_exchange_start(weft_persistent_exchange* exchange, const weft_buffer* in,
                                           const weft_buffer* out, int32_t field_count,
                                           const weft_call_options* options, weft_work** work,
                                           weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_persistent_exchange& x = capi::given(function, exchange, "exchange");
    const weft::CallOptions o = capi::call_options(function, options);
    const std::shared_ptr<capi::GroupHandle> group = x.group.lock();
    if (group == nullptr || group->destroyed)
      capi::refuse(ErrorCode::bad_argument, function,
                   "the weft_group that exchange was made for was destroyed; expected one that exists");
    capi::begin(function, group, {}, work, [&] { return x.start(function, in, out, field_count, o); });
  });
}

void weft_persistent_exchange_destroy(weft_persistent_exchange* exchange) {
  capi::destroy(__func__, exchange, "exchange");
}

weft_status weft_group_exchange(weft_group* group, const weft_exchange_plan* plan, const weft_buffer* in,
                                const weft_buffer* out, int32_t field_count, const weft_call_options* options,
                                weft_work** work, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_group& g = capi::given(function, group, "group");
    const ExchangePlan read = plan_of(function, plan);
    const weft::CallOptions o = capi::call_options(function, options);
    capi::begin(function, g.handle, {}, work, [&] {
      weft_persistent_exchange exchange(g.handle, read);
      return exchange.start(function, in, out, field_count, o);
    });
  });
}
