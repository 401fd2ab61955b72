// The operations of a group on buffers that say that they are on a device. It is for transports that move a
// device's memory, in tests in which that is the host's memory. With Device{} nothing changes.
#pragma once

#include <utility>

#include "weft/group/process_group.hpp"

namespace weft::test {

class OnDevice {
 public:
  OnDevice(ProcessGroup& group, Device device) : group_(group), device_(device) {}

  Work all_reduce(ConstTensorView in, TensorView out, const CallOptions& o = {}) {
    return submit(call::all_reduce(in, out, o));
  }
  Work broadcast(ConstTensorView in, TensorView out, int root, const CallOptions& o = {}) {
    return submit(call::broadcast(in, out, root, o));
  }
  Work reduce_scatter(ConstTensorView in, TensorView out, const CallOptions& o = {}) {
    return submit(call::reduce_scatter(in, out, o));
  }
  Work all_gather_v(ConstTensorView in, TensorView out, Blocks out_blocks, const CallOptions& o = {}) {
    return submit(call::all_gather_v(in, out, out_blocks, o));
  }
  Work reduce_scatter_v(ConstTensorView in, TensorView out, Blocks in_blocks, const CallOptions& o = {}) {
    return submit(call::reduce_scatter_v(in, out, in_blocks, o));
  }
  Work all_to_all_v(ConstTensorView in, TensorView out, Blocks in_blocks, Blocks out_blocks,
                    const CallOptions& o = {}) {
    return submit(call::all_to_all_v(in, out, in_blocks, out_blocks, o));
  }
  Work barrier() { return group_.barrier(); }
  Work send(ConstTensorView in, int dst, const CallOptions& o = {}) { return submit(call::send(in, dst, o)); }
  Work recv(TensorView out, int src, const CallOptions& o = {}) { return submit(call::recv(out, src, o)); }
  Work send_recv(ConstTensorView in, int dst, TensorView out, int src, const CallOptions& o = {}) {
    return coalesced({call::send(in, dst, o), call::recv(out, src, o)});
  }
  Work submit(const Call& call) { return group_.submit(there(call)); }
  PersistentCall make(const Call& call) { return group_.make(there(call)); }
  Work coalesced(std::vector<Call> calls) {
    for (Call& call : calls) call = there(call);
    return group_.coalesced(calls);
  }
  const Traits& traits() const { return group_.traits(); }
  ProcessGroup subgroup(std::string_view name, std::span<const int> ranks) {
    return group_.subgroup(name, ranks);
  }

 private:
  Call there(Call call) const {
    call.in.device = call.out.device = device_;
    return call;
  }
  ProcessGroup& group_;
  Device device_;
};

}  // namespace weft::test
