// How a process gets its rank in a job of processes, and how it reaches the job's store.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/waits/suspension.hpp"
#include "host/peers.hpp"
#include "store/claim.hpp"
#include "store/duration_text.hpp"
#include "store/launch.hpp"
#include "store/launcher_notice.hpp"
#include "store/prefix_store.hpp"
#include "store/rendezvous.hpp"
#include "store/rendezvous_file.hpp"
#include "store/table.hpp"
#include "store/tcp/address.hpp"
#include "weft/base/env.hpp"
#include "weft/base/error.hpp"
#include "weft/store/file.hpp"
#include "weft/store/tcp.hpp"

namespace weft {
namespace {

/// All keys of a job begin with its name, so that jobs can share a server or a file without sharing keys.
std::shared_ptr<Store> store_of(std::string_view job, std::shared_ptr<Store> store) {
  return std::make_shared<PrefixStore>(fmt::format("{}/", job), std::move(store));
}

/// Runs `reach`. If `reach` throws an Error, adds to the text the variables that led to this place.
template <class F>
auto reached_by(const std::string& variables, F&& reach) {
  try {
    return reach();
  } catch (const Error& e) {
    throw Error(e.code(), fmt::format("{}: {}", variables, e.what()));
  }
}

/// The stores of this process's jobs, one per job and rank. A second open() returns the same store, on all
/// ranks. A store that rank 0 serves exists as long as the Context.
class JobStores {
 public:
  explicit JobStores(Context& context) : context_(context) {}
  ~JobStores() {
    for (const auto& [place, address] : published_) place->remove(address);
    for (const auto& [store, claim] : claims_) leave(*store, claim);
    claims_.clear();
    stores_.clear();  // the clients are destroyed first, because the servers wait for them
  }

  std::shared_ptr<Store> open(const LaunchInfo& launch, Deadline deadline);

 private:
  struct Refusal {
    std::string why;
    bool will_pass = false;  // the refusal will end, because the job that uses the store is ending
  };

  std::shared_ptr<Store> reach(const LaunchInfo& launch, const std::string& job, Deadline deadline);
  std::shared_ptr<Store> in_file(const std::string& path, const LaunchInfo& launch, const std::string& job,
                                 Deadline deadline);
  std::shared_ptr<Store> at(const HostPort& where, bool rank_zero_must_serve, const LaunchInfo& launch,
                            const std::string& job, Deadline deadline);
  bool serve(const HostPort& where, bool must, const std::string& secret, const std::string& owner);
  std::optional<Refusal> take_place(Store& server, Store& store, const Claim& mine, const std::string& job,
                                    Deadline deadline) const;
  std::shared_ptr<Store> by_rendezvous_file(const std::string& key, const std::string& host,
                                            const LaunchInfo& launch, const std::string& job,
                                            Deadline deadline);
  void serve_and_publish(const std::shared_ptr<const RendezvousFile>& place, const std::string& host,
                         const Claim& mine, const std::string& job, Deadline deadline);
  std::shared_ptr<Store> join_published(const RendezvousFile& place, const std::string& address,
                                        const LaunchInfo& launch, const Claim& mine, const std::string& job,
                                        Deadline deadline, std::string& why) const;
  Claim claim_of(const LaunchInfo& launch) const {
    Claim mine = make_claim(host_peers_of(context_).self().host, launch.rank, launch.size);
    // Jobs are distinguished by their names, and jobs without names by their origins.
    if (!env::get("WEFT_JOB") && job_of(launch).empty()) add_origin(mine, batch_job());
    return mine;
  }
  static std::optional<Refusal> give_way(Store& store, const std::string& first, const Claim& mine,
                                         Deadline deadline);
  static std::string claim(Store& store, const Claim& mine, Deadline deadline);
  static void leave(Store& store, Claim claim) noexcept;
  void tell(const std::string& address) const;

