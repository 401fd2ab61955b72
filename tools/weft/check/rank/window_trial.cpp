#include "rank/window_trial.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "oracle.hpp"

namespace weft::check {
namespace {

constexpr std::int64_t kNoRow = -1;  // zeros

// Returns which row of the tensor of n rows an index of a window stands for, by the edge rule alone.
std::int64_t row_of(Edge::Kind edge, std::int64_t i, std::int64_t n) {
  if (i >= 0 && i < n) return i;
  switch (edge) {
    case Edge::Kind::periodic: return ((i % n) + n) % n;
    case Edge::Kind::replicate: return i < 0 ? 0 : n - 1;
    case Edge::Kind::reflect: return i < 0 ? -i : 2 * (n - 1) - i;
    case Edge::Kind::zero:
    case Edge::Kind::none:
    case Edge::Kind::constant:
    case Edge::Kind::pole: break;
  }
  return kNoRow;
}

Edge edge_of(const Step& s) { return {static_cast<Edge::Kind>(s.window.edge)}; }

}  // namespace

const Window& Windows::of(const Step& s, ProcessGroup& group, int copy) {
  DeviceMesh mesh;
  for (const Made& m : made_) {
    if (m.group != s.group || m.rows != s.counts || !m.plan.same_geometry(s.window)) continue;
    if (m.copy == copy) return m.window;
    mesh = m.mesh;
  }
  if (!mesh) mesh = DeviceMesh(group, {{"y", group.size()}});
  PartitionDim cut{.dim = 0, .axes = {"y"}};
  std::int64_t next = 0;
  for (const std::int64_t rows : s.counts) {
    cut.parts.push_back(rows == 0 ? IndexRanges{} : IndexRanges{{next, next + rows}});
    next += rows;
  }
  const Partition x(mesh, Shape{next, 1}, {cut});
  Window window(x, {WindowDim::halo(x, 0, s.window.before, s.window.after, edge_of(s))});
  made_.push_back({s.group, s.counts, s.window, copy, std::move(mesh), std::move(window)});
  return made_.back().window;
}

WindowTrial::WindowTrial(Context& context, const Step& s, int me, int n, Pool* pool)
    : s_(s), me_(me), buffers_(context, s_, pool) {
  Dice habits(mix(s.salt, static_cast<std::uint64_t>(me) + 1000));
  for (int r = 0; r < n; ++r) {
    const std::int64_t rows = s.counts[static_cast<std::size_t>(r)];
    parts_.push_back({all_, rows, rows == 0 ? 0 : rows + s.window.before + s.window.after});
    all_ += rows;
  }
  mine_ = parts_[static_cast<std::size_t>(me)];
  for (int f = 0; f < s.window.exchanges * s.window.fields; ++f) {
    Field field{buffers_.room(habits, in_rows() * s.count), buffers_.room(habits, out_rows() * s.count)};
    for (std::int64_t i = 0; i < in_rows(); ++i) {
      const std::vector<std::byte> bytes = given(static_cast<std::size_t>(f), me, i);
      std::copy(bytes.begin(), bytes.end(), field.in + i * bytes_of_row());
    }
    fields_.push_back(field);
  }
}

// The values in a row of a field of the tensor.
std::vector<std::byte> WindowTrial::row(std::size_t field, std::int64_t row) const {
  std::vector<std::byte> bytes(static_cast<std::size_t>(bytes_of_row()));
  if (row == kNoRow) return bytes;
  const std::uint64_t seed = mix(mix(s_.salt, field + 50), static_cast<std::uint64_t>(row));
  for (std::size_t i = 0; i < bytes.size(); i += 8) {
    std::uint64_t h = mix(seed, i);
    if (s_.dtype == DType::boolean) h &= 0x0101010101010101u;
    std::memcpy(bytes.data() + i, &h, std::min<std::size_t>(8, bytes.size() - i));
  }
  return bytes;
}

// Row i of the data that a rank passes: of its part, or of the gradient of its window. The gradient has
// numbers whose sums are exact in each dtype. An element of the tensor is in at most 8 windows of at most 7
// rows.
std::vector<std::byte> WindowTrial::given(std::size_t field, int rank, std::int64_t i) const {
  if (!s_.window.adjoint) return row(field, parts_[static_cast<std::size_t>(rank)].first + i);
  const std::uint64_t seed = mix(mix(s_.salt, field + 50), static_cast<std::uint64_t>(i) * kMostRanks +
                                                               static_cast<std::uint64_t>(rank));
  std::vector<int> numbers;
  for (std::int64_t c = 0; c < s_.count; ++c)
    numbers.push_back(static_cast<int>(mix(seed, static_cast<std::uint64_t>(c)) % 3));
  return small_numbers(s_.dtype, numbers);
}

// Row i of the data that this rank receives.
std::vector<std::byte> WindowTrial::expected(std::size_t field, std::int64_t i) const {
  const Edge::Kind edge = edge_of(s_).kind;
  if (!s_.window.adjoint) return row(field, row_of(edge, mine_.first - s_.window.before + i, all_));
  std::vector<int> sums(static_cast<std::size_t>(s_.count));
  for (int r = 0; r < static_cast<int>(parts_.size()); ++r) {
    const Part& part = parts_[static_cast<std::size_t>(r)];
    for (std::int64_t k = 0; k < part.wanted; ++k) {
      if (row_of(edge, part.first - s_.window.before + k, all_) != mine_.first + i) continue;
      const std::vector<int> more = numbers_in(s_.dtype, given(field, r, k));
      for (std::size_t c = 0; c < sums.size(); ++c) sums[c] += more[c];
    }
  }
  return small_numbers(s_.dtype, sums);
}

namespace {

// The elements of a row in a plan: as a box, or as a list of indices from the last element to the first.
ExchangeBox box_of_row(int field, std::int64_t first, std::int64_t count, bool by_indices) {
  ExchangeBox box{.field = field, .offset = first, .counts = {count}, .strides = {1}};
  for (std::int64_t i = count; by_indices && i-- > 0;) box.indices.push_back(i);
  return box;
}

}  // namespace

// Each row of a window is a box of its owner's part. Every other row is a list of indices. The adjoint sends
// it back.
ExchangePlan WindowTrial::plan() const {
  const Edge::Kind edge = edge_of(s_).kind;
  ExchangePlan plan;
  plan.kind = s_.window.adjoint ? ExchangePlan::Kind::add : ExchangePlan::Kind::copy;
  plan.fields.assign(static_cast<std::size_t>(s_.window.fields), s_.dtype);
  const auto add = [](std::vector<ExchangePart>& parts, int peer, const ExchangeBox& box) {
    if (parts.empty() || parts.back().peer != peer) parts.push_back({peer, {}});
    parts.back().boxes.push_back(box);
  };
  std::vector<ExchangePart> windows,
      rows;  // of this rank: the rows of its window from each rank, and its rows in each rank's window
  const int n = static_cast<int>(parts_.size());
  for (int other = 0; other < n; ++other)
    for (int f = 0; f < s_.window.fields; ++f)
      for (const bool mine : {true, false}) {
        const Part& holder = parts_[static_cast<std::size_t>(mine ? other : me_)];
        const Part& reader = parts_[static_cast<std::size_t>(mine ? me_ : other)];
        for (std::int64_t k = 0; k < reader.wanted; ++k) {
          const std::int64_t row = row_of(edge, reader.first - s_.window.before + k, all_) - holder.first;
          if (row < 0 || row >= holder.rows) continue;
          add(mine ? windows : rows, other, box_of_row(f, (mine ? k : row) * s_.count, s_.count, k % 2 == 1));
        }
      }
  plan.sends = s_.window.adjoint ? windows : rows;
  plan.receives = s_.window.adjoint ? rows : windows;
  return plan;
}

namespace {

// Wraps a Work as the transfer that a Window returns.
class Planned final : public WindowTransfer::Steps {
 public:
  explicit Planned(Work work) : work_(std::move(work)) {}
  bool done() override { return work_.done(); }
  void finish() override { work_.wait(); }
  Work& work() override { return work_; }

