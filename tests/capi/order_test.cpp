// Handles may be destroyed in any order: each one last, with work in flight. Two threads are the ranks.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <latch>
#include <regex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/temporary_folder.hpp"
#include "weft/weft.h"

namespace weft::test::order_test {
namespace {

constexpr std::int64_t kSeconds = 1'000'000'000;

struct Destroyed {
  std::string name;
  std::function<void()> destroy;
};
using Handles = std::vector<Destroyed>;

// One rank's handles, of every kind, and the memory that its calls use.
class Rank {
 public:
  Rank(int rank, weft_store* store, const std::string& folder) : folder_(folder) {
    make_group(rank, store);
    make_mesh();
    make_others(rank);
    begin_calls(rank);
  }
  Handles handles;

 private:
  template <class T>
  T* made(const char* name, weft_status status, T* handle, void (*destroy)(T*)) {
    EXPECT_EQ(status, WEFT_OK) << name << ": " << error_.text;
    handles.push_back({name, [=] { destroy(handle); }});
    return handle;
  }
  // Makes a handle: create(&handle) is a call of weft.h.
  template <class T, class Create>
  T* make(const char* name, void (*destroy)(T*), const Create& create) {
    T* handle = nullptr;
    const weft_status status = create(&handle);
    return made(name, status, handle, destroy);
  }
  weft_buffer buffer(std::vector<float>& of) {
    return {of.data(), static_cast<std::int64_t>(of.size()), WEFT_F32, WEFT_CPU};
  }

  void make_group(int rank, weft_store* store) {
    context_ = make<weft_context>("context", weft_context_destroy,
                                  [&](auto** to) { return weft_context_create(nullptr, to, &error_); });
    weft_group_options options = WEFT_GROUP_OPTIONS_INIT;
    options.deadline_ns = 20 * kSeconds;
    options.process_rank = 0;
    options.progress = rank == 0 ? WEFT_PROGRESS_THREAD : WEFT_PROGRESS_CALLER;
    group_ = make<weft_group>("group", weft_group_destroy, [&](auto** to) {
      return weft_group_create(context_, store, rank, 2, &options, to, &error_);
    });
    weft_store_server* const server =
        make<weft_store_server>("store_server", weft_store_server_destroy, [&](auto** to) {
          weft_store_server_options at = WEFT_STORE_SERVER_OPTIONS_INIT;
          at.linger_ns = 1;
          return weft_store_server_create(context_, &at, to, &error_);
        });
    make<weft_store>("store", weft_store_destroy, [&](auto** to) {
      std::int32_t port = 0;
      EXPECT_EQ(weft_store_server_port(server, &port, &error_), WEFT_OK);
      return weft_store_create_tcp("127.0.0.1", port, nullptr, 20 * kSeconds, to, &error_);
    });
  }

  void make_mesh() {
    const weft_mesh_axis axis{"dp", -1};
    mesh_ = make<weft_mesh>("mesh", weft_mesh_destroy,
                            [&](auto** to) { return weft_mesh_create(group_, &axis, 1, to, &error_); });
    const std::int64_t extent = 4;
    const weft_axis_placement rows{"dp", {WEFT_SHARD, 0, WEFT_SUM}};
    rows_ = make<weft_layout>("layout", weft_layout_destroy, [&](auto** to) {
      return weft_layout_create(mesh_, &rows, 1, &extent, 1, to, &error_);
    });
    whole_ = make<weft_layout>("layout", weft_layout_destroy, [&](auto** to) {
      return weft_layout_create(mesh_, nullptr, 0, &extent, 1, to, &error_);
    });
    halo_ = make<weft_halo>("halo", weft_halo_destroy, [&](auto** to) {
      const weft_halo_dim dim{0, 0, 1, 1, {WEFT_EDGE_PERIODIC, 0, 0}, {WEFT_EDGE_PERIODIC, 0, 0}};
      return weft_halo_create(rows_, nullptr, 0, &dim, 1, to, &error_);
    });
    make<weft_window>("window", weft_window_destroy, [&](auto** to) {
      const std::array<weft_range, 2> wanted = {{{0, 2}, {2, 4}}};
      const weft_window_dim dim{0, 2, wanted.data(), {WEFT_EDGE_NONE, 0, 0}, {WEFT_EDGE_NONE, 0, 0}};
      return weft_window_create(rows_, nullptr, 0, &dim, 1, to, &error_);
    });
    shards_ =
        make<weft_sharded_parameters>("sharded_parameters", weft_sharded_parameters_destroy, [&](auto** to) {
          const weft_shard_entry entry{"w", whole_, WEFT_F32};
          return weft_sharded_parameters_create(mesh_, &entry, 1, nullptr, to, &error_);
        });
    make<weft_sampler>("sampler", weft_sampler_destroy,
                       [&](auto** to) { return weft_sampler_create(mesh_, 100, 4, 1, to, &error_); });
    reducer_ = make<weft_reducer>("reducer", weft_reducer_destroy, [&](auto** to) {
      const weft_reducer_entry entry{"w", 4, WEFT_F32, WEFT_SUM};
      return weft_reducer_create(mesh_, &entry, 1, nullptr, to, &error_);
    });
    saver_ = make<weft_checkpoint_saver>("checkpoint_saver", weft_checkpoint_saver_destroy, [&](auto** to) {
      return weft_checkpoint_saver_create(mesh_, false, to, &error_);
    });
    reduction_ = make<weft_reduction>("reduction", weft_reduction_destroy, [&](auto** to) {
      const auto combine = [](void*, const void*, const void*, void*, std::int64_t, weft_dtype) {};
      return weft_reduction_create("own", combine, nullptr, nullptr, to, &error_);
    });
  }

