// Groups whose ranks meet at a server of rank 0, in C. Each function waits for all ranks.
#include <algorithm>
#include <array>
#include <cstring>

#include "capi/call_out.hpp"
#include "capi/group_handles.hpp"
#include "weft/store/tcp.hpp"

using weft::Deadline;
using weft::Error;
using weft::ErrorCode;
using weft::Membership;
using weft::ProcessGroup;
using weft::TcpStoreOptions;
using weft::TcpStoreServer;
namespace capi = weft::capi;

namespace {

// As ProcessGroup::create() has it, but before anybody serves or waits.
void check_place(const char* function, int32_t rank, int32_t size) {
  if (size < 1 || size > weft::kMaxRanks)
    capi::refuse(ErrorCode::bad_argument, function,
                 fmt::format("size is {}; expected 1 to {}", size, weft::kMaxRanks));
  if (rank < 0 || rank >= size)
    capi::refuse(ErrorCode::bad_argument, function,
                 fmt::format("rank is {}; expected 0 to {} (size {})", rank, size - 1, size));
}

// The context keeps the server. If a server exists there already, it is used again. The n-th group of a name
// meets the n-th group of the others.
TcpStoreServer& serve(capi::ContextState& state, const TcpStoreOptions& options) {
  const std::string place = fmt::format("{} {}", options.host, options.port);
  const std::lock_guard lock(state.mutex);
  if (const auto known = state.servers.find(place); options.port != 0 && known != state.servers.end())
    return *known->second;
  auto made = std::make_unique<TcpStoreServer>(state.context, options);
  TcpStoreServer& server = *made;
  state.servers.emplace(options.port != 0 ? place : made->address(), std::move(made));
  return server;
}

// The message of rank 0 by `broadcast`: where it serves, or why it cannot. The same bytes on every machine
// and in every version: texts that end in a zero.
struct Invitation {
  std::array<char, 32> version{};
  std::array<char, 16> status{};  // a number
  std::array<char, 16> port{};    // a number
  std::array<char, 512> host{};
  std::array<char, 128> secret{};
  std::array<char, 1024> failure{};
};
static_assert(sizeof(Invitation) == 1728 && std::is_trivially_copyable_v<Invitation>);

template <std::size_t n>
void put(std::array<char, n>& to, std::string_view text) {
  to.fill('\0');
  std::copy_n(text.begin(), std::min(text.size(), n - 1), to.begin());
}
template <std::size_t n>
std::string text_of(const std::array<char, n>& from) {
  return {from.data(), ::strnlen(from.data(), n)};
}

constexpr const char* kOk = "ok";

Invitation invite(const char* function, capi::ContextState& state, const char* host) {
  Invitation to;
  put(to.version, WEFT_VERSION);
  try {
    TcpStoreOptions options;
    if (host != nullptr) {
      options.host = host;
      options.secret = capi::random_secret(function);
    }
    if (options.host.size() >= to.host.size())
      capi::refuse(
          ErrorCode::bad_argument, function,
          fmt::format("host has {} bytes; expected at most {}", options.host.size(), to.host.size() - 1));
    put(to.port, fmt::format("{}", serve(state, options).port()));
    put(to.host, options.host);
    put(to.secret, options.secret);
    put(to.status, kOk);
  } catch (const Error& e) {
    put(to.status, fmt::format("{}", static_cast<int>(e.code())));
    put(to.failure, e.what());
  }
  return to;
}

// The failure of rank 0, and what is no invitation.
void check(const char* function, const Invitation& got, int32_t rank) {
  const std::string version = text_of(got.version), status = text_of(got.status);
  if (version != WEFT_VERSION)
    capi::refuse(ErrorCode::mismatch, function,
                 fmt::format("broadcast copied bytes of {} to rank {}; expected those of rank 0, of weft {}",
                             version.empty() ? "nobody" : "weft " + version, rank, WEFT_VERSION));
  if (status == kOk) return;
  throw Error(
      weft::Failure{.code = weft::error_code(std::atoi(status.c_str())),
                    .text = fmt::format("{}: rank 0 cannot serve: {}", function, text_of(got.failure)),
                    .ranks = {0}});
}

}  // namespace

weft_status weft_group_create_tcp(weft_context* context, const char* host, int32_t port, const char* secret,
                                  int32_t rank, int32_t size, const weft_group_options* options,
                                  weft_group** group, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const std::shared_ptr<capi::ContextState>& in = capi::given(function, context, "context").state;
    const TcpStoreOptions at{.host = &capi::given(function, host, "host"),
                             .port = capi::port_of(function, port, "port", 1),
                             .secret = secret != nullptr ? secret : ""};
    check_place(function, rank, size);
    weft_group*& to = capi::given(function, group, "group");
    const weft_group_options o = capi::group_options(function, options);
    in->context.check_fork(function);
    Membership m = capi::membership(rank, size, 0, o);
    if (size > 1) {
      if (rank == 0) serve(*in, at);
      m.store = make_tcp_store(at.host, at.port, Deadline::after(m.deadline), at.secret);
    }
    to = capi::new_group(in, ProcessGroup::create(in->context, o.backend, m));
  });
}

weft_status weft_group_create_by_broadcast(weft_context* context, const char* host, int32_t rank,
                                           int32_t size, weft_broadcast_fn broadcast, void* broadcast_data,
                                           const weft_group_options* options, weft_group** group,
                                           weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const std::shared_ptr<capi::ContextState>& in = capi::given(function, context, "context").state;
    check_place(function, rank, size);
    if (broadcast == nullptr) capi::refuse(ErrorCode::bad_argument, function, "broadcast is NULL");
    weft_group*& to = capi::given(function, group, "group");
    const weft_group_options o = capi::group_options(function, options);
    in->context.check_fork(function);
    Membership m = capi::membership(rank, size, 0, o);
    if (size > 1) {
      Invitation invitation;
      if (rank == 0) invitation = invite(function, *in, host);
      const capi::CallOut out;
      if (!out) capi::refuse(ErrorCode::system, function, capi::kEnded);
      if (const int32_t answer = broadcast(broadcast_data, &invitation, sizeof invitation); answer != 0)
        capi::refuse(ErrorCode::system, function,
                     fmt::format("broadcast returned {} on rank {}; expected 0", answer, rank));
      check(function, invitation, rank);
      const std::string port = text_of(invitation.port);
      m.store = make_tcp_store(text_of(invitation.host),
                               capi::port_of(function, std::atoi(port.c_str()), "rank 0's port", 1),
                               Deadline::after(m.deadline), text_of(invitation.secret));
    }
    to = capi::new_group(in, ProcessGroup::create(in->context, o.backend, m));
  });
}
