// Stands in for NCCL and the CUDA runtime, so that the control flow of the nccl transport is tested where
// there is no GPU. Ranks are threads of one process, device memory is the host's, streams are ordered queues
// that one "device" thread works off. It models everything that the transport could do wrong:
//
// - streams: a step begins when the previous step has ended; events cover the steps that were queued before
//   them
// - groups: calls wait for the group's end, then a communicator's share of them is one kernel, in which
//   sends and receives do not wait for one another; outside of a group a send holds up its stream
// - a kernel ends when the kernels of all its peers have arrived; a rank that arrives with other calls is
//   never answered
// - non-blocking communicators: a launch is "in progress" for a few questions, and nothing else may be asked
//   of the communicator meanwhile
// - abort, finalize (waits for all ranks), reductions that are made and destroyed; a communicator's buffers,
// in
//   which what was sent may lie until it is received, go with it
// - a stream belongs to a device, and may be captured into a graph: what ends such a capture is a complaint
//
// A forbidden call is a complaint, which the test reads at the end.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backends/nccl/nccl_api.hpp"
#include "weft/backends/backend.hpp"

namespace weft::test {

/// One at a time in a process.
class NcclStandIn {
 public:
  NcclStandIn();
  ~NcclStandIn();
  const nccl::NcclApi& api() const noexcept;
  /// Groups over it.
  BackendFactory factory() const;

  // Settings that may be changed before or during a test; thread-safe.
  void set_version(int version);
  void set_devices(int count);
  void set_launch_questions(int count);  ///< how often a launch is still in progress when asked; default 2
  void never_connect();                  ///< communicators stay in progress until aborted
  void hang_kernels(bool hang);          ///< kernels that have begun never end, until aborted
  /// Sends end at once: their data lies in buffers of the communicator until it is received.
  void send_eagerly(bool eager);
  /// Begins or ends a capture of that stream of the caller's into a graph, in CUDA's global mode.
  void capture(Stream stream, bool on);
  /// Sets the error that the communicators of that rank report as an asynchronous error from now on.
  void break_rank(int rank, nccl::Result found, const std::string& last_error);
  /// The next call of that function, on any rank, returns this result instead.
  void fail_next(const std::string& function, nccl::Result result);
  void fail_next(const std::string& function, nccl::CudaResult result);

  /// A stream of the current device that represents a stream of the caller; the stand-in ends it.
  Stream make_stream();
  /// Work on a stream: `body` runs on the device thread when its turn has come, and again until it says true.
  void run_on(Stream stream, std::function<bool()> body);
  /// Until all work on the stream is done. For tests alone: the transport has no such function.
  void drain(Stream stream);

  /// The functions called so far, in order, over all ranks, without those that only query.
  std::vector<std::string> calls() const;
  std::size_t count(const std::string& function) const;
  /// Forbidden calls, and objects that are left: streams, events, communicators, memory.
  std::vector<std::string> complaints() const;
  std::vector<std::string> leftovers() const;

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace weft::test
