// Copies and fills of boxes between strided memories. The functions have no state; any thread may call them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "host/strided/runs.hpp"
#include "weft/base/dtype.hpp"
#include "weft/base/shape.hpp"
#include "weft/host/device_runtime.hpp"

namespace weft {

/// Returns whether the number of bytes between the first and the last element of such a view does not fit 64
/// bits. No extent may be negative.
bool reaches_too_far(const Shape& shape, const Strides& strides, DType dtype) noexcept;

/// A nest of loops over a box. Each dimension has a number of elements, and the elements' distance in bytes
/// (the step) in the source and in the target. Steps may be negative, or 0. Dimensions of one element are
/// left out. Adjacent dimensions that are contiguous on both sides are joined. On either side, the outermost
/// dimension may be a list: one number for each index, used in place of the index.
class Loops {
 public:
  explicit Loops(std::size_t element_bytes) noexcept : element_(static_cast<std::int64_t>(element_bytes)) {
    find_runs();
  }
  /// Adds a dimension inside the existing ones.
  void add(std::int64_t count, std::int64_t in_step, std::int64_t out_step) noexcept;
  /// Adds the outermost dimension, before all others. Index i is at in_list[i] * in_step on one side, and at
  /// out_list[i] * out_step on the other. If a list is null, i itself is used. The caller keeps the lists
  /// alive.
  void add_list(std::int64_t count, const std::int64_t* in_list, std::int64_t in_step,
                const std::int64_t* out_list, std::int64_t out_step) noexcept;

  /// Returns loops like these that use `way` for copies in the host's memory, for any length of a run.
  Loops by(CopyRuns way) const {
    Loops loops = *this;
    loops.copy_runs_ = way;
    loops.any_run_ = true;
    return loops;
  }

  bool empty() const noexcept { return empty_; }
  /// If the box is one run of bytes on both sides, returns its length. Otherwise 0.
  std::int64_t one_piece() const noexcept;
  /// Returns whether both sides have equal steps.
  bool same_steps() const noexcept;

  /// out = in, in order on `stream`. The two memories must not overlap.
  void copy(DeviceRuntime& runtime, Stream stream, const std::byte* in, std::byte* out) const {
    copy(runtime, stream, in, stream.device, out, stream.device);
  }
  /// Copies between a device and the host, or within one of the two.
  void copy(DeviceRuntime& runtime, Stream stream, const std::byte* in, Device in_device, std::byte* out,
            Device out_device) const;
  /// Copies within the host's memory.
  void copy(const std::byte* in, std::byte* out) const {
    if (outer_ == 0 && !empty_) return copy_runs_(in, out, 1, 0, 0, run_);
    copy_runs(in, out);
  }
  /// Copies elements `first` … `first + count`, within the host's memory. `in` and `out` are the places of
  /// element 0, even if it is not copied.
  void copy_some(std::int64_t first, std::int64_t count, const std::byte* in, std::byte* out) const;
  /// Calls see(in offset, out offset, bytes) for each run of bytes that is contiguous on both sides, in
  /// order.
  template <class See>
  void each_run(const See& see) const {
    if (!empty_) each_index(outer_, [&](std::int64_t in, std::int64_t out) { see(in, out, run_); });
  }
  /// Sets each element of out to the element at `in`, which is in the host's memory. The caller must keep it
  /// alive until the stream has performed this call. The steps of the source have no effect.
  void fill(DeviceRuntime& runtime, Stream stream, const std::byte* element, std::byte* out) const;
  /// Calls row(in offset, out offset, count, in step, out step) for each combination of indices of all
  /// dimensions except the innermost. count and steps are those of the innermost dimension.
  template <class Row>
  void each_row(const Row& row) const {
    if (empty_) return;
    const bool single = rank_ == 0 || (rank_ == 1 && listed());
    const Dim last = single ? Dim{1, element_, element_} : dim(rank_ - 1);
    each_index(single ? rank_ : rank_ - 1,
               [&](std::int64_t in, std::int64_t out) { row(in, out, last.count, last.in, last.out); });
  }

 private:
  struct Dim {
    std::int64_t count, in, out;
  };
  /// Calls see(in offset, out offset) for each combination of indices of the first `dims` dimensions, in
  /// order.
  template <class See>
  void each_index(int dims, const See& see) const {
    if (!listed() || dims < 1) return each_index_of(0, dims, 0, 0, see);
    for (std::int64_t i = 0; i < dim(0).count; ++i) each_index_of(1, dims, in_of(i), out_of(i), see);
  }
  /// Like each_index(), for dimensions `first` to `dims` - 1, from these offsets.
  template <class See>
  void each_index_of(int first, int dims, std::int64_t in, std::int64_t out, const See& see) const {
    std::array<std::int64_t, Dims::kMaxDims + 1> index{};
    for (;;) {
      see(in, out);
      int d = dims - 1;
      for (; d >= first; --d) {
        std::int64_t& at = index[static_cast<std::size_t>(d)];
        in += dim(d).in, out += dim(d).out;
        if (++at < dim(d).count) break;
        in -= dim(d).in * dim(d).count, out -= dim(d).out * dim(d).count;
        at = 0;
      }
      if (d < first) return;
    }
  }
  bool listed() const noexcept { return in_list_ != nullptr || out_list_ != nullptr; }
  /// The offset of index i of a listed dimension.
  std::int64_t in_of(std::int64_t i) const noexcept {
    return (in_list_ != nullptr ? in_list_[i] : i) * dim(0).in;
  }
  std::int64_t out_of(std::int64_t i) const noexcept {
    return (out_list_ != nullptr ? out_list_[i] : i) * dim(0).out;
  }
  template <class See>
  void each_rows(const See& see) const;
  void find_runs() noexcept;
  const Dim& dim(int d) const noexcept { return dims_[static_cast<std::size_t>(d)]; }
  void copy_from_dim(int d, std::int64_t count, const std::byte* in, std::byte* out) const;
  void copy_runs(const std::byte* in, std::byte* out) const;
  void copy_part(int d, std::int64_t first, std::int64_t count, const std::byte* in, std::byte* out) const;
  void copy_list(std::int64_t first, std::int64_t count, const std::byte* in, std::byte* out) const;
  std::int64_t element_;
  bool empty_ = false;
  int rank_ = 0;
  // Copies within the host's memory: the first `outer_` dimensions count runs of `run_` bytes, which are
  // contiguous on both sides.
  int outer_ = 0;
  std::int64_t run_ = 0;
  CopyRuns copy_runs_ = nullptr;
  bool any_run_ = false;  // copy_runs_ was set by by(), for any length
  std::array<Dim, Dims::kMaxDims + 1> dims_{};
  const std::int64_t *in_list_ = nullptr, *out_list_ = nullptr;  // the lists of the first dimension
};

}  // namespace weft
