#!/usr/bin/env python3
"""Fails if a collective function of C++, C or Python is on neither table of docs/agreement.md.

    tools/agreement.py [TREE]        checks the tree (default: the one this file lies in)
    tools/agreement.py --list        prints the functions that it finds
    tools/agreement.py --self-test   checks itself on a small header

docs/agreement.md is made from tests (tests/agreement/): a row is a call in which ranks pass different values.
A function is collective where

- its comment, or that of its class, has the word "collective" ("Not collective" does not count); of a
  class the table has the class's name, or one of its functions;
- or the head of its file says so of all: "Collective among the ranks of the axes", "Every function is
  collective", "Called by every rank";
- or it is a function of ProcessGroup that begins a call, or makes a group.

In the opposite direction, each function on the page must be in a header.

A function of C has the rows of the C++ function that it calls. For libweft tools/c_api_names.txt gives that
function, for the other libraries TWINS below. The definition in src/ must call it. A function of C is
collective if its comment says so (SAYS_C), if the C++ function is on the page, or if its comment begins with
"The same ..." and stands below a collective function. A function that exists only in C has its own rows. A
function or class of Python whose docstring says that ranks call it together must name, in its own code, a
function of C that is covered, or be in PYTHON below.
"""
import ast
import pathlib
import re
import sys

FILE_SAYS = re.compile(r"Collective (among|over)|[Ee]very function is collective|[;,] collective (among|over)|Called by every rank")
SAYS = re.compile(r"(?<!not )\bcollective\b", re.IGNORECASE)
CLASS = re.compile(r"^( *)(?:class|struct)(?: \[\[\w+\]\])? (\w+)(?: final)?(?: : [\w:<>, ]+)? \{")
FUNCTION = re.compile(r"(~?\b[A-Za-z_]\w*)\s*\(")
ROW = re.compile(r"^\| `([\w:]+)` \|")
SKIPPED = {"operator", "if", "for", "while", "switch", "return", "submit", "static_assert", "requires"}
# Functions of ProcessGroup that are point to point, or that concern only one rank.
GROUP_CALLS = re.compile(r"^(?:static )?(Work|ProcessGroup) (\w+)\(")
GROUP_SKIPPED = {"submit", "send", "recv", "ProcessGroup"}

# Words in comments of C and docstrings of Python.
SAYS_C = re.compile(r"(?<!not )\bcollective\b|\ball (?:of them|its ranks|ranks(?: of \S+)?|who live) call\b|\bonly they call\b|\bblocks until (?:they have|all ranks)\b|\branks meet in\b",
                    re.IGNORECASE)
C_COMMENT_OR_FUNCTION = re.compile(r"/\*(.*?)\*/|^(?:static inline )?(?:weft_status|void|const char\*)\s+(weft_\w+)\(", re.DOTALL | re.MULTILINE)
# Functions of C that tools/c_api_names.txt does not have, or names with another function than the one on the
# page, and the C++ function that each function calls.
TWINS = {
    "weft_group_from_env": "ProcessGroup::create",
    "weft_group_from_mpi": "weft_group_create_by_broadcast",
    "weft_checkpoint_saver_create": "AsyncCheckpoint",
    "weft_column_linear_forward": "column_linear_forward",
    "weft_column_linear_backward": "column_linear_backward",
    "weft_row_linear_forward": "row_linear_forward",
    "weft_row_linear_backward": "row_linear_backward",
    "weft_column_conv2d_forward": "column_conv2d_forward",
    "weft_column_conv2d_backward": "column_conv2d_backward",
    "weft_row_conv2d_forward": "row_conv2d_forward",
    "weft_row_conv2d_backward": "row_conv2d_backward",
    "weft_vocab_embedding_forward": "vocab_parallel_embedding_forward",
    "weft_vocab_cross_entropy": "vocab_parallel_cross_entropy",
    "weft_vocab_linear_cross_entropy": "vocab_parallel_linear_cross_entropy",
    "weft_token_routes_create": "gather_choices",
    "weft_dispatch_rows": "TokenRoutes::start_dispatch",
    "weft_combine_rows": "TokenRoutes::start_combine",
    "weft_loss_scaler_unscale": "LossScaler::unscale",
    "weft_model_logits": "compute_logits",
    "weft_model_generate": "generate",
    "weft_model_forward": "compute_outputs",
    "weft_model_expert_balance": "expert_balance",
    "weft_trainer_evaluate": "Trainer::evaluate",
    "weft_model_save": "save_checkpoint",
    "weft_model_load": "load_checkpoint",
    "weft_trainer_step": "Trainer::step",
    "weft_trainer_backward": "Trainer::backward",
    "weft_trainer_update": "Trainer::update",
    "weft_trainer_save": "Trainer::save",
    "weft_trainer_load": "Trainer::load_newest",
    "weft_trainer_train": "train",
    "weft_trainer_backward_batches": "Trainer::backward",
    "weft_model_init_from": "init_from",
}
# Functions of Python that call other functions of Python, and their names on the page.
PYTHON = {
    "WeftBackend": "ProcessGroup",
    "Group.broadcast_object": "ProcessGroup::broadcast",
    "Group.all_gather_object": "ProcessGroup::all_gather",
    "Group.gather_object": "ProcessGroup::all_to_all_v",
    "ParallelModel.forward": "compute_outputs",
    "ParallelModel.expert_balance": "expert_balance",
    "Trainer.step": "Trainer::step",
    "Trainer.evaluate": "Trainer::evaluate",
    "Trainer.backward": "Trainer::backward",
}


