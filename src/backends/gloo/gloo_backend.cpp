// Gloo over TCP. The backend uses Gloo's own collective if that is faster than an exchange between all pairs.
// Before each collective, the ranks announce their calls to each other, because Gloo ends the process if
// calls differ.
#include <fmt/format.h>
#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/broadcast.h>
#include <gloo/config.h>
#include <gloo/context.h>
#include <gloo/reduce.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>

#include "backends/gloo/connections.hpp"
#include "backends/gloo/links.hpp"
#include "backends/test_hooks.hpp"
#include "base/parse_number.hpp"
#include "host/peers.hpp"
#include "host/peers/process_state.hpp"
#include "reduce/reduce.hpp"
#include "weft/backends/blocking.hpp"
#include "weft/backends/join.hpp"
#include "weft/backends/op_table.hpp"
#include "weft/backends/plugin.hpp"
#include "weft/base/env.hpp"

namespace weft::gloo_backend {
namespace {

constexpr std::uint64_t kExchange = 0x42ull << 56;  // slots of exchange(), see links.cpp
constexpr std::uint64_t kBootstrapInfo = 2;         // the version of its form
// Gloo gets no time-out, because the group watches the deadlines.
constexpr auto kForever = std::chrono::milliseconds(std::chrono::hours(24 * 30));

::gloo::transport::tcp::attr loopback() { return {"127.0.0.1"}; }

// Returns the network on which Gloo listens. The user must choose it, because Gloo does not authenticate its
// clients.
::gloo::transport::tcp::attr chosen_interface(const GroupInit& b, std::string_view because) {
  const auto name = env::get("WEFT_INTERFACE");
  if (!name)
    throw Error(
        ErrorCode::unsupported,
        fmt::format(
            "group \"{}\": {} and WEFT_INTERFACE is not set; expected the network interface that gloo "
            "may listen on",
            b.name, because));
  ::gloo::transport::tcp::attr where;
  where.iface = *name;
  return where;
}

struct Connection {
  std::shared_ptr<::gloo::Context> context;
  std::vector<pid_t> processes;  // by rank; 0: this process, or a process of another host
};

Connection connect(const GroupInit& b, bool check) {
  if (b.size == 1) return {std::make_shared<::gloo::Context>(b.rank, b.size), {0}};
  const std::string test_host = test_hooks(b).host;
  const std::string host = test_host.empty() ? host_peers_of(b.context).self().host : test_host;
  const auto word = [](bool on) { return std::string(on ? "on" : "off"); };
  // "on host process"
  std::vector<std::string> hosts = join(b, "gloo", fmt::format("{} {} {}", word(check), host, ::getpid()),
                                        Links::layout() + kExchange + kBootstrapInfo);
  std::vector<pid_t> processes(hosts.size());
  for (int r = 0; r < b.size; ++r) {
    std::string& info = hosts[static_cast<std::size_t>(r)];
    const std::size_t space = info.find(' ');
    if (const std::string theirs = info.substr(0, space); theirs != word(check))
      throw Error(
          Failure{.code = ErrorCode::mismatch,
                  .text = fmt::format("group \"{}\": WEFT_GLOO_CHECK is {} on rank {}, {} on rank {}; "
                                      "expected the same on all ranks [rank {}]",
                                      b.name, theirs, r, word(check), b.rank, b.rank),
                  .ranks = {std::min(r, b.rank), std::max(r, b.rank)}});
    info.erase(0, space + 1);
    const std::size_t end = std::min(info.rfind(' '), info.size());
    const auto process = parse_integer<pid_t>(std::string_view(info).substr(std::min(end + 1, info.size())));
    info.erase(end);
    if (info == host && !is_unknown_host(host) && process && *process != ::getpid())
      processes[static_cast<std::size_t>(r)] = *process;
  }
  const bool one_host = std::all_of(hosts.begin(), hosts.end(), [&](const auto& h) { return h == host; });
  const std::string because = std::none_of(hosts.begin(), hosts.end(), is_unknown_host)
                                  ? "the ranks are on several hosts"
                                  : fmt::format("a rank cannot determine its host ({})", kUnknownHostText);
  const ::gloo::transport::tcp::attr where = one_host ? loopback() : chosen_interface(b, because);
  const std::shared_ptr<::gloo::Context> context = connect_all(b, where, processes);
  context->setTimeout(kForever);
  withdraw(b, "gloo");  // ranks that are connected have read the infos
  return {context, std::move(processes)};
}

// Finds out which ranks of this host have died. A broken connection shows a death sooner, but not if a forked
// child of the dead rank still holds copies of its sockets. When a rank leaves, it announces this, and its
// process may end a moment later. So a rank counts as dead only after two checks. For use by one thread at a
// time.
class Deaths {
 public:
  explicit Deaths(std::vector<pid_t> processes)
      : processes_(std::move(processes)), ended_(processes_.size()) {}
  /// `stays(rank)` returns whether the rank has not announced that it leaves.
  template <class F>
  std::optional<int> look(const F& stays) noexcept {
    constexpr auto kEvery = std::chrono::milliseconds(200);
    constexpr std::size_t kAtOnce = 64;
    const auto now = Clock::now();
    if (now < next_look_) return std::nullopt;
    next_look_ = now + kEvery;
    for (std::size_t i = 0; i < std::min(kAtOnce, processes_.size()); ++i) {
      const std::size_t r = std::exchange(next_, (next_ + 1) % processes_.size());
      if (processes_[r] == 0 || !stays(static_cast<int>(r)) || !has_ended(processes_[r])) continue;
      if (ended_[r]) return static_cast<int>(r);
      ended_[r] = true;
    }
    return std::nullopt;
  }

