// Calls of weft.h's functions with arguments that an input's bytes choose. Zero bytes choose valid arguments,
// so a call whose bytes have run out still does something. The target makes no calls that the API leaves
// undefined: memory that is shorter than its stated length, a destroyed handle, two threads with one Work.
// Everything that waits has a limit of milliseconds, so an input that hangs has found a fault.
//
// tools/c_api_calls.py makes a function `void call_...(World&, Bytes&)` for each function of the headers, of
// what is declared here.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "capi/callbacks.hpp"
#include "weft/weft.h"

namespace weft::fuzz::capi {

/// Ends the program with a report of the call and of what is wrong.
[[noreturn]] void fail(std::string_view function, const std::string& what);

/// An input, or a part of it: bytes, and then zeros.
class Bytes {
 public:
  explicit Bytes(std::string_view bytes) : rest_(bytes) {}
  bool empty() const { return rest_.empty(); }
  unsigned next() {
    if (rest_.empty()) return 0;
    const auto byte = static_cast<unsigned char>(rest_.front());
    rest_.remove_prefix(1);
    return byte;
  }
  std::string_view take(std::size_t most) {
    const std::string_view taken = rest_.substr(0, most);
    rest_.remove_prefix(taken.size());
    return taken;
  }

 private:
  std::string_view rest_;
};

/// Memory of weft_alloc.
struct Block {
  void* data;
  std::size_t bytes;
  void* context;  // the handle that gave it
  bool used;      // calls may still use it: it is freed after all that may
};

/// The state that the ranks of one input share.
struct Shared {
  int ranks = 1;
  weft_context* context = nullptr;
  weft_store* store = nullptr;
  std::string folder;      // of this input, empty at first
  std::string checkpoint;  // a folder with a checkpoint, which nobody changes
  Hub hub;                 // of transports
  Exchange exchange;       // of weft_group_create_by_broadcast
};

/// The state of one rank.
class World {
 public:
  World(Shared& shared, int rank);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  Shared& shared;
  const int rank;
  /// Live handles, by type; calls use the first ones if the input does not choose.
  std::map<std::string, std::vector<void*>, std::less<>> handles;
  std::map<std::string, std::vector<void*>, std::less<>> dead;  // handles that are destroyed, the last few
  std::set<void*> borrowed;                                     // of `handles`: not this rank's to destroy
  std::vector<Block> blocks;
  std::vector<std::unique_ptr<std::byte[]>> memory;
  std::vector<std::unique_ptr<CallbackRecord>> callbacks;  // of weft_work_then
  std::vector<std::unique_ptr<ReleaseRecord>> releases;    // of weft_reduction_create
  CallbackState states[kModes];
  std::set<std::string, std::less<>> left_out;  // callbacks that were NULL in some call

  /// Takes a handle that a call has returned: keeps it, or destroys it if there are many of its type.
  void adopt(std::string_view type, void* handle);
  void destroy(std::string_view type, void* handle);
  void died(std::string_view type, void* handle);
  /// Returns null if there is no such handle. `which` selects one of several.
  void* dead_handle(std::string_view type, unsigned which) const;
  void* other_handle(std::string_view type, unsigned which) const;
  bool is_alive(std::string_view type, void* handle) const;
  bool has_used_blocks(const void* context) const;
  /// Destroys everything, in an order that `seed` chooses.
  void destroy_all(std::uint32_t seed);
};

struct Function {
  const char* name;
  void (*call)(World&, Bytes&);
  bool fails;  // it returns a weft_status
};
struct Destroyer {
  const char* type;
  void (*destroy)(void* handle);
};
const std::vector<Function>& weft_functions();
const std::vector<Destroyer>& weft_destroyers();

/// How often a function was called, and its results.
struct Tally {
  std::atomic<std::uint64_t> calls{0}, good{0};
};
Tally& tally(std::string_view function);
/// The function that each rank is in now; for the report of an input that hangs.
extern std::atomic<const char*> now_in[2];

inline constexpr std::int64_t kMs = 1000000;
inline constexpr std::int64_t kDeadline = 50 * kMs;  // of groups, and so of what ranks wait for each other
inline constexpr std::int64_t kElements = 8;         // in a buffer where the input says nothing
inline constexpr std::size_t kRegionBytes = std::size_t{1} << 16;
inline constexpr int kRegions = 6;

class Call {
 public:
  Call(World& world, Bytes& bytes, const char* function);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  World& world;
  Bytes& bytes;
  const char* const function;

  // Arguments -----------------------------------------------------------------------------------------------

