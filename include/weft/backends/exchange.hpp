// A neighbourhood exchange. For each pair of ranks it has the elements to send and to receive, as boxes of
// fields. Plain values; any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "weft/base/dtype.hpp"
#include "weft/base/shape.hpp"

namespace weft {

/// A box of elements of a field. Element (i, j, …) is `offset + i * strides[0] + j * strides[1] + …` elements
/// after the beginning of the field. A stride may be negative. It may be 0 in a dimension of one element, and
/// in any dimension of a box that is sent.
///
/// `indices` may hold counts[0] numbers, 0 or more, in any order. If it is not empty, indices[i] replaces i
/// in this formula. For example, the rows `indices` of an array (nodes, 3) have counts {n, 3} and strides {3,
/// 1}. The elements `indices` of an array have counts {n} and strides {1}. The other rank may give a box with
/// or without indices, but with the same counts.
struct ExchangeBox {
  int field = 0;
  std::int64_t offset = 0;
  Shape counts{};
  Strides strides{};
  std::vector<std::int64_t> indices{};
};

/// The elements `indices` of a field, in this order, as one box.
std::vector<ExchangeBox> boxes_of(int field, std::span<const std::int64_t> indices);

/// The elements that this rank sends to rank `peer`, or receives from it: the elements of the boxes, one box
/// after the other, in row-major order within each box.
struct ExchangePart {
  int peer = 0;
  std::vector<ExchangeBox> boxes{};
};

/// The part of one rank in an exchange. A value. The sender and the receiver must give boxes of the same
/// fields and counts, in the same order. Offsets and strides may differ. Elements that a rank sends to itself
/// are copied.
struct ExchangePlan {
  enum class Kind : std::uint8_t {
    copy,  ///< a received element replaces the receiver's element
    /// Received elements are added to the receiver's elements: first those of rank 0, then those of rank 1,
    /// and so on. Elements of one rank are added in the order of its boxes. bf16 and f16 are added in f32 and
    /// rounded once, at the end. Integers wrap. Only with `add` may the indices of a box to receive name an
    /// element several times.
    add,
  };
  Kind kind = Kind::copy;
  std::vector<DType> fields{};  ///< the dtype of each field; for `add`: f64, f32, bf16, f16 or an integer
  std::vector<ExchangePart> sends{}, receives{};  ///< each rank at most once, in any order
  /// Error texts about a wrong plan begin with this name. Ranks do not compare it.
  std::string name = "exchange";
};

/// The memory of a field in one start(). Offsets of boxes to send count from `in`, offsets of boxes to
/// receive count from `out`. `in` and `out` may be the same memory.
struct ExchangeField {
  const void* in = nullptr;
  void* out = nullptr;
};

/// A plan that a transport has prepared (Backend::plan_exchange).
class PlannedExchange {
 public:
  PlannedExchange() = default;
  PlannedExchange(const PlannedExchange&) = delete;
  PlannedExchange& operator=(const PlannedExchange&) = delete;
  virtual ~PlannedExchange() = default;
};

/// An exchange in flight, as a transport sees it: OpState::exchange. Valid as long as the call.
struct ExchangeCall {
  PlannedExchange* planned = nullptr;  ///< the transport's own form of the plan
  const ExchangeField* fields = nullptr;
  /// If two starts of one plan have equal numbers, their fields lie at equal addresses. So the transport can
  /// reuse the addresses that it has computed.
  std::uint64_t memory = 0;
};

}  // namespace weft
