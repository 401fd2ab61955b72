#include "weft/checkpoint/full_state.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <vector>

#include "checkpoint/agreement.hpp"
#include "checkpoint/index/index.hpp"
#include "checkpoint/parts.hpp"
#include "weft/base/error.hpp"
#include "weft/base/tensor.hpp"

namespace weft {
namespace {

// Returns whether the rank holds the whole tensor, whose segments then lie in their order.
bool holds_whole(const NamedView& tensor, int rank) {
  return tensor.layout == nullptr || tensor.layout->local_shape(rank) == tensor.layout->global;
}
bool all_hold_whole(const NamedView& tensor, int ranks) {
  for (int rank = 0; rank < ranks; ++rank)
    if (!holds_whole(tensor, rank)) return false;
  return true;
}

Buffer bytes_of(std::byte* data, std::int64_t bytes) { return {data, bytes, DType::u8, {}}; }

// Moves one tensor after the other between the global tensor and the parts that ranks hold.
class FullState {
 public:
  FullState(std::string_view what, const DeviceMesh& mesh, int root)
      : what_(what),
        mesh_(mesh),
        group_(group_of(mesh)),
        rank_(mesh ? mesh.rank() : 0),
        ranks_(mesh ? mesh.size() : 1),
        root_(root) {}

  // The ranks' messages before any data is moved.
  void check(std::span<const NamedView> tensors) {
    std::exception_ptr fault;
    try {
      if (root_ < kEveryRank || root_ >= ranks_)
        throw Error(ErrorCode::bad_argument,
                    fmt::format("{}: root is {}; expected 0 to {}, or {} for every rank", what_, root_,
                                ranks_ - 1, kEveryRank));
      check_tensors(what_, mesh_, tensors);
    } catch (...) {
      fault = std::current_exception();
    }
    agree(group_, what_, "nothing was moved", fault);
    if (group_ == nullptr) return;
    const std::uint64_t own[] = {static_cast<std::uint64_t>(root_)};
    for (const std::uint64_t other : expect_same_tensors(what_, mesh_, tensors, own))
      if (other != static_cast<std::uint64_t>(root_))
        throw Error(ErrorCode::mismatch, fmt::format("{}: ranks gave different roots, {} and {}", what_,
                                                     root_, static_cast<int>(other)));
  }

  void gather(const NamedView& tensor, const FullStateVisitor& see) {
    const bool mine = root_ == kEveryRank || root_ == rank_;
    const bool here = root_ == kEveryRank ? all_hold_whole(tensor, ranks_) : holds_whole(tensor, root_);
    std::exception_ptr fault;
    if (here) {
      if (mine) fault = error_of([&] { see(tensor.name, tensor.data); });
    } else {
      Tensor whole;
      if (mine)
        fault = error_of([&] { whole = Tensor(mesh_.context(), global_shape(tensor), tensor.data.dtype); });
      agree(group_, what_, fmt::format("no tensor from \"{}\" on was moved", tensor.name), fault);
      for (const OwnedPart& part : parts_of(tensor, ranks_)) collect(tensor, part, whole);
      if (mine) fault = error_of([&] { see(tensor.name, whole.view()); });
    }
    agree(group_, what_, fmt::format("tensors after \"{}\" were not moved", tensor.name), fault);
  }

  void set(const MutableNamedView& tensor, const FullStateSource& give) {
    const bool mine = root_ == kEveryRank || root_ == rank_;
    const bool own = holds_whole(tensor, rank_);
    Tensor read;  // if this rank alone holds a part of it
    std::exception_ptr fault;
    if (mine)
      fault = error_of([&] {
        if (!own) read = Tensor(mesh_.context(), global_shape(tensor), tensor.data.dtype);
        give(tensor.name, own ? tensor.data : read.view());
      });
    agree(group_, what_, fmt::format("values from \"{}\" on are undefined", tensor.name), fault);
    const TensorView whole = own ? tensor.data : read.view();
    if (root_ == kEveryRank) {
      for (const HeldBox& held : boxes_of(tensor, rank_))
        if (!own) take(whole, held, tensor.data);
    } else if (all_hold_whole(tensor, ranks_)) {
      if (group_ != nullptr) group_->broadcast(bytes_of(tensor.data.data, tensor.data.bytes()), root_).wait();
    } else {
      for (int rank = 0; rank < ranks_; ++rank)
        for (const HeldBox& held : boxes_of(tensor, rank)) hand_out(tensor, whole, rank, held);
    }
  }