  /// One of the live handles, or NULL.
  template <class T>
  T* handle(const char* type, const char* name) {
    return static_cast<T*>(handle_of(type, name));
  }
  /// Takes a live handle of this type out of the pool, for a call that destroys it; sometimes a dead or
  /// foreign handle instead. NULL if there is none.
  template <class T>
  T* taken(const char* type) {
    return static_cast<T*>(taken_of(type));
  }
  template <class T>
  T number(const char* name) {
    if constexpr (std::is_floating_point_v<T>) {
      return static_cast<T>(real(name));
    } else {
      const std::int64_t n = integer(name, sizeof(T), std::is_signed_v<T>);
      numbers_[name] = n;
      return static_cast<T>(n);
    }
  }
  template <class T>
  T choice(std::initializer_list<int> good, const char* name) {
    const T chosen = static_cast<T>(one_of(good, name));
    numbers_[name] = chosen;
    return chosen;
  }
  bool flag() { return bytes.next() % 2 != 0; }
  const char* text(const char* name);
  /// The data of a callback, and other pointers to anything.
  void* memory(const char* name);
  template <class F>
  F callback(const char* name) {
    const unsigned b = bytes.next();
    if (b >= 0xf0) world.left_out.insert(name);
    return b >= 0xf0 ? nullptr : callback_of(static_cast<F>(nullptr), name);
  }
  std::uint32_t struct_size(std::size_t bytes_of_it);

  /// A struct; NULL if the input says so, and mostly for options.
  template <class T>
  const T* pointer(const char* name) {
    if (is_null(name)) return nullptr;
    const std::string outer = struct_name_;
    const std::size_t outer_bytes = struct_bytes_;
    struct_name_ = name;
    struct_bytes_ = 0;
    T made{};
    fill(*this, made);
    // Exactly as many bytes as the length says, so reading more is detected.
    const std::size_t n = struct_bytes_ != 0 ? struct_bytes_ : sizeof(T);
    struct_name_ = outer;
    struct_bytes_ = outer_bytes;
    void* const at = room_of(n);
    std::memset(at, n > sizeof(T) && bytes.next() > 0xf0 ? 1 : 0, n);
    std::memcpy(at, &made, n < sizeof(T) ? n : sizeof(T));
    return static_cast<const T*>(at);
  }
  /// An array; `count` becomes its length, or an invalid length.
  template <class T, class N>
  const T* array(const T*, N& count, const char* name) {
    using Element = std::conditional_t<std::is_void_v<T>, char, T>;
    const int length = length_of(name);
    Element* const all = static_cast<Element*>(room_of(sizeof(Element) * static_cast<std::size_t>(length)));
    in_array_ = true;
    for (element_ = 0; element_ < length; ++element_) {
      Element one{};
      fill_element(one, name);
      struct_bytes_ = 0;
      std::memcpy(static_cast<void*>(all + element_), &one, sizeof one);
    }
    element_ = 0;
    in_array_ = false;
    count = static_cast<N>(length);
    const unsigned wrong = bytes.next();
    if (wrong >= 0xf8 && std::is_signed_v<N>) count = wrong % 2 != 0 ? N(-1) : std::numeric_limits<N>::min();
    if (length == 0) return wrong % 2 != 0 ? nullptr : all;
    return wrong >= 0xf0 ? nullptr : all;
  }
  template <class T, class N>
  T* const* handles(const char* type, N& count, const char* name) {
    const int length = length_of(name);
    T** const all = static_cast<T**>(room_of(sizeof(T*) * static_cast<std::size_t>(length)));
    for (int i = 0; i < length; ++i) all[i] = handle<T>(type, name);
    count = static_cast<N>(length);
    return bytes.next() >= 0xf8 ? nullptr : all;
  }

  // Outputs -------------------------------------------------------------------------------------------------

  weft_error* error();
  template <class T>
  T** out_handle(const char* type, const char* name) {
    return static_cast<T**>(out_pointer(type, name));
  }
  void** out_memory(const char* name) { return static_cast<void**>(out_pointer("memory", name)); }
  const char** out_text(const char* name) { return static_cast<const char**>(out_pointer("text", name)); }
  template <class T>
  T* out(const char* name) {
    T* const at = static_cast<T*>(out_of(sizeof(T), name, std::is_scalar_v<T>));
    if constexpr (requires { at->struct_size; }) {
      if (at != nullptr) {
        std::memset(static_cast<void*>(at), 0, sizeof(T));
        at->struct_size = struct_size(sizeof(T));
        struct_bytes_ = 0;
        if (at->struct_size > sizeof(T) && at->struct_size <= kMostStruct) at->struct_size = sizeof(T);
        saved(at);
      }
    }
    return at;
  }
  /// As many as room() said.
  template <class T>
  T* out_array(const char* name) {
    return static_cast<T*>(out_of(sizeof(T) * room_, name, false));
  }
  template <class N>
  N room() {
    const unsigned b = bytes.next();
    room_ = b == 0 ? default_room() : b < 0xf0 ? b % 17 : 0;
    if (b >= 0xf8 && std::is_signed_v<N>) return b % 2 != 0 ? N(-1) : std::numeric_limits<N>::min();
    return static_cast<N>(room_);
  }

