#include "cases.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "weft/base/error.hpp"

namespace weft::bench {
namespace {

constexpr std::pair<Kind, std::string_view> kNames[] = {
    {Kind::all_reduce, "all_reduce"},
    {Kind::reduce, "reduce"},
    {Kind::broadcast, "broadcast"},
    {Kind::all_gather, "all_gather"},
    {Kind::reduce_scatter, "reduce_scatter"},
    {Kind::all_to_all, "all_to_all"},
    {Kind::ping_pong, "ping_pong"},
    {Kind::one_way, "one_way"},
    {Kind::coalesced, "coalesced"},
    {Kind::halo_rows, "halo_rows"},
    {Kind::halo_columns, "halo_columns"},
    {Kind::halo_four_columns, "halo_four_columns"},
    {Kind::halo_3d, "halo_3d"},
    {Kind::halo_fields, "halo_fields"},
    {Kind::halo_3d_fields, "halo_3d_fields"},
};

constexpr std::int64_t kRotatingBytes = 256 << 20;
constexpr int kMostSets = 64;

[[noreturn]] void refuse(std::string_view flag, std::string_view value, std::string_view expected) {
  throw Error(ErrorCode::bad_argument,
              std::string(flag) + " \"" + std::string(value) + "\"; expected " + std::string(expected));
}

// 0 … 15: a sum over 8 ranks is exact in i8 and bf16.
int value(int rank, std::int64_t i) { return static_cast<int>((i * 7 + (i >> 6) + rank * 5) & 15); }

template <class T>
struct As {
  using type = T;
};
template <class F>
void with_type(DType t, const F& f) {
  switch (t) {
    case DType::f64: return f(As<double>{});
    case DType::f32: return f(As<float>{});
    case DType::f16: return f(As<f16>{});
    case DType::bf16: return f(As<bf16>{});
    case DType::i8: return f(As<std::int8_t>{});
    case DType::i16: return f(As<std::int16_t>{});
    case DType::i32: return f(As<std::int32_t>{});
    case DType::i64: return f(As<std::int64_t>{});
    case DType::u8: return f(As<std::uint8_t>{});
    case DType::u16: return f(As<std::uint16_t>{});
    case DType::u32: return f(As<std::uint32_t>{});
    case DType::u64: return f(As<std::uint64_t>{});
    case DType::boolean:
    case DType::f8e4m3:
    case DType::f8e5m2:
    case DType::c64:
    case DType::c128: break;
  }
  refuse("--dtype", name(t), "a number that can be summed: f64 f32 f16 bf16 i8 … u64");
}

bool has_blocks(Kind k) {
  return k == Kind::all_gather || k == Kind::reduce_scatter || k == Kind::all_to_all;
}

// Whether this rank has a result, and the value of its element j.
bool has_result(Kind k, int rank) {
  if (k == Kind::reduce) return rank == 0;
  return k != Kind::one_way || rank == 1;
}
// Sets want[k] to element first + k of the result. The loops have no branch inside, because programs verify
// up to 128 MB again and again.
void expect(const Case& c, int rank, std::int64_t first, std::int64_t count, int* want) {
  const auto values = [&](int of, std::int64_t from, std::int64_t begin, std::int64_t end) {
    for (std::int64_t k = begin; k < end; ++k) want[k] = value(of, from + k);
  };
  const auto sums = [&](std::int64_t from) {
    values(0, from, 0, count);
    for (int r = 1; r < c.ranks; ++r)
      for (std::int64_t k = 0; k < count; ++k) want[k] += value(r, from + k);
  };
  const std::int64_t b = c.block();
  // Goes block by block; the elements of rank r begin at `start` in that rank's buffer.
  const auto blocks = [&](std::int64_t start) {
    for (std::int64_t k = 0; k < count;) {
      const std::int64_t r = (first + k) / b, end = std::min(count, (r + 1) * b - first);
      values(static_cast<int>(r), start + first - r * b, k, end);
      k = end;
    }
  };
  // Element i of a halo: from the end of the previous rank's part, or from the beginning of the next rank's
  // part.
  const auto halo = [&] {
    const std::int64_t run = c.faces().run;
    const int before = (rank + c.ranks - 1) % c.ranks, after = (rank + 1) % c.ranks;
    for (std::int64_t k = 0; k < count; ++k) {
      const std::int64_t i = first + k;
      want[k] = i % (2 * run) >= run ? value(after, i - run) : value(before, i + run);
    }
  };
  switch (c.kind) {
    case Kind::halo_rows:
    case Kind::halo_columns:
    case Kind::halo_four_columns:
    case Kind::halo_3d:
    case Kind::halo_fields:
    case Kind::halo_3d_fields: return halo();
    case Kind::all_reduce:
    case Kind::reduce: return sums(first);
    case Kind::reduce_scatter: return sums(rank * b + first);
    case Kind::all_gather: return blocks(0);
    case Kind::all_to_all: return blocks(rank * b);
    case Kind::broadcast:
    case Kind::one_way: return values(0, first, 0, count);
    case Kind::ping_pong:
    case Kind::coalesced: return values(1 - rank, first, 0, count);
  }
}

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> words;
  std::size_t from = 0;
  for (std::size_t comma; (comma = list.find(',', from)) != std::string::npos; from = comma + 1)
    words.push_back(list.substr(from, comma - from));
  words.push_back(list.substr(from));
  return words;
}

std::string join(const std::vector<std::string>& words) {
  std::string all;
  for (const std::string& w : words) all += (all.empty() ? "" : ", ") + w;
  return all;
}

std::int64_t whole(std::string_view flag, const std::string& word, std::int64_t least, std::int64_t most) {
  std::int64_t n = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), n);
  if (error != std::errc{} || end != word.data() + word.size() || n < least || n > most)
    refuse(flag, word, "whole numbers from " + std::to_string(least) + " to " + std::to_string(most));
  return n;
}

