// The Backend over MPI. In a collective, each rank first sends a control message with the call to every rank.
// A rank enters MPI's own collective when the ranks whose data it needs have made the same call. So a
// mismatch never reaches MPI, and a time-out names the ranks that had not arrived. Roots of broadcast and
// scatter, and all ranks except the root of reduce and gather, need no data of other ranks. They do not wait,
// and compare later.
//
// After a failure weft leaks everything that MPI may still use: buffers, requests, the communicator.
#include "backends/mpi/backend.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>

#include "backends/call_numbers.hpp"
#include "backends/last_calls.hpp"
#include "backends/messages/announced_calls.hpp"
#include "backends/messages/peer_messages.hpp"
#include "backends/mpi/control_channel.hpp"
#include "backends/mpi/messages.hpp"
#include "backends/mpi/rounds.hpp"
#include "weft/backends/call_record.hpp"
#include "weft/backends/first_cause.hpp"
#include "weft/backends/op_table.hpp"
#include "weft/backends/plugin.hpp"
#include "weft/base/name_ranks.hpp"

namespace weft::mpi {
namespace {

constexpr std::size_t kAhead = 1024;  // how many calls a rank may be ahead of the comparison
// How long a failure waits for MPI to take its control messages.
constexpr auto kFlush = std::chrono::milliseconds(20);
// how often a rank that waits in another group looks for pings
constexpr auto kLookForPings = std::chrono::milliseconds(20);
constexpr int kLastLooks = 16;  // a leaving rank stops after this many looks in a row without a message
constexpr auto kQuiesceNap = std::chrono::microseconds(200);

class MpiBackend final : public Backend, private MessageMedium {
 public:
  MpiBackend(const GroupInit& b, Process& process, MPI_Comm comm, const Settings& settings)
      : context_(b.context),
        process_(process),
        name_(b.name),
        rank_(b.rank),
        size_(b.size),
        check_(settings.check),
        safe_(settings.safe),
        traits_(*known_traits(kBackend)),
        state_(std::make_unique<KeptMemory>(process, comm, b.rank, b.size,
                                            Limits{settings.safe, settings.max_count})),
        calls_(b.rank, b.size),
        messages_(*this, b.rank, b.size, settings.unexpected) {
    traits_.spin = b.ranks_here <= settings.cores;
    traits_.guarantees.names_absent = traits_.guarantees.checks_calls = check_;
    traits_.guarantees.revocable = traits_.guarantees.quiesces = safe_;
  }

  ~MpiBackend() override {
    if (context_.forked() || !Process::alive() || failed_ || !process_.refuses_thread().empty()) {
      (void)state_.release();
      return;
    }
    leave();
    context_.log().flush();
  }

  const Traits& traits() const noexcept override { return traits_; }

  void post(OpState& s) noexcept override {
    const std::lock_guard guard(mutex_);
    if (failed_) return;
    attempt(s, [&] {
      if (const std::string why = process_.refuses_thread(); !why.empty())
        throw Error(ErrorCode::unsupported, why);
      const auto turn = process_.lock();
      if (row(s.op).collective) {
        announce(s);
      } else {
        post_message(s);
      }
    });
  }

  Step poll(OpState& s) noexcept override {
    const std::lock_guard guard(mutex_);
    if (failed_) return Step::failed;
    if (!process_.refuses_thread().empty()) return Step::pending;  // the right thread polls the call later
    Step step = Step::failed;
    attempt(s, [&] {
      const auto turn = process_.lock();
      const bool news = take_control_messages();
      if (failed_) return;
      step = row(s.op).collective ? collective(s) : message(s);
      if (trouble_) raise(*trouble_);
      if (step == Step::pending && news) step = Step::advanced;
    });
    return failed_ ? Step::failed : step;
  }

  bool healthy() noexcept override {
    const std::lock_guard guard(mutex_);
    if (failed_) return false;
    if (!process_.refuses_thread().empty()) return true;
    OpState nothing;
    attempt(nothing, [&] {
      const auto turn = process_.lock();
      take_control_messages();
      if (!failed_) look_for_leavers();
    });
    return !failed_;
  }

