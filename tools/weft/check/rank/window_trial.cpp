#include "rank/window_trial.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>

namespace weft::check {
namespace {

constexpr std::int64_t kNoRow = -1;  // zeros

// Which row of the tensor of n rows an index of a window is, by the edge rule alone.
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

const Window& Windows::of(const Step& s, ProcessGroup& group) {
  for (const Made& m : made_)
    if (m.group == s.group && m.rows == s.counts && m.plan.same_geometry(s.window)) return m.window;
  DeviceMesh mesh(group, {{"y", group.size()}});
  PartitionDim cut{.dim = 0, .axes = {"y"}};
  std::int64_t next = 0;
  for (const std::int64_t rows : s.counts) {
    cut.parts.push_back(rows == 0 ? IndexRanges{} : IndexRanges{{next, next + rows}});
    next += rows;
  }
  const Partition x(mesh, Shape{next, 1}, {cut});
  Window window(x, {WindowDim::halo(x, 0, s.window.before, s.window.after, edge_of(s))});
  made_.push_back({s.group, s.counts, s.window, std::move(mesh), std::move(window)});
  return made_.back().window;
}

WindowTrial::WindowTrial(Context& context, const Step& s, int me, int n, Pool* pool)
    : s_(s), buffers_(context, s_, pool) {
  Dice habits(mix(s.salt, static_cast<std::uint64_t>(me) + 1000));
  for (int r = 0; r < n; ++r) {
    if (r == me) first_ = all_;
    all_ += s.counts[static_cast<std::size_t>(r)];
  }
  rows_ = s.counts[static_cast<std::size_t>(me)];
  wanted_ = rows_ == 0 ? 0 : rows_ + s.window.before + s.window.after;
  for (int f = 0; f < s.window.exchanges * s.window.fields; ++f) {
    Field field{buffers_.room(habits, rows_ * s.count), buffers_.room(habits, wanted_ * s.count)};
    for (std::int64_t i = 0; i < rows_; ++i) {
      const std::vector<std::byte> bytes = row(static_cast<std::size_t>(f), first_ + i);
      std::copy(bytes.begin(), bytes.end(), field.in + i * bytes_of_row());
    }
    fields_.push_back(field);
  }
}

// What lies in a row of a field.
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

std::vector<WindowTransfer> WindowTrial::start(const Window& window) {
  const auto each = static_cast<std::size_t>(s_.window.fields);
  std::vector<WindowTransfer> transfers;
  for (std::size_t x = 0; x < static_cast<std::size_t>(s_.window.exchanges); ++x) {
    std::vector<WindowField> fields;
    for (std::size_t f = x * each; f < (x + 1) * each; ++f)
      fields.push_back({{fields_[f].in, s_.dtype, {}, Shape{rows_, s_.count}, Strides{s_.count, 1}},
                        {fields_[f].out, s_.dtype, {}, Shape{wanted_, s_.count}, Strides{s_.count, 1}}});
    transfers.push_back(window.start(fields));
  }
  return transfers;
}

std::string WindowTrial::complaint() const {
  Buffers::Marks marks(buffers_);
  for (std::size_t f = 0; f < fields_.size(); ++f) {
    for (std::int64_t i = 0; i < rows_; ++i) {
      const std::vector<std::byte> is = row(f, first_ + i);
      if (!std::equal(is.begin(), is.end(), fields_[f].in + i * bytes_of_row()))
        return fmt::format("window, field {}: in, row {}, was changed", f, first_ + i);
    }
    for (std::int64_t i = 0; i < wanted_; ++i) {
      const std::int64_t at = first_ - s_.window.before + i;
      const std::vector<std::byte> e = row(f, row_of(edge_of(s_).kind, at, all_));
      const std::byte* const got = fields_[f].out + i * bytes_of_row();
      const auto wrong = std::mismatch(e.begin(), e.end(), got);
      if (wrong.first != e.end())
        return fmt::format("window, field {}: row {} of {}: byte {} is 0x{:02x}; expected 0x{:02x}", f, at,
                           all_, wrong.first - e.begin(), static_cast<unsigned>(*wrong.second),
                           static_cast<unsigned>(*wrong.first));
    }
    marks.mark(fields_[f].in, rows_ * bytes_of_row());
    marks.mark(fields_[f].out, wanted_ * bytes_of_row());
  }
  return marks.stray();
}

}  // namespace weft::check