std::string escaped(std::string_view text) {
  std::string s;
  for (const char c : text) {
    if (c == '"' || c == '\\') s += '\\';
    s += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return s;
}

std::string labels(const Row& row) {
  std::string s = "{";
  for (const auto& [key, word] : row.labels) s += "\"" + key + "\": \"" + escaped(word) + "\", ";
  return s + "\"ranks\": " + std::to_string(row.ranks) + ", \"bytes\": " + std::to_string(row.bytes);
}

}  // namespace

std::string_view name(Kind kind) noexcept {
  for (const auto& [k, n] : kNames)
    if (k == kind) return n;
  return "";
}

Kind kind_from_name(std::string_view word) {
  std::vector<std::string> known;
  for (const auto& [k, n] : kNames) {
    if (n == word) return k;
    known.emplace_back(n);
  }
  refuse("--op", word, "one of " + join(known));
}

bool has_place(Kind kind, bool in_place) noexcept {
  if (kind == Kind::all_to_all || is_message(kind) || is_halo(kind)) return !in_place;
  return true;
}

bool usual_place(Kind kind) noexcept {
  return kind == Kind::all_reduce || kind == Kind::reduce || kind == Kind::broadcast;
}

Times per_message(Times t, Kind kind) noexcept {
  const double messages = kind == Kind::ping_pong ? 2 : kind == Kind::one_way ? kWindow : 1;
  t.median_us /= messages;
  t.p99_us /= messages;
  return t;
}

double bus_factor(Kind kind, int ranks) noexcept {
  const double n = ranks;
  if (kind == Kind::all_reduce) return 2 * (n - 1) / n;
  return has_blocks(kind) ? (n - 1) / n : 1;
}