  std::vector<int> missing(const OpState& s, std::string& story) noexcept override {
    const std::lock_guard guard(mutex_);
    if (failed_) {
      story = "the group has failed";
      return {};
    }
    if (row(s.op).collective && !collective_state(s).announced) {
      story = "MPI cannot report which ranks are missing (WEFT_MPI_CHECK is off)";
      return {};
    }
    if (!row(s.op).collective) return messages_.missing(s, story);
    std::vector<int> ranks = awaited_by(s);
    const HoldUp found = messages_.found(ranks);
    if (calls_.late(collective_state(s).sequence).empty()) return tell_all_arrived(found, story);
    story = tell(ranks, found, [](std::span<const int> these) {
      return fmt::format("{} had not arrived", name_ranks(these));
    });
    return ranks;
  }

  bool ask(const OpState& s) noexcept override {
    const std::lock_guard guard(mutex_);
    if (failed_ || (row(s.op).collective && !collective_state(s).announced)) return true;
    if (!process_.refuses_thread().empty()) return true;
    bool settled = true;
    OpState nothing;
    attempt(nothing, [&] {
      const std::vector<int> ranks = awaited_by(s);
      if (ranks.empty()) return;
      const auto turn = process_.lock();
      messages_.ask(s);
      take_control_messages();
      settled = messages_.settled(ranks);
    });
    return settled || failed_;
  }

  std::optional<MessageInfo> probe(int source, int tag) noexcept override {
    const std::lock_guard guard(mutex_);
    std::optional<MessageInfo> found;
    if (failed_ || !process_.refuses_thread().empty()) return found;
    OpState nothing;
    attempt(nothing, [&] {
      const auto turn = process_.lock();
      take_control_messages();
      if (trouble_) raise(*trouble_);
      if (!failed_) found = messages_.probe(source, tag);
    });
    return found;
  }

  // Polls, because MPI delivers a ping to a rank only while that rank polls.
  void answer() noexcept override {
    const auto now = Clock::now();
    if (now < looks_for_pings_) return;
    looks_for_pings_ = now + kLookForPings;
    healthy();
  }

  void fail(const Failure& why) noexcept override {
    const std::lock_guard guard(mutex_);
    if (failed_) return;
    const auto turn = process_.lock();
    raise(why);
    flush();
  }

  Failure failure() const override {
    const std::lock_guard guard(mutex_);
    return failure_;
  }

  bool quiet() const noexcept override {
    if (safe_) return true;
    const std::lock_guard guard(mutex_);
    return !exposed();
  }

  bool quiesce(Deadline deadline, std::span<const MemoryRange>) noexcept override {
    while (!quiet()) {
      if (deadline.passed()) return false;
      std::this_thread::sleep_for(kQuiesceNap);
    }
    return true;
  }

  std::vector<LastCall> last_calls() noexcept override try {
    const std::lock_guard guard(mutex_);
    return messages_.last_calls(check_ ? LastCall::State::none : LastCall::State::unknown);
  } catch (...) {  // out of memory: no answer then
    return {};
  }

  void announce_sleep(bool) noexcept override {}  // MPI wakes no rank: traits().rings is false

