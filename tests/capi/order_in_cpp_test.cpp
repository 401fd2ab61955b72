// C++ objects are destroyed in other orders than the reverse of their construction: each object last, and
// each pair exchanged, with work in flight. Orders that the headers allow succeed. If a Context is destroyed
// before objects that were made with it, it ends the process, and reports which object outlived it. Each
// order runs in a forked child, whose two threads are the ranks.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/errors.hpp"
#include "support/processes.hpp"
#include "support/temporary_folder.hpp"
#include "weft/base/tensor.hpp"
#include "weft/checkpoint/async.hpp"
#include "weft/dp/bucket_reducer.hpp"
#include "weft/dp/sharded_parameters.hpp"
#include "weft/group/process_group.hpp"
#include "weft/host/compute.hpp"
#include "weft/host/context.hpp"
#include "weft/host/pin.hpp"
#include "weft/mesh/halo.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/store/tcp.hpp"

namespace weft::test::order_in_cpp_test {
namespace {

struct Made {
  std::string name;
  /// The text of a Context that is destroyed before this object; empty: the object needs no Context.
  std::string told;
  std::function<void()> destroy;
};

// One rank's objects, of every kind, and the memory that its calls use.
class Rank {
 public:
  Rank(int rank, const std::shared_ptr<Store>& store, const std::string& folder)
      : rank_(rank), folder_(folder), context_(make<Context>("Context", "", [] { return new Context; })) {
    make_group(store);
    make_mesh();
    make_memory();
    begin();
  }
  std::vector<Made> all;

 private:
  static constexpr const char *kGroup = "group \"g\"", *kBlocks = "of memory (tensors)";

  template <class T, class Create>
  T& make(const char* name, const char* told, const Create& create) {
    T* const made = create();
    all.push_back({name, told, [made] { delete made; }});
    return *made;
  }
  template <class T>
  T& keep(const char* name, const char* told, T value) {
    return make<T>(name, told, [&] { return new T(std::move(value)); });
  }

  void make_group(const std::shared_ptr<Store>& store) {
    auto& server = make<TcpStoreServer>("TcpStoreServer", "the store server at ", [this] {
      return new TcpStoreServer(context_, {.linger = std::chrono::milliseconds(1)});
    });
    keep("Store", "", make_tcp_store("127.0.0.1", server.port(), Deadline::after(std::chrono::seconds(10))));
    make<Compute>("Compute", "a Compute of cpu", [this] { return new Compute(context_); });
    Membership m;
    m.store = store, m.rank = rank_, m.size = 2, m.name = "g", m.deadline = std::chrono::seconds(10);
    m.process_rank = 0;  // each has a Context of its own, as a process has
    m.progress = rank_ == 0 ? Progress::thread : Progress::caller;
    group_ = &keep("ProcessGroup", kGroup, ProcessGroup::create(context_, "shm", m));
    const std::array<int, 2> both{0, 1};
    keep("subgroup", "group \"sub\"", group_->subgroup("sub", both));
  }

  void make_mesh() {
    mesh_ = &keep("DeviceMesh", "", DeviceMesh(*group_, {{"dp", 2}, {"tp", 1}}));
    axis_ = &keep("sub-mesh", "", (*mesh_)["dp"]);
    rows_ = keep("Layout", "", make_layout(*mesh_, {Shard{0}, Replicate{}}, {4}));
    whole_ = keep("Layout of a whole", "", replicated_layout(*mesh_, {4}));
  }

  void make_memory() {
    tensor_ = &keep("Tensor in shared memory", kBlocks,
                    Tensor::zeros(context_, {2}, DType::f32, Memory::shared).with_layout(rows_));
    make<PinnedPages>("PinnedPages", "of pinned pages", [this] {
      return new PinnedPages(context_, tensor_->data(), static_cast<std::size_t>(tensor_->bytes()));
    });
    halo_ = &keep("Halo", "a halo",
                  Halo(rows_, {{.dim = 0,
                                .before = 1,
                                .after = 1,
                                .before_edge = Edge::periodic(),
                                .after_edge = Edge::periodic()}}));
    shards_ = &keep("ShardedParameters", "", ShardedParameters(*axis_, {{"w", whole_}}));
    reducer_ = &make<BucketReducer>("BucketReducer", kBlocks, [this] {
      return new BucketReducer(*axis_, {{"w", 4}});
    });
    saves_ =
        &make<AsyncCheckpoint>("AsyncCheckpoint", "group \"", [this] { return new AsyncCheckpoint(*mesh_); });
  }

