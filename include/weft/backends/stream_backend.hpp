// A whole Backend over streams of bytes between pairs of ranks: sockets, pipes, a network's own library.
// Messages and their matching, receives from any source, probes, time-outs that name the rank at fault, the
// first cause of a failure and ranks that leave or die are done here; a transport provides the functions that
// write and read bytes. examples/backend is one.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "weft/backends/backend.hpp"

namespace weft {

/// One rank's end of the streams between the ranks of a group. From each rank to each other one goes a stream
/// of bytes, which arrive in the order in which they were written, each once; streams do not wait for each
/// other. One thread at a time calls it, from any of those that use the group. No pointer is kept: so nothing
/// has to be cancelled. An exception of a function fails the group on all ranks; an Error with `peer_lost`
/// says that the other rank is lost. The destructor is called when the group has ended; bytes written before
/// still arrive.
class ByteStreams {
 public:
  virtual ~ByteStreams() = default;
  /// Takes the first bytes for rank `to`, as many of `most` as it can at once, and returns how many; 0: none
  /// now. Never waits. More than `most`, as -1 is, fails the group.
  virtual std::size_t write(int to, const std::byte* bytes, std::size_t most) = 0;
  /// Writes the next bytes of rank `from` to `bytes`, at most `most`, and returns how many; 0: none now.
  /// Never waits. More than `most` fails the group.
  virtual std::size_t read(int from, std::byte* bytes, std::size_t most) = 0;
  /// Called once, when all ranks have opened their ends: the means by which they met is not needed any more.
  virtual void all_open() {}
};

struct StreamTransport {
  std::string name;            ///< in traits and texts, without line feeds; the same on all ranks
  bool detects_death = false;  ///< streams throw `peer_lost` soon after the other rank has died
  bool spin = false;           ///< a read that finds nothing costs no system call
  std::string address{};       ///< the data that the other ranks need to open theirs
  /// Opens this rank's end; by rank the addresses of all, this one's among them. May wait for the others,
  /// until the deadline of the group's making. Throws if it cannot be had.
  std::function<std::unique_ptr<ByteStreams>(std::span<const std::string> addresses)> open;
};

/// The traits of such a transport if all ranks are on one host. Elsewhere a group has `detects_death` as
/// StreamTransport says.
Traits stream_traits(std::string_view name, bool spin = false) noexcept;

/// Meets the other ranks (join()) and opens this rank's end. Throws what join() and `open` throw, `mismatch`
/// where a rank has a transport of another name, and bad_argument if `name` is empty or has a line feed,
/// and where `open` is empty or returns null.
std::unique_ptr<Backend> make_stream_backend(const GroupInit& b, StreamTransport transport);

}  // namespace weft