 private:
  // The memory that MPI may still use after a failure.
  struct KeptMemory {
    KeptMemory(const Process& process, MPI_Comm comm, int rank, int size, Limits limits)
        : channel(std::make_unique<ControlChannel>(comm, rank, size)),
          rounds(process, comm, rank, size, limits),
          messages(*channel, limits) {}
    std::unique_ptr<ControlChannel> channel;
    Rounds rounds;
    Messages messages;
  };
  // The state of a collective, in the scratch of its slot.
  struct CollectiveState {
    std::uint64_t sequence = 0;                         // the number among the announced calls
    std::uint64_t first_message = 0, last_message = 0;  // the control messages that announced it
    bool announced = false, running = false;
  };
  static CollectiveState& collective_state(OpState& s) noexcept {
    return *std::launder(reinterpret_cast<CollectiveState*>(s.scratch.data()));
  }
  static const CollectiveState& collective_state(const OpState& s) noexcept {
    return *std::launder(reinterpret_cast<const CollectiveState*>(s.scratch.data()));
  }
  std::vector<int> others() const {
    std::vector<int> ranks;
    for (int r = 0; r < size_; ++r)
      if (r != rank_) ranks.push_back(r);
    return ranks;
  }
  // Returns first the ranks without which this rank cannot do its part, then the ranks that have no room for
  // its envelope. Inside a collective of MPI a rank may wait for any other rank. Ranks that have not called
  // are first.
  std::vector<int> awaited_by(const OpState& s) const {
    if (!row(s.op).collective) return messages_.awaited_by(s);
    const std::vector<int> all_late = calls_.late(collective_state(s).sequence);
    std::vector<int> ranks;
    for (const int r : all_late)
      if (needs(s, r, rank_)) ranks.push_back(r);
    if (ranks.empty()) ranks = owed(s);
    if (ranks.empty()) ranks = all_late;
    return ranks.empty() ? others() : ranks;
  }
  // Returns the ranks for which MPI has not yet taken a control message of this call.
  std::vector<int> owed(const OpState& s) const {
    const CollectiveState& p = collective_state(s);
    return state_->channel->owed(p.first_message, p.last_message, [&](int r) { return needs(s, rank_, r); });
  }

  // MessageMedium.
  void notify(int to, Notice notice, std::uint32_t number, std::span<const std::byte> bytes) override {
    state_->channel->send(
        to, {.kind = notice == Notice::ping ? Envelope::ping : Envelope::pong, .number = number}, bytes);
  }
  void fetch(OpState& recv, int source, std::uint64_t number) override {
    recv.peer = source;
    state_->messages.fetch(recv, static_cast<std::uint32_t>(number));
  }
  void done(OpState& s, const MessageInfo& found) override {
    s.peer = found.source;
    if (s.op == Op::wait_message) {
      s.dtype = found.dtype;
      s.out_count = found.count;
    }
    state_->messages.finish(s);
  }
  void refuse(OpState&, Failure why) override {
    if (!trouble_) trouble_ = std::move(why);
  }
  bool over(const OpState& s) const override { return state_->messages.over(s); }
  // If calls are not compared, they are not announced.
  OwnCalls own_calls() const override {
    OwnCalls own;
    if (calls_.has_current()) {
      own.awaited = calls_.late(calls_.current());
      if (own.awaited.empty()) own.awaited = others();
    }
    own.last = check_ ? calls_.last(rank_).value_or(LastCall{.rank = rank_, .state = LastCall::State::none})
                      : unannounced_;
    return own;
  }

  void post_message(OpState& s) {
    state_->messages.begin(s);
    if (s.op != Op::send) return messages_.receive(s);
    messages_.begin_send(s);
    state_->messages.send(s);
  }
  Step message(OpState& s) {
    const Step step = state_->messages.poll(s);
    if (step == Step::done) {
      messages_.ended(s);
    } else {
      messages_.waits_in(s);
    }
    return step;
  }
  static std::uint64_t record_number(const OpState& s) noexcept {
    return s.user != nullptr ? s.user->call | kUsersCall : s.call;
  }

  // Runs f; an exception of f fails the group.
  template <class F>
  void attempt(const OpState& s, const F& f) noexcept {
    try {
      f();
    } catch (const Error& e) {
      Failure why{.code = e.code(),
                  .text = e.what(),
                  .op = s.op,
                  .call = s.call,
                  .ranks = {e.ranks().begin(), e.ranks().end()}};
      if (why.ranks.empty()) why.ranks = {rank_};
      if (s.op == Op::none) why.call = kNoCall;
      const auto turn = process_.lock();
      raise(why);
    } catch (const std::bad_alloc&) {
      const auto turn = process_.lock();
      raise({.code = ErrorCode::system, .text = "out of memory", .op = s.op, .ranks = {rank_}});
    }
    if (!telling_) return;
    const auto turn = process_.lock();
    flush();
  }

