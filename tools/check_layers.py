#!/usr/bin/env python3
"""Fails on every #include that goes against the arrows between layers, and on calls of a Store that may
wait for half a minute.

    tools/check_layers.py [TREE]        checks the tree (default: the one this file lies in)
    tools/check_layers.py --self-test   checks itself on a small tree of known faults

A finding is one line, `file:line: what; the rule`. Exit status 1 if there is any. The rules, in words:

  base <- host <- store <- reduce <- backends <- group <- mesh <- dp, checkpoint <- nn <- tp, domain, ep,
  pp <- train <- models <- capi <- capi_train
       <- tools, bench, examples

1. A file includes its own folder or one to the left. tp, domain, ep and pp do not know each other.
2. nn communicates through boundaries alone: it includes nothing of store, backends or group.
3. An include names its layer ("weft/base/error.hpp", "host/arena.hpp"), never a bare or relative path.
4. Public headers (include/) include public headers and the C and C++ standard libraries only.
5. weft/weft.hpp, weft/group.hpp and weft/train.hpp, which include much, are for programs, not for the
   library.
6. Tests of a layer include what that layer may include, and "support/"; tests of backends also include
   group, which drives a transport.
7. A foreign library's headers stay in the folders that may use it (FOREIGN below).
8. C knows no C++: a header or source of C includes no .hpp and no <name> of C++. Its only headers of
   weft are weft/weft.h, weft/weft_mpi.h and weft/weft_train.h, which consist of the headers in
   include/weft/c/ and include/weft/c_train/.
9. In src/ and tools/ a call of a Store states its deadline: the default is for programs, which may wait.
10. All headers that a public header includes, directly or not, lie in its layer or to the left, too.
11. Public headers do not name files of src/, because an installation has none of these.
12. A folder of sources below its layer stands for an idea that takes several files: a single file lies in
    the folder above.
13. weft::env reads the environment variables that begin with WEFT_; its table (src/base/env.cpp) lists them.
14. with_mutants and train_with_mutants in src/CMakeLists.txt list the sources that include base/mutant.hpp,
    directly or by other headers; the plug-ins have no mistakes.
15. A public header that includes no other header of weft includes weft/base/cxx20.hpp, so that all of them
    refuse an older standard.
16. src/, include/ and tools/ read and write text through the streams of src/base/text/plain_streams.hpp,
    which do not follow the locale of the program as the standard library's streams do.
17. Only NewFile (src/base/files/new_file.hpp) makes files: no other code in src/, include/ and tools/ gives a
    file a name with O_CREAT, creat or fopen, except the places that MAKES_FILES lists with their reasons.
18. Each record in docs/decisions has a line in docs/decisions/README.md, and each line there has its
    record.
19. A header in a folder of a layer (src/mesh/window/plan.hpp) is private to that layer. The headers in
    src/<layer>/ itself are the layer's offer to the layers to the right of it. base and host are toolboxes:
    all of their headers are offered. INNER lists the exceptions, eight at most, with their reasons.
20. A type in an unnamed namespace of a source of src/<layer>/ has a name that no other source of the layer
    gives to such a type: the build compiles several sources as one unit, and which ones depends on their
    number.
"""
import pathlib
import re
import sys
import tempfile

COLUMNS = [["base"], ["host"], ["store"], ["reduce"], ["backends"], ["group"], ["mesh"], ["dp", "checkpoint"], ["nn"], ["tp", "domain", "ep", "pp"], ["train"], ["models"], ["capi"], ["capi_train"],
           ["tools", "bench", "examples"]]
COLUMN = {layer: i for i, column in enumerate(COLUMNS) for layer in column}
PROGRAMS = {"tools", "bench", "examples"}
ARROWS = " <- ".join(", ".join(c) for c in COLUMNS)