  // Objects of no group.
  void make_others(int rank) {
    make<weft_interrupt>("interrupt", weft_interrupt_destroy,
                         [&](auto** to) { return weft_interrupt_create(to, &error_); });
    make<weft_text>("text", weft_text_destroy,
                    [&](auto** to) { return weft_group_trace_json(group_, to, &error_); });
    const std::string own = fmt::format("{}/of rank {}", folder_, rank);
    EXPECT_EQ(weft_checkpoint_save(own.c_str(), nullptr, 1, nullptr, 0, nullptr, 0, nullptr, &error_),
              WEFT_OK)
        << error_.text;
    make<weft_checkpoint_reader>("checkpoint_reader", weft_checkpoint_reader_destroy, [&](auto** to) {
      return weft_checkpoint_reader_open(own.c_str(), to, &error_);
    });
  }

  void begin_calls(int rank) {
    const weft_buffer two = buffer(two_), four = buffer(four_), ghosts = buffer(ghosts_), in = buffer(in_),
                      never = buffer(never_), shard = buffer(shard_), full = buffer(full_);
    EXPECT_EQ(weft_reducer_ready(reducer_, 0, &error_), WEFT_OK) << error_.text;
    bool begun = false;
    const weft_tensor tensor{"w", two, rows_, nullptr, 0};
    EXPECT_EQ(weft_checkpoint_saver_save(saver_, folder_.c_str(), 1, &tensor, 1, nullptr, 0, nullptr, &begun,
                                         &error_),
              WEFT_OK)
        << error_.text;
    make<weft_transfer>("transfer", weft_transfer_destroy, [&](auto** to) {
      return weft_redistribute(&two, rows_, &four, whole_, nullptr, to, &error_);
    });
    make<weft_transfer>("transfer", weft_transfer_destroy, [&](auto** to) {
      return weft_sharded_parameters_unshard(shards_, &shard, &full, 1, to, &error_);
    });
    make<weft_exchange>("exchange", weft_exchange_destroy,
                        [&](auto** to) { return weft_halo_start(halo_, &ghosts, 1, to, &error_); });
    make<weft_work>("work", weft_work_destroy, [&](auto** to) {
      weft_call_options options = WEFT_CALL_OPTIONS_INIT;
      options.reduce_op = WEFT_USER;
      options.reduction = reduction_;
      return weft_all_reduce(group_, &in, &in, &options, to, &error_);
    });
    make<weft_work>("work", weft_work_destroy,
                    [&](auto** to) { return weft_recv(group_, &never, 1 - rank, nullptr, to, &error_); });
    weft_persistent* const persistent =
        make<weft_persistent>("persistent", weft_persistent_destroy, [&](auto** to) {
          weft_call call = WEFT_CALL_INIT;
          call.op = WEFT_OP_RECV;
          call.out = never;
          call.peer = 1 - rank;
          return weft_persistent_create(group_, &call, to, &error_);
        });
    make<weft_work>("work", weft_work_destroy,
                    [&](auto** to) { return weft_persistent_start(persistent, to, &error_); });
    begin_exchange(rank);
  }

