#include "support/nccl_stand_in.hpp"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "backends/nccl/nccl_backend.hpp"
#include "reduce/reduce.hpp"

namespace weft::test {

using namespace nccl;

namespace {

enum class What { all_reduce, reduce, broadcast, all_gather, reduce_scatter, send, recv };

DType dtype_of_type(DataType t) {
  switch (t) {
    case DataType::i8: return DType::i8;
    case DataType::u8: return DType::u8;
    case DataType::i32: return DType::i32;
    case DataType::u32: return DType::u32;
    case DataType::i64: return DType::i64;
    case DataType::u64: return DType::u64;
    case DataType::f16: return DType::f16;
    case DataType::f32: return DType::f32;
    case DataType::f64: return DType::f64;
    case DataType::bf16: return DType::bf16;
  }
  return DType::u8;
}

double scalar_value(const void* at, DataType t) {
  const auto get = [&]<class T>(T value) {
    std::memcpy(&value, at, sizeof(value));
    return value;
  };
  switch (t) {
    case DataType::i8: return get(std::int8_t{});
    case DataType::u8: return get(std::uint8_t{});
    case DataType::i32: return get(std::int32_t{});
    case DataType::u32: return get(std::uint32_t{});
    case DataType::i64: return static_cast<double>(get(std::int64_t{}));
    case DataType::u64: return static_cast<double>(get(std::uint64_t{}));
    case DataType::f16: return static_cast<float>(get(f16{}));
    case DataType::f32: return get(float{});
    case DataType::f64: return get(double{});
    case DataType::bf16: return static_cast<float>(get(bf16{}));
  }
  return 0;
}

struct Request {
  What what;
  const void* in = nullptr;
  void* out = nullptr;
  std::size_t count = 0;
  DataType type = DataType::u8;
  ReduceOp reduction{};
  int root = -1;
  int peer = -1;
  bool done = false;
  std::size_t bytes() const { return count * static_cast<std::size_t>(size_bytes(dtype_of_type(type))); }
  bool agrees(const Request& r) const {
    return what == r.what && count == r.count && type == r.type && reduction == r.reduction && root == r.root;
  }
};

struct CommState;

// The bytes that an eager send has left in the buffers of its communicator.
struct Staged {
  std::vector<std::byte> bytes;
  std::shared_ptr<CommState> sender;
};

// The ranks that share an id.
struct Clique {
  int size = 0, came = 0, finalized = 0;
  bool broken = false;  // a rank has aborted: its peers' kernels never end by themselves
  struct Round {
    std::vector<Request*> requests;
    int came = 0, seen = 0;
    bool done = false, complained = false;
  };
  std::map<std::uint64_t, Round> rounds;
  std::map<std::pair<int, int>, std::pair<std::deque<Request*>, std::deque<Request*>>> pairs;
  std::map<std::pair<int, int>, std::deque<Staged>> staged;
};

// A communicator's part of a group.
struct Kernel {
  std::vector<Request> requests;
  std::vector<std::uint64_t> rounds;  // of its collectives
  bool begun = false;
};

struct CommState {
  std::shared_ptr<Clique> clique;
  int rank = 0, device = 0;
  int questions = 0;  // still in progress for that many
  bool connected = false, finalized = false, aborted = false;
  bool gone = false;  // with its buffers
  std::shared_ptr<Kernel> launching;
  CudaStream stream = nullptr;  // of what is launching
  std::uint64_t next_round = 0;
  int kernels = 0;  // given to streams and not ended
  std::map<int, ReduceOp> made;
  int next_made = 5;
};

using Item = std::function<bool()>;
using Lock = std::unique_lock<std::mutex>;

}  // namespace
}  // namespace weft::test

namespace weft::nccl {

struct Comm {
  std::shared_ptr<test::CommState> state;
};
struct StreamTag {
  int device = 0;
  std::deque<test::Item> items;
  CaptureStatus capture = CaptureStatus::none;
};
struct EventTag {
  int device = 0;
  std::shared_ptr<bool> last;
};

}  // namespace weft::nccl

namespace weft::test {

struct NcclStandIn::Impl {
  NcclApi api;
  mutable std::mutex mutex;
  std::condition_variable changed;
  bool stopping = false;
  std::thread device_thread;

