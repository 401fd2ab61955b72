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
  // `refusal`: why there is no memfd of the block (errno), or 0.
  SocketServer(Logger& log, const Arena& arena, const ProcessAddress& self, ProcessBlock& block, int refusal,
               std::shared_ptr<OfferTable> offers);

  // Returns the errno if each of at least `looks` consecutive checks, kLookAgain apart, found a process whose
  // connection could not be accepted; otherwise 0.
  int refuses(int looks) const noexcept;

  ~SocketServer();

 private:
  void serve() noexcept;
  int timeout(bool listen) const noexcept;
  bool room_for_one() noexcept;
  bool is_ours(int socket) noexcept;
  bool answer(int socket) noexcept;

  Warnings warnings_;  // the thread's
  const Arena& arena_;
  const uid_t user_;
  ProcessBlock& block_;
  const int block_descriptor_, block_refusal_;
  const std::shared_ptr<OfferTable> offers_;
  Descriptor listener_;
  Descriptor stop_;
  std::atomic<int> refusal_{0}, refused_looks_{0};
  // Only the thread uses these members. The memory that most jobs need is allocated at the beginning.
  static constexpr std::size_t kPeers = 64;
  std::vector<Descriptor> connections_;
  std::vector<pollfd> watched_;
  std::latch marked_{1};  // the block says that the process lives
  std::thread thread_;
};

}  // namespace weft
