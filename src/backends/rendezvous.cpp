// Where a process learns who it is in a job of processes, and how it reaches the job's store.
#include <fmt/format.h>

#include <charconv>
#include <climits>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "weft/backends/process_group.hpp"
#include "weft/backends/store_tcp.hpp"
#include "weft/base/env.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

/// A store whose keys all carry the job's token, so that jobs that share a server do not meet. In the rank
/// that serves the store it also owns the server, which therefore outlives this rank's own client.
class JobStore final : public Store {
 public:
  JobStore(std::string_view job, std::unique_ptr<TcpStoreServer> server, std::shared_ptr<Store> store)
      : server_(std::move(server)), store_(std::move(store)), prefix_(fmt::format("{}/", job)) {}

  void set(std::string_view key, std::string_view value) override { store_->set(full(key), value); }
  std::string get(std::string_view key, Deadline deadline) override {
    return store_->get(full(key), deadline);
  }
  std::optional<std::string> try_get(std::string_view key) override { return store_->try_get(full(key)); }
  std::int64_t add(std::string_view key, std::int64_t delta) override {
    return store_->add(full(key), delta);
  }
  std::string compare_set(std::string_view key, std::string_view expected,
                          std::string_view desired) override {
    return store_->compare_set(full(key), expected, desired);
  }
  void remove(std::string_view key) override { store_->remove(full(key)); }

 private:
  std::string full(std::string_view key) const { return prefix_ + std::string(key); }

  std::unique_ptr<TcpStoreServer> server_;
  std::shared_ptr<Store> store_;
  std::string prefix_;
};

/// The names under which one launcher tells a process who it is.
struct Names {
  const char* rank;
  const char* size;
};

/// The variable, which must be there because `because` is.
std::int64_t required_int(const char* name, const char* because, std::int64_t min, std::int64_t max) {
  const auto value = env::get_int(name, min, max);
  if (!value) {
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("{} is not set, but {} is; expected an integer from {} to {}", name, because, min, max));
  }
  return *value;
}

Membership read_rank_and_size(const Names& names, const char* because) {
  Membership m;
  m.identity = 0;  // one rank per process
  m.size =
      static_cast<int>(required_int(names.size, env::get(names.rank) ? names.rank : because, 1, INT_MAX));
  m.rank = static_cast<int>(required_int(names.rank, names.size, 0, INT_MAX));
  if (m.rank >= m.size) {
    throw Error(ErrorCode::bad_argument, fmt::format("{} is \"{}\"; expected 0 to {} ({} is {})", names.rank,
                                                     m.rank, m.size - 1, names.size, m.size));
  }
  return m;
}

/// Runs `reach`; an Error it throws is told with the variables that led there.
template <class F>
auto reached_by(const std::string& variables, F&& reach) {
  try {
    return reach();
  } catch (const Error& e) {
    throw Error(e.code(), fmt::format("{}: {}", variables, e.what()));
  }
}

// weft run serves the store itself, on a port of its choice.
Membership from_weft_run(const char* because) {
  Membership m = read_rank_and_size({"WEFT_RANK", "WEFT_WORLD_SIZE"}, because);
  const auto where = env::get("WEFT_STORE");
  if (!where) {
    throw Error(ErrorCode::bad_argument,
                fmt::format("WEFT_STORE is not set, but {} is; expected host:port", because));
  }
  const std::size_t colon = where->rfind(':');
  const char* const end = where->data() + where->size();
  std::uint16_t port = 0;
  const auto parsed = colon == std::string::npos ? std::from_chars_result{end, std::errc::invalid_argument}
                                                 : std::from_chars(where->data() + colon + 1, end, port);
  if (parsed.ec != std::errc{} || parsed.ptr != end || port == 0) {
    throw Error(ErrorCode::bad_argument,
                fmt::format("WEFT_STORE is \"{}\"; expected host:port, the port from 1 to 65535", *where));
  }
  m.store = reached_by(fmt::format("WEFT_STORE is \"{}\"", *where), [&] {
    return make_tcp_store(where->substr(0, colon), port, Deadline::after(m.deadline));
  });
  m.store = std::make_shared<JobStore>(env::get("WEFT_JOB").value_or("job"), nullptr, std::move(m.store));
  return m;
}

// Under torchrun's variables rank 0 serves the store. A job of one rank needs none, nor a port.
Membership from_torchrun(Context& context, const char* because) {
  Membership m = read_rank_and_size({"RANK", "WORLD_SIZE"}, because);
  if (m.size == 1) {
    m.store = make_local_store();
    return m;
  }
  const std::string host = env::get("MASTER_ADDR").value_or("127.0.0.1");
  const auto port = static_cast<std::uint16_t>(required_int("MASTER_PORT", "WORLD_SIZE", 1, 65535));
  const std::string variables = fmt::format("MASTER_ADDR is \"{}\", MASTER_PORT is \"{}\"", host, port);
  std::unique_ptr<TcpStoreServer> server;
  if (m.rank == 0) {
    server = reached_by(variables, [&] {
      return std::make_unique<TcpStoreServer>(context.log(), TcpStoreOptions{.host = host, .port = port});
    });
  }
  auto store = reached_by(variables, [&] { return make_tcp_store(host, port, Deadline::after(m.deadline)); });
  m.store =
      std::make_shared<JobStore>(env::get("WEFT_JOB").value_or("job"), std::move(server), std::move(store));
  return m;
}

}  // namespace

Membership Membership::from_env(Context& context) {
  for (const char* name : {"WEFT_RANK", "WEFT_WORLD_SIZE", "WEFT_STORE"}) {
    if (env::get(name)) return from_weft_run(name);
  }
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR"}) {
    if (env::get(name)) return from_torchrun(context, name);
  }
  Membership alone;
  alone.store = make_local_store();
  alone.identity = 0;
  return alone;
}

}  // namespace weft