 private:
  const std::vector<pid_t> processes_;
  std::vector<bool> ended_;  // ended at the last look
  std::size_t next_ = 0;
  Clock::time_point next_look_{};
};

// Gloo requires a type, but uses only its size.
template <std::size_t kBytes>
struct Element {
  std::byte bytes[kBytes];
};
template <class F>
void with_element(DType dtype, const F& f) {
  switch (size_bytes(dtype)) {
    case 1: return f(Element<1>{});
    case 2: return f(Element<2>{});
    case 4: return f(Element<4>{});
    case 8: return f(Element<8>{});
    default: return f(Element<16>{});
  }
}

class GlooBackend final : public BlockingBackend {
 public:
  explicit GlooBackend(const GroupInit& b)
      : GlooBackend(b, env::is_on("WEFT_GLOO_CHECK"), UnexpectedLimits::from_env()) {}
  ~GlooBackend() override { end(); }

  const Traits& traits() const noexcept override { return traits_; }
  bool healthy() noexcept override try {
    if (failed()) return false;
    if (const auto rank = deaths_.look([&](int r) { return links_.stays(r); }))
      fail(Failure{.code = ErrorCode::peer_lost,
                   .text = fmt::format("rank {} was lost: its process has ended", *rank),
                   .ranks = {*rank}});
    return !failed();
  } catch (const std::exception&) {  // no memory for a text: tried again at the next look
    return !failed();
  }
  std::vector<int> missing(const OpState& s, std::string& story) noexcept override {
    if (check_ || !row(s.op).collective) return links_.missing(s, story);
    story = "Gloo cannot report which ranks are missing (WEFT_GLOO_CHECK is off)";
    return {};
  }
  std::optional<MessageInfo> probe(int source, int tag) noexcept override {
    return links_.probe(source, tag);
  }
  bool ask(const OpState& s) noexcept override try {
    return (!check_ && row(s.op).collective) || links_.ask(s);
  } catch (const std::exception&) {  // out of memory: then without
    return true;
  }
  std::vector<LastCall> last_calls() noexcept override try {
    return links_.last_calls(check_);
  } catch (const std::exception&) {  // out of memory: then without
    return {};
  }

 protected:
  void start(OpState& s) noexcept override { links_.start(s); }
  void interrupt() noexcept override { links_.interrupt(); }