  int version = 22005, devices = 1, launch_questions = 2;
  bool connects = true, hangs = false, eager = false;
  std::map<int, std::pair<Result, std::string>> broken;
  std::map<std::string, int> failures;
  std::vector<std::string> calls, complaints;
  int next_id = 0;
  std::map<std::string, std::shared_ptr<Clique>> cliques;
  std::set<Comm*> comms;
  std::set<CudaStream> streams;
  std::set<Event> events;
  std::set<void*> memory;
  std::map<int, std::unique_ptr<StreamTag>> defaults;
  std::vector<std::unique_ptr<StreamTag>> callers;
  std::string last_error;

  void complain(const std::string& text) { complaints.push_back(text); }
  // Communicators may be ended by threads that the groups have left behind.
  void await_partings(Lock& lock) {
    changed.wait_for(lock, std::chrono::seconds(10), [&] { return comms.empty(); });
  }

  StreamTag* stream_of(CudaStream s, int device) {
    if (s != nullptr) return s;
    auto& d = defaults[device];
    if (!d) d = std::make_unique<StreamTag>(StreamTag{device, {}, {}});
    return d.get();
  }
  std::vector<StreamTag*> all_streams() {
    std::vector<StreamTag*> all(streams.begin(), streams.end());
    for (auto& d : defaults) all.push_back(d.second.get());
    for (auto& c : callers) all.push_back(c.get());
    return all;
  }
  void work() {
    std::unique_lock lock(mutex);
    while (!stopping) {
      bool moved = false, waiting = false;
      for (StreamTag* const s : all_streams()) {
        while (!s->items.empty() && s->items.front()()) {
          s->items.pop_front();
          moved = true;
        }
        waiting |= !s->items.empty();
      }
      if (moved) {
        changed.notify_all();
      } else if (waiting) {
        changed.wait_for(lock, std::chrono::microseconds(200));
      } else {
        changed.wait(lock);
      }
    }
  }
  void push(StreamTag* s, Item item) {
    s->items.push_back(std::move(item));
    changed.notify_all();
  }

  bool step(const std::shared_ptr<CommState>& comm, Kernel& k) {
    CommState& c = *comm;
    if (c.aborted) return true;
    Clique& q = *c.clique;
    if (!k.begun) {
      k.begun = true;
      for (Request& r : k.requests) {
        if (r.what == What::send && eager) {
          const auto* const in = static_cast<const std::byte*>(r.in);
          q.staged[{c.rank, r.peer}].push_back({{in, in + r.bytes()}, comm});
          r.done = true;
        } else if (r.what == What::send) {
          q.pairs[{c.rank, r.peer}].first.push_back(&r);
        } else if (r.what == What::recv) {
          q.pairs[{r.peer, c.rank}].second.push_back(&r);
        } else {
          Clique::Round& round = q.rounds[c.next_round];
          round.requests.resize(static_cast<std::size_t>(q.size));
          round.requests[static_cast<std::size_t>(c.rank)] = &r;
          ++round.came;
          k.rounds.push_back(c.next_round++);
        }
      }
    }
    if (hangs || q.broken) return false;
    for (auto& pair : q.staged) deliver(pair.second, q.pairs[pair.first].second);
    for (auto& pair : q.pairs) exchange(pair.second.first, pair.second.second);
    bool all = true;
    for (const Request& r : k.requests) all &= r.done || (r.what != What::send && r.what != What::recv);
    for (const std::uint64_t n : k.rounds) {
      Clique::Round& round = q.rounds[n];
      if (round.came == q.size && !round.done) perform(round);
      all &= round.done;
    }
    if (!all) return false;
    for (const std::uint64_t n : k.rounds)
      if (++q.rounds[n].seen == q.size) q.rounds.erase(n);
    return true;
  }

  void deliver(std::deque<Staged>& sent, std::deque<Request*>& receives) {
    while (!sent.empty() && !receives.empty()) {
      if (sent.front().sender->gone) {
        complain("a receive reads buffers that its sender has given back");
      } else {
        std::memcpy(receives.front()->out, sent.front().bytes.data(), sent.front().bytes.size());
      }
      receives.front()->done = true;
      sent.pop_front();
      receives.pop_front();
    }
  }

