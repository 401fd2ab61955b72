// Groups over transports of C programs.
#include "capi/group_handles.hpp"
#include "capi/transport/host_channel.hpp"

namespace capi = weft::capi;

weft_status weft_group_create_over(weft_context* context, const weft_transport* transport, weft_store* store,
                                   int32_t rank, int32_t size, const weft_group_options* options,
                                   weft_group** group, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const std::shared_ptr<capi::ContextState>& in = capi::given(function, context, "context").state;
    const auto host = capi::host_transport(function, transport, rank);
    weft_group*& to = capi::given(function, group, "group");
    const weft_group_options o = capi::group_options(function, options);
    if (options != nullptr && options->backend != nullptr)
      capi::refuse(
          weft::ErrorCode::bad_argument, function,
          fmt::format("options->backend is \"{}\"; expected NULL with a transport", options->backend));
    weft::Membership m = capi::membership(rank, size, -1, o);
    capi::given_or_null(function, store, "store");  // of one rank it is not used
    if (size > 1) m.store = capi::given(function, store, "store").store;
    const weft::BackendFactory make = [host](const weft::GroupInit& b) {
      return weft::make_stream_backend(
          b,
          {.name = host->name,
           .detects_death = host->calls.detects_death,
           .spin = host->calls.spin,
           .address = std::to_string(host->rank),
           .open = [&b, host](std::span<const std::string> addresses) -> std::unique_ptr<weft::ByteStreams> {
             return std::make_unique<capi::HostChannel>(host, b, capi::transport_ranks(b, addresses));
           }});
    };
    to = capi::new_group(in, weft::ProcessGroup::create(in->context, make, m));
  });
}