  // Keeps the first cause, and writes the control messages that notify peers of it. The caller must then call
  // flush().
  void raise(const Failure& why) noexcept {
    if (failed_) return;
    failure_ = why;
    failed_ = true;
    process_.poison();
    if (!Process::alive() || !process_.refuses_thread().empty()) return;
    telling_ = true;
    try {
      // A text that is too long for a control message is cut: only its beginning is sent.
      constexpr std::size_t kMostRanks = 512;
      Failure told = why;
      told.ranks.resize(std::min(told.ranks.size(), kMostRanks));
      std::string text = encode(told);
      text.resize(std::min(text.size(), ControlChannel::kPayload));
      state_->channel->send_others({.kind = Envelope::failure}, std::as_bytes(std::span(text)));
    } catch (...) {  // MPI itself has failed: peers notice that, or reach their deadline
    }
  }

  // Makes MPI send the control messages of raise(). They are sent at once or, for a peer that does not poll,
  // when that peer polls. The caller must not use the channel afterwards. Call it under process_.lock(), and
  // not while control messages are being read.
  void flush() noexcept {
    if (!std::exchange(telling_, false)) return;
    try {
      for (const Deadline end = Deadline::after(kFlush); state_->channel->unsent() > 0 && !end.passed();)
        state_->channel->take([](int, const Envelope&, std::span<const std::byte>) {});
      // If calls use the program's own memory, MPI is not called, because that memory may already belong to
      // other code.
      if (safe_ && state_->channel->owes()) process_.deliver(*state_->channel);
    } catch (...) {  // MPI itself has failed, as above
    }
  }

  // Records this rank's own call and sends it to all ranks.
  void announce(OpState& s) {
    CollectiveState& p = *new (s.scratch.data()) CollectiveState;
    // An all_to_all_v is always announced, because its ranks do not know the size of the largest block.
    p.announced = check_ || s.op == Op::all_to_all_v;
    if (!check_) unannounced_ = last_call_of(rank_, LastCall::State::in_flight, record_of(s, size_));
    if (!p.announced) return;
    Announcement call = announcement_of(s, size_);
    p.sequence = calls_.announce(call, s);
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      announce_to(call, s, r, size_);
      p.last_message = state_->channel->send(r, {.kind = Envelope::call}, std::as_bytes(std::span(&call, 1)));
      if (p.first_message == 0) p.first_message = p.last_message;
    }
    for (int r = 0; r < size_; ++r) compare(r);
  }

  void compare(int r) {
    if (failed_) return;
    if (const auto differs = calls_.compare(r)) raise(*differs);
  }

  bool take_control_messages() {
    return state_->channel->take([&](int from, const Envelope& envelope, std::span<const std::byte> payload) {
      if (failed_) return;
      switch (envelope.kind) {
        case Envelope::call: {
          Announcement call;
          std::memcpy(&call, payload.data(), sizeof call);
          calls_.arrived(from, call);
          messages_.called(from, call.record);
          return compare(from);
        }
        case Envelope::message: {
          const MessageHead head{.dtype = envelope.dtype,
                                 .tag = envelope.tag,
                                 .count = envelope.count,
                                 .offered = !envelope.eager,
                                 .number = envelope.number};
          if (auto why = messages_.arrived(from, head, payload); why && !trouble_) trouble_ = std::move(why);
          return;
        }
        case Envelope::failure:  // the sender has notified all ranks
          failure_ = decode_failure({reinterpret_cast<const char*>(payload.data()), payload.size()});
          failed_ = true;
          process_.poison();
          return;
        case Envelope::left: return messages_.left(from);
        case Envelope::ping: return messages_.received_notice(from, Notice::ping, envelope.number, payload);
        case Envelope::pong: return messages_.received_notice(from, Notice::pong, envelope.number, payload);
      }
    });
  }

  // Returns whether `who` cannot do its part before `whom` has called.
  static bool needs(const OpState& s, int whom, int who) noexcept {
    if (whom == who) return false;
    switch (row(s.op).rooted) {
      case Rooted::no: return true;
      case Rooted::in_at_root: return whom == s.root;
      case Rooted::out_at_root: return who == s.root;
    }
    return true;
  }

  Step collective(OpState& s) {
    CollectiveState& p = collective_state(s);
    if (!p.running) {
      if (p.announced) {
        for (int r = 0; r < size_; ++r)
          if (needs(s, r, rank_) && !calls_.agrees(r, p.sequence)) return Step::pending;
        if (calls_.kept() > kAhead) return Step::pending;
      }
      // All ranks have announced the call, and a barrier needs no more than that.
      if (s.op == Op::barrier && p.announced) return finish(s, p);
      state_->rounds.begin(s, p.announced ? calls_.largest(p.sequence) : 0);
      p.running = true;
    }
    const Step step = state_->rounds.step(s);
    return step == Step::done ? finish(s, p) : step;
  }

