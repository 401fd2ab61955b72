// A kernel of bf16 made of its kernel of f32. Operands in bf16 are widened in temporary memory, and the
// results that the kernel writes there are rounded. Private to this folder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>

#include "weft/nn/kernel_rows.hpp"

namespace weft::kernels {

/// run() is the kernel `Narrow`. Memory(ctx, floats) is the temporary memory; its data() is a float*.
template <auto Narrow, auto Wide, class Memory>
struct Widened;
template <class... Args, void (*KernelTable::*Narrow)(KernelContext&, Args...), auto Wide, class Memory>
struct Widened<Narrow, Wide, Memory> {
  static void run(KernelContext& ctx, Args... args) {
    const auto operands = Row<Narrow>::operands(args...);
    std::int64_t floats = 0;
    const auto size_of = [](const Operand& o) { return (o.elements + 15) / 16 * 16; };  // of whole lines
    for (const Operand& o : operands) floats += is_narrow(o) ? size_of(o) : 0;
    Memory memory(ctx, floats);
    float* wide[operands.size()] = {};
    float* next = memory.data();
    for (std::size_t i = 0; i < operands.size(); ++i) {
      const Operand& o = operands[i];
      if (!is_narrow(o)) continue;
      wide[i] = next;
      next += size_of(o);
      if (o.access != Access::writes)
        ctx.table().widen_bf16(ctx, static_cast<const bf16*>(o.data), wide[i], o.elements);
    }
    std::size_t operand = 0;
    const auto argument = [&]<class A>(A arg) {  // call it for each argument in turn
      const std::size_t i = operand;
      operand += kIsOperand<A> ? 1 : 0;
      if constexpr (std::is_same_v<A, const bf16*>)
        return static_cast<const float*>(wide[i]);
      else if constexpr (std::is_same_v<A, bf16*>)
        return wide[i];
      else
        return Same<A>{arg};
    };
    call(ctx, std::tuple{argument.template operator()<Args>(args)...});  // braces: from left to right
    for (std::size_t i = 0; i < operands.size(); ++i)
      if (wide[i] != nullptr && operands[i].access != Access::reads)
        ctx.table().round_to_bf16(ctx, wide[i], static_cast<bf16*>(const_cast<void*>(operands[i].data)),
                                  operands[i].elements);
  }

 private:
  template <class A>
  struct Same {  // A may be a reference
    A value;
    operator A() const { return value; }
  };
  static bool is_narrow(const Operand& o) { return o.data != nullptr && o.element_bytes == sizeof(bf16); }
  static void call(KernelContext& ctx, const auto& arguments) {
    std::apply([&](const auto&... all) { (ctx.table().*Wide)(ctx, all...); }, arguments);
  }
};

}  // namespace weft::kernels
