#include "support/run_ranks.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "store/prefix_store.hpp"
#include "weft/store/tcp.hpp"

namespace weft::test {
namespace {

void run_threads(int n, const std::function<void(Rank&)>& body, const RankOptions& options) {
  Context context(options.context);
  const std::shared_ptr<Store> store = make_local_store();
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<bool> finished(static_cast<std::size_t>(n), false);
  std::vector<std::string> errors(static_cast<std::size_t>(n));
  std::vector<std::thread> threads;
  for (int r = 0; r < n; ++r) {
    threads.emplace_back([&, r] {
      try {
        Rank rank(r, n, context, store, options);
        body(rank);
      } catch (const std::exception& e) {
        errors[static_cast<std::size_t>(r)] = e.what();
      }
      const std::lock_guard lock(mutex);
      finished[static_cast<std::size_t>(r)] = true;
      changed.notify_all();
    });
  }
  {
    std::unique_lock lock(mutex);
    const auto all = [&] { return std::all_of(finished.begin(), finished.end(), [](bool f) { return f; }); };
    if (!changed.wait_for(lock, options.limit, all)) {  // a thread cannot be ended, so the whole program is
      for (int r = 0; r < n; ++r)
        if (!finished[static_cast<std::size_t>(r)])
          std::fprintf(stderr, "run_ranks: thread rank %d hangs\n", r);
      std::fflush(nullptr);
      _exit(3);
    }
  }
  for (std::thread& t : threads) t.join();
  for (int r = 0; r < n; ++r) {
    const std::string& e = errors[static_cast<std::size_t>(r)];
    if (!e.empty()) ADD_FAILURE() << "rank " << r << " threw: " << e;
  }
}

// The job this process is a rank of, met once for all tests.
struct Job {
  Context context;
  Membership member = Membership::from_env(context);
  int runs = 0;
};

Job& job() {
  static Job the_job;
  return the_job;
}

// No rank leaves a body before all have finished it, failed or not, so all ranks run the same next body.
void run_job(int n, const std::function<void(Rank&)>& body, const RankOptions& options) {
  Job& j = job();
  if (n > j.member.size) GTEST_SKIP() << "the job has " << j.member.size << " ranks, not " << n;
  // The job's store, seen by one body: the next one may use the same keys.
  const auto store = std::make_shared<PrefixStore>(fmt::format("test/body{}/", j.runs++), j.member.store);
  try {
    if (j.member.rank < n) {
      Rank rank(j.member.rank, n, j.context, store, options);
      body(rank);
    }
  } catch (const std::exception& e) {
    ADD_FAILURE() << "rank " << j.member.rank << " threw: " << e.what();
  }
  try {
    Rank(j.member.rank, j.member.size, j.context, store, options).meet("end of body");
  } catch (const std::exception& e) {
    std::fprintf(stderr, "run_ranks: rank %d waited for the others: %s\n", j.member.rank, e.what());
    std::fflush(nullptr);
    _exit(3);
  }
}

}  // namespace

int job_size() { return job().member.size; }

std::string to_string(Ranks kind) {
  switch (kind) {
    case Ranks::threads: return "threads";
    case Ranks::processes: return "processes";
    case Ranks::job: return "job";
  }
  return {};
}

Membership Rank::membership(const std::string& name) const {
  Membership m;
  m.store = store;
  m.rank = rank;
  m.size = size;
  m.name = name;
  m.deadline = options.deadline;
  m.order = options.order;
  return m;
}

ProcessGroup& Rank::group() {
  if (!group_)
    group_ = options.factory ? ProcessGroup::create(context, options.factory, membership())
                             : ProcessGroup::create(context, options.backend, membership());
  return group_;
}

void Rank::meet(const std::string& name) {
  if (store->add("test/meet/" + name, 1) == size) store->set("test/met/" + name, "1");
  store->get("test/met/" + name, Deadline::after(options.limit));
}

// The ranks are forked before the parent makes a thread; then it serves the store and tells them where.
struct RankProcesses::Impl {
  Logger log;
  std::vector<std::unique_ptr<Pipe>> pipes;
  std::vector<ChildProcess> children;
  std::unique_ptr<TcpStoreServer> server;
  std::shared_ptr<Store> store;
  Duration limit;
};

RankProcesses::RankProcesses(int n, std::function<void(Rank&)> body, const RankOptions& options)
    : impl_(std::make_unique<Impl>()) {
  impl_->limit = options.limit;
  for (int r = 0; r < n; ++r) impl_->pipes.push_back(std::make_unique<Pipe>());
  for (int r = 0; r < n; ++r) {
    impl_->children.push_back(ChildProcess::fork([&, r] {
      const int port = std::stoi(impl_->pipes[static_cast<std::size_t>(r)]->read_line());
      Context context(options.context);
      Rank rank(r, n, context,
                make_tcp_store("127.0.0.1", static_cast<std::uint16_t>(port),
                               Deadline::after(std::chrono::seconds(10))),
                options);
      body(rank);
      return 0;
    }));
  }
  impl_->server = std::make_unique<TcpStoreServer>(impl_->log);
  impl_->store =
      make_tcp_store("127.0.0.1", impl_->server->port(), Deadline::after(std::chrono::seconds(10)));
  for (auto& pipe : impl_->pipes) pipe->write_line(std::to_string(impl_->server->port()));
}

RankProcesses::~RankProcesses() {
  impl_->children.clear();
  impl_->store.reset();
}

ChildProcess& RankProcesses::operator[](int rank) { return impl_->children[static_cast<std::size_t>(rank)]; }
Store& RankProcesses::store() { return *impl_->store; }

void RankProcesses::finish(std::initializer_list<int> excused) {
  const Deadline deadline = Deadline::after(impl_->limit);
  for (std::size_t r = 0; r < impl_->children.size(); ++r) {
    if (std::find(excused.begin(), excused.end(), static_cast<int>(r)) != excused.end()) continue;
    const auto status = impl_->children[r].wait(deadline.left());
    if (!status) {
      ADD_FAILURE() << "rank " << r << " hangs; it is killed";
      impl_->children[r].kill(SIGKILL);
    } else if (*status != ExitStatus{0, 0}) {
      ADD_FAILURE() << "rank " << r << " ended with " << to_string(*status);
    }
  }
}

void run_ranks(Ranks kind, int n, const std::function<void(Rank&)>& body, const RankOptions& options) {
  switch (kind) {
    case Ranks::threads: return run_threads(n, body, options);
    case Ranks::processes: return RankProcesses(n, body, options).finish();
    case Ranks::job: return run_job(n, body, options);
  }
}

}  // namespace weft::test