def words_of(comment):
    return " ".join(line.strip().lstrip("/").strip() for line in comment)


def functions_of(text):
    """(names that are collective, all names) of a header. Free functions have their name, others that of
    their class, too."""
    lines = text.splitlines()
    head = words_of([l for l in lines[:60] if l.startswith("// ")])
    whole_file = bool(FILE_SAYS.search(head))
    collective, known = set(), set()
    classes = []  # (name, indent, collective, public)
    comment = []
    last = (None, False)  # the declaration before: overloads that have no comment share its
    i = 0
    while i < len(lines):
        line = lines[i]
        stripped = line.strip()
        i += 1
        if stripped.startswith("///"):
            comment.append(stripped)
            continue
        if not stripped or stripped.startswith(("//", "#", "template", "namespace")):
            if not stripped.startswith("template"):
                comment = []
            continue
        if classes and re.match(rf"^ {{{classes[-1][1]}}}\}};", line):
            classes.pop()
            comment = []
            continue
        if re.match(r"^\s*(public|private|protected):", line):
            if classes:
                classes[-1][3] = stripped.startswith("public")
            comment = []
            continue
        match = CLASS.match(line)
        if match:
            said = bool(SAYS.search(words_of(comment)))
            name = match.group(2)
            outer = classes[-1][0] + "::" if classes else ""
            classes.append([outer + name, len(match.group(1)), said, line.lstrip().startswith("struct")])
            known.add(outer + name)
            if said:
                collective.add(outer + name)
            comment = []
            if "};" in line:
                classes.pop()
            continue
        # A declaration, up to its end.
        declaration = stripped
        while not re.search(r"[;{}]", declaration) and i < len(lines):
            declaration += " " + lines[i].strip()
            i += 1
        depth = declaration.count("{") - declaration.count("}")
        while depth > 0 and i < len(lines):  # its body
            depth += lines[i].count("{") - lines[i].count("}")
            i += 1
        match = FUNCTION.search(re.sub(r"\[\[[^\]]*\]\]|std::function<[^;=]*?>(?= \w)", "", declaration))
        words, comment = words_of(comment), []
        if match is None or match.group(1) in SKIPPED or match.group(1).startswith("~") or declaration.startswith(("using", "friend")):
            continue
        name = match.group(1)
        said = bool(SAYS.search(words)) if words or last[0] != name else last[1]
        last = (name, said)
        if classes and not classes[-1][3]:
            continue
        qualified = "::".join([classes[-1][0], name]) if classes else name
        known.add(qualified)
        group_call = classes and classes[-1][0] == "ProcessGroup" and GROUP_CALLS.match(declaration)
        if group_call and name not in GROUP_SKIPPED:
            collective.add(qualified)
        elif said or (whole_file and not classes and "o communication" not in words):
            if classes and name == classes[-1][0].split("::")[-1]:
                collective.add(classes[-1][0])
            else:
                collective.add(qualified)
    return collective, known


def listed_in(page):
    return {m.group(1) for line in page.splitlines() if (m := ROW.match(line))}


def covers(listed, function):
    """Whether the page has a row of that function, or of a function of that class."""
    return function in listed or any(l.startswith(function + "::") for l in listed)


def findings(headers, page):
    """The faults. headers: name -> text."""
    listed, found = listed_in(page), []
    for name, text in headers.items():
        for function in sorted(functions_of(text)[0]):
            if not covers(listed, function):
                found.append(f"{name}: {function} is collective and has no row in docs/agreement.md; add one in tests/agreement/, of ranks "
                             "that differ (or to without_row() there, with the reason)")
    return found


def unknown_rows(page, known):
    return [f"docs/agreement.md: {function} is in no header of include/weft" for function in sorted(listed_in(page) - known)]


