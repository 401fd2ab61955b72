#include "capi/call.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <utility>

namespace weft::fuzz::capi {

std::atomic<const char*> now_in[2];

void fail(std::string_view function, const std::string& what) {
  std::fprintf(stderr, "fuzz: does not hold: %.*s %s\n", static_cast<int>(function.size()), function.data(),
               what.c_str());
  std::abort();
}

Tally& tally(std::string_view function) {
  static std::mutex mutex;
  static std::map<std::string, Tally, std::less<>> all;
  const std::lock_guard lock(mutex);
  const auto known = all.find(function);
  return known != all.end() ? known->second : all[std::string(function)];
}

namespace {

using Names = std::initializer_list<std::string_view>;
bool among(std::string_view name, Names names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Numbers at which arithmetic goes wrong.
constexpr std::array<std::int64_t, 26> kNumbers = {
    0,         1,         2,  3,   4,         5,         7,         8,         9,
    16,        63,        64, 100, 1000,      INT16_MAX, 65536,     INT32_MAX, INT32_MIN,
    INT64_MAX, INT64_MIN, -1, -2,  1ll << 31, 1ll << 32, 1ll << 61, 1ll << 62};

// Functions that wait for minutes if a limit in their options is zero.
bool waits_by_default(const Call& c) { return c.is("weft_store_get") || c.is("weft_store_create_tcp"); }

// Calls in which a single rank can wait.
bool may_find_nobody(const Call& c) {
  return among(c.function,
               {"weft_send", "weft_recv", "weft_send_recv", "weft_wait_message", "weft_submit",
                "weft_persistent_create", "weft_persistent_start", "weft_coalesced",
                "weft_persistent_start_all", "weft_persistent_exchange_start", "weft_group_exchange"});
}

}  // namespace

Call::Call(World& w, Bytes& b, const char* f) : world(w), bytes(b), function(f) {}
Call::~Call() = default;

// ---- Arguments ----

void* Call::room_of(std::size_t n) {
  memory_.push_back(std::make_unique<char[]>(n));
  std::memset(memory_.back().get(), 0, n);
  return memory_.back().get();
}

const char* Call::keep(std::string_view text) {
  char* const at = static_cast<char*>(room_of(text.size() + 1));
  std::memcpy(at, text.data(), text.size());
  return at;
}

void* Call::given(std::string_view name) const {
  const auto found = given_.find(name);
  return found == given_.end() ? nullptr : found->second;
}
std::int64_t Call::given_number(std::string_view name, std::int64_t otherwise) const {
  const auto found = numbers_.find(name);
  return found == numbers_.end() ? otherwise : found->second;
}

void* Call::handle_of(std::string_view type, std::string_view name) {
  const unsigned b = bytes.next();
  void* chosen = nullptr;
  if (type.starts_with("DLManaged") && b < 0xc0) {
    // A tensor of another library.
    weft_dl_tensor t{
        world.memory[b % kRegions].get(), {WEFT_DL_CPU, 0}, 1, {WEFT_DL_FLOAT, 32, 1}, nullptr, nullptr, 0};
    const int dims = b % 5;
    t.ndim = dims;
    std::vector<std::int64_t> shape(static_cast<std::size_t>(dims)), strides(shape);
    for (auto& extent : shape) extent = integer("extents", sizeof extent, true);
    if (const unsigned s = bytes.next(); s % 4 == 3) {
      for (auto& stride : strides) stride = integer("strides", sizeof stride, true);
      t.strides = static_cast<std::int64_t*>(room_of(strides.size() * sizeof(std::int64_t)));
      std::copy(strides.begin(), strides.end(), t.strides);
    }
    if (const unsigned s = bytes.next(); s < 0xf8) {
      t.shape = static_cast<std::int64_t*>(room_of(shape.size() * sizeof(std::int64_t)));
      std::copy(shape.begin(), shape.end(), t.shape);
    }
    if (const unsigned code = bytes.next(); code != 0) t.dtype.code = static_cast<std::uint8_t>(code % 16);
    if (const unsigned bits = bytes.next(); bits != 0)
      t.dtype.bits = static_cast<std::uint8_t>(bits % 2 != 0 ? 1u << (bits / 2 % 8) : bits);
    if (const unsigned lanes = bytes.next(); lanes != 0)
      t.dtype.lanes = static_cast<std::uint16_t>(lanes > 0xf0 ? 0xffff : lanes % 4);
    if (const unsigned device = bytes.next(); device > 0xc0) {
      t.device.device_type = static_cast<std::int32_t>(device % 16);
      t.device.device_id = static_cast<std::int32_t>(integer("device_id", 4, true));
    }
    if (const unsigned offset = bytes.next(); offset > 0xc0)
      t.byte_offset = static_cast<std::uint64_t>(integer("byte_offset", 8, true));
    if (bytes.next() > 0xf0) t.data = nullptr;
    if (type == "DLManagedTensor") {
      auto* const managed = new (room_of(sizeof(weft_dl_managed_tensor))) weft_dl_managed_tensor{};
      managed->dl_tensor = t;
      return managed;
    }
    if (type == "DLManagedTensorVersioned") {
      auto* const managed =
          new (room_of(sizeof(weft_dl_managed_tensor_versioned))) weft_dl_managed_tensor_versioned{};
      managed->version = {bytes.next() > 0xf0 ? 2u : 1u, 0};
      managed->flags = bytes.next();
      managed->dl_tensor = t;
      return managed;
    }
  }
  const auto pool = world.handles.find(type);
  if (b >= 0xf0 && b < 0xf8 && world.shared.ranks == 1 && !type.starts_with("DL")) {
    // A destroyed handle, or a handle of another kind. (With several ranks a new handle may have the same
    // address.)
    chosen = b < 0xf4 ? world.dead_handle(type, b % 4) : world.other_handle(type, b % 4);
    if (chosen != nullptr && !in_array_ && struct_name_.empty() && !world.is_alive(type, chosen))
      no_handle_ = name;
  } else if (b < 0xf8 && pool != world.handles.end() && !pool->second.empty()) {
    chosen = pool->second[b % pool->second.size()];
  }
  given_[std::string(name)] = chosen;
  return chosen;
}

void* Call::taken_of(std::string_view type) {
  const unsigned b = bytes.next();
  const auto pool = world.handles.find(type);
  if (b >= 0xf0 && b < 0xf8 && world.shared.ranks == 1 && !type.starts_with("DL")) {
    void* const none = b < 0xf4 ? world.dead_handle(type, b % 4) : world.other_handle(type, b % 4);
    if (none != nullptr && !world.is_alive(type, none)) return none;  // it is left alone
  }
  if (b >= 0xf8 || pool == world.handles.end() || pool->second.empty()) return nullptr;
  const std::size_t at = b % pool->second.size();
  void* const handle = pool->second[at];
  if (world.borrowed.contains(handle)) return nullptr;
  if (type == "weft_context") {
    if (world.has_used_blocks(handle)) return nullptr;
    std::erase_if(world.blocks, [&](const Block& block) { return block.context == handle; });
  }
  pool->second.erase(pool->second.begin() + static_cast<std::ptrdiff_t>(at));
  world.died(type, handle);
  return handle;
}

bool Call::is_null(std::string_view name) {
  const unsigned b = bytes.next();
  // Groups of several ranks, and calls that possibly nobody answers, have a deadline of milliseconds.
  if (name == "options" && (begins("weft_group_") ? given_number("size", 1) != 1 : may_find_nobody(*this)))
    return false;
  return b >= (name == "options" ? 0xd0u : 0xf8u);
}

int Call::length_of(std::string_view name) {
  const unsigned b = bytes.next();
  if (among(name, {"extents", "shape"})) return b == 0 ? 1 : static_cast<int>(b % 12);
  return b == 0 ? 1 : static_cast<int>(b % 5);
}

std::size_t Call::default_room() {
  if (is("weft_layout_text")) return 64;
  return is("weft_mesh_coordinates") ? 1 : 16;
}

std::int64_t Call::integer(std::string_view name, std::size_t size, bool is_signed) {
  const unsigned b = bytes.next();
  const int ranks = world.shared.ranks;
  // Limits: an input waits at most as long as the limits chosen here.
  if (among(name, {"limit_ns", "deadline_ns", "linger_ns"})) {
    constexpr std::int64_t least = std::numeric_limits<std::int64_t>::min();
    const bool zero_waits = waits_by_default(*this) || name == "linger_ns" || may_find_nobody(*this) ||
                            (begins("weft_group_") && given_number("size", 1) != 1);
    const std::int64_t few =
        name == "deadline_ns" && (begins("weft_group_") || ranks > 1) ? kDeadline : 5 * kMs;
    if (b < 0x80) return few;
    if (b < 0xa0) return zero_waits ? kMs : 0;
    if (b < 0xc0) return 1;
    if (b < 0xe0) return kMs;
    if (b < 0xf0)  // nobody is waited for
      return among(function, {"weft_store_set", "weft_store_try_get", "weft_store_add", "weft_store_remove",
                              "weft_store_compare_set", "weft_store_create_file"})
                 ? std::numeric_limits<std::int64_t>::max()
                 : few;
    return b % 2 != 0 ? -1 : least;
  }
  if (b == 0) {
    if (name == "rank")
      return among(function, {"weft_layout_local_extents", "weft_layout_part"}) ? -1 : world.rank;
    if (name == "size") return in_array_ && element_ > 0 ? 1 : ranks;
    if (name == "process_rank") return -1;
    if (among(name, {"destination", "source", "peer"})) return ranks - 1 - world.rank;
    if (name == "bytes") return 64;
    if (name == "count") return kElements;
    if (among(name, {"extents", "lengths", "shape"})) return element_ == 0 ? kElements : 1;
    if (name == "ranks") return in_array_ && element_ < ranks ? element_ : 0;
    if (name == "population") return 10;
    if (name == "global_batch") return 2;
    if (name == "dim_count" || name == "key" || name == "delta") return 1;
    if (name == "port") {
      const auto servers = world.handles.find("weft_store_server");
      std::int32_t port = 0;
      if (begins("weft_store_server")) return 0;
      if (servers != world.handles.end() && !servers->second.empty())
        (void)weft_store_server_port(static_cast<weft_store_server*>(servers->second.front()), &port,
                                     nullptr);
      return port != 0 ? port : 1;
    }
    return 0;
  }
  // A port must not be one of a real server, so most ports are invalid.
  if (name == "port") return b < 0x40 ? 0 : b < 0x80 ? 1 : b < 0xc0 ? -1 : 65536 + b % 2 * 1000000;
  std::int64_t n = kNumbers[b % kNumbers.size()];
  if (name == "size" && (begins("weft_group_create")) && n > 2 && n < 2000) n = 2;
  // Memory: little, or more than there can be.
  constexpr std::int64_t most = 100000, addresses = 1ll << 47;
  if (name == "bytes" || (is("weft_reducer_create") && name == "count"))
    if (n > most && n < addresses) n = 4097;
  if (begins("weft_alloc_dlpack") && name == "shape") {
    if (element_ == 0) taken_ = 1;
    if (n < addresses && n > most / taken_) n = 1;
    taken_ *= std::clamp<std::int64_t>(n, 1, most);
    if (taken_ > most) taken_ = most;
  }
  if (!is_signed && n < 0) n = size == 8 ? std::numeric_limits<std::int64_t>::max() : 1;
  if (size == 4) n = std::clamp<std::int64_t>(n, INT32_MIN, INT32_MAX);
  if (size == 2) n &= 0xffff;
  if (size == 1) n &= 0xff;
  return n;
}

double Call::real(std::string_view name) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  constexpr std::array<double, 12> numbers = {
      0,     1,      2,  0.5, infinity, -infinity, -1e-9, std::numeric_limits<double>::quiet_NaN(),
      1e308, 1e-308, -1, 1e18};
  const unsigned b = bytes.next();
  if (b == 0) return among(name, {"p", "max_norm"}) ? 2 : 0;
  return numbers[b % numbers.size()];
}

int Call::one_of(std::initializer_list<int> good, std::string_view name) {
  const unsigned b = bytes.next();
  if (b == 0 && name == "dtype") return WEFT_F32;
  if (b < 0xf0) return *(good.begin() + b % good.size());
  constexpr std::array<int, 5> wrong = {-1, 99, INT32_MAX, INT32_MIN, 64};
  return wrong[b % wrong.size()];
}

std::uint32_t Call::struct_size(std::size_t n) {
  const unsigned b = bytes.next();
  std::size_t chosen = n;
  if (b >= 0xf0) {
    const std::array<std::size_t, 6> others = {0, 4, n - 8, n + 8, kMostStruct, std::size_t{1} << 20};
    chosen = others[b % others.size()];
    // An array's structs stand one behind the other.
    if (in_array_ && chosen > 4 && chosen <= kMostStruct) chosen = 0;
  }
  struct_bytes_ = chosen > kMostStruct || chosen < 4 ? n : chosen;
  return static_cast<std::uint32_t>(chosen);
}

const char* Call::text(const char* name_in) {
  const std::string_view name = name_in;
  const unsigned b = bytes.next();
  const std::string folder = world.shared.folder + "/" + std::to_string(world.rank);
  const auto numbered = [&](std::string text) {
    if (in_array_ && element_ > 0) text += std::to_string(element_);
    return keep(text);
  };
  if (b < 0xa0) {
    if (name == "directory") {
      const bool writes = is("weft_checkpoint_save") || is("weft_checkpoint_saver_save");
      switch (b % 4) {
        case 0: return keep(writes ? folder + "/saved" : world.shared.checkpoint);
        case 1: return keep(folder + "/saved");
        case 2:
          return keep(given("mesh") != nullptr && world.shared.ranks > 1 ? world.shared.folder + "/shared"
                                                                         : folder + "/saved");
        default: return keep(folder + "/none");
      }
    }
    if (name == "file") return keep(folder + "/out.safetensors");
    if (name == "to") return keep(folder + (b % 2 != 0 ? "/saved" : "/converted"));
    if (name == "path") return keep(b % 2 != 0 ? folder + "/none/store" : world.shared.folder + "/store");
    if (name == "host") return b == 0 ? keep("127.0.0.1") : b % 3 == 0 ? keep("::1") : nullptr;
    if (name == "secret") return b % 2 == 0 ? nullptr : keep("0123456789abcdef");
    if (name == "backend")
      return b != 0 ? keep(b % 2 != 0 ? "auto" : "shm") : is("weft_backend_traits") ? keep("shm") : nullptr;
    if (name == "axis" || name == "axes" ||
        (name == "name" && (filling() == "axes" || filling() == "parts"))) {
      constexpr std::array<const char*, 6> axes = {"dp", "tp", "x", "y", "flat", "dp,tp"};
      return keep(
          axes[(b + (filling() == "parts" ? 2u : 0u) + static_cast<unsigned>(in_array_ ? element_ : 0)) %
               axes.size()]);
    }
    if (name == "name" && is("weft_dtype_from_name")) return keep(b % 2 != 0 ? "bf16" : "f32");
    if (name == "name" && is("weft_group_create_over")) return keep("queues");
    return numbered(b == 0 || name == "name" ? "w" : name == "key" ? "n" : "17");
  }
  // A place in the file system is in the folder of the input.
  const bool place = among(name, {"directory", "file", "path", "to"});
  const auto keep = [&](std::string_view text) {
    return this->keep(place ? folder + "/" + std::string(text) : std::string(text));
  };
  switch (b % 10) {
    case 0: return nullptr;
    case 1: return this->keep("");
    case 2: return keep(std::string(b % 3 == 0 ? 1500 : 5000, 'a'));
    case 3: return keep("\xff\xfe\xc0 no text");
    case 4: return keep("{} %s %n {0:>99999999}\n\t\"\\");
    case 5: return keep("weft/own");
    case 6: return this->keep("/dev/null/x");
    case 7: return keep("x/../y");
    case 8: return name == "host" ? keep("127.0.0.1") : keep("\xe2\x82\xac\xe2\x82");
    default: {
      // No name that would be looked up on another computer, and no name of a plug-in.
      std::string text(bytes.take(bytes.next() % 9));
      if (name == "host" || name == "backend") text.insert(0, "/");
      // Nor a place outside.
      if (place) std::replace(text.begin(), text.end(), '.', ',');
      return keep(text.substr(0, text.find('\0')));
    }
  }
}

void* Call::memory(const char* name_in) {
  const std::string_view name = name_in;
  const unsigned b = bytes.next();
  const Mode mode = static_cast<Mode>(b % kModes);
  if (is("weft_work_then")) {
    world.callbacks.push_back(std::make_unique<CallbackRecord>());
    callback_record_ = world.callbacks.back().get();
    callback_record_->mode = mode;
    callback_record_->world = &world;
    callback_record_->thread = std::this_thread::get_id();
    return callback_record_;
  }
  if (is("weft_reduction_create")) {
    world.releases.push_back(std::make_unique<ReleaseRecord>());
    release_record_ = world.releases.back().get();
    release_record_->mode = mode;
    return release_record_;
  }
  if (is("weft_free")) {
    if (b >= 0xf0) return nullptr;
    if (b >= 0xe0) return world.memory[0].get();
    for (Block& block : world.blocks)
      if (!block.used && block.context == given("context")) return freed_ = block.data;
    return nullptr;
  }
  if (name == "tensor") {
    auto* const managed = static_cast<weft_dl_managed_tensor*>(handle_of("DLManagedTensor", "managed"));
    return managed == nullptr ? nullptr : &managed->dl_tensor;
  }
  if (name == "handle") return b < 0xf0 ? nullptr : world.memory[0].get();
  return &world.states[mode];
}

// ---- Structs ----

int Call::group_size() {
  std::int32_t size = 1;
  if (void* const group = given("group"))
    (void)weft_group_size(static_cast<weft_group*>(group), &size, nullptr);
  return size;
}

std::int64_t Call::elements_of(const weft_layout* layout) {
  std::int32_t dims = 0;
  std::array<std::int64_t, WEFT_MAX_DIMS> extents{};
  if (layout == nullptr || weft_layout_dim_count(layout, &dims, nullptr) != WEFT_OK ||
      weft_layout_local_extents(layout, -1, extents.data(), WEFT_MAX_DIMS, nullptr) != WEFT_OK)
    return kElements;
  std::int64_t n = 1;
  for (int d = 0; d < dims; ++d)
    if (__builtin_mul_overflow(n, extents[static_cast<std::size_t>(d)], &n)) return kElements;
  return n;
}

void Call::fill_buffer(weft_buffer& b, std::int64_t count, weft_dtype dtype) {
  b = {nullptr, count, dtype, WEFT_CPU};
  // Memory: a region of the rank's for each buffer of a call, or another one, or memory of weft's.
  const unsigned where = bytes.next(), what = bytes.next();
  const std::size_t number = where == 0 ? static_cast<std::size_t>(buffers_++) : where;
  auto* at = world.memory[number % kRegions].get();
  std::size_t room = kRegionBytes;
  if (where >= 0xc0 && where < 0xf0 && !world.blocks.empty()) {
    Block& block = world.blocks[where % world.blocks.size()];
    block.used = true;
    at = static_cast<std::byte*>(block.data);
    room = block.bytes;
  }
  if (what != 0) {
    const unsigned kind = bytes.next();
    if (kind != 0) b.dtype = static_cast<weft_dtype>(kind % 17);
    const std::size_t skipped = what % 4 == 1 ? 1 : what % 4 == 2 ? 64 : 0;
    if (skipped < room) {
      at += skipped;
      room -= skipped;
    }
    constexpr std::array<std::int64_t, 10> counts = {0, 1, 2, 7, 8, 16, 1000, 1025, 8192, 100000};
    if (what < 0xe0 && what % 3 != 0) b.count = counts[bytes.next() % counts.size()];
  }
  b.data = at;
  const std::int64_t size = weft_dtype_size(b.dtype);
  if (b.count < 0 || b.count > static_cast<std::int64_t>(room) / size)
    b.count = static_cast<std::int64_t>(room) / size;
  if (what >= 0xe0) {
    // Arguments that are refused before memory is read.
    constexpr std::array<std::int64_t, 4> counts = {-1, std::numeric_limits<std::int64_t>::min(),
                                                    std::numeric_limits<std::int64_t>::max(), 1ll << 61};
    switch (what % 5) {
      case 0: b.count = counts[what / 5 % 2]; break;
      case 1:
        b.dtype = WEFT_F64;
        b.count = counts[2 + what / 5 % 2];
        break;
      case 2: b.dtype = what / 5 % 2 != 0 ? 17 : -1; break;
      case 3: b.device = what / 5 % 2 != 0 ? WEFT_CUDA(0) : what / 10 % 2 != 0 ? -3 : INT32_MAX; break;
      default: b.data = nullptr; break;
    }
  }
}

// The extents of an array that a halo or a window takes.
static std::int64_t elements_of_window(const Call& c, bool out) {
  std::array<std::int64_t, 16> part{}, extents{};
  const auto* const halo = static_cast<const weft_halo*>(c.given("halo"));
  const auto* const window = static_cast<const weft_window*>(c.given("window"));
  const auto room = static_cast<std::int32_t>(extents.size());
  extents.fill(1);
  part.fill(1);
  if (halo != nullptr) (void)weft_halo_extents(halo, extents.data(), room, nullptr);
  if (window != nullptr) (void)weft_window_extents(window, part.data(), extents.data(), room, nullptr);
  const bool of_part = window != nullptr && out == c.is("weft_window_start_adjoint");
  std::int64_t count = 1;
  for (const std::int64_t extent : of_part ? part : extents) {
    if (extent > 0 && count > std::int64_t{1} << 20) return count;  // more than any buffer here has
    count *= extent;
  }
  return count;
}

// The elements of the tensor of that number, or of this rank's part of it.
static std::int64_t elements_of_shards(const Call& c, bool part) {
  const auto* const shards = static_cast<const weft_sharded_parameters*>(c.given("shards"));
  weft_layout* layout = nullptr;
  if (shards == nullptr || weft_sharded_parameters_layout(shards, c.element(), &layout, nullptr) != WEFT_OK)
    return kElements;
  std::array<std::int64_t, 16> extents{};
  extents.fill(1);
  if (!part) (void)weft_layout_extents(layout, extents.data(), 16, nullptr);
  std::int64_t count = part ? Call::elements_of(layout) : 1;
  if (!part)
    for (const std::int64_t extent : extents) count *= extent;
  weft_layout_destroy(layout);
  return count;
}

void fill(Call& c, weft_buffer& b) {
  const std::string& name = c.filling();
  const int size = c.group_size();
  std::int64_t count = kElements;
  weft_dtype dtype = WEFT_F32;
  const bool divides = c.begins("weft_reduce_scatter") || c.is("weft_scatter") || c.begins("weft_all_to_all");
  const bool gathers = c.begins("weft_all_gather") || c.is("weft_gather") || c.begins("weft_all_to_all");
  if (name == "in" && divides) count *= size;
  if (name == "out" && gathers) count *= size;
  if (name == "indices" || name == "where") dtype = WEFT_I64;
  if (c.begins("weft_halo_") || c.begins("weft_window_")) count = elements_of_window(c, name == "out");
  if (c.begins("weft_sharded_parameters_")) count = elements_of_shards(c, name == "parts");
  if (c.is("weft_redistribute"))
    count = Call::elements_of(static_cast<const weft_layout*>(c.given(name == "in" ? "from" : "to")));
  c.fill_buffer(b, count, dtype);
}

void fill(Call& c, weft_blocks& b) {
  const int size = c.group_size();
  const unsigned kind = c.bytes.next();
  const std::size_t given = kind < 0xe0 ? static_cast<std::size_t>(size) : kind % 4;
  auto* const counts = static_cast<std::int64_t*>(c.room_of(given * sizeof(std::int64_t)));
  auto* const offsets = static_cast<std::int64_t*>(c.room_of(given * sizeof(std::int64_t)));
  for (std::size_t r = 0; r < given; ++r) {
    counts[r] = kind % 2 == 0 ? kElements : c.number<std::int64_t>("counts");
    offsets[r] = kind % 3 == 0 ? kElements * static_cast<std::int64_t>(r) : c.number<std::int64_t>("offsets");
  }
  b = {kind == 0xff ? nullptr : counts, kind % 4 == 0 ? nullptr : offsets, static_cast<std::int64_t>(given)};
  if (kind >= 0xf8) b.size = kind % 2 != 0 ? -1 : std::numeric_limits<std::int64_t>::min();
}

void fill(Call& c, weft_tensor& t) {
  const unsigned kind = c.bytes.next();
  t.name = c.text("name");
  t.layout = kind == 0 && (c.is("weft_checkpoint_save") || c.is("weft_checkpoint_load") ||
                           c.begins("weft_clip") || c.is("weft_grad_norm"))
                 ? nullptr
                 : c.handle<const weft_layout>("weft_layout", "layout");
  const std::string outer = c.filling();
  c.name_struct("data");
  c.fill_buffer(t.data, Call::elements_of(t.layout), WEFT_F32);
  c.name_struct(outer);
  t.extents = nullptr;
  t.dim_count = 0;
  if (kind >= 0x80) {
    const int dims = static_cast<int>(kind % 10);
    auto* const extents =
        static_cast<std::int64_t*>(c.room_of(static_cast<std::size_t>(dims) * sizeof(std::int64_t)));
    for (int d = 0; d < dims; ++d) extents[d] = c.number<std::int64_t>("extents");
    t.extents = extents;
    t.dim_count = kind >= 0xf8 ? -1 : dims;
  }
}

void fill(Call& c, weft_call& call) {
  call.struct_size = c.struct_size(sizeof call);
  call.op = c.choice<weft_op>(
      {WEFT_OP_ALL_REDUCE, WEFT_OP_REDUCE, WEFT_OP_BROADCAST, WEFT_OP_ALL_GATHER, WEFT_OP_ALL_GATHER_V,
       WEFT_OP_REDUCE_SCATTER, WEFT_OP_REDUCE_SCATTER_V, WEFT_OP_GATHER, WEFT_OP_SCATTER, WEFT_OP_ALL_TO_ALL,
       WEFT_OP_ALL_TO_ALL_V, WEFT_OP_BARRIER, WEFT_OP_SEND, WEFT_OP_RECV, WEFT_OP_SCAN, WEFT_OP_EXSCAN,
       WEFT_OP_WAIT_MESSAGE, WEFT_OP_NONE},
      "op");
  const int size = c.group_size();
  const unsigned kind = c.bytes.next();
  const std::int64_t whole = kElements * size;
  const bool divides = call.op == WEFT_OP_REDUCE_SCATTER || call.op == WEFT_OP_REDUCE_SCATTER_V ||
                       call.op == WEFT_OP_SCATTER || call.op == WEFT_OP_ALL_TO_ALL ||
                       call.op == WEFT_OP_ALL_TO_ALL_V;
  const bool gathers = call.op == WEFT_OP_ALL_GATHER || call.op == WEFT_OP_ALL_GATHER_V ||
                       call.op == WEFT_OP_GATHER || call.op == WEFT_OP_ALL_TO_ALL ||
                       call.op == WEFT_OP_ALL_TO_ALL_V;
  if (call.op == WEFT_OP_BARRIER || (call.op == WEFT_OP_RECV && kind == 0))
    call.in = {nullptr, 0, WEFT_F32, WEFT_CPU};
  else
    c.fill_buffer(call.in, divides ? whole : kElements, WEFT_F32);
  if (call.op == WEFT_OP_BARRIER || (call.op == WEFT_OP_SEND && kind == 0))
    call.out = {nullptr, 0, WEFT_F32, WEFT_CPU};
  else
    c.fill_buffer(call.out, gathers ? whole : kElements, WEFT_F32);
  call.root = kind == 0 ? (call.op == WEFT_OP_REDUCE || call.op == WEFT_OP_BROADCAST ||
                                   call.op == WEFT_OP_GATHER || call.op == WEFT_OP_SCATTER
                               ? 0
                               : -1)
                        : c.number<std::int32_t>("root");
  call.peer = call.op == WEFT_OP_SEND || call.op == WEFT_OP_RECV ? c.number<std::int32_t>("peer") : -1;
  const bool in_blocks = call.op == WEFT_OP_REDUCE_SCATTER_V || call.op == WEFT_OP_ALL_TO_ALL_V;
  const bool out_blocks = call.op == WEFT_OP_ALL_GATHER_V || call.op == WEFT_OP_ALL_TO_ALL_V;
  if (in_blocks != (kind >= 0xf8)) fill(c, call.in_blocks);
  if (out_blocks != (kind >= 0xf8)) fill(c, call.out_blocks);
  call.options = c.pointer<weft_call_options>("options");
}

void fill(Call& c, weft_call_options& o) {
  o = WEFT_CALL_OPTIONS_INIT;
  o.struct_size = c.struct_size(sizeof o);
  o.deadline_ns = c.number<std::int64_t>("deadline_ns");
  const unsigned kind = c.bytes.next();
  if (kind == 0) return;
  o.reduce_op = c.choice<weft_reduce_op>(
      {WEFT_SUM, WEFT_AVG, WEFT_MIN, WEFT_MAX, WEFT_PROD, WEFT_PREMUL_SUM, WEFT_BIT_AND, WEFT_BIT_OR,
       WEFT_BIT_XOR, WEFT_LOGICAL_AND, WEFT_LOGICAL_OR, WEFT_LOGICAL_XOR, WEFT_USER},
      "reduce_op");
  o.order = c.choice<weft_order>({WEFT_ORDER_NATIVE, WEFT_ORDER_CANONICAL}, "order");
  if (o.reduce_op == WEFT_USER || kind > 0xf0)
    o.reduction = c.handle<const weft_reduction>("weft_reduction", "reduction");
  if (o.reduce_op == WEFT_PREMUL_SUM || kind > 0xf0) o.scale = c.number<double>("scale");
  o.tag = c.number<std::int32_t>("tag");
  if (kind > 0xe0) o.reserved = c.number<std::int32_t>("reserved");
  if (kind % 8 == 7) fill(c, o.stream);
}

void fill(Call& c, weft_stream& s) {
  const unsigned kind = c.bytes.next();
  s = {WEFT_CPU, nullptr};
  if (kind == 0) return;
  constexpr std::array<weft_device, 6> devices = {WEFT_CPU, WEFT_CUDA(0), WEFT_CUDA(7), -1, INT32_MAX, 32767};
  s.device = devices[kind % devices.size()];
  s.handle = c.memory("handle");
}

void fill(Call& c, weft_cut& cut) {
  const unsigned kind = c.bytes.next();
  const int parts = kind < 0xc0 ? c.group_size() : static_cast<int>(kind % 4);
  auto* const begins =
      static_cast<std::int64_t*>(c.room_of((static_cast<std::size_t>(parts) + 1) * sizeof(std::int64_t)));
  for (int p = 0; p <= parts; ++p) begins[p] = p == parts ? c.number<std::int64_t>("end") : p;
  if (kind % 8 == 7) begins[0] = c.number<std::int64_t>("begins");
  cut = {c.number<std::int32_t>("dim"), kind >= 0xf8 ? -1 : parts, kind == 0xf7 ? nullptr : begins};
}

void fill(Call& c, weft_window_dim& d) {
  const unsigned kind = c.bytes.next();
  const int parts = kind < 0xc0 ? c.group_size() : static_cast<int>(kind % 4);
  auto* const wanted =
      static_cast<weft_range*>(c.room_of(static_cast<std::size_t>(parts) * sizeof(weft_range)));
  for (int p = 0; p < parts; ++p) wanted[p] = {0, 2};
  if (kind % 8 == 7)
    for (int p = 0; p < parts; ++p) wanted[p] = {c.number<std::int64_t>("lo"), c.number<std::int64_t>("hi")};
  d = {c.number<std::int32_t>("dim"),
       kind >= 0xf8 ? -1 : parts,
       kind == 0xf7 ? nullptr : wanted,
       {c.choice<weft_edge_kind>({WEFT_EDGE_NONE, WEFT_EDGE_ZERO, WEFT_EDGE_CONSTANT, WEFT_EDGE_PERIODIC,
                                  WEFT_EDGE_REFLECT, WEFT_EDGE_REPLICATE, WEFT_EDGE_POLE},
                                 "kind"),
        c.number<std::int32_t>("longitude"), c.number<double>("value")},
       {}};
  if (kind % 16 < 12) d.after_edge = d.before_edge;
}

namespace {

// A list of `count` of them; null at times, and then with a length that is not 0.
template <class T, class Fill>
void fill_list(Call& c, const T*& list, std::int32_t& count, const Fill& fill) {
  const unsigned kind = c.bytes.next();
  count = kind < 0xe0 ? static_cast<std::int32_t>((kind + 1) % 3) : 1;
  auto* const made = static_cast<T*>(c.room_of((static_cast<std::size_t>(count) + 1) * sizeof(T)));
  for (std::int32_t i = 0; i < count; ++i) fill(made[i]);
  list = kind == 0xf7 ? nullptr : made;
  if (kind >= 0xf8) count = -1;
}

void fill_box(Call& c, weft_exchange_box& box) {
  const unsigned kind = c.bytes.next();
  const int dims = kind < 0xc0 ? static_cast<int>(kind % 3) : kind < 0xf0 ? 1 : 8;
  const auto numbers = [&] {
    return static_cast<std::int64_t*>(c.room_of((static_cast<std::size_t>(dims) + 1) * sizeof(std::int64_t)));
  };
  std::int64_t *const counts = numbers(), *const strides = numbers();
  for (int d = 0; d < dims; ++d) counts[d] = kind % 8 == 7 ? c.number<std::int64_t>("counts") : 1 + d;
  for (int d = 0; d < dims; ++d) strides[d] = kind % 8 == 6 ? c.number<std::int64_t>("strides") : 1;
  std::int64_t* const indices = kind % 8 < 3 && kind / 64 == 1 && dims > 0 ? numbers() : nullptr;  // one
  if (indices != nullptr) indices[0] = c.number<std::int64_t>("indices");
  box = {kind % 16 == 15 ? c.number<std::int32_t>("field") : 0,
         kind == 0xf8 ? 9 : dims,
         kind % 8 >= 5 ? c.number<std::int64_t>("offset") : static_cast<std::int64_t>(kind % 4),
         kind == 0xf7 ? nullptr : counts,
         kind % 2 == 0 ? nullptr : strides,
         indices};
}

void fill_parts(Call& c, const weft_exchange_part*& parts, std::int32_t& count) {
  fill_list(c, parts, count, [&](weft_exchange_part& part) {
    const unsigned kind = c.bytes.next();
    part.peer =
        kind < 0xf0 ? static_cast<std::int32_t>(kind) % c.group_size() : c.number<std::int32_t>("peer");
    fill_list(c, part.boxes, part.box_count, [&](weft_exchange_box& box) { fill_box(c, box); });
  });
}

}  // namespace

void fill(Call& c, weft_exchange_plan& p) {
  p = WEFT_EXCHANGE_PLAN_INIT;
  p.struct_size = c.struct_size(sizeof p);
  p.kind = c.choice<weft_exchange_kind>({WEFT_EXCHANGE_COPY, WEFT_EXCHANGE_ADD}, "kind");
  fill_list(c, p.fields, p.field_count, [&](weft_dtype& dtype) {
    dtype = c.choice<weft_dtype>({WEFT_F32, WEFT_F64, WEFT_BF16, WEFT_I32, WEFT_U8, WEFT_BOOL}, "fields");
  });
  fill_parts(c, p.sends, p.send_count);
  fill_parts(c, p.receives, p.receive_count);
  if (c.bytes.next() > 0xf0) p.reserved = 1;
  p.name = c.text("name");
}

void fill(Call& c, weft_transport& t) {
  t = WEFT_TRANSPORT_INIT;
  t.struct_size = c.struct_size(sizeof t);
  t.detects_death = c.flag();
  t.spin = c.flag();
  t.name = c.text("name");
  t.transport_data = c.memory("transport_data");
  t.open = c.callback<Open>("open");
  t.write = c.callback<Write>("write");
  t.read = c.callback<Read>("read");
  t.close = c.callback<Release>("close");
}

// ---- Outputs ----

weft_error* Call::error() {
  const unsigned b = bytes.next();
  if (b >= 0xe0 && b < 0xf0) return nullptr;
  error_ = static_cast<weft_error*>(room_of(sizeof(weft_error)));
  *error_ = WEFT_ERROR_INIT;
  if (b >= 0xf0) error_->struct_size = b % 2 != 0 ? 0 : 100;
  error_before_.assign(reinterpret_cast<const char*>(error_), sizeof *error_);
  return error_;
}

void* Call::out_of(std::size_t n, const char* name, bool whole) {
  const unsigned b = bytes.next();
  if (b >= 0xf8) return nullptr;
  void* const at = room_of(n);
  std::memset(at, 0xab, n);
  outputs_.push_back({at, n, {}, name, "", whole});
  saved(at);
  return at;
}

void* Call::out_pointer(const char* type, const char* name) {
  const unsigned b = bytes.next();
  // Without a Work a call waits, as most of them do in a program.
  if (b >= (std::string_view(type) == "weft_work" ? 0xa0u : 0xf8u)) return nullptr;
  void* const at = room_of(sizeof(void*));
  std::memset(at, 0xab, sizeof(void*));
  outputs_.push_back({at, sizeof(void*), {}, name, type, true});
  saved(at);
  return at;
}

void Call::saved(const void* at) {
  for (Output& o : outputs_)
    if (o.at == at) o.before.assign(static_cast<const char*>(o.at), o.bytes);
}

// ---- The call ----

void Call::begin() { now_in[world.rank].store(function, std::memory_order_relaxed); }
void Call::ended() {
  now_in[world.rank].store(nullptr, std::memory_order_relaxed);
  Tally& t = tally(function);
  ++t.calls;
  ++t.good;
}

void Call::check_error(weft_status status) const {
  if (error_ == nullptr) return;
  if (error_->struct_size != sizeof *error_) {
    if (status != WEFT_BAD_ARGUMENT) fail(function, "takes an error that is not initialised");
    weft_error expected;  // as it was, with a code
    std::memcpy(&expected, error_before_.data(), sizeof expected);
    expected.code = WEFT_BAD_ARGUMENT;
    if (std::memcmp(error_, &expected, sizeof expected) != 0)
      fail(function, "writes more than its code to an error that is not initialised");
    return;
  }
  const bool same = std::memcmp(error_, error_before_.data(), sizeof *error_) == 0;
  if (status == WEFT_OK) {
    if (!same) fail(function, "writes to the error although all went well");
    return;
  }
  const std::size_t length = strnlen(error_->text, WEFT_ERROR_TEXT);
  if (error_->code != status) fail(function, "returns another status than its error has");
  if (length == 0 || length == WEFT_ERROR_TEXT) fail(function, "gives an error without a text");
  if (error_->op < WEFT_OP_NONE || error_->op > WEFT_OP_EXCHANGE || error_->rank_count < 0)
    fail(function, "gives an error of no operation, or of fewer ranks than none");
  for (int i = 0; i < WEFT_ERROR_RANKS; ++i)
    if (error_->ranks[i] < -1 || (i < error_->rank_count) != (error_->ranks[i] >= 0))
      fail(function, std::string("gives an error with ranks that are none: ") + error_->text);
}

void Call::end(weft_status status) {
  now_in[world.rank].store(nullptr, std::memory_order_relaxed);
  if (status < WEFT_OK || status > WEFT_SYSTEM)
    fail(function, "returns " + std::to_string(status) + ", which is no weft_status");
  Tally& t = tally(function);
  ++t.calls;
  if (status == WEFT_OK) ++t.good;
  check_error(status);
  const bool unused = no_handle_ == "store" && begins("weft_group_create") && given_number("size", 1) == 1;
  if (status == WEFT_OK && !no_handle_.empty() && !unused)
    fail(function, "takes a handle that is none for " + no_handle_);
  if (callback_record_ != nullptr) callback_record_->given = status == WEFT_OK;
  if (release_record_ != nullptr) {
    release_record_->given = status == WEFT_OK;
    release_record_->with_release = !world.left_out.contains("release");
    if (status != WEFT_OK && release_record_->releases != 0) fail(function, "fails, and releases the data");
  }
  for (const Output& o : outputs_) {
    const bool same = std::memcmp(o.at, o.before.data(), o.bytes) == 0;
    if (status != WEFT_OK) {
      const bool told = is("weft_work_sources") && o.name == "count";  // how much room there should have been
      if (!same && !told)
        fail(function,
             "writes to " + o.name + " although it fails: " + (error_ != nullptr ? error_->text : ""));
      continue;
    }
    if (o.whole && same && !(is("weft_work_sources") && o.name == "sources"))
      fail(function, "writes nothing to " + o.name + " although all went well");
    if (o.type.empty()) continue;
    void* const made = *static_cast<void**>(o.at);
    if (o.type == "text") {
      if (made == nullptr || std::strlen(static_cast<const char*>(made)) > 1u << 20)
        fail(function, "gives no " + o.name);
      continue;
    }
    if (made == nullptr) {
      const bool none = (is("weft_store_try_get") && o.name == "value") ||
                        (is("weft_group_split") && o.name == "part") ||
                        (is("weft_checkpoint_latest") && o.name == "folder");
      if (!none) fail(function, "gives no " + o.name);
      continue;
    }
    if (o.type == "memory") {
      const std::int64_t n = given_number("bytes", 0);
      std::memset(made, 1, static_cast<std::size_t>(n));  // it is there
      world.blocks.push_back({made, static_cast<std::size_t>(n), given("context"), false});
      continue;
    }
    world.adopt(o.type, made);
  }
  if (is("weft_free") && status == WEFT_OK && freed_ != nullptr)
    std::erase_if(world.blocks, [&](const Block& block) { return block.data == freed_; });
}

}  // namespace weft::fuzz::capi