  void exchange(std::deque<Request*>& sends, std::deque<Request*>& receives) {
    while (!sends.empty() && !receives.empty()) {
      Request &from = *sends.front(), &to = *receives.front();
      if (from.bytes() != to.bytes()) {
        if (complaints.empty() || complaints.back() != "a send and its receive differ")
          complain("a send and its receive differ");
        return;
      }
      std::memcpy(to.out, from.in, from.bytes());
      from.done = to.done = true;
      sends.pop_front();
      receives.pop_front();
    }
  }

  void perform(Clique::Round& round) {
    const std::vector<Request*>& all = round.requests;
    const Request& first = *all.front();
    for (const Request* const r : all) {
      if (r->agrees(first)) continue;
      if (!round.complained) complain("ranks called different collectives");
      round.complained = true;
      return;  // forever, as NCCL
    }
    const std::size_t bytes = first.bytes();
    const auto count = static_cast<std::int64_t>(first.count);
    std::vector<const std::byte*> ins;
    std::vector<std::byte*> outs;
    for (const Request* const r : all) {
      ins.push_back(static_cast<const std::byte*>(r->in));
      outs.push_back(static_cast<std::byte*>(r->out));
    }
    const auto root = static_cast<std::size_t>(std::max(first.root, 0));
    switch (first.what) {
      case What::all_reduce: reduce(dtype_of_type(first.type), first.reduction, ins, outs, count); break;
      case What::reduce:
        reduce(dtype_of_type(first.type), first.reduction, ins, {&outs[root], 1}, count);
        break;
      case What::broadcast:
        for (std::byte* const out : outs)
          if (out != ins[root]) std::memcpy(out, ins[root], bytes);
        break;
      case What::all_gather:
        for (std::byte* const out : outs)
          for (std::size_t r = 0; r < ins.size(); ++r)
            if (out + r * bytes != ins[r]) std::memcpy(out + r * bytes, ins[r], bytes);
        break;
      case What::reduce_scatter:
        for (std::size_t to = 0; to < outs.size(); ++to) {
          std::vector<const std::byte*> blocks;
          for (const std::byte* const in : ins) blocks.push_back(in + to * bytes);
          reduce(dtype_of_type(first.type), first.reduction, blocks, {&outs[to], 1}, count);
        }
        break;
      case What::send:
      case What::recv: break;
    }
    round.done = true;
  }