  // Each rank expects an element of the other one, which never sends it.
  void begin_exchange(int rank) {
    const weft_buffer field = buffer(exchanged_);
    const std::int64_t one = 1;
    const weft_exchange_box box{0, 1, 0, &one, nullptr, nullptr};
    const weft_exchange_part from{1 - rank, 1, &box};
    const weft_dtype dtype = WEFT_F32;
    weft_exchange_plan plan = WEFT_EXCHANGE_PLAN_INIT;
    plan.fields = &dtype;
    plan.field_count = 1;
    plan.receives = &from;
    plan.receive_count = 1;
    weft_persistent_exchange* const exchange = make<weft_persistent_exchange>(
        "persistent_exchange", weft_persistent_exchange_destroy,
        [&](auto** to) { return weft_persistent_exchange_create(group_, &plan, to, &error_); });
    make<weft_work>("work", weft_work_destroy, [&](auto** to) {
      return weft_persistent_exchange_start(exchange, &field, &field, 1, nullptr, to, &error_);
    });
  }

  const std::string folder_;
  weft_error error_ = WEFT_ERROR_INIT;
  weft_context* context_ = nullptr;
  weft_group* group_ = nullptr;
  weft_mesh* mesh_ = nullptr;
  weft_layout *rows_ = nullptr, *whole_ = nullptr;
  weft_halo* halo_ = nullptr;
  weft_sharded_parameters* shards_ = nullptr;
  weft_reducer* reducer_ = nullptr;
  weft_checkpoint_saver* saver_ = nullptr;
  weft_reduction* reduction_ = nullptr;
  std::vector<float> two_ = std::vector<float>(2), four_ = std::vector<float>(4), ghosts_ = four_,
                     in_ = four_, never_ = four_, exchanged_ = two_, shard_ = two_, full_ = four_;
};

// Destroys one handle last. The others are destroyed in the order in which they were made, or in the reverse
// order. Gives the names of all.
std::vector<std::string> destroy_last(std::size_t last, bool reversed) {
  const test::TemporaryFolder folder;
  weft_store* store = nullptr;
  EXPECT_EQ(weft_store_create_local(&store, nullptr), WEFT_OK);
  std::vector<std::string> names;
  // A rank that destroys a call in flight fails the group. Before that the other rank has begun all of its
  // calls.
  std::latch begun(2);
  const auto rank = [&](int r) {
    Rank own(r, store, folder.path().string());
    begun.arrive_and_wait();
    Handles& handles = own.handles;
    if (r == 0)
      for (const Destroyed& each : handles) names.push_back(each.name);
    std::swap(handles[std::min(last, handles.size() - 1)], handles.back());
    if (reversed) std::reverse(handles.begin(), handles.end() - 1);
    for (const Destroyed& each : handles) {
      SCOPED_TRACE(each.name);
      each.destroy();
    }
  };
  std::thread other([&] { rank(1); });
  rank(0);
  other.join();
  weft_store_destroy(store);
  return names;
}

TEST(Order, EachHandleLast) {
  for (std::size_t last = 0; last < destroy_last(last, false).size();) ++last;
}

TEST(Order, EachHandleLastAndTheOthersTheOtherWayRound) {
  for (std::size_t last = 0; last < destroy_last(last, true).size();) ++last;
}

// The tests above have every kind of handle that weft.h has a function to destroy for.
TEST(Order, EveryKindIsThere) {
  const std::vector<std::string> names = destroy_last(0, false);
  const std::set<std::string> there(names.begin(), names.end());
  std::set<std::string> known;
  const std::regex destroys("void weft_([a-z_]+)_destroy\\(");
  for (const auto& header : std::filesystem::directory_iterator(WEFT_TEST_HEADERS)) {
    std::ifstream file(header.path());
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    for (std::sregex_iterator at(text.begin(), text.end(), destroys), end; at != end; ++at)
      known.insert((*at)[1]);
  }
  EXPECT_EQ(there, known);
}

}  // namespace
}  // namespace weft::test::order_test