def twins_of(names):
    """C function -> the C++ functions that tools/c_api_names.txt gives for it."""
    twins = {}
    for line in names.splitlines():
        parts = line.split(None, 1)
        if len(parts) == 2 and not line.startswith("#") and not parts[1].startswith("- "):
            for c_name in re.findall(r"~?(weft_\w+)", parts[1].split(":")[0]):
                twins.setdefault(c_name, set()).add(parts[0])
    return twins


def c_functions_of(text):
    """[(function, its comment)] of a header of C; overloads that have no comment have an empty one."""
    found, comment = [], ""
    for match in C_COMMENT_OR_FUNCTION.finditer(text):
        if match.group(1) is not None:
            comment = " ".join(part.strip(" *") for part in match.group(1).split("\n"))
        else:
            found.append((match.group(2), comment.strip()))
            comment = ""
    return found


def body_of(source, function):
    """The definition of a C function. None if there is none."""
    match = re.search(rf"^(?:static inline )?weft_status {function}\(.*?^}}", source, re.DOTALL | re.MULTILINE)
    return match[0] if match else None


def c_findings(headers, page, names, source, twins=None):
    """The faults of the functions of C, and the functions that are covered. headers: name -> text; source:
    all of src/capi*."""
    twins = TWINS if twins is None else twins
    listed, listed_twins, found, covered, known = listed_in(page), twins_of(names), [], set(), set()
    for name, text in headers.items():
        before = False  # whether the function before is collective
        for function, comment in c_functions_of(text):
            known.add(function)
            of = {twins[function]} if function in twins else {t for t in listed_twins.get(function, ()) if covers(listed, t)}
            before = bool(SAYS_C.search(comment)) or function in twins or function in listed or bool(of) or (before and comment.startswith("The same"))
            if function in listed:
                covered.add(function)
            elif before and not any(covers(listed, t) for t in of):
                found.append(f"{name}: {function} is collective and has no row in docs/agreement.md; say in TWINS of tools/agreement.py which function of "
                             "C++ it calls, or add a row in tests/agreement/capi_test.cpp")
            elif before:
                covered.add(function)
                body = body_of(source, function)
                if body is None or not any(re.search(rf"\b(?:start_)?{t.split('::')[-1]}\b", body) for t in of):
                    found.append(f"{name}: {function} does not call {' or '.join(sorted(of))} in src/capi*")
    found += [f"tools/agreement.py: {function} of TWINS is in no header of C" for function in sorted(set(twins) - known)]
    return found, covered, known


def python_findings(modules, page, covered, table=None):
    """The faults of functions and classes of Python. modules: name -> text; covered: functions of C."""
    table = PYTHON if table is None else table
    listed, found, known = listed_in(page), [], set()

    def visit(name, node, outer):
        for child in node.body:
            if not isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                continue
            qualified = outer + child.name
            known.add(qualified)
            says = not qualified.startswith("_") and SAYS_C.search(" ".join((ast.get_docstring(child) or "").split()))
            called = {f"weft_{n.attr}" for n in ast.walk(child) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "lib"}
            if says and not called & covered and not covers(listed, table.get(qualified, "")):
                found.append(f"{name}: {qualified} is collective and calls no function of C that docs/agreement.md covers; see PYTHON of tools/agreement.py")
            if isinstance(child, ast.ClassDef):
                visit(name, child, qualified + ".")
    for name, text in modules.items():
        visit(name, ast.parse(text), "")
    found += [f"tools/agreement.py: {function} of PYTHON is in no module" for function in sorted(set(table) - known)]
    return found


def texts(tree, folders, ends, but=()):
    """Files under `folders` of the tree: name -> text."""
    return {p.relative_to(tree).as_posix(): p.read_text(encoding="utf-8") for folder in folders for p in sorted((tree / folder).rglob("*" + ends))
            if p.relative_to(tree / folder).parts[0] not in but}


def headers_of(tree):
    # Programs do not call the parts of transports.
    return texts(tree, ["include/weft"], ".hpp", ("backends", "host", "base", "store"))


def all_findings(tree):
    page = (tree / "docs/agreement.md").read_text(encoding="utf-8")
    headers = headers_of(tree)
    c_headers = texts(tree, ["include/weft/c", "include/weft/c_train"], ".h")
    c_headers["include/weft/weft_mpi.h"] = (tree / "include/weft/weft_mpi.h").read_text(encoding="utf-8")
    source = "\n".join([*texts(tree, ["src/capi", "src/capi_train"], ".cpp").values(), c_headers["include/weft/weft_mpi.h"]])
    names = (tree / "tools/c_api_names.txt").read_text(encoding="utf-8")
    found, covered, c_known = c_findings(c_headers, page, names, source)
    known = c_known.union(*(functions_of(text)[1] for text in headers.values()))
    modules = {name: text for name, text in texts(tree, ["python/weft"], ".py").items() if not pathlib.Path(name).name.startswith("_")}
    found = findings(headers, page) + found + python_findings(modules, page, covered) + unknown_rows(page, known)
    return found, f"agreement: {len(listed_in(page))} functions are listed, and no collective one is missing; they cover {len(covered)} of C"