  void launch(const std::shared_ptr<CommState>& c) {
    ++c->kernels;
    const std::shared_ptr<Kernel> kernel = std::move(c->launching);
    c->launching = nullptr;
    push(stream_of(c->stream, c->device), [this, c, kernel] {
      if (!step(c, *kernel)) return false;
      --c->kernels;
      return true;
    });
  }
};

namespace {

NcclStandIn::Impl* g = nullptr;  // the one of this process: NCCL's functions carry no context

// The calling thread's.
thread_local int device = 0;
thread_local int group_depth = 0;
thread_local CaptureMode capture_mode = CaptureMode::global;
struct Grouped {
  Comm* comm;
  CudaStream stream;
  Request request;
};
thread_local std::vector<Grouped> grouped;

// Records the call. Returns the result that a test has requested instead, if any.
template <class R>
std::optional<R> begin(const char* name) {
  g->calls.push_back(name);
  const auto at = g->failures.find(name);
  if (at == g->failures.end()) return std::nullopt;
  const auto result = static_cast<R>(at->second);
  g->failures.erase(at);
  return result;
}

bool known(Comm* comm, const char* name) {
  if (g->comms.count(comm) != 0) return true;
  g->complain(std::string(name) + " of a communicator that is not there");
  return false;
}

// Nothing but questions and the end may reach a communicator that is busy.
bool free_for(Comm* comm, const char* name) {
  if (!known(comm, name)) return false;
  CommState& c = *comm->state;
  if (c.device != device) g->complain(std::string(name) + " with another device current");
  if (c.connected && !c.launching && !c.finalized) return true;
  g->complain(std::string(name) + " of a communicator that is in progress");
  return false;
}

Result end_group(std::vector<Grouped> all) {
  Result result = Result::success;
  std::map<Comm*, std::pair<CudaStream, std::shared_ptr<Kernel>>> kernels;
  for (Grouped& each : all) {
    if (!free_for(each.comm, "a call")) return Result::invalid_argument;
    auto& kernel = kernels[each.comm];
    if (!kernel.second) kernel = {each.stream, std::make_shared<Kernel>()};
    if (kernel.first != each.stream) g->complain("one communicator on two streams in a group");
    kernel.second->requests.push_back(each.request);
  }
  for (auto& [comm, kernel] : kernels) {
    const std::shared_ptr<CommState>& c = comm->state;
    c->stream = kernel.first;
    c->launching = kernel.second;
    c->questions = g->launch_questions;
    if (c->questions == 0) {
      g->launch(c);
    } else {
      result = Result::in_progress;
    }
  }
  return result;
}

Result give(const char* name, Comm* comm, CudaStream stream, const Request& request) {
  const Lock lock(g->mutex);
  if (const auto r = begin<Result>(name)) return *r;
  if (!free_for(comm, name)) return Result::invalid_argument;
  if (group_depth == 0) return end_group({{comm, stream, request}});
  grouped.push_back({comm, stream, request});
  return Result::success;
}

ReduceOp reduction(RedOp op, Comm* comm) {
  switch (op) {
    case RedOp::sum: return ReduceOp::sum;
    case RedOp::prod: return ReduceOp::prod;
    case RedOp::max: return ReduceOp::max;
    case RedOp::min: return ReduceOp::min;
    case RedOp::avg: return ReduceOp::avg;
  }
  const Lock lock(g->mutex);
  if (known(comm, "a made reduction")) {
    const auto at = comm->state->made.find(static_cast<int>(op));
    if (at != comm->state->made.end()) return at->second;
  }
  g->complain("a reduction that is not there");
  return ReduceOp::sum;
}

// ---- NCCL

Result ncclGetVersion(int* version) {
  const Lock lock(g->mutex);
  *version = g->version;
  return Result::success;
}

Result ncclGetUniqueId(UniqueId* id) {
  const Lock lock(g->mutex);
  if (const auto r = begin<Result>("ncclGetUniqueId")) return *r;
  *id = {};
  std::snprintf(id->bytes, sizeof(id->bytes), "stand-in %d", ++g->next_id);
  id->bytes[127] = 'z';  // all of it must arrive
  return Result::success;
}

const char* ncclGetErrorString(Result r) {
  switch (r) {
    case Result::success: return "no error";
    case Result::unhandled_cuda_error: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case Result::system_error: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case Result::internal_error: return "internal error - please report this issue to the NCCL developers";
    case Result::invalid_argument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case Result::invalid_usage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case Result::remote_error: return "remote process exited or there was a network error";
    case Result::in_progress: return "NCCL operation in progress";
  }
  return "unknown result code";
}

const char* ncclGetLastError(Comm*) {
  const Lock lock(g->mutex);
  return g->last_error.c_str();
}

Result ncclCommInitRankConfig(Comm** comm, int size, UniqueId id, int rank, Config* config) {
  const Lock lock(g->mutex);
  if (const auto r = begin<Result>("ncclCommInitRankConfig")) return *r;
  if (config->blocking != 0) g->complain("a blocking communicator");
  if (id.bytes[127] != 'z') g->complain("an id that is not whole");
  std::shared_ptr<Clique>& clique = g->cliques[id.bytes];
  if (!clique) {
    clique = std::make_shared<Clique>();
    clique->size = size;
  }
  if (clique->size != size) g->complain("ranks of different group sizes under one id");
  ++clique->came;
  auto state = std::make_shared<CommState>();
  state->clique = clique;
  state->rank = rank;
  state->device = device;
  state->questions = g->launch_questions;
  *comm = new Comm{state};
  g->comms.insert(*comm);
  return Result::in_progress;
}

Result ncclCommGetAsyncError(Comm* comm, Result* error) {
  const Lock lock(g->mutex);
  if (!known(comm, "ncclCommGetAsyncError")) return Result::invalid_argument;
  CommState& c = *comm->state;
  const auto broken = g->broken.find(c.rank);
  if (broken != g->broken.end()) {
    *error = broken->second.first;
    g->last_error = broken->second.second;
    return Result::success;
  }
  *error = Result::in_progress;
  if (!c.connected) {
    if (!g->connects || c.clique->came < c.clique->size || c.questions-- > 0) return Result::success;
    c.connected = true;
  } else if (c.launching) {
    if (--c.questions > 0) return Result::success;
    g->launch(comm->state);
  } else if (c.finalized && c.clique->finalized < c.clique->size) {
    return Result::success;
  }
  *error = Result::success;
  return Result::success;
}

Result ncclCommFinalize(Comm* comm) {
  const Lock lock(g->mutex);
  if (const auto r = begin<Result>("ncclCommFinalize")) return *r;
  if (!known(comm, "ncclCommFinalize")) return Result::invalid_argument;
  CommState& c = *comm->state;
  if (c.connected && !c.finalized) ++c.clique->finalized;
  c.finalized = true;
  return Result::in_progress;
}

Result ncclCommDestroy(Comm* comm) {
  const Lock lock(g->mutex);
  if (const auto r = begin<Result>("ncclCommDestroy")) return *r;
  if (!known(comm, "ncclCommDestroy")) return Result::invalid_argument;
  if (comm->state->kernels > 0) g->complain("ncclCommDestroy while kernels run");
  if (!comm->state->made.empty()) g->complain("a made reduction was not destroyed");
  comm->state->gone = true;
  g->comms.erase(comm);
  delete comm;
  g->changed.notify_all();
  return Result::success;
}

// Waits for its kernels, which end at once when their turn on their stream has come.
Result ncclCommAbort(Comm* comm) {
  Lock lock(g->mutex);
  if (const auto r = begin<Result>("ncclCommAbort")) return *r;
  if (!known(comm, "ncclCommAbort")) return Result::invalid_argument;
  const std::shared_ptr<CommState> c = comm->state;
  c->aborted = true;
  c->launching = nullptr;
  c->clique->broken = true;
  g->changed.notify_all();
  g->changed.wait(lock, [&] { return c->kernels == 0; });
  c->gone = true;
  g->comms.erase(comm);
  delete comm;
  g->changed.notify_all();
  return Result::success;
}

Result ncclGroupStart() {
  const Lock lock(g->mutex);
  if (const auto r = begin<Result>("ncclGroupStart")) return *r;
  ++group_depth;
  return Result::success;
}

Result ncclGroupEnd() {
  const Lock lock(g->mutex);
  const auto failure = begin<Result>("ncclGroupEnd");
  if (group_depth == 0) {
    g->complain("ncclGroupEnd without ncclGroupStart");
    return Result::invalid_usage;
  }
  if (--group_depth > 0) return Result::success;
  std::vector<Grouped> all = std::move(grouped);
  grouped.clear();
  return failure ? *failure : end_group(std::move(all));
}

Result ncclAllReduce(const void* in, void* out, std::size_t count, DataType type, RedOp op, Comm* comm,
                     CudaStream stream) {
  return give("ncclAllReduce", comm, stream, {What::all_reduce, in, out, count, type, reduction(op, comm)});
}
Result ncclReduce(const void* in, void* out, std::size_t count, DataType type, RedOp op, int root, Comm* comm,
                  CudaStream stream) {
  return give("ncclReduce", comm, stream, {What::reduce, in, out, count, type, reduction(op, comm), root});
}
Result ncclBroadcast(const void* in, void* out, std::size_t count, DataType type, int root, Comm* comm,
                     CudaStream stream) {
  return give("ncclBroadcast", comm, stream, {What::broadcast, in, out, count, type, {}, root});
}
Result ncclAllGather(const void* in, void* out, std::size_t count, DataType type, Comm* comm,
                     CudaStream stream) {
  return give("ncclAllGather", comm, stream, {What::all_gather, in, out, count, type});
}
Result ncclReduceScatter(const void* in, void* out, std::size_t count, DataType type, RedOp op, Comm* comm,
                         CudaStream stream) {
  return give("ncclReduceScatter", comm, stream,
              {What::reduce_scatter, in, out, count, type, reduction(op, comm)});
}
Result ncclSend(const void* in, std::size_t count, DataType type, int peer, Comm* comm, CudaStream stream) {
  return give("ncclSend", comm, stream, {What::send, in, nullptr, count, type, {}, -1, peer});
}
Result ncclRecv(void* out, std::size_t count, DataType type, int peer, Comm* comm, CudaStream stream) {
  return give("ncclRecv", comm, stream, {What::recv, nullptr, out, count, type, {}, -1, peer});
}

Result ncclRedOpCreatePreMulSum(RedOp* op, void* scalar, DataType type, Residence residence, Comm* comm) {
  const Lock lock(g->mutex);
  if (const auto r = begin<Result>("ncclRedOpCreatePreMulSum")) return *r;
  if (!free_for(comm, "ncclRedOpCreatePreMulSum")) return Result::invalid_argument;
  if (residence != Residence::host_immediate) g->complain("a scalar on the device");
  const int handle = comm->state->next_made++;
  comm->state->made.emplace(handle, ReduceOp::premul_sum(scalar_value(scalar, type)));
  *op = static_cast<RedOp>(handle);
  return Result::success;
}

Result ncclRedOpDestroy(RedOp op, Comm* comm) {
  const Lock lock(g->mutex);
  if (const auto r = begin<Result>("ncclRedOpDestroy")) return *r;
  if (!known(comm, "ncclRedOpDestroy")) return Result::invalid_argument;
  if (comm->state->made.erase(static_cast<int>(op)) == 0)
    g->complain("ncclRedOpDestroy of what is not there");
  return Result::success;
}

// ---- CUDA

const char* cudaGetErrorString(CudaResult r) {
  switch (r) {
    case CudaResult::success: return "no error";
    case CudaResult::insufficient_driver:
      return "CUDA driver version is insufficient for CUDA runtime version";
    case CudaResult::no_device: return "no CUDA-capable device is detected";
    case CudaResult::invalid_resource_handle: return "invalid resource handle";
    case CudaResult::not_ready: return "device not ready";
  }
  return "unspecified launch failure";
}

CudaResult cudaGetDeviceCount(int* count) {
  const Lock lock(g->mutex);
  *count = g->devices;
  return g->devices == 0 ? CudaResult::no_device : CudaResult::success;
}

CudaResult cudaGetDevice(int* current) {
  *current = device;
  return CudaResult::success;
}

CudaResult cudaSetDevice(int wanted) {
  device = wanted;
  return CudaResult::success;
}

bool known(CudaStream stream, const char* name) {
  if (stream == nullptr) return true;
  for (const auto& c : g->callers)
    if (c.get() == stream) return true;
  if (g->streams.count(stream) != 0) return true;
  g->complain(std::string(name) + " of a stream that is not there");
  return false;
}

bool known(Event event, const char* name) {
  if (g->events.count(event) != 0) return true;
  g->complain(std::string(name) + " of an event that is not there");
  return false;
}

constexpr auto kInvalidValue = static_cast<CudaResult>(1);

// Some functions end every capture in the global mode, unless the thread that calls them is relaxed.
void unsafe(const char* name) {
  if (capture_mode == CaptureMode::relaxed) return;
  for (StreamTag* const s : g->all_streams()) {
    if (s->capture != CaptureStatus::active) continue;
    s->capture = CaptureStatus::invalidated;
    g->complain(std::string(name) + " while a stream is captured");
  }
}

bool captured(CudaStream stream, const char* name) {
  if (stream == nullptr || stream->capture == CaptureStatus::none) return false;
  g->complain(std::string(name) + " of a stream that is captured");
  return true;
}

CudaResult cudaStreamIsCapturing(CudaStream stream, CaptureStatus* status) {
  const Lock lock(g->mutex);
  const std::vector<StreamTag*> all = g->all_streams();
  if (std::find(all.begin(), all.end(), stream) == all.end()) return CudaResult::invalid_resource_handle;
  *status = stream->capture;
  return CudaResult::success;
}

CudaResult cudaThreadExchangeStreamCaptureMode(CaptureMode* mode) {
  std::swap(capture_mode, *mode);
  return CudaResult::success;
}

CudaResult cudaStreamCreateWithFlags(CudaStream* stream, unsigned flags) {
  const Lock lock(g->mutex);
  if (const auto r = begin<CudaResult>("cudaStreamCreateWithFlags")) return *r;
  if (flags != kStreamNonBlocking) g->complain("a stream that waits for the default stream");
  *stream = new StreamTag{device, {}, {}};
  g->streams.insert(*stream);
  return CudaResult::success;
}

CudaResult cudaStreamDestroy(CudaStream stream) {
  const Lock lock(g->mutex);
  if (const auto r = begin<CudaResult>("cudaStreamDestroy")) return *r;
  if (!known(stream, "cudaStreamDestroy")) return kInvalidValue;
  if (!stream->items.empty()) g->complain("cudaStreamDestroy with work on it");
  g->streams.erase(stream);
  delete stream;
  return CudaResult::success;
}

CudaResult cudaStreamQuery(CudaStream stream) {
  const Lock lock(g->mutex);
  if (!known(stream, "cudaStreamQuery")) return kInvalidValue;
  unsafe("cudaStreamQuery");
  return g->stream_of(stream, device)->items.empty() ? CudaResult::success : CudaResult::not_ready;
}

CudaResult cudaStreamWaitEvent(CudaStream stream, Event event, unsigned) {
  const Lock lock(g->mutex);
  if (const auto r = begin<CudaResult>("cudaStreamWaitEvent")) return *r;
  if (!known(stream, "cudaStreamWaitEvent") || !known(event, "cudaStreamWaitEvent")) return kInvalidValue;
  if (captured(stream, "cudaStreamWaitEvent")) return kInvalidValue;
  if (event->last) g->push(g->stream_of(stream, device), [flag = event->last] { return *flag; });
  return CudaResult::success;
}

CudaResult cudaEventCreateWithFlags(Event* event, unsigned flags) {
  const Lock lock(g->mutex);
  if (const auto r = begin<CudaResult>("cudaEventCreateWithFlags")) return *r;
  if (flags != kEventDisableTiming) g->complain("an event that takes the time");
  *event = new EventTag{device, nullptr};
  g->events.insert(*event);
  return CudaResult::success;
}

CudaResult cudaEventRecord(Event event, CudaStream stream) {
  const Lock lock(g->mutex);
  if (const auto r = begin<CudaResult>("cudaEventRecord")) return *r;
  if (!known(stream, "cudaEventRecord") || !known(event, "cudaEventRecord")) return kInvalidValue;
  StreamTag* const s = g->stream_of(stream, device);
  if (s->device != event->device) return CudaResult::invalid_resource_handle;
  if (captured(stream, "cudaEventRecord")) return kInvalidValue;
  for (const Comm* const comm : g->comms)
    if (comm->state->launching && comm->state->stream == stream && stream != nullptr)
      g->complain("cudaEventRecord before the launch is over");
  event->last = std::make_shared<bool>(false);
  g->push(s, [flag = event->last] {
    *flag = true;
    return true;
  });
  return CudaResult::success;
}

CudaResult cudaEventQuery(Event event) {
  const Lock lock(g->mutex);
  const auto at = g->failures.find("cudaEventQuery");
  if (at != g->failures.end()) {
    const auto r = static_cast<CudaResult>(at->second);
    g->failures.erase(at);
    return r;
  }
  if (!known(event, "cudaEventQuery")) return kInvalidValue;
  unsafe("cudaEventQuery");
  return event->last && !*event->last ? CudaResult::not_ready : CudaResult::success;
}

CudaResult cudaEventDestroy(Event event) {
  const Lock lock(g->mutex);
  if (const auto r = begin<CudaResult>("cudaEventDestroy")) return *r;
  if (!known(event, "cudaEventDestroy")) return kInvalidValue;
  g->events.erase(event);
  delete event;
  return CudaResult::success;
}

CudaResult cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, CopyKind, CudaStream stream) {
  const Lock lock(g->mutex);
  if (const auto r = begin<CudaResult>("cudaMemcpyAsync")) return *r;
  if (!known(stream, "cudaMemcpyAsync")) return kInvalidValue;
  g->push(g->stream_of(stream, device), [=] {
    std::memcpy(to, from, bytes);
    return true;
  });
  return CudaResult::success;
}

CudaResult cudaMalloc(void** data, std::size_t bytes) {
  const Lock lock(g->mutex);
  if (const auto r = begin<CudaResult>("cudaMalloc")) return *r;
  unsafe("cudaMalloc");
  *data = ::operator new(bytes);
  g->memory.insert(*data);
  return CudaResult::success;
}

CudaResult cudaFree(void* data) {
  const Lock lock(g->mutex);
  if (const auto r = begin<CudaResult>("cudaFree")) return *r;
  if (g->memory.erase(data) == 0) {
    g->complain("cudaFree of what is not there");
    return kInvalidValue;
  }
  ::operator delete(data);
  return CudaResult::success;
}

}  // namespace