  Context& context_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<TcpStoreServer>> servers_;
  std::map<std::string, std::shared_ptr<Store>> stores_;
  std::vector<std::pair<std::shared_ptr<const RendezvousFile>, std::string>> published_;
  // the claims of this process at stores of servers
  std::vector<std::pair<std::shared_ptr<Store>, Claim>> claims_;
};

std::shared_ptr<Store> JobStores::open(const LaunchInfo& launch, Deadline deadline) {
  const auto value = [](const char* variable) { return env::get(variable).value_or(""); };
  const std::string launcher_job = job_of(launch);
  const std::string job = env::get("WEFT_JOB").value_or(launcher_job.empty() ? "job" : launcher_job);
  const std::string key = fmt::format("{} of {} {} {} {}:{}", launch.rank, launch.size, job,
                                      value("WEFT_STORE"), value("MASTER_ADDR"), value("MASTER_PORT"));
  {
    const std::lock_guard lock(mutex_);
    if (const auto known = stores_.find(key); known != stores_.end()) return known->second;
  }
  auto store = reach(launch, job, deadline);
  const std::lock_guard lock(mutex_);
  return stores_[key] = std::move(store);
}

std::shared_ptr<Store> JobStores::reach(const LaunchInfo& launch, const std::string& job, Deadline deadline) {
  if (const auto where = env::get("WEFT_STORE")) {
    constexpr std::string_view kFile = "file://";
    const std::string variable = fmt::format("WEFT_STORE is \"{}\"", *where);
    if (where->starts_with(kFile) && where->size() > kFile.size() && (*where)[kFile.size()] == '/')
      return reached_by(variable,
                        [&] { return in_file(where->substr(kFile.size()), launch, job, deadline); });
    const auto place = parse_host_port(*where);
    if (!place)
      throw Error(
          ErrorCode::bad_argument,
          fmt::format("{}; expected host:port, [IPv6 address]:port or file:///path, the port from 0 to "
                      "65535",
                      variable));
    return reached_by(variable, [&] {
      if (place->port != 0) return at(*place, false, launch, job, deadline);
      return by_rendezvous_file(fmt::format("{} {}", *where, job), place->host, launch, job, deadline);
    });
  }
  if (launch.launcher == Launcher::weft)
    throw Error(ErrorCode::bad_argument,
                fmt::format("WEFT_STORE is not set, but {} is; expected host:port, [IPv6 address]:port or "
                            "file:///path",
                            env::get(launch.rank_name) ? launch.rank_name : launch.size_name));
  if (launch.size == 1) return make_local_store();

  if (launch.launcher == Launcher::torchrun) {
    const std::string host = env::get("MASTER_ADDR").value_or("127.0.0.1");
    const auto port = static_cast<std::uint16_t>(required_int("MASTER_PORT", launch.size_name, 1, 65535));
    const auto agent = env::get("TORCHELASTIC_USE_AGENT_STORE");
    if (!agent || (*agent != "True" && *agent != "1"))
      return reached_by(fmt::format("MASTER_ADDR is \"{}\", MASTER_PORT is \"{}\"", host, port), [&] {
        return at({host, port}, true, launch, job, deadline);
      });
    // torchrun's agent has its own store on MASTER_PORT, so weft's store uses another port.
  }
  require_one_host(launch);
  const std::string launcher_job = job_of(launch);
  if (launcher_job.empty())
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} is set, but nothing that names the job ({}); expected that, or WEFT_STORE as "
                            "host:port or file:///path",
                            launch.rank_name,
                            launch.launcher == Launcher::openmpi ? "PMIX_NAMESPACE" : "TORCHELASTIC_RUN_ID"));
  return reached_by(name(launch.launcher),
                    [&] { return by_rendezvous_file(launcher_job, "localhost", launch, job, deadline); });
}

/// Takes this rank's place, once in a job. Returns an empty text, or the present owner of the place: a second
/// process of that rank, or the rank of an earlier job that used this store.
std::string JobStores::claim(Store& store, const Claim& mine, Deadline deadline) {
  std::string held = store.compare_set(place_key(mine.rank), "", mine.text(), deadline);
  return held == mine.text() ? "" : held;
}

/// Marks the place as free for another process, because this process may continue without its Context. A
/// failure does no harm.
void JobStores::leave(Store& store, Claim claim) noexcept try {
  if (claim.process != ::getpid()) return;  // in a forked child: the place belongs to the parent
  const std::string held = claim.text();
  claim.left = true;
  store.compare_set(place_key(claim.rank), held, claim.text(),
                    Deadline::after(std::chrono::milliseconds(200)));
} catch (...) {}

