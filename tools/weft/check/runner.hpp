// Runs programs. It has one rank's part (rank.cpp), and ranks as threads and processes of this host or as the
// processes of an mpirun, watched from outside (runner.cpp). All findings are written to the SharedReport.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "program.hpp"
#include "shared_report.hpp"
#include "weft/group/process_group.hpp"

namespace weft::check {

struct Settings {
  std::string backend = "shm";
  Traits traits;
  Duration deadline = std::chrono::seconds(1);   ///< of the calls of programs that run into it
  Duration patience = std::chrono::seconds(10);  ///< of the calls of all others
  /// If set, groups are made with it instead of the backend's name.
  std::function<BackendFactory(Context&)> factory;
  /// The words of the mpirun command. `-n` and this program's own path follow them. Empty: ranks are forked
  /// here.
  std::vector<std::string> mpirun;
  std::string self;  ///< path of this program, for mpirun

  Duration call_deadline(const Program& p) const;
  /// The deadline for making groups after something may have gone wrong.
  Duration group_deadline(const Program& p) const;
  bool exact() const { return traits.native_is_canonical; }
};

/// One rank's part of a program. Returns when the rank is done. Its report has the result.
void run_rank(const Program& p, int rank, Context& context, const Membership& member,
              const Settings& settings, SharedReport& shared);

/// Runs one program in separate processes and watches them. Returns when none of them is left. It forks, so
/// call it from a process without threads that may become a sub-reaper of processes that it did not start.
void run_program(const Program& p, const Settings& settings, SharedReport& shared);

/// Runs programs one after the other in one job of mpirun. All have equally many ranks.
void run_job(const std::vector<Program>& programs, const Settings& settings, SharedReport* reports,
             int reports_fd);
/// The work of each process of that job.
int run_job_rank(const std::string& programs_file, const std::string& reports_file, const Settings& settings);

}  // namespace weft::check
