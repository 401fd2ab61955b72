// The cases, which weft's programs and the peers' programs take by the same flags, and the output: one line
// of JSON for each case. One thread per rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "measure.hpp"
#include "weft/base/dtype.hpp"

namespace weft::bench {

/// The measured operations. `ping_pong`: rank 0 sends, rank 1 sends back, and the time is half of the round
/// trip. `one_way`: rank 0 sends kWindow messages, rank 1 answers the last with a few bytes, and the time is
/// that of one message. `coalesced`: each rank sends four parts of `bytes` and receives four, as one call of
/// the group and, in turns with that, as eight calls. `halo_…`: in a ring of ranks each rank gets a face from
/// each of its two neighbours, half of `bytes` per face. Rows of a matrix are contiguous, columns are every
/// other element, and four columns are runs of four elements. Faces of a cuboid, cut in the middle dimension,
/// have about as many runs as a run has elements. `…fields` exchanges rows, or faces of cuboids, of eight
/// fields.
enum class Kind {
  all_reduce,
  reduce,
  broadcast,
  all_gather,
  reduce_scatter,
  all_to_all,
  ping_pong,
  one_way,
  coalesced,
  halo_rows,
  halo_columns,
  halo_four_columns,
  halo_3d,
  halo_fields,
  halo_3d_fields
};
inline constexpr int kWindow = 16;
std::string_view name(Kind kind) noexcept;
/// Throws bad_argument with the list of known names.
Kind kind_from_name(std::string_view name);
inline bool is_message(Kind kind) noexcept { return kind >= Kind::ping_pong && kind <= Kind::coalesced; }
inline bool is_halo(Kind kind) noexcept { return kind >= Kind::halo_rows && kind <= Kind::halo_3d_fields; }
inline constexpr int kHaloFields = 8;  ///< of halo_fields and halo_3d_fields
/// has_place(): whether this operation has a form that is in place (or out of place). usual_place(): the form
/// that is measured by default, which is in place for all_reduce, reduce and broadcast.
bool has_place(Kind kind, bool in_place) noexcept;
bool usual_place(Kind kind) noexcept;
/// A run of ping_pong or one_way is several messages: converts the times of a run to those of one message.
Times per_message(Times t, Kind kind) noexcept;
/// Bus bandwidth = algorithm bandwidth x this, as nccl-tests (NVIDIA/nccl-tests, doc/PERFORMANCE.md) defines
/// it: 2(n-1)/n for all_reduce, (n-1)/n for all_gather, reduce_scatter and all_to_all, 1 for the rest.
double bus_factor(Kind kind, int ranks) noexcept;

struct Case {
  Kind kind = Kind::all_reduce;
  DType dtype = DType::f32;
  std::int64_t bytes = 0;  ///< as in nccl-tests: the size of the larger of a rank's two buffers
  bool in_place = false;
  bool rotating = false;  ///< uses other buffers in every run: 256 MB in all, at most 64 of each
  int ranks = 2;

  /// The number of elements in one block, if a buffer has a block for each rank; otherwise the number of
  /// elements in the buffer.
  std::int64_t block() const noexcept;
  std::int64_t in_count() const noexcept;
  std::int64_t out_count() const noexcept;
  /// For a halo: the number of fields, and the places of a field's two faces in its memory, which holds
  /// `runs` times a run of the first face and a run of the second face.
  struct Faces {
    std::int64_t fields, runs, run;
  };
  Faces faces() const noexcept;
  /// The bytes that are really moved: `bytes`, rounded up to equal blocks of whole elements.
  std::int64_t moved_bytes() const noexcept;
};

/// One rank's buffers of a case. Values are small integers that depend on rank and index, and their sum over
/// up to 8 ranks is exact in every dtype: so verification detects a misplaced block.
class Buffers {
 public:
  using Allocate = std::function<std::shared_ptr<std::byte>(std::size_t bytes)>;
  Buffers(const Case& c, int rank, const Allocate& allocate);
  int sets() const noexcept { return static_cast<int>(sets_.size()); }
  std::byte* in(int set) const noexcept { return sets_[static_cast<std::size_t>(set)].in; }
  std::byte* out(int set) const noexcept { return sets_[static_cast<std::size_t>(set)].out; }
  /// Writes fresh inputs, and fills outputs with values that no result has.
  void reset();
  /// Returns an empty string, or for example "rank 1: element 5 is 3; expected 7".
  std::string wrong() const;