/// Separates two jobs without names that use one address at the same moment. Otherwise each job could get
/// some of the places. `first`: the claim of the rank that serves, or that arrived first. A rank with another
/// parent process than `first` waits a moment, so that ranks with the parent of `first` take their places
/// earlier. If the batch systems show that these are two jobs, the rank is refused.
std::optional<JobStores::Refusal> JobStores::give_way(Store& store, const std::string& first,
                                                      const Claim& mine, Deadline deadline) {
  constexpr Duration kSiblingsFirst = std::chrono::milliseconds(500);
  const auto other = Claim::parse(first);
  if (!other || other->is_over(mine.host)) return std::nullopt;
  if (mine.is_of_another_batch(*other))
    return Refusal{fmt::format(
        "it belongs to another job: {} runs in {}, this process in {}; ranks of one job that spans "
        "both have the same WEFT_JOB",
        other->shown(), other->batch, mine.batch)};
  if (!mine.is_no_sibling_of(*other)) return std::nullopt;
  const Deadline turn = Deadline::after(std::min<Duration>(kSiblingsFirst, deadline.left() / 4));
  while (!turn.passed() && !store.try_get(place_key(mine.rank), deadline))
    sleep_noticing(std::min<Duration>(std::chrono::milliseconds(20), turn.left()));
  return std::nullopt;
}

std::shared_ptr<Store> JobStores::in_file(const std::string& path, const LaunchInfo& launch,
                                          const std::string& job, Deadline deadline) {
  const Duration patience = std::chrono::seconds(30);
  std::shared_ptr<Store> store = store_of(job, make_file_store(path, patience, deadline));
  const Claim mine = claim_of(launch);
  const std::string first = store->compare_set("weft/first", "", mine.text(), deadline);
  if (const auto refused = give_way(*store, first, mine, deadline))
    throw Error(ErrorCode::bad_argument,
                fmt::format("store: {}: {}; expected a file for each job (or another WEFT_JOB); this is {}",
                            path, refused->why, mine.shown()));
  if (const std::string other = claim(*store, mine, deadline); !other.empty())
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("store: {} holds a rank {} already, {}; expected a file that no other job has used "
                    "(or another WEFT_JOB); this is {}",
                    path, launch.rank, shown_claim(other), mine.shown()));
  context_.log().write(LogLayer::store, LogLevel::info, fmt::format("rendezvous: store in {}", path));
  return store;
}

void JobStores::tell(const std::string& address) const {
  if (!context_.log().enabled(LogLayer::store, LogLevel::info)) return;
  const auto place = parse_host_port(address);
  std::string why;
  const auto all = place ? resolve(place->host, place->port, why) : std::vector<SocketAddress>{};
  if (all.empty()) return;
  context_.log().write(
      LogLayer::store, LogLevel::info,
      fmt::format("rendezvous: store at {} by interface {}", address, interface_to(all.front())));
}

/// Rank 0 serves if no other process does. Returns false if another process serves.
bool JobStores::serve(const HostPort& where, bool must, const std::string& secret, const std::string& owner) {
  std::string why;
  const auto all = resolve(where.host, where.port, why);
  // On loopback no secret is needed, so that a job on one host needs no libsodium.
  const bool off_loopback =
      std::any_of(all.begin(), all.end(), [](const SocketAddress& a) { return !a.is_loopback(); });
  TcpStoreOptions options{.host = where.host, .port = where.port, .served_by = owner};
  if (off_loopback) options.secret = secret;
  // For Debian, whose /etc/hosts maps a host's own name to loopback.
  if (!off_loopback && !all.empty() && !secret.empty() &&
      where.host.find_first_not_of("0123456789.:") < where.host.size() && where.host != "localhost")
    context_.log().write(
        LogLayer::store, LogLevel::warning,
        fmt::format(
            "rendezvous: on this host {} is {}, where ranks of other hosts cannot reach it; give the store "
            "an address of the network between them",
            where.host, all.front().text()));
  auto server = must ? std::make_unique<TcpStoreServer>(context_, options)
                     : TcpStoreServer::try_serve(context_, options);
  if (!server) return false;
  context_.log().write(LogLayer::store, LogLevel::info,
                       fmt::format("rendezvous: serving at {}", server->address()));
  const std::lock_guard lock(mutex_);
  servers_.push_back(std::move(server));
  return true;
}

