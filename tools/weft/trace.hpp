// The result of comparing the trace files of a job's ranks: which rank was late, which did not come, which
// called something else. Pure except for reading files; for use by one thread.
#pragma once

#include <string>
#include <vector>

#include "group/trace/trace.hpp"

namespace weft::tools {

struct TraceFile {
  std::string path;
  Trace trace;
};

/// Throws bad_argument that names the file, and the fault in it.
TraceFile read_trace(const std::string& path);
/// Reads the files and, for folders among the paths, their files that end in .json. Throws like read_trace;
/// bad_argument if two files are of one rank and group, or disagree about a group's size.
std::vector<TraceFile> read_traces(const std::vector<std::string>& paths);

/// The offset of the times of each trace, so that all have one clock. It is 0 for traces of one host. Between
/// hosts it is the difference of their real-time clocks.
std::vector<std::int64_t> shifts(const std::vector<TraceFile>& files);
/// Text for people, a paragraph per group.
std::string report(const std::vector<TraceFile>& files);

}  // namespace weft::tools