# Foreign headers and the folders that may include them; a trailing / includes everything below.
FOREIGN = [
    (r"nlohmann/", ["src/base/json_reader.hpp", "src/checkpoint/", "src/store/", "src/backends/", "src/group/", "src/models/llama.cpp", "src/models/from_json.cpp", "tools/", "tests/", "bench/"]),
    (r"xxhash\.h", ["src/checkpoint/content_hash.cpp"]),
    (r"CLI/", ["tools/", "bench/", "examples/"]),
    (r"benchmark/", ["bench/"]),
    (r"(gtest|gmock)/", ["tests/"]),
    (r"mpi\.h", ["include/weft/weft_mpi.h", "src/backends/mpi/", "tests/backends/mpi_", "bench/peers/"]),
    (r"toml\+\+/", ["src/models/transformer_text.cpp", "tools/"]),
    (r"pcre2\.h", ["tools/weft/train/tokenizer.cpp"]),
    (r"sodium\.h", ["src/store/tcp/seal.cpp"]),
    (r"gloo/", ["src/backends/gloo/", "bench/peers/"]),
    (r"(nccl|cuda_runtime(_api)?)\.h", ["src/backends/nccl/", "bench/peers/"]),
]
# Rule 13: a name that is read, and the rows of the table.
VARIABLE = re.compile(r'\b(getenv|env::get|env::get_int|env::is_on)\(\s*"(WEFT_\w+)"')
VARIABLE_ROW = re.compile(r'\{"(\w+)",')
READS_BY_ITSELF = ("src/base/env.cpp", "src/base/mutant.hpp")  # the second without libweft's own functions

C_API = ("weft/weft.h", "weft/weft_mpi.h", "weft/weft_train.h")
C_FOLDERS = {"c": "capi", "c_train": "capi_train"}  # of include/weft

UMBRELLAS = ("weft/weft.hpp", "weft/group.hpp", "weft/train.hpp")
CXX20 = "weft/base/cxx20.hpp"  # rule 15

# Rule 17.
MAKES_FILES = {
    "src/base/files/new_file.cpp": "this is NewFile",
    "src/store/file.cpp": "a store is one file for all ranks, opened by open_own_file, which checks it and its folder",
    "src/store/own_file.hpp": "names the flag in a comment",
    "src/store/rendezvous_file.cpp": "in a folder of mode 0700 of this user",
    "src/base/memfd.cpp": "without a name",
    "tools/weft/bench/job.cpp": "in a folder that it made itself, with mode 0700",
}
MAKES_FILE = re.compile(r'\bO_CREAT\b|\bfopen\([^)]*"[wa]|\bcreat\(')

# Rule 19.
TOOLBOXES = {"base", "host"}
INNER = {
    "backends/compose/compose.hpp": "group makes of messages what a transport lacks",
    "backends/compose/op_support.hpp": "group asks which operations those are",
    "backends/exchange/program.hpp": "an exchange worked out: group keeps it, windows on one rank carry it out",
    "group/persistent/prepared_exchange.hpp": "windows and dispatches have checked their plans and fields themselves",
    "checkpoint/index/index.hpp": "train writes checkpoints of other programs' formats",
    "nn/maps/conv_maps.hpp": "domain and tp cut the loops of convolutions",
    "nn/maps/geometry.hpp": "the same",
    "nn/maps/taps.hpp": "domain cuts the loops of pooling and resampling",
}

# Rule 16.
PLAIN_STREAMS = "src/base/text/plain_streams.hpp"
STREAM = re.compile(r"\bstd::w?([io]?(?:stringstream|fstream))\b")

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
# Standard and system headers that a public header may name. They are headers without a folder, or in one of
# the folders of the kernel and the C library.
SYSTEM_FOLDERS = ("sys/", "linux/", "netinet/", "arpa/", "bits/", "asm/")

# A Store by its usual names; its functions, and how many arguments they take including the deadline.
STORE_CALL = re.compile(r"\b(?:\w*store_?|server)\s*(?:->|\.)\s*(set|get|try_get|add|compare_set|remove)\(")
STORE_ARGUMENTS = {"set": 3, "get": 2, "try_get": 2, "add": 3, "compare_set": 4, "remove": 2}


def layer_of_file(path):
    """(layer, kind) of a file of the tree; kind is public, private, test or program. None if no rule applies
    to it."""
    parts = path.parts
    if parts[0] == "include" and len(parts) >= 3:
        return ("api", "public") if len(parts) == 3 else (C_FOLDERS.get(parts[2], parts[2]), "public")
    if parts[0] == "src" and len(parts) >= 3:
        return parts[1], "private"
    if parts[0] == "tests" and len(parts) >= 3:
        return parts[1], "test"
    if parts[0] in PROGRAMS:
        return parts[0], "program"
    return None


def reaches(layer, wanted):
    return layer == wanted or COLUMN[wanted] < COLUMN[layer]


