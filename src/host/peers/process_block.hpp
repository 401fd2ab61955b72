// A process's block: memory that its peer processes map, to see whether the process is alive and to ring its
// doorbells.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "host/arena.hpp"
#include "host/peers/peer_process.hpp"
#include "weft/host/doorbell.hpp"

namespace weft {

inline constexpr std::size_t kBlockLineBytes = 64;

// Only its own process writes to the block, except for the doorbells, which peers ring. An entry of
// `segments` is written once, `bytes` last.
struct ProcessBlock {
  struct Segment {
    std::atomic<std::uint64_t> bytes;  // 0: the entry is not valid yet
    std::uint64_t inode;
    std::int32_t descriptor;
  };
  struct alignas(kBlockLineBytes) DoorbellLine {
    std::atomic<std::uint32_t> word;
  };
  static constexpr std::uint32_t kEnded = 0, kBegins = 1;

  alignas(kBlockLineBytes) char name[kBlockLineBytes];       // the name of the process's socket
  alignas(kBlockLineBytes) std::atomic<std::uint32_t> life;  // see LifeMark
  alignas(kBlockLineBytes) Segment segments[Arena::kMaxSegments];
  DoorbellLine doorbells[kMaxProcessDoorbells];
};

// While this object exists, the end of the calling thread changes the word in the block, however the thread
// ends. The word is a robust futex. The kernel changes it if the process is killed, or if the process becomes
// another program by exec, which a pidfd does not report. A LifeMark replaces the thread's list of robust
// mutexes, so the thread must not use such mutexes.
class LifeMark {
 public:
  explicit LifeMark(std::atomic<std::uint32_t>& word) noexcept : word_(word) {
    word_.store(static_cast<std::uint32_t>(::syscall(SYS_gettid)), std::memory_order_seq_cst);
    head_.list.next = &node_;
    node_.next = &head_.list;
    head_.futex_offset = reinterpret_cast<char*>(&word_) - reinterpret_cast<char*>(&node_);
    head_.list_op_pending = nullptr;
    ::syscall(SYS_set_robust_list, &head_, sizeof head_);
  }
  ~LifeMark() {
    word_.store(ProcessBlock::kEnded, std::memory_order_seq_cst);
    ::syscall(SYS_set_robust_list, nullptr, sizeof head_);
  }
  LifeMark(const LifeMark&) = delete;
  LifeMark& operator=(const LifeMark&) = delete;

 private:
  std::atomic<std::uint32_t>& word_;
  robust_list_head head_{};
  robust_list node_{};
};

inline Doorbell doorbell_on(ProcessBlock* block, int number) {
  if (block == nullptr || number < 0 || number >= kMaxProcessDoorbells) return {};
  return Doorbell(&block->doorbells[number].word);
}

}  // namespace weft
