// Ranks for tests. The ranks are threads of this process (one Context), separate processes, or the processes
// of a job that mpirun started. This process is then one of them. A hanging body is reported and ended, so no
// test waits for it without limit.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "backends/test_hooks.hpp"
#include "support/errors.hpp"
#include "support/processes.hpp"
#include "weft/group/process_group.hpp"

namespace weft::test {

/// `job`: the whole test program runs in every rank of a job (mpirun -n N program). The membership comes from
/// the environment, and each body runs in the first n of the processes.
enum class Ranks { threads, processes, job };
std::string to_string(Ranks kind);

struct RankOptions {
  Duration deadline = std::chrono::seconds(20);  ///< of the group's calls
  Duration limit = std::chrono::seconds(60);     ///< of the whole body
  TestHooks hooks = {};
  std::string backend = "shm";
  BackendFactory factory;       ///< if set, instead of `backend`
  Order order = Order::native;  ///< of the group's reductions
  ContextOptions context;
};

/// The arguments of a body.
class Rank {
 public:
  Rank(int rank_in, int size_in, Context& context_in, std::shared_ptr<Store> store_in,
       const RankOptions& options_in)
      : rank(rank_in),
        size(size_in),
        context(context_in),
        store(std::move(store_in)),
        options(options_in),
        hooks_(context_in, rank_in, options_in.hooks) {}

  const int rank, size;
  Context& context;
  std::shared_ptr<Store> store;
  const RankOptions& options;

  /// The membership with which all ranks can make a group of the given name.
  Membership membership(const std::string& name = "world") const;
  /// The group "world", made at the first call.
  ProcessGroup& group();
  /// A barrier of all ranks through the store, without a group.
  void meet(const std::string& name);

 private:
  const ScopedTestHooks hooks_;  // of all groups that this rank makes
  ProcessGroup group_;
};

/// Runs body on n ranks at once and waits for all. An exception or a failed gtest check in any rank fails the
/// test, with the rank named. Ranks::job: all processes of the job make the same calls of run_ranks, and more
/// ranks than job_size() skip the test.
void run_ranks(Ranks kind, int n, const std::function<void(Rank&)>& body, const RankOptions& options = {});

/// The number of processes of the job that this process belongs to; 1 outside a job.
int job_size();

/// Ranks as processes, to be killed or stopped one by one.
class RankProcesses {
 public:
  RankProcesses(int n, std::function<void(Rank&)> body, const RankOptions& options = {});
  ~RankProcesses();
  ChildProcess& operator[](int rank);
  /// The store in which the ranks meet. The test may send requests to it.
  Store& store();
  /// Waits for the ranks that still run. Each rank that is not in `excused` and did not end with status 0 is
  /// a failure.
  void finish(std::initializer_list<int> excused = {});

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weft::test
