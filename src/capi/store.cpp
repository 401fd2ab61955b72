// Stores and their servers in C. Any thread. Comments in c/store.h say which functions block.
#include <sys/random.h>

#include <cerrno>

#include "capi/group_handles.hpp"
#include "store/table.hpp"
#include "weft/store/file.hpp"
#include "weft/store/tcp.hpp"

using weft::Deadline;
using weft::Duration;
using weft::ErrorCode;
using weft::Store;
using weft::TcpStoreOptions;
namespace capi = weft::capi;

struct weft_store_server : capi::Handle<weft_store_server> {
  static constexpr const char* kKind = "weft_store_server";
  std::shared_ptr<capi::ContextState> context;  // its log
  std::unique_ptr<weft::TcpStoreServer> server;
  std::string address;
};

namespace weft::capi {

Duration limit_or(const char* function, std::int64_t ns, const char* what, Duration otherwise) {
  return ns == 0 ? otherwise : limit(function, ns, what);
}

std::uint16_t port_of(const char* function, std::int32_t port, const char* what, int least) {
  constexpr int kMostPort = 65535;
  if (port < least || port > kMostPort)
    refuse(ErrorCode::bad_argument, function,
           fmt::format("{} is {}; expected {} to {}", what, port, least, kMostPort));
  return static_cast<std::uint16_t>(port);
}

std::string random_secret(const char* function) {
  unsigned char bytes[32];
  std::size_t got = 0;
  while (got < sizeof bytes) {
    const ssize_t n = ::getrandom(bytes + got, sizeof bytes - got, 0);
    if (n > 0)
      got += static_cast<std::size_t>(n);
    else if (errno != EINTR)
      throw_errno(fmt::format("{}: no random numbers", function), errno);
  }
  std::string text;
  for (const unsigned char b : bytes) text += fmt::format("{:02x}", b);
  return text;
}

}  // namespace weft::capi

namespace {

constexpr std::size_t kServerOptionsFirstBytes = 32;
static_assert(offsetof(weft_store_server_options, max_clients) == kServerOptionsFirstBytes);
static_assert(sizeof(weft_store_server_options) == 80);

constexpr Duration kAnswer = std::chrono::seconds(30), kMeet = std::chrono::minutes(5);

constexpr std::string_view kOwnKeys = "weft/";

// A request's arguments as C++ values: every function below begins with it.
struct Request {
  Store& store;
  std::string_view key;
  Deadline deadline;
};
Request request(const char* function, weft_store* store, const char* key, std::int64_t limit_ns,
                Duration otherwise = kAnswer) {
  Store& s = *capi::given(function, store, "store").store;
  const std::string_view k = &capi::given(function, key, "key");
  if (k.substr(0, kOwnKeys.size()) == kOwnKeys)
    capi::refuse(
        ErrorCode::bad_argument, function,
        fmt::format("key is {}; keys that begin with \"{}\" are weft's own", weft::shown_key(k), kOwnKeys));
  return {s, k, Deadline::after(capi::limit_or(function, limit_ns, "limit_ns", otherwise))};
}

std::string_view bytes_of(const char* function, const void* data, std::size_t bytes, const char* what) {
  if (bytes == 0) return {};
  return {static_cast<const char*>(&capi::given(function, static_cast<const char*>(data), what)), bytes};
}

weft_text* text_of(std::string value) { return new weft_text{std::move(value)}; }

TcpStoreOptions server_options(const char* function, const weft_store_server_options* options) {
  const weft_store_server_options o =
      capi::read(function, options, weft_store_server_options WEFT_STORE_SERVER_OPTIONS_INIT,
                 kServerOptionsFirstBytes, "WEFT_STORE_SERVER_OPTIONS_INIT");
  TcpStoreOptions to;
  to.port = capi::port_of(function, o.port, "options->port", 0);
  if (o.host != nullptr) to.host = o.host;
  if (o.secret != nullptr) to.secret = o.secret;
  to.linger = capi::limit_or(function, o.linger_ns, "options->linger_ns", to.linger);
  to.join_limit = capi::limit_or(function, o.join_limit_ns, "options->join_limit_ns", to.join_limit);
  const auto most = [&](std::int64_t number, const char* field, std::size_t& limit) {
    if (number < 0)
      capi::refuse(ErrorCode::bad_argument, function,
                   fmt::format("options->{} is {}; expected 0 or more", field, number));
    if (number > 0) limit = static_cast<std::size_t>(number);
  };
  most(o.max_clients, "max_clients", to.max_clients);
  most(o.max_unauthenticated, "max_unauthenticated", to.max_unauthenticated);
  most(o.max_keys, "max_keys", to.max_keys);
  most(o.max_bytes, "max_bytes", to.max_bytes);
  most(o.max_unanswered, "max_unanswered", to.max_unanswered);
  return to;
}

}  // namespace