 private:
  struct Set {
    std::shared_ptr<std::byte> owner, other;
    std::byte* in;
    std::byte* out;
  };
  Case case_;
  int rank_;
  std::vector<Set> sets_;
};

/// Allocates pages that only this process knows: `foreign` memory, and the memory of the peers' programs.
std::shared_ptr<std::byte> allocate_pages(std::size_t bytes);

/// Makes a Prepared from the buffers and a call on them: call(in, out) is one run.
Prepared prepare(const std::shared_ptr<Buffers>& buffers,
                 const std::function<void(std::byte* in, std::byte* out)>& call);

/// The cores on which ranks run if there are at least as many cores as ranks. none: any cores. cores: each
/// rank on its own core. share: each rank, with its helper thread, on an equal share of the cores.
enum class Bind : std::uint8_t { none, cores, share };

/// The options of a program.
struct Spec {
  std::vector<Kind> kinds;
  std::vector<DType> dtypes = {DType::f32};
  std::vector<std::int64_t> bytes;  ///< default: 8 B to 128 MB in steps of four
  std::vector<bool> in_place;       ///< --place in,out
  std::vector<bool> rotating = {false};
  std::vector<std::string> memory = {"foreign"};
  std::string backend = "shm";
  int ranks = 2;
  bool threads = false;
  Bind bind = Bind::cores;
  double seconds = 0.25;  ///< of sampling per case
  std::string turns{};    ///< a FIFO: one byte for each rank starts each case; its end ends the program
  bool rows = false;      ///< print rows (below) instead of Google Benchmark's report

  /// The line that rank 0 prints before all rows: the program, and the settings it runs with.
  void print_settings(std::string_view who, std::string_view settings) const;
};

/// Further facts of a program.
struct Defaults {
  std::vector<Kind> kinds;  ///< the only kinds that the program can measure
  std::vector<std::string> memory = {"foreign"};
};

/// Takes the flags above out of the arguments; flags that begin with --benchmark_ stay. Throws bad_argument
/// with the flag, its value and the expected values.
Spec parse_spec(int& argc, char** argv, const Defaults& defaults);
/// Returns the cases of one kind of memory, ordered by kind, dtype, place, buffers, bytes. Leaves out a case
/// if its operation has no form for the place.
std::vector<Case> cases_of(const Spec& spec);

/// Labels and numbers of a measured case.
struct Row {
  std::vector<std::pair<std::string, std::string>> labels;  ///< "op", "dtype", "memory", "place", "buffers"
  std::int64_t ranks = 0, bytes = 0;
  std::vector<std::pair<std::string, double>> numbers;  ///< "median_us", …
};
Row row_of(const Case& c, std::string_view memory);
void add_times(Row& row, const Times& t, std::int64_t moved_bytes, double factor);
/// Prints the row to standard output, as one line of JSON.
void print(const Row& row);
/// Prints one line of JSON for a case that this program cannot run.
void print_unsupported(Row row, std::string_view why);

/// Programs that run in turns, case by case: each sleeps until it is asked to go on.
class Turns {
 public:
  explicit Turns(const std::string& path);  ///< empty: the program may always run
  ~Turns();
  Turns(const Turns&) = delete;
  Turns& operator=(const Turns&) = delete;
  /// Waits for this program's turn. Returns false if there are no more turns.
  bool take();

 private:
  int fd_ = -1;
};

}  // namespace weft::bench
