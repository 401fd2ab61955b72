// The rows of the list of kernels (kernels.inl) as data: the name of each kernel, and what each of its
// operands is. It is for code that treats all kernels alike: the table of a device, checks of arguments, and
// the copies of kernels that run on the host. Pure functions of arguments. No function here reads an operand.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "weft/nn/kernels.hpp"

namespace weft::kernels {

enum class Access : unsigned char { reads, writes, updates };

/// An array in the device's memory that the caller passed to a kernel.
struct Operand {
  const void* data;  ///< null only where the list says optional(…)
  std::int64_t elements;
  std::size_t element_bytes;
  Access access;
  bool may_be_null = false;
  /// The number of bytes that the kernel may touch at `data`. 0 if `data` is null.
  constexpr std::size_t bytes() const noexcept {
    return data == nullptr ? 0 : static_cast<std::size_t>(elements) * element_bytes;
  }
};

/// Whether a parameter of this type is an operand: a pointer, or a struct that contains a pointer.
template <class T>
inline constexpr bool kIsOperand =
    std::is_pointer_v<T> || std::is_same_v<T, WeightMatrix> || std::is_same_v<T, ScoreBias>;

namespace detail {

// The words of the list.
template <class... Sizes>
constexpr std::int64_t product(Sizes... sizes) noexcept {
  return (std::int64_t{1} * ... * static_cast<std::int64_t>(sizes));
}
/// The elements from the first element to the last of `rows` rows of `columns` elements that begin `stride`
/// elements apart.
constexpr std::int64_t strided(std::int64_t rows, std::int64_t stride, std::int64_t columns) noexcept {
  return rows == 0 || columns == 0 ? 0 : (rows - 1) * stride + columns;
}
template <class T, class... Sizes>
constexpr Operand reads(const T* data, Sizes... sizes) noexcept {
  return {data, product(sizes...), sizeof(T), Access::reads};
}
template <class... Sizes>
constexpr Operand reads(const WeightMatrix& matrix, Sizes... sizes) noexcept {
  return reads(matrix.data, sizes...);
}
constexpr Operand reads(const ScoreBias& bias, std::int64_t batch, std::int64_t queries,
                        std::int64_t keys) noexcept {
  return reads(bias.data, bias.of_each_sample ? batch : 1, bias.of_each_query ? queries : 1, keys);
}
template <class T, class... Sizes>
constexpr Operand writes(T* data, Sizes... sizes) noexcept {
  return {data, product(sizes...), sizeof(T), Access::writes};
}
template <class T, class... Sizes>
constexpr Operand updates(T* data, Sizes... sizes) noexcept {
  return {data, product(sizes...), sizeof(T), Access::updates};
}
constexpr Operand optional(Operand operand) noexcept {
  operand.may_be_null = true;
  return operand;
}

// The operands of a call, from its arguments without the context: OperandsOf<float>::add(a, b, out, n). No
// operand depends on all arguments.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
template <class T>
struct OperandsOf {
#define WEFT_PARAMETERS(...) __VA_ARGS__
#define WEFT_KERNEL(name, parameters, ...) \
  static auto name(WEFT_PARAMETERS parameters) { return std::array{__VA_ARGS__}; }
#define WEFT_KERNEL_F32_BF16(...) WEFT_KERNEL(__VA_ARGS__)
#include "weft/nn/kernels.inl"
#undef WEFT_PARAMETERS
};
#pragma GCC diagnostic pop

}  // namespace detail

/// One kernel, by its member of the table: Row<&KernelTable::add>.
///   name       "add"
///   text       its operands as the list has them: "reads(a, n), reads(b, n), writes(out, n)"
///   operands   the function from its arguments, without the context, to its operands
///   number     its place in the list
template <auto Member>
struct Row;
#define WEFT_ROW(member, function, T, ...)                                                             \
  template <>                                                                                          \
  struct Row<&KernelTable::member> {                                                                   \
    static constexpr std::string_view name = #member, text = #__VA_ARGS__;                             \
    static constexpr auto operands = &detail::OperandsOf<T>::function;                                 \
    static constexpr std::size_t number = offsetof(KernelTable, member) / sizeof(KernelTable::member); \
  };
#define WEFT_KERNEL(name, parameters, ...) WEFT_ROW(name, name, float, __VA_ARGS__)
#define WEFT_KERNEL_F32_BF16(name, parameters, ...) \
  WEFT_ROW(name, name, float, __VA_ARGS__)          \
  WEFT_ROW(name##_bf16, name, bf16, __VA_ARGS__)
#include "weft/nn/kernels.inl"
#undef WEFT_ROW

inline constexpr std::size_t kKernels = sizeof(KernelTable) / sizeof(KernelTable::add);

/// Calls f.template operator()<&KernelTable::add>() for each kernel, in the order of the list.
template <class F>
constexpr void for_each_kernel(F&& f) {
#define WEFT_KERNEL(name, ...) f.template operator()<&KernelTable::name>();
#define WEFT_KERNEL_F32_BF16(name, ...)        \
  f.template operator()<&KernelTable::name>(); \
  f.template operator()<&KernelTable::name##_bf16>();
#include "weft/nn/kernels.inl"
}

}  // namespace weft::kernels
