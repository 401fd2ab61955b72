#include "backends/mpi/control_channel.hpp"

#include <cstring>
#include <type_traits>

namespace weft::mpi {

static_assert(std::is_trivially_copyable_v<Envelope>);

ControlChannel::ControlChannel(MPI_Comm comm, int rank, int size)
    : comm_(comm),
      rank_(rank),
      size_(size),
      buffers_(new std::byte[kBytes * kPosted]),
      gone_(static_cast<std::size_t>(size)) {
  for (int i = 0; i < kPosted; ++i) {
    head_index_ = i;
    again();
  }
}

// Receives that match nothing any more end at once when cancelled.
ControlChannel::~ControlChannel() {
  for (MPI_Request& r : posted_) {
    MPI_Cancel(&r);
    MPI_Wait(&r, MPI_STATUS_IGNORE);
  }
  MPI_Comm_free(&comm_);
}

std::uint64_t ControlChannel::send(int to, Envelope head, std::span<const std::byte> payload) {
  const std::size_t bytes = sizeof(Envelope) + payload.size();
  head.payload = static_cast<std::uint32_t>(payload.size());
  Sent& s = sent_.emplace_back(
      Sent{MPI_REQUEST_NULL, std::unique_ptr<std::byte[]>(new std::byte[bytes]), to, ++written_});
  std::memcpy(s.bytes.get(), &head, sizeof(Envelope));
  if (!payload.empty()) std::memcpy(s.bytes.get() + sizeof(Envelope), payload.data(), payload.size());
  must(MPI_Isend(s.bytes.get(), static_cast<int>(bytes), MPI_BYTE, to, kTag, comm_, &s.request), "MPI_Isend");
  return s.number;
}

void ControlChannel::send_others(const Envelope& head, std::span<const std::byte> payload) {
  for (int r = 0; r < size_; ++r)
    if (r != rank_) send(r, head, payload);
}

void ControlChannel::reap() {
  for (auto s = sent_.begin(); s != sent_.end();) {
    int done = 0;
    must(MPI_Test(&s->request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    s = done ? sent_.erase(s) : std::next(s);
  }
}

// Receives match in the order in which they were posted, so the receive at the head completes first.
const std::byte* ControlChannel::next() {
  int done = 0;
  MPI_Status status;
  must(MPI_Test(&posted_[head_index_], &done, &status), "MPI_Test");
  if (!done) return nullptr;
  from_ = status.MPI_SOURCE;
  const std::byte* const bytes = buffers_.get() + kBytes * static_cast<std::size_t>(head_index_);
  std::memcpy(&head_, bytes, sizeof(Envelope));
  return bytes;
}

void ControlChannel::again() {
  must(MPI_Irecv(buffers_.get() + kBytes * static_cast<std::size_t>(head_index_), static_cast<int>(kBytes),
                 MPI_BYTE, MPI_ANY_SOURCE, kTag, comm_, &posted_[head_index_]),
       "MPI_Irecv");
  head_index_ = (head_index_ + 1) % kPosted;
}

bool ControlChannel::idle() noexcept {
  try {
    take([](int, const Envelope&, std::span<const std::byte>) {});
  } catch (...) {  // MPI has lost a rank: the channel is never idle, and is leaked
    return false;
  }
  return left_ == size_ - 1 && sent_.empty();
}

}  // namespace weft::mpi