def check_include(path, layer, kind, quote, name):
    """The fault of one include, or None."""
    if path.suffix in (".c", ".h") and name not in C_API:
        part = path.parts[0] == "include" and name.startswith(("weft/c/", "weft/c_train/"))
        if not name.endswith(".h") or (name.startswith("weft/") and not part):
            return f"includes {name}; C includes headers of C, and of weft {', '.join(C_API)} alone"
        if part:
            return None
    for pattern, folders in FOREIGN:
        if re.match(pattern, name):
            allowed = any(path.as_posix().startswith(f) for f in folders)
            return None if allowed else f"includes {name}; that library's headers are for {', '.join(folders)} only"
    if quote == "<" and not name.startswith("weft/"):
        if kind == "public" and "/" in name and not name.startswith(SYSTEM_FOLDERS):
            return f"includes <{name}>; public headers include the standard libraries only"
        return None
    if name.startswith(".") or "/../" in name or "/" not in name:
        # A program or a test may have headers in its own folder; the library names the layer.
        if kind in ("program", "test") and not name.startswith(".") and "/" not in name:
            return None
        return f'includes "{name}"; an include names its layer, as in "host/arena.hpp"'
    if name in UMBRELLAS or name in C_API:
        if kind in ("program", "test") or layer in ("api", "capi", "capi_train"):
            return None
        return f'includes "{name}"; that is for programs, the library includes what it uses'
    parts = name.split("/")
    public = parts[0] == "weft" and len(parts) > 2
    wanted = parts[1] if public else parts[0]
    if wanted == "support":
        return None if kind == "test" else f'includes "{name}"; support/ is for tests'
    if kind == "program" and wanted not in COLUMN:
        return None  # a folder of the program's own
    if kind == "test" and wanted == layer:
        return None
    if wanted not in COLUMN:
        return f'includes "{name}"; there is no layer "{wanted}"'
    if kind == "public" and not public:
        return f'includes "{name}"; a public header includes public headers only'
    if layer in ("api", "support", "house", "agreement", "fuzz"):
        return None
    if layer == "nn" and wanted in ("store", "backends", "group") and kind != "test":
        return f'includes "{name}"; nn communicates through boundaries of mesh alone'
    if kind == "test" and layer == "backends":
        layer = "group"  # the layer that drives a transport
    if not reaches(layer, wanted):
        return f'includes "{name}": {layer} may not know {wanted}; {ARROWS}'
    if kind == "private" and not public and wanted != layer and len(parts) > 2 and wanted not in TOOLBOXES and name not in INNER:
        return f'includes "{name}", which is private to {wanted}; expected a header of src/{wanted}/ itself, or a line in INNER'
    return None


def arguments_at(text, start):
    """How many arguments the call has whose opening parenthesis is before `start`."""
    depth, count, quote, i = 0, 1, None, start
    while i < len(text):
        c = text[i]
        if quote:
            i += c == "\\"
            quote = None if c == quote else quote
        elif c in "\"'":
            quote = c
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            if depth == 0:
                return count
            depth -= 1
        elif c == "," and depth == 0:
            count += 1
        i += 1
    return count


def calls_without_deadline(text):
    """(line, what is wrong) of each call of a Store that leaves the deadline to the default."""
    for call in STORE_CALL.finditer(text):
        if arguments_at(text, call.end()) < STORE_ARGUMENTS[call.group(1)]:
            yield text.count("\n", 0, call.start()) + 1, f"{call.group(1)}() of a Store without a deadline; expected one"


def wrongly_listed_mutants(tree):
    """The faults of the list of sources that are compiled again with mistakes."""
    build = tree / "src/CMakeLists.txt"
    listed = build.exists() and re.findall(r"set\((?:train_)?with_mutants\s([^)]*)\)", build.read_text(encoding="utf-8"))
    if not listed:
        return
    included = {p.relative_to(tree / "src").as_posix(): set(re.findall(r'#include "([^"]+)"', p.read_text(encoding="utf-8")))
                for p in (tree / "src").rglob("*") if p.suffix in (".hpp", ".cpp")}
    reach, grows = {"base/mutant.hpp"}, True
    while grows:
        further = {name for name, names in included.items() if names & reach} - reach
        reach |= further
        grows = bool(further)
    plug_in = re.compile("backends/(gloo|mpi|nccl)/")
    wanted = {name for name in reach if name.endswith(".cpp") and not plug_in.match(name)}
    for name in sorted(wanted ^ set(" ".join(listed).split())):
        what = "includes base/mutant.hpp and is not" if name in wanted else "does not include base/mutant.hpp and is"
        yield f"src/CMakeLists.txt:1: {name} {what} among with_mutants"


