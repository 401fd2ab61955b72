// A benchmark program and its ranks, which are started once and then given turns. It measures a case on
// request, reports it in a line of JSON, and sleeps until its next turn. For use by one thread.
#pragma once

#include <sys/types.h>

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "weft/base/clock.hpp"

namespace weft::bench {

/// A private folder of this process in the system's temporary folder; the destructor removes it.
class WorkFolder {
 public:
  WorkFolder();
  ~WorkFolder();
  WorkFolder(const WorkFolder&) = delete;
  WorkFolder& operator=(const WorkFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// While this object exists, SIGINT, SIGTERM and SIGHUP make Job::next() throw Interrupted instead of ending
/// the process. Orphans of the jobs become this process's children, to be killed.
class Watch {
 public:
  Watch();
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;
};
struct Interrupted {
  int signal;
};

class Job {
 public:
  struct Start {
    std::vector<std::string> command;  ///< "--turns PATH" is added
    std::map<std::string, std::string> environment{};
    int ranks = 2;
  };
  /// Starts the program. Throws system if that fails; next() reports a missing program.
  Job(const WorkFolder& folder, const std::string& name, Start start);
  /// Gives the program a moment to end by itself, then kills all its processes.
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  /// Lets the program measure its next case.
  void go();
  /// The next line of JSON that the program prints. Returns nothing if it ended, or if the limit has passed;
  /// problem() says which.
  std::optional<nlohmann::ordered_json> next(Duration limit);
  const std::string& problem() const { return problem_; }
  bool timed_out() const { return timed_out_; }
  void kill();

 private:
  std::string last_words() const;
  std::string fifo_path_, error_path_;
  int ranks_ = 0;
  pid_t pid_ = -1;
  int turns_ = -1, out_ = -1;
  std::string pending_;
  std::string problem_;
  bool timed_out_ = false;
};

}  // namespace weft::bench