  void run(const OpState& s) override {
    links_.begin(s);
    if (check_ || s.op == Op::barrier) links_.agree(s);
    try {
      carry_out(s);
    } catch (const std::exception&) {
      // If calls are compared, a rank leaves only after its part of the agreed calls is done. So a call does
      // not break because a rank leaves.
      if (check_) throw;
      if (auto why = links_.leaving(s)) throw Error(*std::move(why));
      throw;
    }
    links_.over();
  }

 private:
  // Environment variables are read, and bad values refused, before the ranks meet.
  GlooBackend(const GroupInit& b, bool check, UnexpectedLimits unexpected)
      : GlooBackend(b, check, unexpected, connect(b, check)) {}
  GlooBackend(const GroupInit& b, bool check, UnexpectedLimits unexpected, Connection connection)
      : BlockingBackend(b),
        rank_(b.rank),
        size_(b.size),
        check_(check),
        traits_(*known_traits("gloo")),
        context_(std::move(connection.context)),
        deaths_(std::move(connection.processes)),
        links_(context_, unexpected,
               {.finished = [this](OpState& s) { finished(s); },
                .found = [this](OpState& s, const MessageInfo& found) { finished(s, found); },
                .refuse = [this](OpState& s, Failure why) { refuse(s, std::move(why)); },
                .fail = [this](const Failure& why) { fail(why); },
                .before_leave = test_hooks(b).before_leave}) {
    traits_.guarantees.checks_calls = traits_.guarantees.names_absent = check_;
    begin();
  }
  void carry_out(const OpState& s) {
    switch (s.op) {
      case Op::barrier: return;  // the comparison of calls was already a barrier
      case Op::all_reduce: return all_reduce(s);
      case Op::reduce: return reduce_to_root(s);
      case Op::broadcast: return broadcast(s);
      case Op::all_gather: return all_gather(s);
      case Op::all_gather_v:
      case Op::gather:
      case Op::scatter:
      case Op::all_to_all:
      case Op::all_to_all_v: return exchange(s);
      case Op::none:
      case Op::reduce_scatter:
      case Op::reduce_scatter_v:
      case Op::send:
      case Op::recv:
      case Op::scan:
      case Op::exscan:
      case Op::exchange:
      case Op::wait_message: break;
    }
    throw Error(ErrorCode::unsupported, fmt::format("{}: gloo does not have it", name(s.op)));
  }

  static auto combine(const OpState& s) {
    return [dtype = s.dtype, op = s.reduce](void* to, const void* a, const void* b, std::size_t n) {
      const std::array<const std::byte*, 2> in{static_cast<const std::byte*>(a),
                                               static_cast<const std::byte*>(b)};
      std::byte* const out = static_cast<std::byte*>(to);
      weft::reduce(dtype, op, in, {&out, 1}, static_cast<std::int64_t>(n));
    };
  }
  template <class T>
  static T* as(const std::byte* p) {
    return reinterpret_cast<T*>(const_cast<std::byte*>(p));
  }
  std::uint32_t tag(const OpState& s) const { return static_cast<std::uint32_t>(s.call); }

  void all_reduce(const OpState& s) {
    if (s.out_count == 0) return;
    with_element(s.dtype, [&](auto element) {
      using T = decltype(element);
      ::gloo::AllreduceOptions options(context_);
      if (s.in != s.out) options.setInput(as<T>(s.in), static_cast<std::size_t>(s.in_count));
      options.setOutput(as<T>(s.out), static_cast<std::size_t>(s.out_count));
      options.setReduceFunction(combine(s));
      options.setTag(tag(s));
      ::gloo::allreduce(options);
    });
  }

  void reduce_to_root(const OpState& s) {
    if (s.in_count == 0) return;
    std::vector<std::byte> unused;  // on every rank Gloo works in `out`
    const std::byte* out = s.out;
    if (rank_ != s.root) {
      unused.resize(static_cast<std::size_t>(s.in_count * size_bytes(s.dtype)));
      out = unused.data();
    }
    with_element(s.dtype, [&](auto element) {
      using T = decltype(element);
      ::gloo::ReduceOptions options(context_);
      if (s.in != out) options.setInput(as<T>(s.in), static_cast<std::size_t>(s.in_count));
      options.setOutput(as<T>(out), static_cast<std::size_t>(s.in_count));
      options.setReduceFunction(combine(s));
      options.setRoot(s.root);
      options.setTag(tag(s));
      ::gloo::reduce(options);
    });
  }