def too_far_by_others(tree):
    """For each public header, the first include that leads, through other headers, to a layer that it may
    not know."""
    includes = {}
    for file in sorted((tree / "include").rglob("*.hpp")):
        lines = enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        includes[file.relative_to(tree / "include").as_posix()] = [
            (number, match.group(2)) for number, line in lines if (match := INCLUDE.match(line))]

    def layer_of(name):
        parts = name.split("/")
        return parts[1] if len(parts) > 2 and parts[1] in COLUMN else None

    for header, own in includes.items():
        layer = layer_of(header)
        if layer is None:
            continue
        for number, first in own:
            if layer_of(first) is None or not reaches(layer, layer_of(first)):
                continue  # rule 1 speaks of it
            way = {first: [first]}
            queue = [first]
            for name in queue:
                for _, further in includes.get(name, []):
                    if further not in way and layer_of(further) is not None:
                        way[further] = way[name] + [further]
                        queue.append(further)
            wrong = [w for name, w in way.items() if not reaches(layer, layer_of(name))]
            if wrong:
                yield f"include/{header}:{number}: drags in {' -> '.join(wrong[0])}: {layer} may not know {layer_of(wrong[0][-1])}"


def without_standard(tree):
    """Public headers that compile with an older standard of C++."""
    for file in sorted((tree / "include").rglob("*.hpp")):
        name = file.relative_to(tree / "include").as_posix()
        included = [m.group(2) for line in file.read_text(encoding="utf-8").splitlines() if (m := INCLUDE.match(line))]
        if name != CXX20 and not any(other.startswith("weft/") for other in included):
            yield f"include/{name}:1: includes no header of weft; expected {CXX20} among its includes"


def lonely_files(tree):
    """Folders below a layer that hold one source or header and nothing below it."""
    held = {}
    for top in ("include/weft", "src"):
        for file in (tree / top).rglob("*"):
            if file.suffix in (".hpp", ".cpp", ".h", ".c", ".cu"):
                for folder in file.relative_to(tree / top).parents:
                    held.setdefault((top, folder), []).append(file.relative_to(tree).as_posix())
    for (top, folder), files in sorted(held.items()):
        if len(folder.parts) > 1 and len(files) == 1:
            yield f"{files[0]}:1: is alone in its folder; expected it in {top}/{folder.parent.as_posix()}"


def unknown_variables(path, text, known):
    """(line, what is wrong) of each read of a variable that bypasses the table."""
    for match in VARIABLE.finditer(text):
        how, name = match.groups()
        line = text.count("\n", 0, match.start()) + 1
        if path.as_posix() in READS_BY_ITSELF:
            how = "env::get"
        if how == "getenv":
            yield line, f'getenv("{name}"); expected env::get, which knows the table'
        elif name not in known:
            yield line, f'reads {name}, which has no row in src/base/env.cpp'


def files_made(path, text):
    """(line, what is wrong) of each place that makes a file without NewFile."""
    if path.parts[0] not in ("src", "include", "tools") or path.as_posix() in MAKES_FILES:
        return
    for match in MAKES_FILE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield line, f"makes a file by {match.group()}; expected NewFile of src/base/files/new_file.hpp, which follows nobody's link"


def streams_of_the_program(path, text):
    """(line, what is wrong) of each stream that uses the locale of the program."""
    if path.parts[0] not in ("src", "include", "tools") or path.as_posix() == PLAIN_STREAMS:
        return
    for match in STREAM.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield line, f"std::{match.group(1)} takes the locale of the program; expected a stream of {PLAIN_STREAMS}"


def unlisted_decisions(tree):
    """Records without a line in the index of decisions, and lines without a record."""
    index = tree / "docs/decisions/README.md"
    if not index.parent.exists():
        return
    text = index.read_text(encoding="utf-8") if index.exists() else ""
    rows = set(re.findall(r"^\| \[[^]]*\]\(([^)]*\.md)\)", text, re.M))
    records = {p.name for p in index.parent.glob("*.md")} - {index.name}
    for name in sorted(records - rows):
        yield f"docs/decisions/{name}:1: has no line in docs/decisions/README.md"
    for name in sorted(rows - records):
        yield f"docs/decisions/README.md:1: has a line for {name}, which is not there"