std::int64_t Case::block() const noexcept {
  const std::int64_t size = size_bytes(dtype), parts = has_blocks(kind) ? ranks : 1;
  const std::int64_t count = std::max<std::int64_t>(1, (bytes + size * parts - 1) / (size * parts));
  constexpr std::int64_t kFaces = 2 * kHaloFields;
  return is_halo(kind) ? (count + kFaces - 1) / kFaces * kFaces : count;
}
Case::Faces Case::faces() const noexcept {
  const std::int64_t fields = kind == Kind::halo_fields || kind == Kind::halo_3d_fields ? kHaloFields : 1;
  const std::int64_t face = block() / fields / 2;
  if (kind == Kind::halo_columns) return {fields, face, 1};
  if (kind == Kind::halo_four_columns) return {fields, face / 4, 4};
  if (kind != Kind::halo_3d && kind != Kind::halo_3d_fields) return {fields, 1, face};
  std::int64_t runs = 1;
  while (4 * runs * runs <= face && face % (2 * runs) == 0) runs *= 2;
  return {fields, runs, face / runs};
}

std::int64_t Case::in_count() const noexcept {
  return kind == Kind::reduce_scatter || kind == Kind::all_to_all ? block() * ranks : block();
}
std::int64_t Case::out_count() const noexcept {
  return kind == Kind::all_gather || kind == Kind::all_to_all ? block() * ranks : block();
}
std::int64_t Case::moved_bytes() const noexcept {
  return std::max(in_count(), out_count()) * size_bytes(dtype);
}

std::shared_ptr<std::byte> allocate_pages(std::size_t bytes) {
  const std::size_t pages = (std::max<std::size_t>(bytes, 1) + 4095) / 4096 * 4096;
  void* const p = std::aligned_alloc(4096, pages);
  if (p == nullptr) throw_errno("bench: " + std::to_string(pages) + " bytes", ENOMEM);
  return {static_cast<std::byte*>(p), [](std::byte* b) { std::free(b); }};
}

Buffers::Buffers(const Case& c, int rank, const Allocate& allocate) : case_(c), rank_(rank) {
  const std::int64_t size = size_bytes(c.dtype), in = c.in_count() * size, out = c.out_count() * size;
  const std::int64_t sets =
      c.rotating ? std::clamp<std::int64_t>(kRotatingBytes / std::max<std::int64_t>(1, c.bytes), 2, kMostSets)
                 : 1;
  for (std::int64_t s = 0; s < sets; ++s) {
    Set set;
    set.owner = allocate(static_cast<std::size_t>(c.in_place ? std::max(in, out) : in));
    set.in = set.out = set.owner.get();
    if (c.in_place) {
      if (in < out) set.in += rank * in;
      if (out < in) set.out += rank * out;
    } else {
      set.other = allocate(static_cast<std::size_t>(out));
      set.out = set.other.get();
    }
    sets_.push_back(std::move(set));
  }
  reset();
}

void Buffers::reset() {
  const std::int64_t size = size_bytes(case_.dtype);
  for (const Set& s : sets_) {
    if (!case_.in_place || case_.out_count() > case_.in_count())
      std::memset(s.out, 0xee, static_cast<std::size_t>(case_.out_count() * size));
    with_type(case_.dtype, [&](auto as) {
      using T = typename decltype(as)::type;
      T* const in = reinterpret_cast<T*>(s.in);
      // The receivers of a broadcast must not already hold the root's data.
      const int who = case_.kind == Kind::broadcast && rank_ != 0 ? rank_ + 1 : rank_;
      for (std::int64_t i = 0; i < case_.in_count(); ++i)
        in[i] = static_cast<T>(static_cast<float>(value(who, i)));
    });
  }
}

