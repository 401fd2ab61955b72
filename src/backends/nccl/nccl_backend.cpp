// Streams: a call runs on the group's own stream, behind an event of the caller's stream. So it runs after
// all work that was queued on the caller's stream before the call. The caller's stream waits for the call
// only if the caller requests it (wait_on). The host never waits for a device in this file.
//
// Collectives run on one communicator. Messages cannot share that communicator, because NCCL performs the
// operations of a communicator one after the other. A send whose receiver is late would hold up everything
// behind it, and two ranks that both send before they receive would wait forever. So every (source,
// destination, tag) has a separate lane. It is a communicator of the two ranks, made at its first use, in
// which only the source sends. A message from a rank to itself is a copy.
//
// A background thread sends all requests to the Store (Notices). Other threads wait for this thread at most
// half a second, and only when the group ends, or when it fails and the Store answers.
//
// Failures: the first cause is a key in the Store. A rank that has a cause, or finds one in the Store, aborts
// its communicators on a separate thread. An abort waits for kernels, which wait for streams of the caller.
// After the abort no rank accesses the callers' memory any more.
#include "backends/nccl/nccl_backend.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>
#include <tuple>

#include "backends/last_calls.hpp"
#include "backends/nccl/channel.hpp"
#include "backends/nccl/endings.hpp"
#include "backends/nccl/notices.hpp"
#include "base/hash.hpp"
#include "base/parse_number.hpp"
#include "base/signals.hpp"
#include "host/cores/usable_cores.hpp"
#include "store/duration_text.hpp"
#include "weft/backends/blocking.hpp"
#include "weft/backends/first_cause.hpp"
#include "weft/backends/join.hpp"
#include "weft/backends/matching.hpp"
#include "weft/backends/op_table.hpp"
#include "weft/backends/plugin.hpp"
#include "weft/base/env.hpp"
#include "weft/base/name_ranks.hpp"

namespace weft::nccl {
namespace {

constexpr Duration kLookAtMost = std::chrono::milliseconds(500);
// how long this thread waits for peers to leave; then a separate thread waits
constexpr auto kLeave = std::chrono::seconds(1);
constexpr auto kPart = std::chrono::minutes(10);  // how long that thread waits; then it aborts the other
                                                  // communicators
constexpr std::size_t kMostLanes = 64;
// A digest of the values that must be equal on all ranks: the data that they exchange through the store, and
// the number of lanes of a group.
constexpr std::uint64_t kLayout = digest_of(sizeof(UniqueId), kMostLanes);

// Returns the value of the variable, 1 to 32, which CUDA itself reads at its first use in a process.
int hardware_queues() {
  constexpr int kDefault = 8;
  const int n = parse_integer<int>(env::get("CUDA_DEVICE_MAX_CONNECTIONS").value_or("")).value_or(0);
  return n >= 1 && n <= 32 ? n : kDefault;
}

class NcclBackend final : public Backend {
 public:
  NcclBackend(const NcclApi& api, const GroupInit& b);
  ~NcclBackend() override;
  const Traits& traits() const noexcept override { return traits_; }
  void post(OpState& s) noexcept override;
  Step poll(OpState& s) noexcept override;
  bool healthy() noexcept override;
  bool ask(const OpState& s) noexcept override;
  std::vector<int> missing(const OpState& s, std::string& story) noexcept override;
  void fail(const Failure& why) noexcept override { raise(why); }
  Failure failure() const override;
  bool quiet() const noexcept override;
  bool quiesce(Deadline deadline, std::span<const MemoryRange> exposed) noexcept override;
  std::vector<LastCall> last_calls() noexcept override;
  void announce_sleep(bool) noexcept override {}  // no rank rings, because a device cannot
  void batch(bool begin) noexcept override;
  bool wait_on(OpState& s, Stream stream) noexcept override;
  void check_stream(Stream stream, bool calls) override;

 private:
  /// The messages of one (source, destination, tag).
  struct Lane {
    std::unique_ptr<Channel> channel;  // in a lane to this rank itself only its stream is used
    std::string key;                   // the key under which the source publishes the communicator's id
    bool named = false;                // the id is known
    bool own = false;                  // a lane to this rank itself
    std::deque<OpState*> sends, receives;
  };

