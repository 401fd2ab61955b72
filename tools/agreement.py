#!/usr/bin/env python3
"""Fails where a collective function of the public headers is on neither table of docs/agreement.md.

    tools/agreement.py [TREE]        checks the tree (default: the one this file lies in)
    tools/agreement.py --list        prints the functions that it finds
    tools/agreement.py --self-test   checks itself on a small header

docs/agreement.md is made of tests (tests/agreement/): a row is a call in which ranks give different values. A function is collective where

- its comment, or that of its class, has the word "collective" ("Not collective" does not count); of a class the table has the class's name, or
  one of its functions;
- or the head of its file says so of all: "Collective among the ranks of the axes", "Every function is collective", "Called by every rank";
- or it is a function of ProcessGroup that begins a call, or makes a group.

The other way round, each function on the page must be in a header.
"""
import pathlib
import re
import sys

FILE_SAYS = re.compile(r"Collective (among|over)|[Ee]very function is collective|[;,] collective (among|over)|Called by every rank")
SAYS = re.compile(r"(?<!not )\bcollective\b", re.IGNORECASE)
CLASS = re.compile(r"^( *)(?:class|struct)(?: \[\[\w+\]\])? (\w+)(?: final)?(?: : [\w:<>, ]+)? \{")
FUNCTION = re.compile(r"(~?\b[A-Za-z_]\w*)\s*\(")
ROW = re.compile(r"^\| `([\w:]+)` \|")
SKIPPED = {"operator", "if", "for", "while", "switch", "return", "submit", "static_assert", "requires"}
# Of ProcessGroup: point to point, and what is each rank's own.
GROUP_CALLS = re.compile(r"^(?:static )?(Work|ProcessGroup) (\w+)\(")
GROUP_SKIPPED = {"submit", "send", "recv", "ProcessGroup"}


def words_of(comment):
    return " ".join(line.strip().lstrip("/").strip() for line in comment)


def functions_of(text):
    """(names that are collective, all names) of a header: free functions by their name, others with that of their class."""
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


def findings(headers, page):
    """What is wrong. headers: name -> text."""
    listed, found, all_known = listed_in(page), [], set()
    for name, text in headers.items():
        collective, known = functions_of(text)
        all_known |= known
        for function in sorted(collective):
            inside = any(l.startswith(function + "::") for l in listed)
            if function not in listed and not inside:
                found.append(f"{name}: {function} is collective and has no row in docs/agreement.md; add one in tests/agreement/, of ranks "
                             "that differ (or to without_row() there, with the reason)")
    for function in sorted(listed - all_known):
        found.append(f"docs/agreement.md: {function} is in no header of include/weft")
    return found


def headers_of(tree):
    # What transports are made of is not called by programs.
    return {p.relative_to(tree).as_posix(): p.read_text(encoding="utf-8") for p in sorted((tree / "include/weft").rglob("*.hpp"))
            if p.relative_to(tree / "include/weft").parts[0] not in ("backends", "host", "base", "store")}


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
    assert len(missing) == 2 and "told is collective" in missing[0] and "stale is in no header" in missing[1], missing
    whole = functions_of("// Moves. Collective among the ranks.\n#pragma once\nTensor full(const Tensor& in);\n")[0]
    assert whole == {"full"}, whole
    print("agreement: the functions of a small header are found")


def main():
    if sys.argv[1:] == ["--self-test"]:
        self_test()
        return 0
    tree = pathlib.Path(__file__).resolve().parent.parent
    if len(sys.argv) > 1 and sys.argv[1] != "--list":
        tree = pathlib.Path(sys.argv[1])
    headers = headers_of(tree)
    if sys.argv[1:] == ["--list"]:
        for name, text in headers.items():
            for function in sorted(functions_of(text)[0]):
                print(f"{name}: {function}")
        return 0
    page = (tree / "docs/agreement.md").read_text(encoding="utf-8")
    found = findings(headers, page)
    print("\n".join(found) if found else f"agreement: {len(listed_in(page))} functions are listed, and no collective one is missing")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