std::string Buffers::wrong() const {
  if (!has_result(case_.kind, rank_)) return "";
  std::string problem;
  for (const Set& s : sets_)
    with_type(case_.dtype, [&](auto as) {
      using T = typename decltype(as)::type;
      const T* const out = reinterpret_cast<const T*>(s.out);
      constexpr std::int64_t kChunk = 4096;
      int want[kChunk];
      for (std::int64_t first = 0; first < case_.out_count() && problem.empty(); first += kChunk) {
        const std::int64_t count = std::min(kChunk, case_.out_count() - first);
        expect(case_, rank_, first, count, want);
        std::int64_t bad = 0;
        for (std::int64_t k = 0; k < count; ++k)
          bad += static_cast<float>(out[first + k]) != static_cast<float>(want[k]);
        if (bad == 0) continue;
        std::int64_t k = 0;
        while (static_cast<float>(out[first + k]) == static_cast<float>(want[k])) ++k;
        problem = "rank " + std::to_string(rank_) + ": element " + std::to_string(first + k) + " is " +
                  std::to_string(static_cast<float>(out[first + k])) + "; expected " +
                  std::to_string(want[k]);
      }
    });
  return problem.empty()
             ? ""
             : std::string(name(case_.kind)) + " of " + std::to_string(case_.bytes) + " bytes: " + problem;
}

Prepared prepare(const std::shared_ptr<Buffers>& buffers,
                 const std::function<void(std::byte* in, std::byte* out)>& call) {
  Prepared p;
  p.cycle = buffers->sets();
  if (p.cycle == 1) {
    p.run = [buffers, call, in = buffers->in(0), out = buffers->out(0)] { call(in, out); };
  } else {
    p.run = [buffers, call, next = 0]() mutable {
      call(buffers->in(next), buffers->out(next));
      if (++next == buffers->sets()) next = 0;
    };
  }
  p.verify = [buffers] { return buffers->wrong(); };
  p.reset = [buffers] { buffers->reset(); };
  return p;
}

Spec parse_spec(int& argc, char** argv, const Defaults& defaults) {
  Spec spec;
  spec.kinds = {defaults.kinds.at(0)};
  spec.memory = {defaults.memory.at(0)};
  for (std::int64_t b = 8; b <= 128 << 20; b *= 4) spec.bytes.push_back(b);
  int kept = 1;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag.starts_with("--benchmark_")) {
      argv[kept++] = argv[i];
      continue;
    }
    if (flag == "--rows") {
      spec.rows = true;
      continue;
    }
    static constexpr const char* kKnown[] = {"--op",       "--dtype",   "--bytes",   "--place",
                                             "--buffers",  "--memory",  "--backend", "--ranks",
                                             "--ranks-as", "--seconds", "--turns",   "--bind"};
    if (std::find(std::begin(kKnown), std::end(kKnown), flag) == std::end(kKnown))
      refuse("flag", flag,
             "--op, --dtype, --bytes, --place, --buffers, --memory, --backend, --ranks, --ranks-as, "
             "--seconds, --turns, "
             "--rows or one that begins with --benchmark_");
    if (i + 1 == argc) refuse(flag, "", "a value after it");
    const std::string text = argv[++i];
    const std::vector<std::string> words = split(text);
    const auto choose = [&](const std::vector<std::string>& known) {
      for (const std::string& w : words)
        if (std::find(known.begin(), known.end(), w) == known.end()) refuse(flag, w, "one of " + join(known));
    };
    if (flag == "--op") {
      std::vector<std::string> known;
      for (const Kind k : defaults.kinds) known.emplace_back(name(k));
      choose(known);
      spec.kinds.clear();
      for (const std::string& w : words) spec.kinds.push_back(kind_from_name(w));
    } else if (flag == "--dtype") {
      spec.dtypes.clear();
      for (const std::string& w : words) {
        spec.dtypes.push_back(dtype_from_name(w));
        if (spec.dtypes.back() != DType::f8e4m3)
          with_type(spec.dtypes.back(), [](auto) {});  // layers have it
      }
    } else if (flag == "--bytes") {
      spec.bytes.clear();
      for (const std::string& w : words) spec.bytes.push_back(whole(flag, w, 1, std::int64_t{1} << 32));
    } else if (flag == "--place") {
      choose({"in", "out"});
      spec.in_place.clear();
      for (const std::string& w : words) spec.in_place.push_back(w == "in");
    } else if (flag == "--buffers") {
      choose({"hot", "rotating"});
      spec.rotating.clear();
      for (const std::string& w : words) spec.rotating.push_back(w == "rotating");
    } else if (flag == "--memory") {
      choose(defaults.memory);
      spec.memory = words;
    } else if (flag == "--backend") {
      spec.backend = text;
    } else if (flag == "--ranks") {
      spec.ranks = static_cast<int>(whole(flag, text, 1, 64));
    } else if (flag == "--ranks-as") {
      if (text != "processes" && text != "threads") refuse(flag, text, "processes or threads");
      spec.threads = text == "threads";
    } else if (flag == "--bind") {
      if (text != "cores" && text != "share" && text != "none") refuse(flag, text, "cores, share or none");
      spec.bind = text == "cores" ? Bind::cores : text == "share" ? Bind::share : Bind::none;
    } else if (flag == "--seconds") {
      char* end = nullptr;
      spec.seconds = std::strtod(text.c_str(), &end);
      if (end == text.c_str() || *end != 0 || !(spec.seconds > 0 && spec.seconds <= 60))
        refuse(flag, text, "seconds above 0, up to 60");
    } else {
      spec.turns = text;
    }
  }
  argc = kept;
  argv[argc] = nullptr;
  return spec;
}