  void connect(const GroupInit& b);
  Lane& lane(const OpState& s);
  bool advance(Lane& lane);
  bool advance(OpState& s);
  void match_own(Lane& lane);
  void drop(Ticket& t) noexcept {
    events_->give_back(t.ready);
    events_->give_back(t.done);
  }
  /// Runs `step` on the device, unless the group has failed; an exception of `step` fails the group.
  template <class F>
  void guarded(const OpState* s, const F& step) noexcept;
  void raise(const Failure& why) noexcept;
  void abort() noexcept;
  void leave() noexcept;
  void tell_leave() noexcept;
  std::string oversubscribed() const;

  const int rank_, size_;
  const std::string token_, name_;
  const std::shared_ptr<Store> store_;
  const FirstCause first_cause_;
  Traits traits_;
  Driver driver_;

  // Guards the members up to the next blank line. It is held for a few calls of the driver, and never during
  // a wait. abort() takes the communicators out, and ends them without the lock.
  std::mutex mutex_;
  std::byte* word_ = nullptr;
  std::unique_ptr<EventPool> events_;
  std::unique_ptr<Channel> main_;
  std::map<std::tuple<int, int, int>, Lane> lanes_;
  std::uint64_t batch_ = 0, open_batch_ = 0;
  std::uint64_t came_ = 0;  // the number of collectives posted
  LastCall last_{.state = LastCall::State::none};
  Event probe_ = nullptr;  // recorded on callers' streams, to find out whether they belong to this device

  Clock::time_point waits_since_{}, looked_{};  // used only by healthy()
  std::uint64_t waits_at_ = 0;
  std::atomic<int> communicators_{1};  // the number of communicators of this rank

