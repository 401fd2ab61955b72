#include "backends/support_table.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <functional>
#include <vector>

#include "backends/compose/op_support.hpp"
#include "reduce/reduce.hpp"
#include "weft/backends/op_table.hpp"
#include "weft/backends/plugin.hpp"

namespace weft {
namespace {

using Cell = std::function<std::string(const Traits&)>;

std::string head(std::string_view corner) {
  std::string line = fmt::format("| {} |", corner), rule = "|---|";
  for (const std::string_view backend : known_backends()) {
    line += fmt::format(" {} |", backend);
    rule += "---|";
  }
  return line + "\n" + rule + "\n";
}

std::string row_of(std::string_view label, const Cell& cell) {
  std::string line = fmt::format("| {} |", label);
  for (const std::string_view backend : known_backends())
    line += fmt::format(" {} |", cell(*known_traits(backend)));
  return line + "\n";
}

std::string word(OpSupport op_support) {
  switch (op_support) {
    case OpSupport::native: return "native";
    case OpSupport::composed: return "composed";
    case OpSupport::unsupported: return "unsupported";
  }
  return {};
}

// "native", or if the dtypes differ "native; composed: f16 bf16".
std::string by_dtype(const std::vector<DType>& dtypes, const std::function<OpSupport(DType)>& op_support) {
  std::string text;
  for (const OpSupport r : {OpSupport::native, OpSupport::composed, OpSupport::unsupported}) {
    std::vector<std::string_view> these;
    for (const DType d : dtypes)
      if (op_support(d) == r) these.push_back(name(d));
    if (these.empty()) continue;
    if (these.size() == dtypes.size()) return word(r);
    text += fmt::format("{}{}: {}", text.empty() ? "" : "; ", word(r), fmt::join(these, " "));
  }
  return text;
}

std::vector<DType> all_dtypes() {
  std::vector<DType> all;
  for (int d = 0; d < kDTypeCount; ++d) all.push_back(static_cast<DType>(d));
  return all;
}

struct Class {
  std::string_view label;
  std::vector<DType> dtypes;
};
std::vector<Class> classes() {
  return {{"f64 f32", {DType::f64, DType::f32}},
          {"f16 bf16", {DType::f16, DType::bf16}},
          {"integers",
           {DType::i8, DType::i16, DType::i32, DType::i64, DType::u8, DType::u16, DType::u32, DType::u64}},
          {"bool", {DType::boolean}},
          {"c64 c128", {DType::c64, DType::c128}}};
}

std::string moving() {
  std::string text = head("operation");
  for (int o = 1; o < kOpCount; ++o) {
    const auto op = static_cast<Op>(o);
    if (row(op).reduces) continue;
    text += row_of(name(op), [&](const Traits& t) {
      return by_dtype(all_dtypes(),
                      [&](DType d) { return op_support(t, op, d, ReduceOp::Kind::sum, Order::native); });
    });
  }
  return text;
}

// Returns a table of the operations that reduce, for dtypes and reductions that the backend supports
// natively.
std::string reducing() {
  std::string text = head("operation");
  for (int o = 1; o < kOpCount; ++o) {
    const auto op = static_cast<Op>(o);
    if (!row(op).reduces) continue;
    for (const Order order : {Order::native, Order::canonical})
      text += row_of(
          fmt::format("{}{}", name(op), order == Order::canonical ? ", canonical order" : ""),
          [&](const Traits& t) { return word(op_support(t, op, DType::f32, ReduceOp::Kind::sum, order)); });
  }
  return text;
}

std::string reductions() {
  std::string text = head("reduction");
  for (int k = 0; k < kReduceKindCount; ++k) {
    const auto kind = static_cast<ReduceOp::Kind>(k);
    for (const Class& c : classes()) {
      std::vector<DType> defined;
      for (const DType d : c.dtypes)
        if (can_reduce(d, kind)) defined.push_back(d);
      if (defined.empty()) continue;
      text += row_of(fmt::format("{} of {}", name(kind), c.label), [&](const Traits& t) {
        return by_dtype(defined,
                        [&](DType d) { return op_support(t, Op::all_reduce, d, kind, Order::native); });
      });
    }
  }
  return text;
}

std::string promises() {
  struct Promise {
    std::string_view label;
    bool FailureGuarantees::*of;
  };
  const Promise all[] = {
      {"a call not finished by its deadline fails with `timeout`", &FailureGuarantees::deadline},
      {"the time-out names the ranks that had not arrived", &FailureGuarantees::names_absent},
      {"a rank that dies is `peer_lost` on every survivor, before the deadline",
       &FailureGuarantees::detects_death},
      {"survivors may go on, in other groups", &FailureGuarantees::survives_death},
      {"ranks that call different things get `mismatch`", &FailureGuarantees::checks_calls},
      {"a failed call leaves the caller's memory", &FailureGuarantees::revocable},
      {"`quiesce()` becomes true even where a peer is stopped", &FailureGuarantees::quiesces},
  };
  std::string text = head("promise");
  for (const Promise& p : all)
    text += row_of(p.label, [&](const Traits& t) -> std::string {
      if (t.name == "shm" && !(shm_single_copy_traits().guarantees.*p.of) && t.guarantees.*p.of)
        return "yes; no with `WEFT_SINGLE_COPY=push`";
      return t.guarantees.*p.of ? "yes" : "no";
    });
  text += row_of("memory", [](const Traits& t) { return t.device ? "CUDA" : "host"; });
  text += row_of("its own order is the canonical one",
                 [](const Traits& t) { return t.native_is_canonical ? "yes" : "no"; });
  text += row_of("progress", [](const Traits& t) {
    switch (t.progress) {
      case ProgressStyle::polled: return "polled";
      case ProgressStyle::threaded: return "a thread of its own";
      case ProgressStyle::stream: return "a device stream";
    }
    return "";
  });
  return text;
}

}  // namespace

std::string support_tables() {
  return fmt::format(
      R"(# What each backend does, and what it promises

Generated from the traits in `src/backends/known_traits.cpp`: `weft doctor --tables > docs/support.md`. The
conformance suite (`ctest -L conformance`) checks what is said here against what the backends do.

**native**: the transport does it itself. **composed**: weft makes it from the transport's messages or its
`all_to_all_v`, with the same results; reductions then are in canonical order. **unsupported**: the call throws
`unsupported`.

## Operations that move

Of every dtype, unless said otherwise.

{}
## Operations that reduce

Of an f32 sum; where the next table says composed, so is the operation.

{}
## Reductions

Of `all_reduce` in native order. What is not listed is not defined: f8 is moved, never combined.

{}
## Failure guarantees

{}
Over shm nothing moves, and `quiesce()` waits for the stopped rank, while pages are pinned ([shm.md](shm.md), "Failure").
With `WEFT_SINGLE_COPY=push` ranks of shm write each other's foreign memory by the kernel. One that was stopped before its system
call writes when it goes on, to an address which may have a new owner by then; nothing but its end or its return makes
`quiesce()` true.

What stands here of nccl is checked over a stand-in for NCCL and CUDA. Some of it no GPU has confirmed yet: see "Not verified on a
GPU" in nccl.md.
)",
      moving(), reducing(), reductions(), promises());
}

}  // namespace weft
