// C functions without a C++ counterpart. The rows of the others are in the other files: tools/agreement.py
// finds them.
#include <gtest/gtest.h>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <string>

#include "agreement/row.hpp"
#include "weft/weft.h"

namespace weft::agreement {
namespace capi_test {
namespace {

using test::Rank;

void expect_ok(weft_status status, const weft_error& error) {
  if (status != WEFT_OK) throw Error(static_cast<ErrorCode>(status), error.text);
}

struct Destroy {
  void operator()(weft_context* c) const { weft_context_destroy(c); }
  void operator()(weft_store* s) const { weft_store_destroy(s); }
  void operator()(weft_group* g) const { weft_group_destroy(g); }
};
template <class T>
using Owned = std::unique_ptr<T, Destroy>;

// The arguments of a rank that makes a group: ranks are threads of one process.
struct Maker {
  explicit Maker(const Rank& r) {
    weft_context* made = nullptr;
    expect_ok(weft_context_create(nullptr, &made, &error), error);
    context.reset(made);
    options.name = "g";
    options.backend = "shm";
    options.process_rank = r.rank;
  }
  weft_error error = WEFT_ERROR_INIT;
  Owned<weft_context> context;
  weft_group_options options = WEFT_GROUP_OPTIONS_INIT;
  weft_group* group = nullptr;
};

// The broadcast of a library that already connects the ranks.
struct Broadcast {
  Rank* rank;
  static std::int32_t run(void* data, void* bytes, std::size_t count) {
    ProcessGroup& group = static_cast<Broadcast*>(data)->rank->group();
    const TensorView all = view(static_cast<std::uint8_t*>(bytes), {static_cast<std::int64_t>(count)});
    group.broadcast(all, all, 0).wait();
    return 0;
  }
};

// A port that is free now.
int free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof at;
  EXPECT_EQ(::bind(fd, reinterpret_cast<const sockaddr*>(&at), size), 0);
  EXPECT_EQ(::getsockname(fd, reinterpret_cast<sockaddr*>(&at), &size), 0);
  ::close(fd);
  return ntohs(at.sin_port);
}

// A transport of which no function is called, because the ranks do not agree on their numbers.
weft_transport no_transport() {
  weft_transport t = WEFT_TRANSPORT_INIT;
  t.name = "none";
  t.open = [](void*, const weft_channel_init*, void**, weft_error*) { return weft_status{WEFT_SYSTEM}; };
  t.write = [](void*, std::int32_t, const void*, std::size_t, std::size_t*, weft_error*) {
    return weft_status{WEFT_SYSTEM};
  };
  t.read = [](void*, std::int32_t, void*, std::size_t, std::size_t*, weft_error*) {
    return weft_status{WEFT_SYSTEM};
  };
  return t;
}

}  // namespace
}  // namespace capi_test

Rows capi_rows() {
  using namespace capi_test;
  const std::string made = "when it is made", says = "group \"g\": rank …says size ";
  const int port = free_port();
  return {
      {"weft_group_create_tcp", "size", made, ErrorCode::mismatch, says,
       [port](Rank& r) {
         Maker m(r);
         expect_ok(weft_group_create_tcp(m.context.get(), "127.0.0.1", port, nullptr, r.rank,
                                         r.rank == 1 ? 3 : 2, &m.options, &m.group, &m.error),
                   m.error);
       }},
      {"weft_group_create_by_broadcast", "size", made, ErrorCode::mismatch, says,
       [](Rank& r) {
         Maker m(r);
         Broadcast by{&r};
         expect_ok(weft_group_create_by_broadcast(m.context.get(), nullptr, r.rank, r.rank == 1 ? 3 : 2,
                                                  Broadcast::run, &by, &m.options, &m.group, &m.error),
                   m.error);
       }},
      {"weft_group_create_over", "size", made, ErrorCode::mismatch, says,
       [store = std::shared_ptr<weft_store>(
            [] {
              weft_store* s = nullptr;
              weft_error error = WEFT_ERROR_INIT;
              expect_ok(weft_store_create_local(&s, &error), error);
              return s;
            }(),
            weft_store_destroy)](Rank& r) {
         Maker m(r);
         m.options.backend = nullptr;
         const weft_transport transport = no_transport();
         expect_ok(weft_group_create_over(m.context.get(), &transport, store.get(), r.rank,
                                          r.rank == 1 ? 3 : 2, &m.options, &m.group, &m.error),
                   m.error);
       }},
  };
}

TEST(AgreementOfC, EachRankIsTold) { expect_told(capi_rows()); }

}  // namespace weft::agreement