 private:
  template <class Action>
  static std::exception_ptr error_of(const Action& action) {
    try {
      action();
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }

  // Receives a part of the global tensor from the rank that has it, or copies it if that rank is the root
  // itself.
  void collect(const NamedView& tensor, const OwnedPart& part, const Tensor& whole) {
    int from = part.rank;
    if (root_ != kEveryRank)
      for (const HeldBox& held : boxes_of(tensor, root_))
        if (held.box == part.box) from = root_;
    const Shape& shape = part.box.shape;
    Tensor copy;  // of the part, if it does not lie in one piece
    std::byte* bytes = nullptr;
    const bool receives = root_ == kEveryRank || root_ == rank_;
    if (rank_ == from) {
      for (const HeldBox& held : boxes_of(tensor, rank_)) {
        if (!(held.box == part.box)) continue;
        if (shape == tensor.data.shape) {
          bytes = const_cast<std::byte*>(tensor.data.data);  // sent, and not written
        } else {
          copy = Tensor(mesh_.context(), shape, tensor.data.dtype);
          copy_elements(narrow(tensor.data, held.at, shape), copy);
          bytes = copy.data();
        }
      }
    } else if (receives) {
      copy = Tensor(mesh_.context(), shape, tensor.data.dtype);
      bytes = copy.data();
    }
    const Buffer message = bytes_of(bytes, shape.count() * size_bytes(tensor.data.dtype));
    if (root_ == kEveryRank) {
      group_->broadcast(message, from).wait();
    } else if (from != root_) {
      if (rank_ == from) group_->send(message, root_).wait();
      if (rank_ == root_) group_->recv(message, from).wait();
    }
    if (receives)
      copy_elements({bytes, whole.dtype(), {}, shape, row_major(shape)},
                    narrow(whole.view(), part.box.offset, shape));
  }

  // Copies a box of the global tensor to its place in a local tensor.
  static void take(const TensorView& whole, const HeldBox& held, const TensorView& to) {
    copy_elements(narrow(whole, held.box.offset, held.box.shape), narrow(to, held.at, held.box.shape));
  }

  // Sends a box of the global tensor from the root to the rank that holds it.
  void hand_out(const MutableNamedView& tensor, const TensorView& whole, int rank, const HeldBox& held) {
    if (held.box.shape.count() == 0 || (rank_ != root_ && rank_ != rank)) return;
    if (rank == root_) {
      if (whole.data != tensor.data.data) take(whole, held, tensor.data);
      return;
    }
    const Shape& shape = held.box.shape;
    const bool in_one_piece = rank_ == rank && shape == tensor.data.shape;
    const Tensor copy = in_one_piece ? Tensor() : Tensor(mesh_.context(), shape, tensor.data.dtype);
    const Buffer message = bytes_of(in_one_piece ? tensor.data.data : copy.data(),
                                    shape.count() * size_bytes(tensor.data.dtype));
    if (rank_ == root_) {
      copy_elements(narrow(whole, held.box.offset, shape), copy);
      group_->send(message, rank).wait();
    } else {
      group_->recv(message, root_).wait();
      if (!in_one_piece) copy_elements(copy, narrow(tensor.data, held.at, shape));
    }
  }

  std::string_view what_;
  const DeviceMesh& mesh_;
  ProcessGroup* group_;
  int rank_, ranks_, root_;
};

}  // namespace

void gather_full_state(const DeviceMesh& mesh, std::span<const NamedView> tensors, int root,
                       const FullStateVisitor& see) {
  FullState state("gather_full_state", mesh, root);
  state.check(tensors);
  for (const NamedView& tensor : tensors) state.gather(tensor, see);
}

void set_full_state(const DeviceMesh& mesh, std::span<const MutableNamedView> tensors, int root,
                    const FullStateSource& give) {
  FullState state("set_full_state", mesh, root);
  state.check(std::vector<NamedView>(tensors.begin(), tensors.end()));
  for (const MutableNamedView& tensor : tensors) state.set(tensor, give);
}

}  // namespace weft