  void broadcast(const OpState& s) {
    if (s.out_count == 0) return;
    ::gloo::BroadcastOptions options(context_);
    const auto bytes = static_cast<std::size_t>(s.out_count * size_bytes(s.dtype));
    if (rank_ == s.root && s.in != s.out) options.setInput(as<char>(s.in), bytes);
    options.setOutput(as<char>(s.out), bytes);
    options.setRoot(s.root);
    options.setTag(tag(s));
    ::gloo::broadcast(options);
  }

  void all_gather(const OpState& s) {
    if (s.in_count == 0) return;
    ::gloo::AllgatherOptions options(context_);
    const auto bytes = static_cast<std::size_t>(s.in_count * size_bytes(s.dtype));
    if (s.in != s.out + static_cast<std::size_t>(rank_) * bytes) options.setInput(as<char>(s.in), bytes);
    options.setOutput(as<char>(s.out), bytes * static_cast<std::size_t>(size_));
    options.setTag(tag(s));
    ::gloo::allgather(options);
  }

  // Sends each block directly from its source to its destination, like Gloo's own gather and all_to_all. But
  // in weft blocks may lie anywhere.
  void exchange(const OpState& s) {
    const auto element = static_cast<std::size_t>(size_bytes(s.dtype));
    const auto bytes = [&](std::int64_t n) { return static_cast<std::size_t>(n) * element; };
    // The extent is the end of the last block, because blocks of v-forms may leave gaps.
    std::int64_t in_end = 0, out_end = 0;
    for (int r = 0; r < size_; ++r) {
      const BufferBlock give = in_block(s, r, size_), get = out_block(s, r, size_);
      in_end = std::max(in_end, give.offset + give.count);
      out_end = std::max(out_end, get.offset + get.count);
    }
    const UnboundBuffer in = context_->createUnboundBuffer(as<void>(s.in), bytes(in_end));
    const UnboundBuffer out = context_->createUnboundBuffer(as<void>(s.out), bytes(out_end));
    const std::uint64_t slot = kExchange + s.call;
    int sends = 0, receives = 0;
    for (int i = 1; i < size_; ++i) {
      const int from = (rank_ + size_ - i) % size_, to = (rank_ + i) % size_;
      if (const BufferBlock get = out_block(s, from, size_); get.count > 0) {
        out->recv(from, slot, bytes(get.offset), bytes(get.count));
        ++receives;
      }
      if (const BufferBlock give = in_block(s, to, size_); give.count > 0) {
        in->send(to, slot, bytes(give.offset), bytes(give.count));
        ++sends;
      }
    }
    const BufferBlock give = in_block(s, rank_, size_), get = out_block(s, rank_, size_);
    if (give.count > 0 && get.count > 0 && s.in + bytes(give.offset) != s.out + bytes(get.offset))
      std::memcpy(s.out + bytes(get.offset), s.in + bytes(give.offset), bytes(give.count));
    while (receives-- > 0) out->waitRecv(kForever);
    while (sends-- > 0) in->waitSend(kForever);
  }

  const int rank_, size_;
  const bool check_;
  Traits traits_;
  const std::shared_ptr<::gloo::Context> context_;
  Deaths deaths_;
  Links links_;
};

}  // namespace
}  // namespace weft::gloo_backend

WEFT_BACKEND_PLUGIN {
  static const std::string version =
      fmt::format("Gloo {}.{}.{}", GLOO_VERSION_MAJOR, GLOO_VERSION_MINOR, GLOO_VERSION_PATCH);
  static const weft::BackendPlugin plugin{
      .name = "gloo",
      .version = version.c_str(),
      .make = [](const weft::GroupInit& b) -> std::unique_ptr<weft::Backend> {
        return std::make_unique<weft::gloo_backend::GlooBackend>(b);
      },
      .traits = [] { return *weft::known_traits("gloo"); }};
  return &plugin;
}