def self_test():
    header = """// A file.
#pragma once
namespace weft {
/// Gives it. Collective over the ranks.
void told(int a,
          int b);
void told(long a);

/// Not collective.
void alone();
/// A class. Collective over the axes.
class Exchange {
 public:
  /// No communication.
  explicit Exchange(int n);
  /// Begins; collective among the ranks.
  int start(const std::function<void(int)>& f = {}) const { return 1; }
  int size() const;

 private:
  /// Collective.
  void inner();
};
class ProcessGroup {
 public:
  Work all_reduce(int x) {
    return submit(x);
  }
  Work send(int x);
};
}
"""
    wanted = {"told", "Exchange", "Exchange::start", "ProcessGroup::all_reduce"}
    collective, _ = functions_of(header)
    assert collective == wanted, collective
    page = "| `told` | x |\n| `Exchange::start` | y |\n| `ProcessGroup::all_reduce` | y |\n"
    assert findings({"h": header}, page) == [], findings({"h": header}, page)
    missing = findings({"h": header}, page.replace("`told`", "`stale`"))
    assert len(missing) == 1 and "told is collective" in missing[0], missing
    missing = unknown_rows(page.replace("`told`", "`stale`"), functions_of(header)[1])
    assert len(missing) == 1 and "stale is in no header" in missing[0], missing
    whole = functions_of("// Moves. Collective among the ranks.\n#pragma once\nTensor full(const Tensor& in);\n")[0]
    assert whole == {"full"}, whole
    c_self_test()
    python_self_test()
    print("agreement: the functions of small headers of C++ and C, and of a small module, are found")


def c_self_test():
    header = """/* A file. */
/* Gives it. Collective
 * over the ranks. */
weft_status weft_told(int32_t a,
                      weft_error* error);
/* The same, and waits. */
weft_status weft_told_now(weft_error* error);
/* Not collective. */
weft_status weft_alone(weft_error* error);
/* Of C alone: all ranks of `group` call it. */
weft_status weft_own(weft_error* error);
void weft_own_destroy(weft_own* own);
"""
    page, names = "| `told` | x |\n| `weft_own` | y |\n", "told  weft_told: by its name\nalone  weft_alone\nother  - not in C\n"
    source = "weft_status weft_told(int32_t a) {\n  return told(a);\n}\n\nweft_status weft_told_now() {\n  return told(0);\n}\n"
    twins = {"weft_told_now": "told"}
    found, covered, known = c_findings({"h": header}, page, names, source, twins)
    assert found == [] and covered == {"weft_told", "weft_told_now", "weft_own"}, (found, covered)
    assert known == covered | {"weft_alone", "weft_own_destroy"}, known

    def expect(text, *args):
        found = c_findings({"h": header}, *args)[0]
        assert len(found) == 1 and text in found[0], (text, found)
    expect("weft_own is collective and has no row", page.replace("weft_own", "x"), names, source, twins)
    expect("weft_told_now is collective and has no row", page, names, source, {})
    expect("weft_stale of TWINS is in no header", page, names, source, {**twins, "weft_stale": "told"})
    expect("weft_told does not call told", page, names, source.replace("told(a)", "other(a)"), twins)


def python_self_test():
    module = '''"""A module. All ranks call it."""
class Group:
    def told(self):
        """Gives it. All ranks
        call it."""
        return errors.call(lib.told, self)
    def twice(self):
        """All ranks call it."""
        return self.told() + self.told()
    def alone(self):
        """Not collective."""
'''
    page, covered = "| `told` | x |\n", {"weft_told"}

    def expect(text, covered, table):
        found = python_findings({"m": module}, page, covered, table)
        assert len(found) == (1 if text else 0) and text in "".join(found), (text, found)
    expect("", covered, {"Group.twice": "told"})
    expect("Group.twice is collective", covered, {})
    expect("Group.told is collective", set(), {"Group.twice": "told"})
    expect("Group.stale of PYTHON is in no module", covered, {"Group.twice": "told", "Group.stale": "told"})


def main():
    if sys.argv[1:] == ["--self-test"]:
        self_test()
        return 0
    tree = pathlib.Path(__file__).resolve().parent.parent
    if len(sys.argv) > 1 and sys.argv[1] != "--list":
        tree = pathlib.Path(sys.argv[1])
    if sys.argv[1:] == ["--list"]:
        for name, text in headers_of(tree).items():
            for function in sorted(functions_of(text)[0]):
                print(f"{name}: {function}")
        return 0
    found, whole = all_findings(tree)
    print("\n".join(found) if found else whole)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