/// Takes this rank's place in the store of a server, which may be another job's server. If the store
/// continues after jobs, the places of an earlier job that is over are free.
std::optional<JobStores::Refusal> JobStores::take_place(Store& server, Store& store, const Claim& mine,
                                                        const std::string& job, Deadline deadline) const {
  const auto over = [&](const std::string& text) {
    const auto claim = Claim::parse(text);
    return claim && claim->is_over(mine.host);
  };
  // A claim of another Context of this process does not count as a claim of another job.
  const auto is_own = [&](const std::string& text) {
    const auto claim = Claim::parse(text);
    return claim && !claim->left && claim->host == mine.host && claim->process == mine.process &&
           claim->started == mine.started && claim->rank == mine.rank && claim->size == mine.size;
  };
  const auto told = server.try_get(kServedByKey, deadline);
  if (told && told->empty()) return Refusal{"the process that serves it is about to end", true};
  const std::string owner = told.value_or("");
  const std::string serving = owner.substr(0, owner.find('\n'));
  if (!owner.empty() && owner != fmt::format("{}\n{}", serving, job))
    return Refusal{fmt::format("it belongs to another job, and is served by {}", shown_claim(serving)),
                   over(serving)};
  // The serving rank owns its place, even before it has taken it.
  if (const auto server_rank = Claim::parse(serving);
      server_rank && server_rank->rank == mine.rank && serving != mine.text() && !is_own(serving))
    return Refusal{fmt::format("it has a rank {} already, {}", mine.rank, shown_claim(serving)),
                   over(serving)};
  const std::string here = owner.empty() ? store.try_get("weft/size", deadline).value_or("") : serving;
  if (auto refused = give_way(store, here, mine, deadline)) return refused;
  // Takes the key for this process unless another claim holds it; returns the claim that holds it.
  const auto hold = [&](const std::string& key) {
    std::string held = store.compare_set(key, "", mine.text(), deadline);
    if (held != mine.text() && (is_own(held) || (owner.empty() && over(held))))
      held = store.compare_set(key, held, mine.text(), deadline);
    return held;
  };
  std::string held = hold("weft/size");
  if (const auto first = Claim::parse(held); first && first->size != mine.size)
    return Refusal{fmt::format("its job has {} ranks, as {} stated", first->size, first->shown()),
                   over(held)};
  held = hold(place_key(mine.rank));
  if (held == mine.text()) return std::nullopt;
  return Refusal{fmt::format("it has a rank {} already, {}", mine.rank, shown_claim(held)), over(held)};
}

std::shared_ptr<Store> JobStores::at(const HostPort& where, bool rank_zero_must_serve,
                                     const LaunchInfo& launch, const std::string& job, Deadline deadline) {
  const std::string secret = store_secret_from_env();
  const Claim mine = claim_of(launch);
  const std::string address = shown_host_port(where.host, where.port);
  bool served = false;
  Refusal refusal;
  for (auto pause = std::chrono::milliseconds(5);;
       pause = std::min(2 * pause, std::chrono::milliseconds(100))) {
    if (launch.rank == 0 && !served)
      served = serve(where, rank_zero_must_serve, secret, fmt::format("{}\n{}", mine.text(), job));
    try {
      auto server = make_tcp_store(where.host, where.port, deadline, secret);
      auto store = store_of(job, server);
      auto refused = launch.size == 1 ? std::nullopt : take_place(*server, *store, mine, job, deadline);
      if (!refused) {
        tell(address);
        const std::lock_guard lock(mutex_);
        if (launch.size > 1 && !served) claims_.emplace_back(store, mine);
        return store;
      }
      refusal = std::move(*refused);
    } catch (const Error& e) {
      // Perhaps the server that answered belonged to an ending job, and no other server appeared until the
      // deadline.
      const bool was_ending = e.code() == ErrorCode::timeout && refusal.will_pass;
      if (e.code() == ErrorCode::timeout && !was_ending && launch.rank == 0 && !served)
        throw Error(
            ErrorCode::timeout,
            fmt::format("{}; this rank 0 could not serve there either: the address is not of this host, or "
                        "its port is in use",
                        e.what()));
      if (!was_ending && (e.code() != ErrorCode::peer_lost || served)) throw;
      if (!was_ending) refusal = {e.what(), true};
    }
    // The store of an earlier job that is ending will soon be free for this job's store.
    if (!refusal.will_pass || deadline.passed())
      throw Error(
          refusal.will_pass ? ErrorCode::timeout : ErrorCode::bad_argument,
          fmt::format("store: the store at {}: {}; expected another address for each job or, in a store "
                      "that no rank serves, another WEFT_JOB; this is {}",
                      address, refusal.why, mine.shown()));
    sleep_noticing(std::min<Duration>(pause, deadline.left()));
  }
}