  // The call ------------------------------------------------------------------------------------------------

  template <class F>
  void status(const F& f) {
    begin();
    end(f());
  }
  template <class F>
  void name(const F& f) {
    begin();
    const char* const text = f();
    ended();
    if (text == nullptr || std::strlen(text) > 4096 * 1024) fail(function, "gives no text");
  }
  template <class F>
  void nothing(const F& f) {
    begin();
    f();
    ended();
  }
  template <class F>
  void plain(const F& f) {
    begin();
    (void)f();
    ended();
  }

  // For fill() ----------------------------------------------------------------------------------------------

  /// Memory only for this call, of exactly so many bytes.
  void* room_of(std::size_t n);
  bool is(std::string_view name) const { return name == function; }
  bool begins(std::string_view prefix) const { return std::string_view(function).starts_with(prefix); }
  /// The ranks of the group that the call is given.
  int group_size();
  /// The handle that was passed under that name, or null.
  void* given(std::string_view name) const;
  std::int64_t given_number(std::string_view name, std::int64_t otherwise) const;
  /// Elements of what this rank has of a layout's whole.
  static std::int64_t elements_of(const weft_layout* layout);
  void fill_buffer(weft_buffer& b, std::int64_t count, weft_dtype dtype);
  /// The name of the struct that is being filled.
  const std::string& filling() const { return struct_name_; }
  int element() const { return element_; }
  bool in_array() const { return in_array_; }
  void name_struct(std::string name) { struct_name_ = std::move(name); }

 private:
  static constexpr std::uint32_t kMostStruct = 4096;

  struct Output {
    void* at;
    std::size_t bytes;
    std::string before;
    std::string name, type;  // type: of a handle; "" otherwise
    bool whole;              // success writes it
  };

  void* handle_of(std::string_view type, std::string_view name);
  void* taken_of(std::string_view type);
  std::int64_t integer(std::string_view name, std::size_t size, bool is_signed);
  double real(std::string_view name);
  int one_of(std::initializer_list<int> good, std::string_view name);
  bool is_null(std::string_view name);
  int length_of(std::string_view name);
  std::size_t default_room();
  void* out_of(std::size_t n, const char* name, bool whole);
  void* out_pointer(const char* type, const char* name);
  void saved(const void* at);
  void begin();
  void ended();
  void end(weft_status status);
  void check_error(weft_status status) const;
  const char* keep(std::string_view text);

  template <class T>
  void fill_element(T& one, const char* name) {
    if constexpr (std::is_same_v<T, const char*>) {
      one = text(name);
    } else if constexpr (std::is_same_v<T, char>) {
      one = static_cast<char>(bytes.next());
    } else if constexpr (std::is_arithmetic_v<T>) {
      one = number<T>(name);
    } else {
      struct_name_ = name;
      fill(*this, one);
    }
  }

  std::vector<std::unique_ptr<char[]>> memory_;
  std::vector<Output> outputs_;
  std::map<std::string, void*, std::less<>> given_;
  std::map<std::string, std::int64_t, std::less<>> numbers_;
  weft_error* error_ = nullptr;
  std::string error_before_;
  std::string struct_name_;
  CallbackRecord* callback_record_ = nullptr;
  ReleaseRecord* release_record_ = nullptr;
  std::size_t struct_bytes_ = 0, room_ = 0;
  int element_ = 0, buffers_ = 0;
  std::int64_t taken_ = 1;  // elements of a shape so far
  bool in_array_ = false;
  std::string no_handle_;  // the argument that is no live handle
  void* freed_ = nullptr;  // what weft_free is given
};

// Structs whose members depend on each other.
void fill(Call& c, weft_buffer& b);
void fill(Call& c, weft_blocks& b);
void fill(Call& c, weft_tensor& t);
void fill(Call& c, weft_call& call);
void fill(Call& c, weft_call_options& o);
void fill(Call& c, weft_stream& s);
void fill(Call& c, weft_transport& t);
void fill(Call& c, weft_cut& cut);
void fill(Call& c, weft_window_dim& d);
void fill(Call& c, weft_exchange_plan& p);

}  // namespace weft::fuzz::capi
