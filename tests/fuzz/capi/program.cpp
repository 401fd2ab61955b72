#include "capi/program.hpp"

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/text/plain_streams.hpp"
#include "capi/call.hpp"

namespace weft::fuzz::capi {
namespace {

constexpr int kMostCalls = 64;
constexpr std::size_t kMostHandles = 8;  // of one type

// Functions that are not expected to succeed here.
constexpr const char* kNeverGood[] = {
    "weft_group_shrink",  // needs a failed group whose other ranks live
};

std::uint16_t number_of(std::string_view name) {
  std::uint32_t hash = 2166136261u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return static_cast<std::uint16_t>(hash ^ hash >> 16);
}

// Functions by number; a number without a function chooses the next function.
const Function& function_of(std::uint16_t number) {
  static const std::map<std::uint16_t, const Function*> all = [] {
    std::map<std::uint16_t, const Function*> by_number;
    for (const Function& f : weft_functions())
      if (!by_number.emplace(number_of(f.name), &f).second)
        fail(f.name, "has the number of another function");
    return by_number;
  }();
  const auto found = all.lower_bound(number);
  return *(found != all.end() ? found : all.begin())->second;
}

void must(weft_status status, const char* what) {
  if (status != WEFT_OK)
    fail(what, std::string("fails before the input begins: ") + weft_status_name(status));
}

std::string new_folder() {
  static std::atomic<int> number{0};
  static const std::string first = [] {
    std::string made =
        std::string(::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp") + "/weft-fuzz-XXXXXX";
    if (::mkdtemp(made.data()) == nullptr) fail("mkdtemp", made);
    static std::string kept;
    kept = made;
    std::atexit([] {
      std::error_code ignored;
      std::filesystem::remove_all(kept, ignored);
    });
    return made;
  }();
  return first + "/" + std::to_string(number++);
}

// Writes a checkpoint of one tensor and one string, once per process.
const std::string& checkpoint() {
  static const std::string folder = [] {
    const std::string made = new_folder();
    std::vector<float> values(kElements, 1.5f);
    const weft_tensor tensor{"w", {values.data(), kElements, WEFT_F32, WEFT_CPU}, nullptr, nullptr, 0};
    const weft_checkpoint_string string{"k", "v"};
    must(weft_checkpoint_save(made.c_str(), nullptr, 7, &tensor, 1, &string, 1, nullptr, nullptr),
         "weft_checkpoint_save");
    return made;
  }();
  return folder;
}

// Transfers between the parts of a tensor: shards, a halo, a window, an exchange that has begun.
void begin_transfers(World& w, const weft_mesh* mesh, const weft_layout* whole, const weft_layout* cut) {
  const weft_shard_entry entry{"w", whole, WEFT_F32};
  weft_sharded_parameters* shards = nullptr;
  must(weft_sharded_parameters_create(mesh, &entry, 1, nullptr, &shards, nullptr),
       "weft_sharded_parameters_create");
  w.adopt("weft_sharded_parameters", shards);
  const weft_edge zero{WEFT_EDGE_ZERO, 0, 0};
  const weft_halo_dim ghosts{0, 0, 1, 1, zero, zero};
  weft_halo* halo = nullptr;
  must(weft_halo_create(cut, nullptr, 0, &ghosts, 1, &halo, nullptr), "weft_halo_create");
  w.adopt("weft_halo", halo);
  const weft_range wanted[] = {{0, 2}, {0, 2}};
  const weft_window_dim dim{0, w.shared.ranks, wanted, zero, zero};
  weft_window* window = nullptr;
  must(weft_window_create(cut, nullptr, 0, &dim, 1, &window, nullptr), "weft_window_create");
  w.adopt("weft_window", window);
  const weft_buffer field{w.memory.back().get(), kElements / w.shared.ranks + 2, WEFT_F32, WEFT_CPU};
  weft_exchange* exchange = nullptr;
  // In a program with two ranks a busy machine may be late.
  if (weft_halo_start(halo, &field, 1, &exchange, nullptr) == WEFT_OK) w.adopt("weft_exchange", exchange);
}

// The objects that every rank begins with.
void begin(World& w, unsigned with) {
  if (with == 3) return;
  weft_context* const context = w.shared.context;
  weft_store* const store = w.shared.store;
  w.handles["weft_context"].push_back(context);
  w.handles["weft_store"].push_back(store);
  w.borrowed = {context, store};
  if (with == 2) return;
  weft_group_options options = WEFT_GROUP_OPTIONS_INIT;
  options.deadline_ns = kDeadline;
  weft_group* group = nullptr;
  // In a program with two ranks a busy machine may be late.
  if (weft_group_create(context, store, w.rank, w.shared.ranks, &options, &group, nullptr) != WEFT_OK) return;
  w.adopt("weft_group", group);
  const weft_mesh_axis axes[] = {{"dp", w.shared.ranks}, {"tp", 1}};
  weft_mesh *mesh = nullptr, *both = nullptr;
  must(weft_mesh_create(group, axes, 1, &mesh, nullptr), "weft_mesh_create");
  must(weft_mesh_create(group, axes, 2, &both, nullptr), "weft_mesh_create");
  w.adopt("weft_mesh", mesh);
  w.adopt("weft_mesh", both);
  if (with == 1) return;
  const std::int64_t extents[] = {kElements};
  std::vector<weft_layout*> layouts;
  for (const weft_placement placement : {weft_replicate(), weft_shard(0), weft_partial(WEFT_SUM)}) {
    const weft_axis_placement on{"dp", placement};
    weft_layout* layout = nullptr;
    must(weft_layout_create(mesh, &on, 1, extents, 1, &layout, nullptr), "weft_layout_create");
    w.adopt("weft_layout", layout);
    layouts.push_back(layout);
  }
  begin_transfers(w, mesh, layouts[0], layouts[1]);
  weft_work* work = nullptr;
  (void)weft_barrier(group, nullptr, &work, nullptr);
  if (work != nullptr) w.adopt("weft_work", work);
  const weft_reducer_entry entry{"w", kElements, WEFT_F32, WEFT_SUM};
  weft_reducer* reducer = nullptr;
  must(weft_reducer_create(mesh, &entry, 1, nullptr, &reducer, nullptr), "weft_reducer_create");
  w.adopt("weft_reducer", reducer);
  weft_sampler* sampler = nullptr;
  must(weft_sampler_create(mesh, 10, 2, 1, &sampler, nullptr), "weft_sampler_create");
  w.adopt("weft_sampler", sampler);
  weft_checkpoint_reader* reader = nullptr;
  must(weft_checkpoint_reader_open(w.shared.checkpoint.c_str(), &reader, nullptr),
       "weft_checkpoint_reader_open");
  w.adopt("weft_checkpoint_reader", reader);
  weft_checkpoint_saver* saver = nullptr;
  must(weft_checkpoint_saver_create(nullptr, with == 3, &saver, nullptr), "weft_checkpoint_saver_create");
  w.adopt("weft_checkpoint_saver", saver);
  weft_store* own = nullptr;
  must(weft_store_create_local(&own, nullptr), "weft_store_create_local");
  must(weft_store_set(own, "n", "5", 1, 0, nullptr), "weft_store_set");
  w.adopt("weft_store", own);
}

void run_rank(Shared& shared, int rank, unsigned header, unsigned seed, std::string_view calls) {
  World world(shared, rank);
  begin(world, header >> 1 & 3u);
  Bytes bytes(calls);
  for (int i = 0; i < kMostCalls && !bytes.empty(); ++i) {
    const unsigned high = bytes.next(), low = bytes.next(), how = bytes.next();
    const std::string_view own = bytes.take(how & 63u);
    const unsigned who = how >> 6;
    if (who == 1 + static_cast<unsigned>(1 - rank)) continue;
    Bytes arguments(who == 3 && rank == 1 && !own.empty() ? own.substr(1) : own);
    const Function& f = function_of(static_cast<std::uint16_t>(high << 8 | low));
    static const bool shown = std::getenv("WEFT_FUZZ_SHOW") != nullptr;
    if (shown) std::fprintf(stderr, "rank %d: %s(%zu bytes)\n", rank, f.name, own.size());
    f.call(world, arguments);
  }
  world.destroy_all(seed);
}

void run_once(std::string_view bytes) {
  Bytes head(bytes);
  const unsigned header = head.next(), seed = head.next();
  const std::string_view calls = bytes.size() > 2 ? bytes.substr(2) : std::string_view();
  Shared shared;
  shared.ranks = 1 + static_cast<int>(header & 1u);
  shared.checkpoint = checkpoint();
  shared.folder = new_folder();
  for (int r = 0; r < shared.ranks; ++r)
    std::filesystem::create_directories(shared.folder + "/" + std::to_string(r));
  weft_context_options options = WEFT_CONTEXT_OPTIONS_INIT;
  CallbackState state;
  options.log = callback_of(static_cast<Log>(nullptr), "log");
  options.log_data = &state;
  must(weft_context_create(&options, &shared.context, nullptr), "weft_context_create");
  must(weft_store_create_local(&shared.store, nullptr), "weft_store_create_local");
  if (shared.ranks == 1) {
    run_rank(shared, 0, header, seed, calls);
  } else {
    std::thread other([&] { run_rank(shared, 1, header, seed, calls); });
    run_rank(shared, 0, header, seed, calls);
    other.join();
  }
  weft_store_destroy(shared.store);
  weft_context_destroy(shared.context);
  std::filesystem::remove_all(shared.folder);
}

int entries_of(const char* folder) {
  DIR* const all = ::opendir(folder);
  if (all == nullptr) return 0;
  int n = 0;
  while (::readdir(all) != nullptr) ++n;
  ::closedir(all);
  return n;
}

// Mappings of files and shared memory, which are weft's: those of the heap come and go.
int mappings() {
  FileIn maps("/proc/self/maps");
  int n = 0;
  for (std::string line; std::getline(maps, line);)
    n += line.find("memfd:") != std::string::npos || line.find("/dev/shm/") != std::string::npos;
  return n;
}

struct Resources {
  std::int64_t descriptors, threads, mapped, files, allocations;
  static Resources now(std::int64_t (*live_allocations)()) {
    return {entries_of("/proc/self/fd"), entries_of("/proc/self/task"), mappings(), entries_of("/dev/shm"),
            live_allocations != nullptr ? live_allocations() : 0};
  }
};

// The resources of which the process has more than before; "" if there are none.
std::string grown(const Resources& before, const Resources& after) {
  std::string text;
  const auto compare = [&](const char* what, std::int64_t a, std::int64_t b) {
    if (b > a) text += std::string(text.empty() ? "" : ", ") + std::to_string(b - a) + " more " + what;
  };
  compare("descriptors", before.descriptors, after.descriptors);
  compare("threads", before.threads, after.threads);
  compare("mappings of shared memory", before.mapped, after.mapped);
  compare("allocations", before.allocations, after.allocations);
  return text;
}

std::string call(std::string_view name, std::string_view arguments = {}, unsigned who = 0) {
  const std::uint16_t number = number_of(name);
  std::string text{static_cast<char>(number >> 8), static_cast<char>(number & 0xffu),
                   static_cast<char>(who << 6 | static_cast<unsigned>(arguments.size()))};
  return text.append(arguments);
}

}  // namespace

// ---- The world ----

World::World(Shared& s, int r) : shared(s), rank(r) {
  for (int i = 0; i < kModes; ++i) {
    states[i].mode = static_cast<Mode>(i);
    states[i].rank = r;
    states[i].hub = &s.hub;
    states[i].exchange = &s.exchange;
  }
  for (int i = 0; i < kRegions; ++i) {
    memory.push_back(std::make_unique<std::byte[]>(kRegionBytes));
    std::memset(memory.back().get(), i, kRegionBytes);
  }
}

World::~World() = default;

void World::destroy(std::string_view type, void* handle) {
  if (type.starts_with("DLManaged")) {
    if (type == "DLManagedTensor") {
      auto* const managed = static_cast<weft_dl_managed_tensor*>(handle);
      managed->deleter(managed);
    } else {
      auto* const managed = static_cast<weft_dl_managed_tensor_versioned*>(handle);
      managed->deleter(managed);
    }
    return;
  }
  for (const Destroyer& d : weft_destroyers()) {
    if (type != d.type) continue;
    now_in[rank].store(d.type, std::memory_order_relaxed);
    d.destroy(handle);
    now_in[rank].store(nullptr, std::memory_order_relaxed);
    return;
  }
  fail(type, "is a handle that no function destroys");
}

void World::adopt(std::string_view type, void* handle) {
  if (type == "weft_text") {
    const auto* const text = static_cast<weft_text*>(handle);
    if (weft_text_data(text)[weft_text_size(text)] != '\0') fail("weft_text_data", "has no zero at its end");
  }
  auto& pool = handles[std::string(type)];
  if (pool.size() >= kMostHandles) return destroy(type, handle);
  pool.push_back(handle);
}

void World::died(std::string_view type, void* handle) {
  auto& gone = dead[std::string(type)];
  if (gone.size() >= 4) gone.erase(gone.begin());
  gone.push_back(handle);
}

void* World::dead_handle(std::string_view type, unsigned which) const {
  const auto gone = dead.find(type);
  return gone == dead.end() || gone->second.empty() ? nullptr : gone->second[which % gone->second.size()];
}

void* World::other_handle(std::string_view type, unsigned which) const {
  std::vector<void*> others;
  for (const auto& [name, pool] : handles)
    if (name != type && !name.starts_with("DL") && !pool.empty()) others.push_back(pool.front());
  return others.empty() ? nullptr : others[which % others.size()];
}

bool World::is_alive(std::string_view type, void* handle) const {
  const auto pool = handles.find(type);
  return pool != handles.end() &&
         std::find(pool->second.begin(), pool->second.end(), handle) != pool->second.end();
}

bool World::has_used_blocks(const void* context) const {
  return std::any_of(blocks.begin(), blocks.end(),
                     [&](const Block& block) { return block.used && block.context == context; });
}

void World::destroy_all(std::uint32_t seed) {
  const auto random = [&](std::size_t below) {
    seed = seed * 1664525u + 1013904223u;
    return static_cast<std::size_t>(seed >> 8) % below;
  };
  std::vector<std::pair<std::string, void*>> last;  // contexts whose memory calls may still use
  for (;;) {                                        // a callback may begin another call meanwhile
    std::vector<std::string> types;
    for (auto& [type, pool] : handles) {
      std::erase_if(pool, [&](void* handle) { return borrowed.contains(handle); });
      if (!pool.empty()) types.push_back(type);
    }
    if (types.empty()) break;
    const std::string type = types[random(types.size())];
    auto& pool = handles[type];
    const std::size_t at = random(pool.size());
    void* const handle = pool[at];
    pool.erase(pool.begin() + static_cast<std::ptrdiff_t>(at));
    if (type == "weft_context" && has_used_blocks(handle))
      last.emplace_back(type, handle);
    else
      destroy(type, handle);
  }
  for (const auto& [type, handle] : last) destroy(type, handle);
  for (const auto& record : callbacks)
    if (record->given && record->calls != 1)
      fail("weft_work_then", "took a callback that was called " + std::to_string(record->calls) + " times");
  for (const auto& record : releases)
    if (record->given && record->with_release && record->releases != 1)
      fail("weft_reduction_create",
           "took data that were released " + std::to_string(record->releases) + " times");
}

// ---- Programs ----

void run_program(std::string_view bytes, std::int64_t (*live_allocations)()) {
  [[maybe_unused]] static const bool warm = [] {
    for (const char* name :
         {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "WEFT_RANK", "WEFT_SIZE", "WEFT_STORE"})
      ::unsetenv(name);
    run_once(std::string(2, '\0'));
    run_once(std::string("\1\0", 2));
    return true;
  }();
  // Objects that are made once, and kept, are made in the first of three runs.
  std::string more;
  for (int run = 0; run < 4; ++run) {
    const Resources before = Resources::now(live_allocations);
    run_once(bytes);
    more = grown(before, Resources::now(live_allocations));
    for (int i = 0; i < 20 << run && !more.empty(); ++i) {  // a thread that has ended takes its time to go
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      more = grown(before, Resources::now(live_allocations));
    }
    if (more.empty()) return;
  }
  fail("every run of this input", "leaves " + more);
}

std::vector<std::string> program_seeds() {
  std::vector<std::string> seeds;
  for (const char header : {'\0', '\1'})
    for (const Function& f : weft_functions()) seeds.push_back(std::string{header, '\0'} + call(f.name));
  // Calls in which exactly one argument is wrong or at the end of its range.
  for (const Function& f : weft_functions()) {
    std::string calls;
    for (std::size_t at = 0; at < 16; ++at)
      for (const char byte : {'\xff', '\xfa', '\xf1', '\x12'})
        calls += call(f.name, std::string(at, '\0') + byte);
    seeds.push_back(std::string(2, '\0') + calls);
  }
  // Calls that need another call before them. The number of a handle is the first byte: of Works, 0 is a
  // barrier's.
  const std::vector<std::string> sequences = {
      call("weft_send") + call("weft_wait_message") + call("weft_recv") + call("weft_work_wait", "\2") +
          call("weft_work_source", "\2"),
      call("weft_send_recv") + call("weft_work_wait", "\1") + call("weft_work_sources", "\1"),
      call("weft_reducer_begin_no_sync") + call("weft_reducer_ready") + call("weft_reducer_end_no_sync") +
          call("weft_reducer_ready") + call("weft_reducer_finish"),
      call("weft_redistribute", std::string("\1\2", 2)) + call("weft_transfer_done") +
          call("weft_transfer_finish"),
      call("weft_store_server_create") + call("weft_store_server_port") + call("weft_store_server_address") +
          call("weft_store_create_tcp") + call("weft_store_set", "\2") + call("weft_store_get", "\2"),
      call("weft_group_create_over") + call("weft_all_reduce", "\1") + call("weft_work_wait", "\1"),
      call("weft_interrupt_create") + call("weft_interrupt_raise"),
      call("weft_persistent_create") + call("weft_persistent_start") + call("weft_work_wait", "\1") +
          call("weft_persistent_start"),
      call("weft_persistent_create") + call("weft_persistent_start_all") + call("weft_work_wait", "\1"),
      call("weft_persistent_exchange_create") + call("weft_persistent_exchange_start") +
          call("weft_work_wait", "\1") + call("weft_persistent_exchange_start"),
      call("weft_group_abort") + call("weft_barrier") + call("weft_group_quiesce") +
          call("weft_group_shrink"),
      call("weft_reduction_create") + call("weft_all_reduce", std::string("\0\0\0\0\0\0\0\0\0\0\1\14", 12)) +
          call("weft_work_wait", "\1"),
      call("weft_checkpoint_save") + call("weft_checkpoint_reader_open", "\1") +
          call("weft_checkpoint_load", std::string("\377\1", 2)),
  };
  for (const char header : {'\0', '\1'})
    for (const std::string& sequence : sequences) seeds.push_back(std::string{header, '\0'} + sequence);
  return seeds;
}

std::string random_program(std::uint64_t seed, int calls) {
  const auto random = [&](std::uint64_t below) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return static_cast<unsigned>((seed >> 33) % below);
  };
  std::string program;
  program += static_cast<char>(random(4) == 0 ? random(8) : random(2));
  program += static_cast<char>(random(256));
  const auto& all = weft_functions();
  const auto subject = [](std::string_view name) {  // "weft_group_"
    return name.substr(0, name.find('_', name.find('_') + 1) + 1);
  };
  const Function* last = nullptr;
  for (int i = 0; i < calls; ++i) {
    const Function* next = &all[random(all.size())];
    // Calls of functions of one subject reach more states together.
    if (last != nullptr && random(2) == 0)
      for (int tries = 0; tries < 40 && subject(next->name) != subject(last->name); ++tries)
        next = &all[random(all.size())];
    std::string arguments;
    for (unsigned n = random(3) == 0 ? random(48) : random(12); n > 0; --n)
      arguments += static_cast<char>(random(3) != 0 ? 0u : random(4) == 0 ? 0xf0u + random(16) : random(256));
    const unsigned who = random(8) == 0 ? random(4) : 0;
    program += call(next->name, arguments, who);
    last = next;
  }
  return program;
}

std::vector<std::string> never_good() {
  std::vector<std::string> names;
  for (const Function& f : weft_functions()) {
    const Tally& t = tally(f.name);
    const bool excused = std::any_of(std::begin(kNeverGood), std::end(kNeverGood),
                                     [&](std::string_view name) { return name == f.name; });
    if (t.calls == 0 || (t.good == 0 && !excused)) names.emplace_back(f.name);
  }
  return names;
}

}  // namespace weft::fuzz::capi
