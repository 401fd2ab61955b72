#include "support/namespaces.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <locale>
#include <stdexcept>

#include "base/memfd.hpp"

namespace weft::test {
namespace {

constexpr int kHere = CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWNS;

bool make_here() {
  return ::unshare(kHere) == 0 && ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         ::mount("sysfs", "/sys", "sysfs", 0, nullptr) == 0;
}

[[noreturn]] void refuse(const std::string& what) {
  throw std::runtime_error(fmt::format("namespaces: {}: {}", what, std::strerror(errno)));
}

/// A process in namespaces of its own that does nothing.
ChildProcess keeper(const std::string& name) {
  Pipe ready;
  ChildProcess child = ChildProcess::fork([&] {
    const bool made = make_here() && ::sethostname(name.data(), name.size()) == 0;
    ready.write_line(made ? "" : std::strerror(errno));
    for (;;) ::pause();
    return 0;
  });
  if (const std::string problem = ready.read_line(); !problem.empty())
    throw std::runtime_error(fmt::format("namespaces: {}", problem));
  return child;
}

void join(pid_t process) {
  for (const char* const kind : {"net", "uts", "ipc", "mnt"}) {
    const std::string path = fmt::format("/proc/{}/ns/{}", process, kind);
    const Descriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd || ::setns(fd.get(), 0) != 0) refuse(path);
  }
}

/// Runs shell commands where `process` lives.
void run_at(pid_t process, const std::string& commands) {
  const auto result = run_in_child([&] {
    join(process);
    return std::system(("set -e; " + commands).c_str()) == 0 ? 0 : 1;
  });
  if (!result.ok()) throw std::runtime_error(fmt::format("namespaces: {}: {}", commands, to_string(result)));
}

}  // namespace

std::string Hosts::unavailable() {
  if (std::system("ip -V >/dev/null 2>&1") != 0) return "there is no `ip` (Debian's package iproute2)";
  const auto result = run_in_child([] {
    if (!make_here()) return 2;
    return std::system(
               "ip link add weftbr type bridge >/dev/null 2>&1 && "
               "ip link add weftv type veth peer name weftw >/dev/null 2>&1") == 0
               ? 0
               : 3;
  });
  if (result.status.code == 2) return "namespaces are not permitted (needs root)";
  if (!result.ok()) return "the kernel has no bridges or veth pairs";
  return {};
}

Hosts::Hosts(int count) {
  bridge_ = std::make_unique<ChildProcess>(keeper("bridge"));
  run_at(bridge_->pid(), "ip link add bridge type bridge && ip link set bridge up");
  for (int h = 0; h < count; ++h) {
    hosts_.push_back(keeper(fmt::format("host{}", h)));
    run_at(bridge_->pid(),
           fmt::format(
               "ip link add to{0} type veth peer name {1} netns {2} && ip link set to{0} master bridge up", h,
               kInterface, process(h)));
    run_at(process(h), fmt::format("ip address add {0}/24 dev {1}; ip link set {1} up; ip link set lo up",
                                   address(h), kInterface));
  }
}

Hosts::~Hosts() { end_all(); }

void Hosts::end_all() const {
  // In a namespace of ours, except for its keeper: the keepers end by themselves. A process that is ended may
  // have started another one just before. So this is done twice.
  const auto net = [](const std::string& process) {
    std::error_code gone;
    return std::filesystem::read_symlink("/proc/" + process + "/ns/net", gone).string();
  };
  for (int round = 0; round < 2; ++round) {
    for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
      const std::string name = entry.path().filename();
      if (name.find_first_not_of("0123456789") != std::string::npos) continue;
      const std::string where = net(name);
      for (const ChildProcess& host : hosts_)
        if (!where.empty() && name != std::to_string(host.pid()) && where == net(std::to_string(host.pid())))
          ::kill(std::stoi(name), SIGKILL);
    }
  }
}

std::string Hosts::on(int host) const { return fmt::format("nsenter -t {} -n -u -i -m --", process(host)); }

void Hosts::write_agent(const std::string& path) const {
  {
    std::ofstream script(path);
    script.imbue(std::locale::classic());
    script << "#!/bin/sh\ncase \"$1\" in\n";
    for (int h = 0; h < count(); ++h) script << address(h) << ") p=" << process(h) << ";;\n";
    script << "*) echo \"agent: there is no host $1\" >&2; exit 1;;\nesac\nshift\n"
           << "exec nsenter -t $p -n -u -i -m -- /bin/sh -c \"$*\" </dev/null >/dev/null 2>&1\n";
  }
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
}

void Hosts::enter(int host) const { join(process(host)); }

void Hosts::link(int host, const char* state) const {
  run_at(bridge_->pid(), fmt::format("ip link set to{} {}", host, state));
}

}  // namespace weft::test
