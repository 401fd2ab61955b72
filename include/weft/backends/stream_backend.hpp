// A whole Backend over streams of bytes between pairs of ranks: sockets, pipes, a network's own library. This
// Backend handles messages and their matching, receives from any source and probes. It handles time-outs that
// name the rank at fault, the first cause of a failure, and ranks that leave or die. A transport provides the
// functions that write and read bytes. examples/backend is such a transport.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "weft/backends/backend.hpp"

namespace weft {

/// One rank's end of the streams between the ranks of a group. There is a stream of bytes from each rank to
/// each other rank. Bytes arrive in the order in which they were written, each once. Streams do not wait for
/// each other. Any thread that uses the group may call the functions, but only one thread at a time. A
/// function keeps no pointer after it returns, so nothing has to be cancelled. If a function throws an
/// exception, the group fails on all ranks. An Error with `peer_lost` says that the other rank is lost. The
/// destructor is called when the group has ended. Bytes that were written before must still arrive.
class ByteStreams {
 public:
  virtual ~ByteStreams() = default;
  /// Takes the first bytes for rank `to`, as many as it can at once, up to `most`, and returns how many. 0 if
  /// it can take none now. Never waits. A result above `most` (such as -1) fails the group.
  virtual std::size_t write(int to, const std::byte* bytes, std::size_t most) = 0;
  /// Writes the next bytes of rank `from` to `bytes`, at most `most`, and returns how many. 0 if there are
  /// none now. Never waits. A result above `most` fails the group.
  virtual std::size_t read(int from, std::byte* bytes, std::size_t most) = 0;
  /// Called once, when all ranks have opened their ends. After that the transport may free what it needed
  /// only to connect the ranks.
  virtual void all_open() {}
};

struct StreamTransport {
  std::string name;            ///< appears in traits and texts; without line feeds; the same on all ranks
  bool detects_death = false;  ///< streams throw `peer_lost` soon after the other rank has died
  bool spin = false;           ///< a read that finds nothing costs no system call
  std::string address{};       ///< the data that the other ranks need to open their ends
  /// Opens this rank's end. `addresses` holds the addresses of all ranks, by rank, including this one. May
  /// wait for the other ranks, until the deadline for making the group. Throws if the end cannot be opened.
  std::function<std::unique_ptr<ByteStreams>(std::span<const std::string> addresses)> open;
};

/// The traits of a transport over streams if all ranks are on one host. If the ranks are on several hosts,
/// `detects_death` is that of the StreamTransport.
Traits stream_traits(std::string_view name, bool spin = false) noexcept;

/// Exchanges addresses with the other ranks (join()) and opens this rank's end. Throws the errors of join()
/// and of `open`. Throws mismatch if a rank has a transport of another name. Throws bad_argument if `name` is
/// empty or has a line feed, or if `open` is empty or returns null.
std::unique_ptr<Backend> make_stream_backend(const GroupInit& b, StreamTransport transport);

}  // namespace weft