# A type of a whole source, not one inside another type or a function.
OWN_TYPE = re.compile(r"(?:struct|class|enum class|enum) (?:alignas\(\w+\) |\[\[\w+\]\] )?(\w+)[^;]*$")


def types_of_two_sources(tree):
    """Types of unnamed namespaces that two sources of a layer call alike."""
    first = {}
    for file in sorted((tree / "src").rglob("*.cpp")):
        path = file.relative_to(tree)
        unnamed = False
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if line == "namespace {":
                unnamed = True
            elif line == "}  // namespace":
                unnamed = False
            elif unnamed and (match := OWN_TYPE.match(line)):
                other = first.setdefault((path.parts[1], match.group(1)), path)
                if other != path:
                    yield f"{path}:{number}: {match.group(1)} is a type of {other}, too; one unit may have both sources"


def needless_inner(tree):
    """Lines of INNER that no source needs."""
    if not (tree / "tools/check_layers.py").exists():
        return
    if len(INNER) > 8:
        yield f"tools/check_layers.py:1: INNER has {len(INNER)} lines; expected at most 8"
    used = {match.group(2) for file in (tree / "src").rglob("*.[ch]pp") for line in file.read_text(encoding="utf-8").splitlines()
            if (match := INCLUDE.match(line)) and match.group(2).split("/")[0] != file.relative_to(tree / "src").parts[0]}
    for name in sorted(set(INNER) - used):
        yield f"tools/check_layers.py:1: INNER has {name}, which no other layer includes"


def findings(tree):
    found = list(unlisted_decisions(tree)) + list(needless_inner(tree)) + list(wrongly_listed_mutants(tree)) + list(too_far_by_others(tree)) + list(without_standard(tree)) + list(lonely_files(tree)) + list(types_of_two_sources(tree))
    table = tree / "src/base/env.cpp"
    known = set(VARIABLE_ROW.findall(table.read_text(encoding="utf-8"))) if table.exists() else set()
    files = sorted(p for top in ("include", "src", "tests", "tools", "bench", "examples")
                   for p in (tree / top).rglob("*") if p.suffix in (".hpp", ".cpp", ".h", ".c", ".cu"))
    for file in files:
        path = file.relative_to(tree)
        place = layer_of_file(path)
        if place is None:
            continue
        layer, kind = place
        if layer not in COLUMN and layer not in ("api", "support", "house", "agreement", "fuzz"):
            found.append(f"{path}:1: lies in a folder that is no layer, \"{layer}\"; {ARROWS}")
            continue
        text = file.read_text(encoding="utf-8")
        if kind == "private" or path.parts[0] == "tools":
            found += [f"{path}:{number}: {wrong}" for number, wrong in calls_without_deadline(text)]
        if kind in ("private", "public", "program"):
            found += [f"{path}:{number}: {wrong}" for number, wrong in unknown_variables(path, text, known)]
        found += [f"{path}:{number}: {wrong}" for number, wrong in streams_of_the_program(path, text)]
        found += [f"{path}:{number}: {wrong}" for number, wrong in files_made(path, text)]
        for number, line in enumerate(text.splitlines(), 1):
            match = INCLUDE.match(line)
            wrong = match and check_include(path, layer, kind, match.group(1), match.group(2))
            if kind == "public" and re.search(r"\bsrc/", line):
                wrong = "names a file of src/, which an installation has not; say what it means"
            if wrong:
                found.append(f"{path}:{number}: {wrong}")
    return found, len(files)


