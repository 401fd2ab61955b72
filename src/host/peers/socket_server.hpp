// The thread that serves this process's socket: it passes descriptors of the block, of segments and of
// regions to processes of the same user.
#pragma once

#include <poll.h>
#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <latch>
#include <memory>
#include <thread>
#include <vector>

#include "base/memfd.hpp"
#include "host/arena.hpp"
#include "host/peers/process_address.hpp"
#include "host/peers/process_block.hpp"
#include "host/peers/region.hpp"
#include "host/warnings.hpp"

namespace weft {

class SocketServer {
 public:
  // `refusal`: the errno if the system refused a memfd for the block, or 0.
  SocketServer(Logger& log, const Arena& arena, const ProcessAddress& self, ProcessBlock& block, int refusal,
               std::shared_ptr<OfferTable> offers);

  // Checks for waiting connections take place every kLookAgain. Returns the errno if at least the last
  // `looks` checks found a connection that could not be accepted; otherwise 0.
  int refuses(int looks) const noexcept;

  ~SocketServer();

 private:
  void serve() noexcept;
  int timeout(bool listen) const noexcept;
  bool room_for_one() noexcept;
  bool is_ours(int socket) noexcept;
  bool answer(int socket) noexcept;

  Warnings warnings_;  // used by the thread
  const Arena& arena_;
  const uid_t user_;
  ProcessBlock& block_;
  const int block_descriptor_, block_refusal_;
  const std::shared_ptr<OfferTable> offers_;
  Descriptor listener_;
  Descriptor stop_;
  std::atomic<int> refusal_{0}, refused_looks_{0};
  // Only the thread uses these members. Memory that is enough for most jobs is allocated at the beginning.
  static constexpr std::size_t kPeers = 64;
  std::vector<Descriptor> connections_;
  std::vector<pollfd> watched_;
  std::latch marked_{1};  // counted down when the block says that the process is alive
  std::thread thread_;
};

}  // namespace weft