weft_status weft_store_create_local(weft_store** store, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_store*& to = capi::given(function, store, "store");
    to = new weft_store{weft::make_local_store()};
  });
}

weft_status weft_store_create_file(const char* path, int64_t limit_ns, weft_store** store,
                                   weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const char* const at = &capi::given(function, path, "path");
    weft_store*& to = capi::given(function, store, "store");
    to = new weft_store{weft::make_file_store(at, capi::limit_or(function, limit_ns, "limit_ns", kAnswer))};
  });
}

weft_status weft_store_create_tcp(const char* host, int32_t port, const char* secret, int64_t limit_ns,
                                  weft_store** store, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const char* const at = &capi::given(function, host, "host");
    const std::uint16_t number = capi::port_of(function, port, "port", 1);
    weft_store*& to = capi::given(function, store, "store");
    const Duration limit = capi::limit_or(function, limit_ns, "limit_ns", kMeet);
    to = new weft_store{
        weft::make_tcp_store(at, number, Deadline::after(limit), secret != nullptr ? secret : "")};
  });
}

void weft_store_destroy(weft_store* store) { capi::destroy(__func__, store, "store"); }

weft_status weft_store_server_create(weft_context* context, const weft_store_server_options* options,
                                     weft_store_server** server, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const std::shared_ptr<capi::ContextState>& state = capi::given(function, context, "context").state;
    weft_store_server*& to = capi::given(function, server, "server");
    const TcpStoreOptions o = server_options(function, options);
    state->context.check_fork(function);
    auto made = std::make_unique<weft_store_server>();
    made->context = state;
    made->server = std::make_unique<weft::TcpStoreServer>(state->context, o);
    made->address = made->server->address();
    to = made.release();
  });
}

weft_status weft_store_server_port(const weft_store_server* server, int32_t* port, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_store_server& s = capi::given(function, server, "server");
    capi::given(function, port, "port") = s.server->port();
  });
}

weft_status weft_store_server_address(const weft_store_server* server, const char** address,
                                      weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_store_server& s = capi::given(function, server, "server");
    capi::given(function, address, "address") = s.address.c_str();
  });
}

void weft_store_server_destroy(weft_store_server* server) { capi::destroy(__func__, server, "server"); }

weft_status weft_store_secret_from_env(weft_text** secret, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_text*& to = capi::given(function, secret, "secret");
    to = text_of(weft::store_secret_from_env());
  });
}

weft_status weft_store_secret_create(weft_text** secret, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_text*& to = capi::given(function, secret, "secret");
    to = text_of(capi::random_secret(function));
  });
}

weft_status weft_store_set(weft_store* store, const char* key, const void* value, size_t bytes,
                           int64_t limit_ns, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const Request r = request(function, store, key, limit_ns);
    r.store.set(r.key, bytes_of(function, value, bytes, "value"), r.deadline);
  });
}

weft_status weft_store_get(weft_store* store, const char* key, int64_t limit_ns, weft_text** value,
                           weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const Request r = request(function, store, key, limit_ns, kMeet);
    weft_text*& to = capi::given(function, value, "value");
    to = text_of(r.store.get(r.key, r.deadline));
  });
}

weft_status weft_store_try_get(weft_store* store, const char* key, int64_t limit_ns, weft_text** value,
                               weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const Request r = request(function, store, key, limit_ns);
    weft_text*& to = capi::given(function, value, "value");
    std::optional<std::string> found = r.store.try_get(r.key, r.deadline);
    to = found ? text_of(*std::move(found)) : nullptr;
  });
}

weft_status weft_store_add(weft_store* store, const char* key, int64_t delta, int64_t limit_ns,
                           int64_t* value, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const Request r = request(function, store, key, limit_ns);
    int64_t& to = capi::given(function, value, "value");
    to = r.store.add(r.key, delta, r.deadline);
  });
}

weft_status weft_store_compare_set(weft_store* store, const char* key, const void* expected,
                                   size_t expected_bytes, const void* desired, size_t desired_bytes,
                                   int64_t limit_ns, weft_text** value, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const Request r = request(function, store, key, limit_ns);
    const std::string_view from = bytes_of(function, expected, expected_bytes, "expected");
    const std::string_view wanted = bytes_of(function, desired, desired_bytes, "desired");
    weft_text*& to = capi::given(function, value, "value");
    to = text_of(r.store.compare_set(r.key, from, wanted, r.deadline));
  });
}

weft_status weft_store_remove(weft_store* store, const char* key, int64_t limit_ns, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const Request r = request(function, store, key, limit_ns);
    r.store.remove(r.key, r.deadline);
  });
}
