// An exchange over links (links.hpp): what goes to a rank is packed into slots, or, where it is much and that rank reaches the memory
// itself, copied by that rank from where it lies to where it belongs. Its thread begins, asks and finishes; steps are taken by whichever thread
// owns the links.
#pragma once

#include <algorithm>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <utility>

#include "mesh/window/exchange.hpp"
#include "mesh/window/links/links.hpp"

namespace weft::windows {

inline constexpr std::int64_t kPackedBytes = kFewBytes;  ///< up to here it is packed, wherever it lies
/// Memory that is not shared (ways.hpp): from so many bytes on the ways are measured; fewer are packed run by run.
inline constexpr std::int64_t kMeasuredBytes = 8 << 10;
/// From so many bytes on the kernel may copy, where runs have kLongRun on average: each costs it 0.4 us, as much as 6 KiB. Shorter runs may be gathered.
inline constexpr std::int64_t kKernelBytes = 12 << 10, kLongRun = 16 << 10;

/// Walks through packed bytes, a slot at a time: both sides cut them alike, between elements.
struct Cursor {
  std::size_t box = 0;
  std::int64_t element = 0;

  /// Calls move(box, first element, count, place in the slot) for what the next slot has.
  template <class Move>
  void slot(const Window::Plan::Program::Traffic& t, const Move& move) {
    std::int64_t at = 0;
    for (; box < t.boxes.size(); ++box, element = 0) {
      const Window::Plan::Program::Box& b = t.boxes[box];
      const std::int64_t size = b.element;
      const std::int64_t count = std::min(b.elements - element, (kSlotBytes - at) / size);
      if (count > 0) move(b, element, count, at);
      at += count * size;
      element += count;
      if (element < b.elements) return;
    }
  }
  bool at_end(const Window::Plan::Program::Traffic& t) const noexcept { return box == t.boxes.size(); }
};

class OverLinks final : public WindowTransfer::Steps, public LinkedSteps, private Exchange {
 public:
  OverLinks(std::shared_ptr<const Plan> plan, const Program& program, const Judged& fields, Stream stream);
  OverLinks(const OverLinks&) = delete;
  OverLinks& operator=(const OverLinks&) = delete;
  ~OverLinks() override;
  // Where another thread of this rank is stuck in a step of it, it stays until the Context ends.
  static void operator delete(OverLinks* x, std::destroying_delete_t);
  static void operator delete(void* memory) { ::operator delete(memory); }
  bool done() override;
  void finish() override;

  // LinkedSteps
  const char* name() const noexcept override { return plan_->name; }
  bool complete() const noexcept override { return left_ == 0; }
  bool step() override;
  void broke(std::exception_ptr why) noexcept override;
  Wish wish() const override;
  void append_awaited(std::vector<int>& ranks) const override;
  bool touches(const std::byte* begin, const std::byte* end) const noexcept override;

 private:
  enum class Phase : std::uint8_t { queued, moving, awaiting, there, done };
  struct Out {
    Links::End* end = nullptr;
    std::uint64_t ticket = 0, until = 0;
    Cursor cursor{};
    Phase phase = Phase::queued;
    Way way = Way::gathered;
    std::uint16_t timing = 0;  // not 0: it is measured
  };
  struct In {
    Links::End* end = nullptr;
    std::uint64_t ticket = 0;
    std::int64_t at = 0;    // of the adjoint, in came_
    std::int64_t read = 0;  // bytes that the kernel has copied
    Cursor cursor{};
    Phase phase = Phase::queued;
    Holds holds = Holds::packed;  // what its slot says, where it is held
    bool held = false;            // of the adjoint: the slot is taken when its bytes are added
    Unpacking unpacking = Unpacking::plain;
    bool unpacking_timed = false, trial = false;  // trial: so the sender is told no time of it
    std::uint64_t ns = 0;                         // of copies, where the sender asks
  };

  bool end() noexcept;
  bool broken() const noexcept;
  void give_up() noexcept;
  [[noreturn]] void raise();
  [[noreturn]] void throw_it(const Error& e) const;
  template <class Side>
  bool end_of(Side& side) {
    side.phase = Phase::done;
    --left_;
    return true;
  }

  // send.cpp
  bool send(Out& o, const Program::Traffic& t);
  void end_turn(Out& o, const Program::Traffic& t, Holds holds);
  Slot& begin_slot(Links::End& end, const Program::Traffic& t, Holds holds, std::uint16_t timing = 0);
  void pack(Out& o, const Program::Traffic& t);
  void pack_few(Slot& slot, Links::End& end, const Program::Traffic& t);
  void pack_many(Slot& slot, Out& o, const Program::Traffic& t);
  bool kernel_reaches(const Links::End& end, const Program::Traffic& t,
                      std::array<Place, kMostPlaces>& places) const;
  bool find_shared(std::uint32_t mapped, const Arena& arena, std::array<Place, kMostPlaces>& places);
  Holds find_places(Out& o, const Program::Traffic& t, std::array<Place, kMostPlaces>& places);
  bool name_places(Out& o, const Program::Traffic& t);
  void choose_way(Out& o, const Program::Traffic& t, bool kernel_reaches);
  std::pair<const std::byte*, const std::byte*> span_sent(std::size_t f) const;

  // receive.cpp
  bool receive(In& in, const Program::Traffic& t);
  void choose_unpacking(In& in, const Program::Traffic& t) const;
  void end_timing(const In& in, const Program::Traffic& t, std::uint16_t timing) const;
  bool copy_slot(In& in, const Program::Traffic& t, const Slot& slot, Holds holds);
  void make_room();
  bool read(In& in, const Program::Traffic& t, const Slot& slot);
  [[noreturn]] void lose(int rank, bool ended);
  void keep_packed(In& in, const Program::Traffic& t, const Slot& slot);
  const std::byte* place_of(const Slot& slot, const Program::Traffic& t, std::size_t field);
  const std::byte* reach(const Place& place, const Program::Traffic& t, std::size_t field);
  void check_head(const Slot& slot, const Program::Traffic& t, Holds holds);
  const std::vector<Program::Step>& joint_of(const Slot& slot, const Program::Traffic& t);
  [[noreturn]] void disagree(const Slot& slot, const Program::Traffic& t);
  void add_from(In& in, const Program::Traffic& t);
  void add_all();

  Links* const links_;                            // the plan's
  bool given_up_ = false, over_ = false;          // of its thread: over_: it has seen it complete
  bool kept_ = false;                             // for the Context to end
  std::optional<Clock::time_point> asked_since_;  // when done() first said no
  // Of the thread that owns the links.
  Few<Out, 4> outs_;
  Few<In, 4> ins_;
  std::size_t left_, there_ = 0;
  bool added_ = false;
  std::exception_ptr why_;      // it has failed
  std::uint32_t segments_ = 0;  // told to receivers that could map more of this rank's memory
  std::unique_ptr<Tensor> came_;
};
// What malloc keeps ready for each thread: glibc's up to 1032 bytes; beyond, each exchange would take 40 ns more.
static_assert(sizeof(OverLinks) <= 1024);

}  // namespace weft::windows