std::vector<Case> cases_of(const Spec& spec) {
  std::vector<Case> cases;
  for (const Kind kind : spec.kinds)
    for (const DType dtype : spec.dtypes)
      for (const bool in_place : spec.in_place.empty() ? std::vector<bool>{usual_place(kind)} : spec.in_place)
        for (const bool rotating : spec.rotating)
          for (const std::int64_t bytes : spec.bytes)
            if (has_place(kind, in_place))
              cases.push_back({kind, dtype, bytes, in_place, rotating, spec.ranks});
  return cases;
}

Row row_of(const Case& c, std::string_view memory) {
  return {{{"op", std::string(name(c.kind))},
           {"dtype", std::string(name(c.dtype))},
           {"memory", std::string(memory)},
           {"place", c.in_place ? "in" : "out"},
           {"buffers", c.rotating ? "rotating" : "hot"}},
          c.ranks,
          c.bytes,
          {}};
}

void add_times(Row& row, const Times& t, std::int64_t moved_bytes, double factor) {
  const double rate = static_cast<double>(moved_bytes) / t.median_us * 1e-3;
  row.numbers.insert(row.numbers.end(), {{"median_us", t.median_us},
                                         {"p99_us", t.p99_us},
                                         {"alg_GBs", rate},
                                         {"bus_GBs", rate * factor},
                                         {"samples", static_cast<double>(t.samples)}});
}

void print(const Row& row) {
  std::string line = labels(row);
  for (const auto& [key, number] : row.numbers) {
    char text[64];
    std::snprintf(text, sizeof text, ", \"%s\": %.6g", key.c_str(), number);
    line += text;
  }
  std::printf("%s}\n", line.c_str());
  std::fflush(stdout);
}

void print_unsupported(Row row, std::string_view why) {
  std::printf("%s, \"unsupported\": \"%s\"}\n", labels(row).c_str(), escaped(why).c_str());
  std::fflush(stdout);
}

void Spec::print_settings(std::string_view who, std::string_view settings) const {
  std::printf("{\"who\": \"%s\", \"settings\": \"%s\"}\n", escaped(who).c_str(), escaped(settings).c_str());
  std::fflush(stdout);
}

Turns::Turns(const std::string& path) {
  if (path.empty()) return;
  fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd_ < 0) throw_errno("bench: --turns " + path, errno);
}
Turns::~Turns() {
  if (fd_ >= 0) ::close(fd_);
}
bool Turns::take() {
  if (fd_ < 0) return true;
  char byte;
  for (;;) {
    const ssize_t n = ::read(fd_, &byte, 1);
    if (n >= 0 || errno != EINTR) return n == 1;
  }
}

}  // namespace weft::bench