  std::mutex raise_mutex_;          // held by the thread that asks the Store for the first cause
  mutable std::mutex cause_mutex_;  // always locked after the others
  std::atomic<bool> failed_{false};
  Failure cause_;
  std::shared_ptr<Abortion> abortion_;
  std::unique_ptr<Notices> notices_;  // null in a group of one rank
};

NcclBackend::NcclBackend(const NcclApi& api, const GroupInit& b)
    : rank_(b.rank),
      size_(b.size),
      token_(b.token),
      name_(b.name),
      store_(b.size > 1 ? b.store : nullptr),
      first_cause_(store_, b.token),
      traits_(*known_traits("nccl")),
      driver_{api} {
  if (const std::string why = obstacle(api); !why.empty())
    throw Error(ErrorCode::unsupported, fmt::format("group \"{}\": nccl: {} [rank {}]", b.name, why, b.rank));
  driver_.check("cudaGetDevice", api.cudaGetDevice(&driver_.device));
  traits_.device_index = static_cast<std::int16_t>(driver_.device);
  traits_.spin = b.ranks_here <= usable_cores();
  try {
    connect(b);
    if (store_) notices_ = std::make_unique<Notices>(store_, token_, rank_);
  } catch (const Error&) {  // the group notifies the others
    main_.reset();
    if (word_ != nullptr) api.cudaFree(word_);
    throw;
  }
}

void NcclBackend::connect(const GroupInit& b) {
  const auto began = Clock::now();
  void* word = nullptr;
  driver_.check("cudaMalloc", driver_.api.cudaMalloc(&word, 1));
  word_ = static_cast<std::byte*>(word);
  events_ = std::make_unique<EventPool>(driver_);
  main_ = std::make_unique<Channel>(driver_, *events_, rank_, size_, word_);
  UniqueId id{};
  if (rank_ == 0) driver_.check("ncclGetUniqueId", driver_.api.ncclGetUniqueId(&id));
  // Each rank announces its arrival, so that absent ranks can be named. NCCL itself only waits.
  const std::string info =
      join(b, "nccl/here", std::string_view(id.bytes, rank_ == 0 ? sizeof(id.bytes) : 0), kLayout)[0];
  std::memcpy(id.bytes, info.data(), std::min(info.size(), sizeof(id.bytes)));
  main_->connect(id);
  for (Duration nap = kNap;; nap = std::min<Duration>(2 * nap, std::chrono::milliseconds(5))) {
    main_->advance(0);
    if (main_->connected()) {
      withdraw(b, "nccl/here");
      return;
    }
    if (b.deadline.passed())
      throw Error(ErrorCode::timeout, fmt::format("group \"{}\": NCCL did not connect the ranks within {} "
                                                  "[rank {}]",
                                                  name_, shown_seconds(Clock::now() - began), rank_));
    if (Clock::now() - looked_ > kLookAtStore) {
      looked_ = Clock::now();
      throw_first_cause(b);
    }
    std::this_thread::sleep_for(nap);
  }
}

// If the group has not failed, first ends the communicators (leave()); otherwise waits up to a second
// (kLeave) for their abort. If an abort hangs, GroupState::end() never destroys the group, so this destructor
// does not run.
NcclBackend::~NcclBackend() {
  try {
    const DeviceScope scope(driver_);
    if (!failed_.load()) leave();
    if (failed_.load()) {
      for (const Deadline limit = Deadline::after(kLeave); !quiet() && !limit.passed();)
        std::this_thread::sleep_for(kNap);
    }
    lanes_.clear();
    main_.reset();
    events_.reset();
    driver_.api.cudaFree(word_);
  } catch (const std::exception&) {  // the device is lost: nothing must be freed on it
  }
}

// Notifies ranks that may still wait for this rank that it leaves: "rank:calls rank:calls …".
void NcclBackend::tell_leave() noexcept {
  if (!store_) return;
  try {
    const Deadline answer = Deadline::after(kStoreAnswer);
    const std::string mine = fmt::format("{}:{} ", rank_, came_), left_key = Notices::left_key(token_);
    for (std::string there;;) {
      const std::string now = store_->compare_set(left_key, there, there + mine, answer);
      if (now == there + mine) return;
      there = now;
    }
    // the Store has ended before the groups, so the other ranks have ended, too
  } catch (const std::exception&) {}
}

// Ends the communicators together with the peers; if the peers take long, on a separate thread.
void NcclBackend::leave() noexcept {
  tell_leave();
  const auto parting = std::make_shared<Parting>(Parting{driver_, first_cause_, {}});
  const auto take = [&](Channel& c) {
    if (Comm* const comm = c.release_comm()) parting->comms.push_back(comm);
  };
  take(*main_);
  for (auto& entry : lanes_) take(*entry.second.channel);
  for (Comm* const comm : parting->comms) driver_.api.ncclCommFinalize(comm);
  if (parting->until(Deadline::after(kLeave))) return;
  const auto rest = [parting] {
    begin_thread(parting->driver);
    if (parting->until(Deadline::after(kPart))) return;
    for (Comm* const comm : parting->comms) parting->driver.api.ncclCommAbort(comm);
  };
  try {
    const NoSignals inherited;
    std::thread(rest).detach();
  } catch (const std::system_error&) {
    rest();  // no thread can be created: this thread waits for the peers
  }
}

template <class F>
void NcclBackend::guarded(const OpState* s, const F& step) noexcept {
  Failure why;
  try {
    const std::lock_guard lock(mutex_);
    if (failed_.load(std::memory_order_acquire)) return;
    const DeviceScope scope(driver_);
    step();
    return;
  } catch (const Error& e) {
    why = {e.code(), e.what(), s ? s->op : Op::none, s ? s->call : kNoCall, {}};
  } catch (const std::exception& e) {
    why = {ErrorCode::system, e.what(), s ? s->op : Op::none, s ? s->call : kNoCall, {}};
  }
  if (s != nullptr) why.text = fmt::format("{}: {}", name(s->op), why.text);
  raise(why);
}

void NcclBackend::post(OpState& s) noexcept {
  Ticket& t = *new (s.scratch.data()) Ticket;
  guarded(&s, [&] {
    t.ready = events_->take();
    driver_.check("cudaEventRecord",
                  driver_.api.cudaEventRecord(t.ready, static_cast<CudaStream>(s.stream.handle)));
    if (row(s.op).collective) {
      came_ = s.call + 1;
      last_ = last_call_of(rank_, LastCall::State::finished, record_of(s, size_));
      t.batch = open_batch_;
      t.channel = main_.get();
      main_->queue(s);
      main_->advance(open_batch_);
      return;
    }
    Lane& l = lane(s);
    if (l.own) {
      (s.op == Op::send ? l.sends : l.receives).push_back(&s);
    } else {
      t.channel = l.channel.get();
      l.channel->queue(s);
    }
    advance(l);
  });
}

Step NcclBackend::poll(OpState& s) noexcept {
  Step found = Step::pending;
  guarded(&s, [&] {
    if (advance(s)) found = Step::advanced;
    Ticket& t = ticket(s);
    if (t.stage != Stage::running) return;
    const CudaResult r = driver_.api.cudaEventQuery(t.done);
    if (r == CudaResult::not_ready) {
      if (t.channel) t.channel->check_health();
      return;
    }
    driver_.check("cudaEventQuery", r);
    drop(t);
    found = Step::done;
  });
  // If this rank has noticed the end of a call, the call stays finished, even if the group has failed; later
  // calls fail.
  return found != Step::done && failed_.load(std::memory_order_acquire) ? Step::failed : found;
}

bool NcclBackend::wait_on(OpState& s, Stream stream) noexcept {
  bool told = false;
  guarded(&s, [&] {
    advance(s);
    Ticket& t = ticket(s);
    if (t.stage != Stage::running) return;
    driver_.check("cudaStreamWaitEvent",
                  driver_.api.cudaStreamWaitEvent(static_cast<CudaStream>(stream.handle), t.done, 0));
    told = true;
  });
  return told;
}

void NcclBackend::check_stream(Stream given, bool calls) {
  auto* const stream = static_cast<CudaStream>(given.handle);
  if (stream == nullptr) {  // a default stream; wait_on() has made the group's device the current one
    const Device own{DeviceKind::cuda, static_cast<std::int16_t>(driver_.device)};
    if (given != Stream{} && given.device != own)
      throw Error(ErrorCode::bad_argument,
                  fmt::format("the stream is the default one of {}; expected {}'s, or a "
                              "stream with a handle",
                              to_string(given.device), to_string(own)));
    return;
  }
  const std::lock_guard lock(mutex_);
  if (failed_.load(std::memory_order_acquire)) return;
  const DeviceScope scope(driver_);
  const NcclApi& api = driver_.api;
  CaptureStatus capture = CaptureStatus::none;
  CudaResult r = api.cudaStreamIsCapturing(stream, &capture);
  if (r == CudaResult::success && capture != CaptureStatus::none)
    throw Error(ErrorCode::unsupported,
                "the stream is being captured into a graph, and a call that is replayed would have no Work; "
                "expected one that is not");
  if (r == CudaResult::success && calls) {
    if (probe_ == nullptr) probe_ = events_->take();
    r = api.cudaEventRecord(probe_, stream);
  }
  if (r == CudaResult::invalid_resource_handle)
    throw Error(ErrorCode::bad_argument, fmt::format("the stream is no stream of cuda:{}; expected one (the "
                                                     "device of the group)",
                                                     driver_.device));
  driver_.check(calls ? "cudaEventRecord" : "cudaStreamIsCapturing", r);
}

void NcclBackend::batch(bool begin) noexcept {
  open_batch_ = begin ? ++batch_ : 0;
  if (!begin) guarded(nullptr, [&] { main_->advance(0); });
}

bool NcclBackend::advance(OpState& s) {
  return row(s.op).collective ? main_->advance(open_batch_) : advance(lane(s));
}

NcclBackend::Lane& NcclBackend::lane(const OpState& s) {
  const int src = s.op == Op::send ? rank_ : s.peer, dst = s.op == Op::send ? s.peer : rank_;
  const auto at = lanes_.find({src, dst, s.tag});
  if (at != lanes_.end()) return at->second;
  if (lanes_.size() == kMostLanes)
    throw Error(ErrorCode::unsupported,
                fmt::format("tag {} would be the {}th pair of peer and tag of this rank; each takes a "
                            "communicator of NCCL, and {} are the most",
                            s.tag, kMostLanes + 1, kMostLanes));
  auto channel = std::make_unique<Channel>(driver_, *events_, rank_ == src ? 0 : 1, 2, word_);
  Lane& l = lanes_[{src, dst, s.tag}];
  l.channel = std::move(channel);
  l.own = src == dst;
  if (l.own) return l;
  l.key = fmt::format("{}/nccl/lane/{}>{}/{}", token_, src, dst, s.tag);
  if (rank_ == src) {
    UniqueId id{};
    driver_.check("ncclGetUniqueId", driver_.api.ncclGetUniqueId(&id));
    notices_->put(l.key, std::string(id.bytes, sizeof(id.bytes)));
    l.channel->connect(id);
    l.named = true;
  } else {
    notices_->want(l.key);
  }
  communicators_.fetch_add(1, std::memory_order_relaxed);
  return l;
}

bool NcclBackend::advance(Lane& l) {
  if (l.own) {
    const std::size_t before = l.sends.size();
    match_own(l);
    return l.sends.size() != before;
  }
  if (!l.named) {
    const std::optional<std::string> text = notices_->got(l.key);
    if (!text) return false;
    UniqueId id{};
    std::memcpy(id.bytes, text->data(), std::min(text->size(), sizeof(id.bytes)));
    l.channel->connect(id);
    l.named = true;
  }
  return l.channel->advance(0);
}

void NcclBackend::match_own(Lane& l) {
  const CudaStream stream = l.channel->stream();
  while (!l.sends.empty() && !l.receives.empty()) {
    OpState &from = *l.sends.front(), &to = *l.receives.front();
    if (from.dtype != to.dtype || from.in_count != to.out_count)
      throw Error(ErrorCode::mismatch,
                  fmt::format("rank {} sends itself {} x{} [tag {}] and receives {} x{}", rank_,
                              name(from.dtype), from.in_count, from.tag, name(to.dtype), to.out_count));
    for (OpState* const s : {&from, &to})
      driver_.check("cudaStreamWaitEvent", driver_.api.cudaStreamWaitEvent(stream, ticket(*s).ready, 0));
    if (from.in_count > 0)
      driver_.check("cudaMemcpyAsync",
                    driver_.api.cudaMemcpyAsync(
                        to.out, from.in, static_cast<std::size_t>(from.in_count * size_bytes(from.dtype)),
                        CopyKind::device_to_device, stream));
    for (OpState* const s : {&from, &to}) {
      Ticket& t = ticket(*s);
      t.done = events_->take();
      driver_.check("cudaEventRecord", driver_.api.cudaEventRecord(t.done, stream));
      t.stage = Stage::running;
    }
    l.sends.pop_front();
    l.receives.pop_front();
  }
}

// The slow path of a waiting rank: from time to time it checks a few keys of the Store, which another thread
// reads.
bool NcclBackend::healthy() noexcept {
  if (failed_.load(std::memory_order_acquire)) return false;
  if (!notices_) return true;
  std::uint64_t came = 0;
  LastCall last;
  {
    const std::lock_guard lock(mutex_);
    came = came_;
    last = last_;
  }
  try {
    const auto now = Clock::now();
    if (waits_at_ != came) {
      waits_at_ = came;
      waits_since_ = now;
    }
    // The longer the wait, the more rarely it checks, so that a thousand waiting ranks do not overload the
    // Store.
    const Duration pause = std::clamp<Duration>((now - waits_since_) / 4, kLookAtStore, kLookAtMost);
    if (now - std::max(looked_, waits_since_) >= pause) {
      looked_ = now;
      notices_->look(came, last);
    }
    const std::optional<Failure> why = notices_->found();
    if (!why) return true;
    raise(*why);
    return false;
  } catch (const std::exception&) {  // no memory for the check; the deadline still holds
    return true;
  }
}

bool NcclBackend::ask(const OpState& s) noexcept try {
  return !notices_ || !row(s.op).collective || notices_->ask(s.call, size_);
} catch (const std::exception&) {  // no memory for the request
  return true;
}

// Called after ask().
std::vector<int> NcclBackend::missing(const OpState& s, std::string& story) noexcept {
  if (!row(s.op).collective) {
    story = s.op == Op::send ? not_received(s) : not_sent(s, {&s.peer, 1}, s.peer, 0);
    story += oversubscribed();
    return {s.peer};
  }
  const auto told = notices_ ? notices_->silent() : std::vector<int>{};
  if (!told) {
    story = "the Store does not say which ranks have arrived" + oversubscribed();
    return {};
  }
  const std::vector<int>& silent = *told;
  story = silent.empty() ? std::string("all ranks wait for it: the devices are stuck or busy")
                         : fmt::format("{} {} not announced a wait for it", name_ranks(silent),
                                       silent.size() == 1 ? "has" : "have");
  story += oversubscribed();
  return silent;
}

std::vector<LastCall> NcclBackend::last_calls() noexcept try {
  if (!notices_) return {};
  std::vector<LastCall> calls = notices_->last_calls(size_);
  for (int r = 0; r < size_; ++r) calls[static_cast<std::size_t>(r)].rank = r;
  LastCall& own = calls[static_cast<std::size_t>(rank_)];
  const std::lock_guard lock(mutex_);
  own = last_;  // the group knows whether the call is finished
  own.answered = true;
  return calls;
} catch (const std::exception&) {  // no memory: the list stays empty
  return {};
}

// Returns a hint for a call that does not end. The device runs kernels of only a limited number of streams at
// once. A kernel that is queued behind a kernel that waits for a peer does not begin.
std::string NcclBackend::oversubscribed() const {
  const int have = communicators_.load(std::memory_order_relaxed);
  const int queues = hardware_queues();
  if (have <= queues) return {};
  return fmt::format(
      "; this rank has {} communicators of NCCL in this group and the device {} queues "
      "(CUDA_DEVICE_MAX_CONNECTIONS), so that one may wait behind another",
      have, queues);
}

void NcclBackend::raise(const Failure& why) noexcept {
  const std::lock_guard one(raise_mutex_);
  if (failed_.load(std::memory_order_acquire)) return;
  Failure first = why;
  if (notices_ && !notices_->answers()) {
    notices_->raise(why);  // for the other ranks; if the Store does not answer now, it is tried again later
  } else {
    first = first_cause_.raise(why);
  }
  {
    const std::lock_guard lock(cause_mutex_);
    cause_ = std::move(first);
    failed_.store(true, std::memory_order_release);
  }
  abort();
}

void NcclBackend::abort() noexcept {
  const auto abortion = std::make_shared<Abortion>(driver_);
  {
    const std::lock_guard lock(mutex_);
    const auto take = [&](Channel& c) {
      if (Comm* const comm = c.release_comm()) abortion->comms.push_back(comm);
      abortion->streams.push_back(c.stream());
    };
    take(*main_);
    for (auto& entry : lanes_) take(*entry.second.channel);
  }
  try {
    start_thread("nccl", [abortion] { Abortion::run(abortion); }).detach();
  } catch (const Error&) {
    Abortion::run(abortion);  // no thread can be created: this thread waits for the device
  }
  const std::lock_guard lock(cause_mutex_);
  abortion_ = abortion;
}

Failure NcclBackend::failure() const {
  const std::lock_guard lock(cause_mutex_);
  return cause_;
}

bool NcclBackend::quiet() const noexcept {
  const std::lock_guard lock(cause_mutex_);
  return abortion_ != nullptr && abortion_->over.load(std::memory_order_acquire);
}

bool NcclBackend::quiesce(Deadline deadline, std::span<const MemoryRange>) noexcept {
  while (!quiet()) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(kNap);
  }
  return true;
}

}  // namespace

std::unique_ptr<Backend> make_backend(const NcclApi& api, const GroupInit& init) {
  return std::make_unique<NcclBackend>(api, init);
}

}  // namespace weft::nccl