void JobStores::serve_and_publish(const std::shared_ptr<const RendezvousFile>& place, const std::string& host,
                                  const Claim& mine, const std::string& job, Deadline deadline) {
  auto server = std::make_unique<TcpStoreServer>(
      context_, TcpStoreOptions{.host = host, .served_by = fmt::format("{}\n{}", mine.text(), job)});
  const std::string address = server->address();
  place->publish(address, deadline);
  context_.log().write(LogLayer::store, LogLevel::info,
                       fmt::format("rendezvous: serving at {}, written to {}", address, place->path()));
  const std::lock_guard lock(mutex_);
  published_.emplace_back(place, address);
  servers_.push_back(std::move(server));
}

/// Takes this rank's place in the store that the file names. Returns null if another process with this rank
/// number has joined that store. The store then belongs to an earlier program of the same job, which is about
/// to end, and `why` says so.
std::shared_ptr<Store> JobStores::join_published(const RendezvousFile& place, const std::string& address,
                                                 const LaunchInfo& launch, const Claim& mine,
                                                 const std::string& job, Deadline deadline,
                                                 std::string& why) const {
  const auto at = parse_host_port(address);
  if (!at) throw Error(ErrorCode::system, fmt::format("it holds \"{}\"", address));
  const auto server = make_tcp_store(
      at->host, at->port, Deadline::after(std::min<Duration>(deadline.left(), std::chrono::seconds(5))));
  const auto store = store_of(job, server);
  const std::string owner = server->try_get(kServedByKey, deadline).value_or("");
  const auto refused = give_way(*store, owner.substr(0, owner.find('\n')), mine, deadline);
  if (refused) throw Error(ErrorCode::bad_argument, refused->why);
  if (const std::string other = claim(*store, mine, deadline); !other.empty()) {
    why = fmt::format("the store at {} has a rank {} already, {}", address, launch.rank, shown_claim(other));
    return nullptr;
  }
  tell(address);
  if (store->add("weft/ranks", 1, deadline) == launch.size) place.remove(address);  // all ranks have come
  return store;
}

std::shared_ptr<Store> JobStores::by_rendezvous_file(const std::string& key, const std::string& host,
                                                     const LaunchInfo& launch, const std::string& job,
                                                     Deadline deadline) {
  const Duration limit = deadline.left();
  const Claim mine = claim_of(launch);
  if (is_unknown_host(mine.host))
    throw Error(ErrorCode::unsupported,
                fmt::format("rendezvous: this process cannot determine its host: {}; expected WEFT_STORE as "
                            "host:port, the port not 0",
                            kUnknownHostText));
  // The key contains the host, because ranks must not share the file if they do not share loopback and
  // process numbers.
  const auto place = std::make_shared<const RendezvousFile>(fmt::format("{} {}", mine.host, key));
  if (launch.rank == 0) serve_and_publish(place, host, mine, job, deadline);
  std::string why;
  for (auto pause = std::chrono::milliseconds(1);;
       pause = std::min(2 * pause, std::chrono::milliseconds(50))) {
    if (const auto address = place->find()) {
      try {
        if (auto store = join_published(*place, *address, launch, mine, job, deadline, why)) return store;
      } catch (const Error& e) {  // perhaps the server is ending, and another server will be published
        if (why.empty() || !deadline.passed()) why = e.what();
      }
    }
    if (deadline.passed())
      throw Error(ErrorCode::timeout,
                  fmt::format("rendezvous: rank 0 did not write into {} where it serves within {} ({})",
                              place->path(), shown_duration(limit), why.empty() ? "it is not there" : why));
    sleep_noticing(std::min<Duration>(pause, deadline.left()));
  }
}

}  // namespace

Rendezvous meet_by_env(Context& context, Deadline deadline) {
  const LaunchInfo launch = find_launch_info(context);
  return {.store = launch.launcher == Launcher::none ? make_local_store()
                                                     : context.attached<JobStores>().open(launch, deadline),
          .rank = launch.rank,
          .size = launch.size};
}

}  // namespace weft