  // No call of these is finished, except the save.
  void begin() {
    reducer_->ready(0);
    const NamedView named{"w", tensor_->view(), rows_};
    saves_->save(folder_, 1, {&named, 1});
    keep("Transfer of a redistribution", kGroup, start_redistribute(*tensor_, {Replicate{}, Replicate{}}));
    const std::vector<ConstTensorView> parts{*tensor_};
    keep("Transfer of ShardedParameters", kGroup, shards_->start_unshard(parts));
    const std::array<TensorView, 1> fields{view(ghosts_.data(), {4})};
    keep("exchange of the Halo", "a halo", halo_->start(fields));
    const TensorView in = view(in_.data(), {4});
    keep("Work of an all_reduce", kGroup, group_->all_reduce(in, in));
    keep("Work of a recv", kGroup, group_->recv(view(never_.data(), {4}), 1 - rank_));
    PersistentCall& persistent =
        keep("PersistentCall", "", group_->make_recv(view(never_.data(), {4}), 1 - rank_));
    keep("Work of a PersistentCall", kGroup, persistent.start());
  }

  const int rank_;
  const std::string folder_;
  Context& context_;
  ProcessGroup* group_ = nullptr;
  DeviceMesh *mesh_ = nullptr, *axis_ = nullptr;
  LayoutRef rows_ = nullptr, whole_ = nullptr;
  Tensor* tensor_ = nullptr;
  Halo* halo_ = nullptr;
  ShardedParameters* shards_ = nullptr;
  BucketReducer* reducer_ = nullptr;
  AsyncCheckpoint* saves_ = nullptr;
  std::vector<float> ghosts_ = std::vector<float>(4), in_ = ghosts_, never_ = ghosts_;
};

using Order = std::vector<std::size_t>;

struct Ended {
  std::optional<ExitStatus> status;  ///< nothing: it did not end
  std::string said;
};

// A child in which both ranks destroy their objects in this order. None: in the reverse of their making.
// `kinds`: a file for their names.
class Run {
 public:
  explicit Run(const Order& order, const std::string& kinds = {})
      : child_(ChildProcess::fork([this, order, kinds] { return body(order, kinds); })) {}
  Ended end() {
    const std::optional<ExitStatus> status = child_.wait(std::chrono::seconds(30));
    return {status, contents(file_)};
  }

 private:
  int body(const Order& order, const std::string& kinds) const {
    if (std::freopen(file_.c_str(), "w", stderr) == nullptr) return 1;
    const std::shared_ptr<Store> store = make_local_store();
    std::barrier made(2);
    const auto rank = [&](int r) {
      Rank own(r, store, folder_ / "run");
      made.arrive_and_wait();
      if (r == 0 && !kinds.empty()) {
        std::ofstream out(kinds);
        for (const Made& m : own.all) out << m.name << '\t' << m.told << '\n';
      }
      for (std::size_t i = 0; i < own.all.size(); ++i)
        own.all[order.empty() ? own.all.size() - 1 - i : order[i]].destroy();
    };
    std::thread other([&] { rank(1); });
    rank(0);
    other.join();
    return 0;
  }