def self_test():
    sound = {
        "include/weft/base/a.hpp": '#include <vector>\n#include <sys/types.h>\n\n#include "weft/base/cxx20.hpp"\n',
        "include/weft/base/cxx20.hpp": '#error "too old"\n',
        "include/weft/weft.hpp": '#include "weft/base/a.hpp"\n#include "weft/models/m.hpp"\n',
        "include/weft/models/m.hpp": '#include "weft/tp/t.hpp"\n#include "weft/nn/n.hpp"\n',
        "src/base/a.cpp": '#include "weft/base/a.hpp"\n#include "base/b.hpp"\n#include <fmt/format.h>\n',
        "src/dp/d.cpp": '  #  include "weft/backends/g.hpp"\n#include "mesh/m.hpp"\n',
        "src/nn/kernels/k.cpp": '',
        "src/nn/o.cpp": 'namespace {\nstruct Own {\n};\n}  // namespace\nclass Public {};\n',
        "src/nn/p.cpp": 'namespace {\nstruct Own;\n  struct Own {\n}  // namespace\nclass Public {};\n',
        "src/nn/kernels/rows/r.cpp": '',
        "src/nn/kernels/rows/s.cpp": '',
        "tests/nn/n_test.cpp": '#include "support/ranks.hpp"\n#include "weft/backends/g.hpp"\n#include <gtest/gtest.h>\n',
        "include/weft/weft.h": '#include "weft/c/error.h"\n',
        "include/weft/c/error.h": '#include <stdint.h>\n',
        "include/weft/c/group.h": '#include "weft/c/error.h"\n',
        "include/weft/weft_mpi.h": '#include <mpi.h>\n#include "weft/weft.h"\n',
        "include/weft/weft_train.h": '#include "weft/c_train/layers.h"\n#include "weft/weft.h"\n',
        "include/weft/c_train/layers.h": '#include "weft/c/group.h"\n',
        "src/capi_train/l.cpp": '#include "capi/handles.hpp"\n#include "weft/weft_train.h"\n#include "weft/models/m.hpp"\n',
        "src/capi/c.cpp": '#include "capi/handles.hpp"\n#include "weft/weft.h"\n#include "weft/mesh/m.hpp"\n',
        "tests/capi/c_test.c": '#include "weft/weft.h"\n#include <sys/wait.h>\n',
        "examples/c/e.c": '#include <weft/weft.h>\n',
        "src/backends/s.cpp": 'b.store->set(fmt::format("{}, {}", a, \',\'), pack(all),\n  b.deadline);\nstore_->get(k, d); x.remove(y);\n',
        "tests/backends/s_test.cpp": 'store->set("a", "b");\n',
        "src/host/arena.cpp": '#include "base/mutant.hpp"\nauto a = env::get("WEFT_KNOWN");\n',
        "src/base/env.cpp": 'constexpr Variable k[] = {{"WEFT_KNOWN", "text"}};\n',
        "include/weft/group/far.hpp": '#include "weft/backends/near.hpp"\n',
        "include/weft/backends/near.hpp": '#include "weft/base/a.hpp"\n',
        "src/base/text/more.hpp": '',
        "src/base/text/plain_streams.hpp": 'class FileIn : public std::ifstream {};\n',
        "src/CMakeLists.txt": 'set(with_mutants host/arena.cpp)\n',
        "docs/decisions/README.md": '| record | decision |\n|---|---|\n| [a](a.md) | one |\n',
        "docs/decisions/a.md": '# One\n',
        "tools/weft/main.cpp": '#include "weft/weft.hpp"\n#include "commands.hpp"\n#include <CLI/CLI.hpp>\n',
    }
    faults = {
        ("src/base/x.cpp", 2, '\n#include "weft/mesh/mesh.hpp"'): "base may not know mesh",
        ("src/tp/x.cpp", 1, '#include "weft/train/gradient_reducer.hpp"'): "tp may not know train",
        ("src/nn/x.cpp", 1, '#include "weft/group/process_group.hpp"'): "boundaries of mesh alone",
        ("src/mesh/x.cpp", 1, '#include "layout.hpp"'): "an include names its layer",
        ("src/mesh/y.cpp", 1, '#include "../base/arena.hpp"'): "an include names its layer",
        ("include/weft/base/x.hpp", 1, '#include "host/arena.hpp"\n#include "weft/base/a.hpp"'): "public headers only",
        ("include/weft/base/y.hpp", 1, '#include <fmt/format.h>\n#include "weft/base/a.hpp"'): "standard libraries only",
        ("src/host/stream.cpp", 2, '#include <sstream>\nstd::istringstream words(text);'): "takes the locale of the program",
        ("tools/weft/stream.cpp", 1, 'std::ofstream out(path);'): "std::ofstream takes the locale of the program",
        ("src/host/make.cpp", 1, 'open(name, O_WRONLY | O_CREAT, 0666);'): "makes a file by O_CREAT",
        ("tools/weft/make.cpp", 1, 'std::FILE* f = std::fopen(name, "w");'): "makes a file by fopen",
        ("include/weft/base/old.hpp", 1, '#include <vector>'): "expected weft/base/cxx20.hpp",
        ("src/mesh/z.cpp", 1, '#include "weft/weft.hpp"'): "is for programs",
        ("src/mesh/umbrella.cpp", 1, '#include "weft/group.hpp"'): "is for programs",
        ("src/mesh/w.cpp", 1, '#include "support/ranks.hpp"'): "support/ is for tests",
        ("src/mesh/v.cpp", 1, '#include "weft/mash/mesh.hpp"'): 'there is no layer "mash"',
        ("tests/base/x_test.cpp", 1, '#include "weft/store/store.hpp"'): "base may not know store",
        ("src/backends/x.cpp", 1, '#include <mpi.h>'): "src/backends/mpi/",
        ("include/weft/c/mpi.h", 1, '#include <mpi.h>'): "include/weft/weft_mpi.h",
        ("examples/c/x.c", 1, '#include <weft/weft.hpp>'): "headers of C",
        ("examples/c/y.c", 1, '#include <weft/c/error.h>'): "weft/weft.h, weft/weft_mpi.h, weft/weft_train.h alone",
        ("include/weft/c/z.h", 1, '#include "weft/base/a.hpp"'): "headers of C",
        ("tests/capi/x.c", 1, '#include <vector>'): "headers of C",
        ("include/weft/x.h", 1, '#include <cstdint>'): "headers of C",
        ("src/mesh/u.cpp", 1, '#include "weft/weft.h"'): "is for programs",
        ("src/dp/inner.cpp", 1, '#include "mesh/window/plan.hpp"'): "private to mesh",
        ("src/checkpoint/x.cpp", 1, '#include "capi/handles.hpp"'): "checkpoint may not know capi",
        ("src/misc/x.cpp", 1, ''): "no layer",
        ("docs/decisions/b.md", 1, '# Two'): "no line in docs/decisions/README.md",
        ("src/store/x.cpp", 1, '#include "weft/group/process_group.hpp"'): "store may not know group",
        ("src/backends/y.cpp", 2, '\nm.store->add(fmt::format("{}", f(a, b)), 1);'): "without a deadline",
        ("src/CMakeLists.txt", 1, 'set(with_mutants host/arena.cpp base/log.cpp)'): "does not include base/mutant.hpp",
        ("include/weft/mesh/over.hpp", 2, '\n#include "weft/group/over.hpp"'): "drags in weft/group/over.hpp -> weft/nn/over.hpp: mesh may not know nn",
        ("include/weft/group/over.hpp", 1, '#include "weft/nn/over.hpp"'): "group may not know nn",
        ("include/weft/nn/over.hpp", 3, '#include "weft/base/a.hpp"\n\n// See src/nn/over.cpp.'): "names a file of src/",
        ("src/host/getenv.cpp", 1, 'std::getenv("WEFT_KNOWN")'): "expected env::get",
        ("src/host/no_row.cpp", 2, '\nenv::is_on(\n"WEFT_OTHER")'): "no row in src/base/env.cpp",
        ("src/backends/z.cpp", 1, 'server.try_get(kKey);'): "without a deadline",
        ("src/nn/q.cpp", 2, "namespace {\nclass Own {"): "Own is a type of src/nn/o.cpp, too",
        ("src/tp/lonely/only.cpp", 1, ""): "is alone in its folder; expected it in src/tp",
    }
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder)

        def write(name, text):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_text(text, encoding="utf-8")

        for name, text in sound.items():
            write(name, text)
        found, count = findings(tree)
        assert not found and count == len(sound) - 3, found  # one is CMake's, two are pages
        for name, _, text in faults:
            write(name, text)
        found, _ = findings(tree)
        for (name, line, _), rule in faults.items():
            matching = [f for f in found if f.startswith(f"{name}:{line}: ")]
            assert len(matching) == 1 and rule in matching[0], (name, rule, matching)
        assert len(found) == len(faults), found
    print(f"check_layers: {len(sound)} sound files pass, {len(faults)} faults are found")


def main():
    if sys.argv[1:] == ["--self-test"]:
        self_test()
        return 0
    tree = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent.parent)
    found, count = findings(tree)
    print("\n".join(found) if found else f"check_layers: {count} files, every include goes left, every call of a Store has its deadline")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