NcclStandIn::NcclStandIn() : impl_(std::make_unique<Impl>()) {
  g = impl_.get();
#define WEFT_STAND_IN(name, ...) impl_->api.name = test::name;
  WEFT_NCCL_FUNCTIONS(WEFT_STAND_IN)
  WEFT_CUDA_FUNCTIONS(WEFT_STAND_IN)
#undef WEFT_STAND_IN
  impl_->device_thread = std::thread([this] { impl_->work(); });
}

NcclStandIn::~NcclStandIn() {
  {
    Lock lock(impl_->mutex);
    impl_->await_partings(lock);
    impl_->stopping = true;
    impl_->changed.notify_all();
  }
  impl_->device_thread.join();
  g = nullptr;
}

const NcclApi& NcclStandIn::api() const noexcept { return impl_->api; }

BackendFactory NcclStandIn::factory() const {
  return [this](const GroupInit& b) { return make_backend(impl_->api, b); };
}

void NcclStandIn::set_version(int version) {
  const Lock lock(impl_->mutex);
  impl_->version = version;
}
void NcclStandIn::set_devices(int count) {
  const Lock lock(impl_->mutex);
  impl_->devices = count;
}
void NcclStandIn::set_launch_questions(int count) {
  const Lock lock(impl_->mutex);
  impl_->launch_questions = count;
}
void NcclStandIn::never_connect() {
  const Lock lock(impl_->mutex);
  impl_->connects = false;
}
void NcclStandIn::hang_kernels(bool hang) {
  const Lock lock(impl_->mutex);
  impl_->hangs = hang;
  impl_->changed.notify_all();
}
void NcclStandIn::send_eagerly(bool eager) {
  const Lock lock(impl_->mutex);
  impl_->eager = eager;
}
void NcclStandIn::capture(Stream stream, bool on) {
  const Lock lock(impl_->mutex);
  static_cast<nccl::CudaStream>(stream.handle)->capture = on ? CaptureStatus::active : CaptureStatus::none;
}
void NcclStandIn::break_rank(int rank, Result found, const std::string& last_error) {
  const Lock lock(impl_->mutex);
  impl_->broken[rank] = {found, last_error};
}
void NcclStandIn::fail_next(const std::string& function, Result result) {
  const Lock lock(impl_->mutex);
  impl_->failures[function] = static_cast<int>(result);
}
void NcclStandIn::fail_next(const std::string& function, CudaResult result) {
  const Lock lock(impl_->mutex);
  impl_->failures[function] = static_cast<int>(result);
}

