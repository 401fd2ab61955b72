// Sharded parameters in C. Comments in weft/c/sharded_parameters.h say which functions block.
#include "weft/dp/sharded_parameters.hpp"

#include <cstddef>

#include "capi/transfer_handle.hpp"

using weft::DeviceMesh;
using weft::ErrorCode;
namespace capi = weft::capi;

struct weft_sharded_parameters : capi::Handle<weft_sharded_parameters> {
  static constexpr const char* kKind = "weft_sharded_parameters";
  weft_sharded_parameters(capi::MeshOwner owner_in, DeviceMesh axes_in, weft::ShardedParameters shards_in)
      : owner(std::move(owner_in)), axes(std::move(axes_in)), shards(std::move(shards_in)) {}
  capi::MeshOwner owner;
  DeviceMesh axes;
  weft::ShardedParameters shards;
};

namespace {

constexpr std::size_t kOptionsFirstBytes = 32;
static_assert(sizeof(weft_sharded_parameters_options) == kOptionsFirstBytes);
static_assert(sizeof(weft_shard_entry) == 24);  // has no struct_size: it stays as it is

weft::ShardedParametersOptions options_of(const char* function,
                                          const weft_sharded_parameters_options* options) {
  const weft_sharded_parameters_options o =
      capi::read(function, options, weft_sharded_parameters_options WEFT_SHARDED_PARAMETERS_OPTIONS_INIT,
                 kOptionsFirstBytes, "WEFT_SHARDED_PARAMETERS_OPTIONS_INIT");
  weft::ShardedParametersOptions to;
  to.reduce = capi::dtype_of(function, o.reduce, "options->reduce");
  to.gradient = capi::dtype_of(function, o.gradient, "options->gradient");
  if (o.alone_bytes != 0) to.alone_bytes = o.alone_bytes;
  if (o.replicate != nullptr) to.replicate = capi::mesh_of(function, o.replicate, "options->replicate");
  return to;
}

std::vector<weft::ShardEntry> entries_of(const char* function, const weft_shard_entry* entries,
                                         std::int32_t count) {
  std::vector<weft::ShardEntry> list;
  for (const weft_shard_entry& e : capi::list_of(function, entries, count, "entries", "count")) {
    const std::string entry = fmt::format("entries[{}]", list.size());
    const char* const name = capi::text_of(function, e.name, (entry + ".name").c_str());
    list.push_back({name, capi::layout_of(function, e.layout, (entry + ".layout").c_str()),
                    capi::dtype_of(function, e.dtype, (entry + ".dtype").c_str())});
  }
  return list;
}

template <class Shards>
Shards& shards_of(const char* function, Shards* shards) {
  return capi::given(function, shards, "shards");
}

std::size_t checked(const char* function, const weft_sharded_parameters& shards, std::int32_t i) {
  if (i < 0 || static_cast<std::size_t>(i) >= shards.shards.size())
    capi::refuse(
        ErrorCode::bad_argument, function,
        fmt::format("i is {}; expected 0 to {}", i, static_cast<std::int64_t>(shards.shards.size()) - 1));
  return static_cast<std::size_t>(i);
}

// A list of the caller's as views: of wholes, or of what this rank keeps.
template <class View>
std::vector<View> views_of(const char* function, const weft_sharded_parameters& of,
                           const weft_buffer* buffers, std::int32_t count, const char* what, bool wholes) {
  std::vector<View> views;
  for (const weft_buffer& b : capi::list_of(function, buffers, count, what, "count")) {
    const std::size_t i = views.size();
    const std::string name = count == 1 ? what : fmt::format("{}[{}]", what, i);
    const weft::Buffer buffer = capi::buffer_of(function, &b, name.c_str());
    weft::Shape shape = weft::Dims::line(buffer.count);
    if (i < of.shards.size())
      shape = (wholes ? of.shards.whole_layout(i) : of.shards.shard_layout(i))->local_shape();
    views.push_back(capi::view_of(buffer, shape));
  }
  return views;
}
constexpr bool kWholes = true, kParts = false;

}  // namespace

weft_status weft_sharded_parameters_create(const weft_mesh* axes, const weft_shard_entry* entries,
                                           int32_t count, const weft_sharded_parameters_options* options,
                                           weft_sharded_parameters** shards, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const DeviceMesh& over = capi::mesh_of(function, axes, "axes");
    std::vector<weft::ShardEntry> list = entries_of(function, entries, count);
    const weft::ShardedParametersOptions o = options_of(function, options);
    weft_sharded_parameters*& to = capi::given(function, shards, "shards");
    to = new weft_sharded_parameters(axes->owner, over, weft::ShardedParameters(over, std::move(list), o));
  });
}

