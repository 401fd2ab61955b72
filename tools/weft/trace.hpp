// The result of comparing the trace files of a job's ranks: who was late, who did not come, who called
// something else. Pure except for reading files; one thread.
#pragma once

#include <string>
#include <vector>

#include "group/trace/trace.hpp"

namespace weft::tools {

struct TraceFile {
  std::string path;
  Trace trace;
};

/// Throws bad_argument naming the file, and what in it is not as it should be.
TraceFile read_trace(const std::string& path);
/// The files, and those that end in .json of folders among them. Throws as read_trace does, bad_argument
/// if two are of the same rank and group, or disagree about a group's size.
std::vector<TraceFile> read_traces(const std::vector<std::string>& paths);

/// The offset of the times of each trace, so that all have one clock: 0 for traces of one host; between
/// hosts the difference that their real-time clocks show.
std::vector<std::int64_t> shifts(const std::vector<TraceFile>& files);
/// Text for people, a paragraph per group.
std::string report(const std::vector<TraceFile>& files);

}  // namespace weft::tools
