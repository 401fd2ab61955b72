// A prepared exchange for fields of certain shapes and strides. It is made once, and kept with the plan
// (program.cpp). exchange.cpp performs it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backends/exchange/program.hpp"
#include "mesh/window/fill_element.hpp"
#include "mesh/window/judged.hpp"
#include "mesh/window/plan.hpp"
#include "weft/group/persistent_exchange.hpp"

namespace weft {

namespace windows {

// A field, except for its place in memory: a part of the tensor, and a window on it.
struct Form {
  Shape shape;  // of the part
  Strides part, window;
  DType dtype = DType::f32;
  std::int64_t element = 0;
  Shape of_window{};  // its shape
  // The bytes that part and window span, from where they begin.
  std::int64_t part_low = 0, part_high = 0, window_low = 0, window_high = 0;
  friend bool operator==(const Form& a, const Form& b) noexcept {
    return a.shape == b.shape && a.part == b.part && a.window == b.window && a.dtype == b.dtype;
  }
};

}  // namespace windows

// The steps of an exchange of fields of certain forms: an exchange that is repeated works nothing out.
// Offsets are in bytes, of a field's part or window, or of packed bytes.
struct Window::Plan::Program {
  struct Step {
    std::size_t field;
    Loops loops;
    std::int64_t from, to;
  };
  struct Fill {
    Step step;
    std::array<std::byte, 16> element;
  };
  struct Place {  // the places of the whole part in the window: its own place, and those of its images beyond
                  // a periodic end
    /// Whether the part lies there in memory.
    bool holds(const windows::Pair& p) const noexcept { return p.part + part == p.window + window; }
    std::int64_t part = 0, window = 0;
    Dims begin{};  // in the window
  };
  windows::Way way = windows::Way::fetch;
  std::uint64_t id = 0;  ///< no other program of this process has it
  std::vector<windows::Form> forms{};
  mutable std::array<windows::Judged, 4> judged{};  // the last: programs exchange arrays by turns
  mutable std::size_t next_judged = 0;              // of these
  // The exchange of all ranks of the plan's group, this one's own boxes among them.
  ExchangePlan plan{};
  mutable PersistentExchange exchange{};  // made at the first start; empty if this rank exchanges only with
                                          // itself
  // For a rank that exchanges only with itself: copies on any device; or the sums, on the host, and memory
  // for them.
  std::vector<Step> own{};
  std::optional<ExchangeProgram> sums{};
  mutable std::vector<std::byte> room{};
  std::vector<Step> cleared{};  // of the adjoint
  std::vector<Fill> fills{};
  std::vector<std::vector<Place>> places{};  // of each field
};

namespace windows {

/// Throws bad_argument: what the program called, and the text.
[[noreturn]] void refuse(const Window::Plan& plan, const std::string& text);

/// "in", "out of field 3": in texts of errors.
std::string called(const char* which, std::size_t index, std::size_t count);

/// The program for these fields: the program of an earlier exchange, or a new one. Throws bad_argument naming
/// the field that does not fit the window.
const Window::Plan::Program& program_for(const Window& window, const Window::Plan& plan,
                                         std::span<const WindowField> fields, Way way);

/// The facts that must be equal on all ranks, in words: "2 fields: f32, f64", with "the adjoint of " or "sums
/// of " before them.
std::string fields_text(const std::vector<Form>& forms, Way way);

}  // namespace windows
}  // namespace weft
