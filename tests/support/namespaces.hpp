// "Hosts" for tests on one machine: network and UTS namespaces, joined by a bridge that nothing else is on.
// They have no names and are kept by child processes, so they go when those do, however the test ends.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "support/processes.hpp"

namespace weft::test {

/// Make it before any thread of the process is started; needs root (CAP_SYS_ADMIN and CAP_NET_ADMIN) and
/// `ip`.
class Hosts {
 public:
  /// Why there can be none here. Empty if there can.
  static std::string unavailable();

  /// Host i has the name "host<i>", the address 10.77.0.<i + 1> on `kInterface`, and a loopback of its own.
  explicit Hosts(int count);
  ~Hosts();  ///< after end_all()
  Hosts(const Hosts&) = delete;
  Hosts& operator=(const Hosts&) = delete;
  static constexpr const char* kInterface = "weft0";
  int count() const { return static_cast<int>(hosts_.size()); }
  static std::string address(int host) { return "10.77.0." + std::to_string(host + 1); }
  /// The number of a process that lives there: for nsenter.
  pid_t process(int host) const { return hosts_[static_cast<std::size_t>(host)].pid(); }

  /// Ends with SIGKILL what was started on them and still runs.
  void end_all() const;
  /// Writes to `path` a program that runs a command on a host: `agent <address> <command> …`, as the
  /// launchers of the MPIs call ssh. The command's output is discarded: the launchers have connections of
  /// their own.
  void write_agent(const std::string& path) const;
  /// The words before a command to run it there.
  std::string on(int host) const;

  /// Moves this process, which must have one thread, there.
  void enter(int host) const;
  /// Disconnects the host: processes that wait for it get no more data.
  void cut_off(int host) const { link(host, "down"); }
  void plug_in(int host) const { link(host, "up"); }

 private:
  void link(int host, const char* state) const;

  std::unique_ptr<ChildProcess> bridge_;
  std::vector<ChildProcess> hosts_;
};

}  // namespace weft::test
