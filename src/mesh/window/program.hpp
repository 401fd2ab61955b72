// An exchange worked out for fields of certain shapes and strides. Made once, and kept with the plan (program.cpp); carried out in exchange.cpp.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "host/arena.hpp"
#include "mesh/window/fill_element.hpp"
#include "mesh/window/judged.hpp"
#include "mesh/window/links/kernel_reads.hpp"
#include "mesh/window/links/links.hpp"
#include "mesh/window/links/ways.hpp"
#include "mesh/window/plan.hpp"
#include "reduce/strided_sums.hpp"
#include "weft/group/persistent_exchange.hpp"

namespace weft {

namespace windows {

// What a field is, but for where it lies: a part of the tensor, and a window on it.
struct Form {
  Shape shape;  // of the part
  Strides part, window;
  DType dtype = DType::f32;
  std::int64_t element = 0;
  Shape of_window{};  // its shape
  std::int64_t part_low = 0, part_high = 0, window_low = 0,
               window_high = 0;  // the bytes that they span, from where they begin
  friend bool operator==(const Form& a, const Form& b) noexcept {
    return a.shape == b.shape && a.part == b.part && a.window == b.window && a.dtype == b.dtype;
  }
};

}  // namespace windows

// What an exchange of fields of certain forms does, step by step: so that one that is repeated works nothing out. Offsets are in bytes, of a field's
// part or window, or of packed bytes.
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
  struct Place {  // of the whole part in the window: its own, and those of its images beyond a periodic end
    /// Whether the part lies there in memory.
    bool holds(const windows::Pair& p) const noexcept { return p.part + part == p.window + window; }
    std::int64_t part = 0, window = 0;
    Dims begin{};  // in the window
  };
  // Over links (links.hpp): what goes to one rank, or comes from it. `loops` are between this rank's memory and the packed bytes.
  struct Box {
    std::size_t field;
    Shape counts;
    std::int64_t element, elements;                  // bytes of one, and how many
    std::int64_t offset;                             // in this rank's part or window
    std::array<std::int64_t, Dims::kMaxDims> steps;  // there
    std::int64_t at;                                 // in the packed bytes
    Loops loops;
  };
  // A run of bytes in this rank's memory, at its place in the packed bytes.
  struct Move {
    std::uint32_t field, bytes, at;
    std::int64_t offset;
  };
  struct Run {
    std::size_t field;
    std::int64_t from, to, bytes;
    CopyRuns copy;
  };
  struct Span {
    std::int64_t low, high;
  };
  struct Traffic {
    // Of bytes that go out, where memory is not shared: how they go, and what is being measured of that.
    struct Measured {
      windows::Ways ways{};
      windows::Way way = windows::Way::gathered;
      std::uint16_t timing = 0;     // 0: nothing
      std::uint64_t last_slot = 0;  // of the exchange that is measured; 0: not yet sent
      std::uint64_t ns = 0;         // that the sender took to pack
    };
    int rank = 0;
    std::int64_t bytes = 0, runs = 0;  // runs: of bytes in one piece, in this rank's memory
    std::vector<Box> boxes{};
    // Of few bytes in few runs: all of them, for which the loops of boxes would take longer than the copies. Those of a slot's first line
    // come first, `moves_beside` of them. Empty: there are more.
    std::vector<Move> moves{};
    std::size_t moves_beside = 0;
    std::uint32_t move_bytes = 0;  // of each of them; 0: they differ
    std::uint64_t form = 0;        // a hash of what both ranks must have alike: fields, and their boxes
    std::string about{};           // of that, in words: the fields, and the first box of each
    // Of many packed bytes that come: the loops of each box around the caches, whether that is quicker, and how often bytes came.
    std::vector<Loops> streamed{};
    mutable windows::Unpackings unpackings{};
    mutable std::uint64_t came = 0;
    // Of what comes from the memory of the other rank: the copies, worked out from its boxes when they were those of that number.
    mutable std::uint64_t joint_id = 0;
    mutable std::vector<Step> joint{};
    mutable std::vector<Run> joint_runs{};  // the same, where each is one run
    mutable std::vector<Span>
        joint_spans{};  // of each field: the bytes that are read, from where it begins there
    // Memory of that rank, as this one reaches it: the segment in which a field lay last. Once it is mapped it stays where it is.
    struct Reached {
      std::uint64_t segment = 0, begin = 0, bytes = 0;
    };
    mutable Reached reached{};
    mutable Measured measured{};
    // Of bytes that go out: where fields that were judged lay in memory that the receiver maps.
    struct Placed {
      std::uint64_t judged = 0;  // its id; 0: none
      Arena::Version arena{};
      std::uint32_t mapped = 0;
      std::array<windows::Place, windows::kMostPlaces> places{};
    };
    mutable Placed placed{};
    mutable std::array<std::uint64_t, 4>
        copyable{};  // fields that were judged, by id, of whose memory the kernel let others read then
    mutable std::uint64_t pieces_id = 0;  // the same for copies by the kernel: by field
    mutable std::vector<windows::Piece> there{}, here{};
  };
  bool adjoint = false, linked = false;
  std::vector<Traffic> to{}, from{};
  mutable std::uint64_t boxes_id = 0;  // of `to`, for the receivers
  std::vector<windows::Form> forms{};
  // Of each field what this rank sends from: the bytes that it spans, from where it begins. (Forms are large, and not read in each exchange.)
  std::vector<Span> sent_spans{};
  mutable std::array<windows::Judged, 4> judged{};  // the last: programs exchange arrays by turns
  mutable std::size_t next_judged = 0;              // of these
  // Not over links: the group's exchange, made at the first start, of this plan.
  ExchangePlan plan{};
  mutable PersistentExchange exchange{};
  std::int64_t room = 0;
  std::vector<Step> own{}, cleared{};
  std::vector<Step> rounded{};  // of the adjoint: sums, in the memory of messages, to parts
  std::vector<std::int64_t>
      sums{};  // of each field of the adjoint: where its sums are there; -1: in its part
  std::vector<Fill> fills{};
  std::vector<std::vector<Place>> places{};  // of each field
};

namespace windows {

/// Throws bad_argument: what the program called, and the text.
[[noreturn]] void refuse(const Window::Plan& plan, const std::string& text);

/// "in", "out of field 3": in texts of errors.
std::string called(const char* which, std::size_t index, std::size_t count);

/// The program for these fields: that of an exchange before, or a new one. Throws bad_argument naming the field that does not fit the
/// window. `adjoint`: `in` is a window, `out` a part. `linked`: over links, not by messages.
const Window::Plan::Program& program_for(const Window& window, const Window::Plan& plan,
                                         std::span<const WindowField> fields, bool adjoint, bool linked);

/// What all ranks must give alike, in words: "2 fields: f32, f64", with "the adjoint of " before where it is that.
std::string fields_text(const std::vector<Form>& forms, bool adjoint);

}  // namespace windows
}  // namespace weft