  // A call is done only when MPI has taken its control messages. Otherwise the rank might make no more MPI
  // calls afterwards, and ranks that need these messages would wait.
  Step finish(const OpState& s, const CollectiveState& p) {
    if (p.announced) {
      if (!owed(s).empty()) return Step::pending;
      calls_.finish(p.sequence);
    }
    if (!check_ && unannounced_.call == record_number(s)) unannounced_.state = LastCall::State::finished;
    return Step::done;
  }

  // Looks for ranks that have left, and so cannot arrive any more. If a rank arrived before it left, no rank
  // waits for it.
  void look_for_leavers() {
    std::vector<int> lost = messages_.lost();
    const bool pending = calls_.has_current();
    for (int r = 0; pending && r < size_; ++r)
      if (messages_.has_left(r) && calls_.announced_by(r) <= calls_.current()) lost.push_back(r);
    std::sort(lost.begin(), lost.end());
    lost.erase(std::unique(lost.begin(), lost.end()), lost.end());
    if (lost.empty()) return;
    Failure why{.code = ErrorCode::peer_lost, .text = {}, .ranks = lost};
    if (pending) {
      why.op = calls_.record(calls_.current()).op;
      why.call = calls_.record(calls_.current()).call;
    }
    why.text = left_text(why.op, lost);
    raise(why);
  }

  void leave() noexcept {
    compare_the_rest();
    if (failed_) {
      (void)state_.release();
      return;
    }
    const auto turn = process_.lock();
    try {
      state_->channel->send_others({.kind = Envelope::left});
      process_.defer_free(std::move(state_->channel));
    } catch (...) {  // out of memory, or MPI lost a peer
      process_.poison();
      (void)state_.release();
    }
  }

  // When this rank leaves, it compares calls that needed no other rank with the calls that have arrived. This
  // comparison waits for no rank, but MPI may need several polls to deliver sent messages. A mismatch cannot
  // be thrown here; the remaining ranks get it.
  void compare_the_rest() noexcept {
    OpState nothing;
    attempt(nothing, [&] {
      const auto turn = process_.lock();
      for (int looks = 0; looks < kLastLooks && !failed_; ++looks)
        if (take_control_messages()) looks = 0;
      std::string found;
      if (failed_ && failure_.code == ErrorCode::mismatch) found = failure_.text;
      if (!failed_ && std::uncaught_exceptions() == 0) found = calls_.left_out(messages_.left_ranks());
      if (!found.empty())
        context_.log().write_later(
            LogLayer::backends, LogLevel::warning,
            fmt::format("mismatch, found when the group was left: {} [group \"{}\", rank {}]",
                        unmarked(found), name_, rank_));
    });
  }

  bool exposed() const noexcept {
    if (!Process::alive()) return false;
    const auto turn = process_.lock();
    return state_->rounds.exposed() || state_->messages.exposed();
  }

  Context& context_;
  Process& process_;
  const std::string name_;
  const int rank_, size_;
  const bool check_, safe_;
  Traits traits_;
  mutable std::mutex mutex_;  // guards all members below, because any thread may call fail()
  std::unique_ptr<KeptMemory> state_;
  AnnouncedCalls calls_;
  PeerMessages messages_;
  // the failure of a message, which the next poll raises
  std::optional<Failure> trouble_;
  LastCall unannounced_{.state = LastCall::State::none};  // the last call, if calls are not compared
  Clock::time_point looks_for_pings_{};
  std::atomic<bool> failed_{false};
  bool telling_ = false;  // control messages of a failure are written, but not flushed
  Failure failure_;
};

}  // namespace

std::unique_ptr<Backend> make_backend(const GroupInit& b, Process& process, MPI_Comm comm,
                                      const Settings& settings) {
  return std::make_unique<MpiBackend>(b, process, comm, settings);
}

}  // namespace weft::mpi