void weft_sharded_parameters_destroy(weft_sharded_parameters* shards) {
  capi::destroy(__func__, shards, "shards");
}

weft_status weft_sharded_parameters_layout(const weft_sharded_parameters* shards, int32_t i,
                                           weft_layout** layout, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_sharded_parameters& of = shards_of(function, shards);
    const std::size_t at = checked(function, of, i);
    weft_layout*& to = capi::given(function, layout, "layout");
    to = new weft_layout(of.owner, of.shards.shard_layout(at));
  });
}

weft_status weft_sharded_parameters_range(const weft_sharded_parameters* shards, int32_t i, int32_t rank,
                                          int32_t index, int64_t* offset, int64_t* count,
                                          int32_t* range_count, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_sharded_parameters& of = shards_of(function, shards);
    const std::size_t at = checked(function, of, i);
    if (rank < 0 || rank >= of.axes.size())
      capi::refuse(ErrorCode::bad_argument, function,
                   fmt::format("rank is {}; expected 0 to {}", rank, of.axes.size() - 1));
    const std::vector<weft::Chunk> ranges = of.shards.ranges(at, rank);
    if (index < 0 || static_cast<std::size_t>(index) >= ranges.size())
      capi::refuse(ErrorCode::bad_argument, function,
                   fmt::format("index is {}; expected 0 to {}", index, ranges.size() - 1));
    std::int64_t &begin = capi::given(function, offset, "offset"),
                 &size = capi::given(function, count, "count");
    begin = ranges[static_cast<std::size_t>(index)].offset;
    size = ranges[static_cast<std::size_t>(index)].size;
    if (range_count != nullptr) *range_count = static_cast<std::int32_t>(ranges.size());
  });
}

weft_status weft_sharded_parameters_bytes(const weft_sharded_parameters* shards, int64_t* unshard_bytes,
                                          int64_t* reduce_bytes, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_sharded_parameters& of = shards_of(function, shards);
    std::int64_t &gathered = capi::given(function, unshard_bytes, "unshard_bytes"),
                 &reduced = capi::given(function, reduce_bytes, "reduce_bytes");
    gathered = of.shards.unshard_bytes();
    reduced = of.shards.reduce_bytes();
  });
}

weft_status weft_sharded_parameters_unshard(weft_sharded_parameters* shards, const weft_buffer* parts,
                                            const weft_buffer* wholes, int32_t count,
                                            weft_transfer** transfer, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_sharded_parameters& of = shards_of(function, shards);
    const auto from = views_of<weft::ConstTensorView>(function, of, parts, count, "parts", kParts);
    const auto to = views_of<weft::TensorView>(function, of, wholes, count, "wholes", kWholes);
    capi::finish_or_give(of.owner, transfer, [&] { return of.shards.start_unshard(from, to); });
  });
}

weft_status weft_sharded_parameters_reshard(const weft_sharded_parameters* shards, const weft_buffer* wholes,
                                            const weft_buffer* parts, int32_t count, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_sharded_parameters& of = shards_of(function, shards);
    const auto from = views_of<weft::ConstTensorView>(function, of, wholes, count, "wholes", kWholes);
    const auto to = views_of<weft::TensorView>(function, of, parts, count, "parts", kParts);
    of.shards.reshard(from, to);
  });
}

weft_status weft_sharded_parameters_reduce_scatter(weft_sharded_parameters* shards,
                                                   const weft_buffer* gradients, const weft_buffer* parts,
                                                   int32_t count, weft_reduce_op op, weft_transfer** transfer,
                                                   weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_sharded_parameters& of = shards_of(function, shards);
    if (op != WEFT_SUM && op != WEFT_AVG)
      capi::refuse(ErrorCode::bad_argument, function,
                   fmt::format("op is {}; expected 0 (WEFT_SUM) or 1 (WEFT_AVG)", op));
    const auto from = views_of<weft::ConstTensorView>(function, of, gradients, count, "gradients", kWholes);
    const auto to = views_of<weft::TensorView>(function, of, parts, count, "parts", kParts);
    capi::finish_or_give(of.owner, transfer, [&] {
      return of.shards.start_reduce_scatter(from, to,
                                            op == WEFT_SUM ? weft::ReduceOp::sum : weft::ReduceOp::avg);
    });
  });
}