Stream NcclStandIn::make_stream() {
  const Lock lock(impl_->mutex);
  impl_->callers.push_back(std::make_unique<StreamTag>(StreamTag{device, {}, {}}));
  return {{DeviceKind::cuda, static_cast<std::int16_t>(device)}, impl_->callers.back().get()};
}

void NcclStandIn::run_on(Stream stream, std::function<bool()> body) {
  const Lock lock(impl_->mutex);
  impl_->push(impl_->stream_of(static_cast<nccl::CudaStream>(stream.handle), device), std::move(body));
}

void NcclStandIn::drain(Stream stream) {
  Lock lock(impl_->mutex);
  StreamTag* const s = impl_->stream_of(static_cast<nccl::CudaStream>(stream.handle), device);
  impl_->changed.wait(lock, [&] { return s->items.empty(); });
}

std::vector<std::string> NcclStandIn::calls() const {
  const Lock lock(impl_->mutex);
  return impl_->calls;
}

std::size_t NcclStandIn::count(const std::string& function) const {
  const Lock lock(impl_->mutex);
  return static_cast<std::size_t>(std::count(impl_->calls.begin(), impl_->calls.end(), function));
}

std::vector<std::string> NcclStandIn::complaints() const {
  const Lock lock(impl_->mutex);
  return impl_->complaints;
}

std::vector<std::string> NcclStandIn::leftovers() const {
  Lock lock(impl_->mutex);
  impl_->await_partings(lock);
  std::vector<std::string> left;
  const auto add = [&](std::size_t n, const char* what) {
    if (n > 0) left.push_back(std::to_string(n) + " " + what);
  };
  add(impl_->comms.size(), "communicators");
  add(impl_->streams.size(), "streams");
  add(impl_->events.size(), "events");
  add(impl_->memory.size(), "pieces of memory");
  return left;
}

}  // namespace weft::test