 private:
  Work work_;
};

}  // namespace

std::vector<WindowTransfer> WindowTrial::start(Windows& windows, ProcessGroup& group) {
  const auto each = static_cast<std::size_t>(s_.window.fields);
  std::vector<WindowTransfer> transfers;
  if (s_.window.by_plan) {
    PersistentExchange exchange = group.make_exchange(plan());
    for (std::size_t x = 0; x < static_cast<std::size_t>(s_.window.exchanges); ++x) {
      std::vector<ExchangeField> fields;
      for (std::size_t f = x * each; f < (x + 1) * each; ++f) {  // rows of no rank are zeros; sums begin at 0
        std::fill_n(fields_[f].out, out_rows() * bytes_of_row(), std::byte{0});
        fields.push_back({fields_[f].in, fields_[f].out});
      }
      transfers.emplace_back(std::make_unique<Planned>(exchange.start(fields)));
    }
    return transfers;
  }
  const auto fields_of = [&](std::size_t x) {
    std::vector<WindowField> fields;
    for (std::size_t f = x * each; f < (x + 1) * each; ++f)
      fields.push_back({{fields_[f].in, s_.dtype, {}, Shape{in_rows(), s_.count}, Strides{s_.count, 1}},
                        {fields_[f].out, s_.dtype, {}, Shape{out_rows(), s_.count}, Strides{s_.count, 1}}});
    return fields;
  };
  const auto exchanges = static_cast<std::size_t>(s_.window.exchanges);
  if (s_.window.together) {
    std::vector<std::vector<WindowField>> fields;
    std::vector<WindowFields> all;
    for (std::size_t x = 0; x < exchanges; ++x) fields.push_back(fields_of(x));
    for (std::size_t x = 0; x < exchanges; ++x)
      all.push_back({windows.of(s_, group, static_cast<int>(x)), fields[x]});
    transfers.push_back(start_together(all));
    return transfers;
  }
  const Window& window = windows.of(s_, group);
  for (std::size_t x = 0; x < exchanges; ++x)
    transfers.push_back(s_.window.adjoint ? window.start_adjoint(fields_of(x)) : window.start(fields_of(x)));
  return transfers;
}

std::string WindowTrial::complaint() const {
  Buffers::Marks marks(buffers_);
  const std::int64_t in_from = mine_.first - (s_.window.adjoint ? s_.window.before : 0),
                     out_from = mine_.first - (s_.window.adjoint ? 0 : s_.window.before);
  for (std::size_t f = 0; f < fields_.size(); ++f) {
    for (std::int64_t i = 0; i < in_rows(); ++i) {
      const std::vector<std::byte> is = given(f, me_, i);
      if (!std::equal(is.begin(), is.end(), fields_[f].in + i * bytes_of_row()))
        return fmt::format("window, field {}: in, row {}, was changed", f, in_from + i);
    }
    for (std::int64_t i = 0; i < out_rows(); ++i) {
      const std::vector<std::byte> e = expected(f, i);
      const std::byte* const got = fields_[f].out + i * bytes_of_row();
      const auto wrong = std::mismatch(e.begin(), e.end(), got);
      if (wrong.first != e.end())
        return fmt::format("{}window, field {}: row {} of {}: byte {} is 0x{:02x}; expected 0x{:02x}",
                           s_.window.adjoint ? "adjoint of a " : "", f, out_from + i, all_,
                           wrong.first - e.begin(), static_cast<unsigned>(*wrong.second),
                           static_cast<unsigned>(*wrong.first));
    }
    marks.mark(fields_[f].in, in_rows() * bytes_of_row());
    marks.mark(fields_[f].out, out_rows() * bytes_of_row());
  }
  return marks.stray();
}

}  // namespace weft::check