  const TemporaryFolder folder_;
  const std::string file_ = folder_ / "stderr";
  ChildProcess child_;
};

// Makes one object of each kind, without destroying it. This also runs in a child, so this process has no
// thread or Context when it forks others.
std::vector<Made> kinds() {
  const TemporaryFolder folder;
  const std::string file = folder / "kinds";
  const Ended ended = Run({}, file).end();
  EXPECT_EQ(ended.status, ExitStatus{.code = 0}) << ended.said;
  std::vector<Made> all;
  std::istringstream lines(contents(file));
  for (std::string line; std::getline(lines, line);) {
    const std::size_t at = line.find('\t');
    all.push_back({line.substr(0, at), line.substr(at + 1), {}});
  }
  EXPECT_GE(all.size(), 20U);
  return all;
}

// An object that outlives the Context is named; any other order succeeds.
void expect_end(const std::vector<Made>& all, const Order& order, const Ended& ended) {
  std::string text;
  for (const std::size_t i : order) text += fmt::format("{}{}", text.empty() ? "" : ", ", all[i].name);
  SCOPED_TRACE(text);
  ASSERT_TRUE(ended.status) << "it did not end: " << ended.said;
  std::vector<std::string> told;
  for (auto later = std::find(order.begin(), order.end(), std::size_t{0}); later != order.end(); ++later)
    if (!all[*later].told.empty()) told.push_back(all[*later].told);
  if (told.empty()) {
    EXPECT_EQ(*ended.status, ExitStatus{.code = 0}) << to_string(*ended.status) << ": " << ended.said;
    return;
  }
  EXPECT_EQ(ended.status->signal, SIGABRT) << to_string(*ended.status) << ": " << ended.said;
  const std::size_t at = ended.said.find("weft: context: destroyed before ");
  ASSERT_NE(at, std::string::npos) << ended.said;
  for (const std::string& piece : told)
    EXPECT_NE(ended.said.find(piece, at), std::string::npos) << ended.said << "has no \"" << piece << '"';
}

// Several at once: they wait most of their time.
void expect_ends(const std::vector<Made>& all, const std::vector<Order>& orders) {
  constexpr std::size_t kAtOnce = 12;
  for (std::size_t first = 0; first < orders.size(); first += kAtOnce) {
    std::vector<std::unique_ptr<Run>> runs;
    for (std::size_t i = first; i < std::min(orders.size(), first + kAtOnce); ++i)
      runs.push_back(std::make_unique<Run>(orders[i]));
    for (std::size_t i = 0; i < runs.size(); ++i) expect_end(all, orders[first + i], runs[i]->end());
  }
}

// A mesh may outlive the group that it borrows; it throws where it needs the group.
TEST(OrderInCpp, AMeshSaysThatItsGroupIsGone) {
  Context context;
  std::optional<ProcessGroup> group = ProcessGroup::create(context, "shm", Membership());
  const DeviceMesh mesh(*group, {{"dp", 1}});
  EXPECT_EQ(mesh["dp"].group().size(), 1);
  const std::string gone =
      "bad_argument: mesh: the group that dp=1 was made of, and borrows, was destroyed, moved from or left; "
      "expected it to exist longer than the mesh, or to be moved into it (std::move)";
  ProcessGroup moved = std::move(*group);
  EXPECT_EQ(error_text([&] { mesh["dp"].group(); }), gone);
  const DeviceMesh second(moved, {{"dp", 1}});
  EXPECT_EQ(second.group().size(), 1);
  { const ProcessGroup ends = std::move(moved); }
  EXPECT_EQ(error_text([&] { second.group(); }), gone);
  EXPECT_EQ(second.size(), 1);
  ProcessGroup left = ProcessGroup::create(context, "shm", Membership());
  const DeviceMesh third(left, {{"dp", 1}});
  left.leave();
  EXPECT_EQ(error_text([&] { third.group(); }), gone);
  const DeviceMesh own(ProcessGroup::create(context, "shm", Membership()), {{"dp", 1}});
  own.group().leave();
  EXPECT_EQ(error_text([&] { own.group(); }),
            "bad_argument: mesh: the group of dp=1 was left; expected that to be its last use");
}

Order reversed(std::size_t count) {
  Order order(count);
  for (std::size_t i = 0; i < count; ++i) order[i] = count - 1 - i;
  return order;
}

TEST(OrderInCpp, EachOneLast) {
  const std::vector<Made> all = kinds();
  std::vector<Order> orders;
  for (std::size_t last = 0; last < all.size(); ++last) {
    orders.push_back(reversed(all.size()));
    orders.back().erase(std::find(orders.back().begin(), orders.back().end(), last));
    orders.back().push_back(last);
  }
  expect_ends(all, orders);
}

TEST(OrderInCpp, EachPairTheOtherWayRound) {
  const std::vector<Made> all = kinds();
  std::vector<Order> orders;
  for (std::size_t i = 0; i < all.size(); ++i)
    for (std::size_t k = i + 1; k < all.size(); ++k) {
      orders.push_back(reversed(all.size()));
      std::swap(orders.back()[i], orders.back()[k]);
    }
  expect_ends(all, orders);
}

}  // namespace
}  // namespace weft::test::order_in_cpp_test
