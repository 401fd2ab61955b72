#!/usr/bin/env python3
"""The functions of weft.h and weft_train.h as one list, read from the headers: for the table in docs, the
lists of exports, the test of bad arguments and bindings.

    c_api.py --json                        functions, structs and constants, for a binding
    c_api.py --check                       compares docs/c_api_table.md, src/*.exports and python/weft/_*api.py with the headers
    c_api.py --write                       writes docs/c_api_table.md and python/weft/_*api.py, and the functions into src/*.exports
    c_api.py --bad-arguments LIBRARY FILE  writes a C program that gives every function of LIBRARY (weft, weft_train) every kind of bad argument;
                                           tests/capi/bad_arguments.h says what is good
    c_api.py --calls LIBRARY FILE          writes the calls of every function of LIBRARY that the fuzz target tests/fuzz/capi makes
    c_api.py --self-test

tools/c_api_names.txt gives the C name of every operation of the C++ API of libweft, or the reason why C does
not have it. If clang is installed, --check also finds operations of public C++ headers that this list does
not have.
"""
import argparse
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs/c_api_table.md"
NAMES = ROOT / "tools/c_api_names.txt"
COMMAND = "tools/c_api.py --write"
LIBRARIES = {"weft": "c", "weft_train": "c_train"}  # folder of their headers in include/weft
# C++ headers whose operations a host program needs from C: all of a layer except what plug-ins and weft's own
# layers use.
CXX_HEADERS = ["base/interrupt.hpp", "base/log.hpp", "base/storage.hpp", "checkpoint/*.hpp", "dp/*.hpp", "group/*.hpp", "host/context.hpp", "mesh/*.hpp", "store/*.hpp"]

# Pointers that may be NULL, wherever they are.
NULLABLE_TYPES = re.compile(r"^(const weft_\w+_options\*|weft_work\*\*|weft_error\*)$")
NULLABLE_NAMES = {"data", "callback_data", "release", "user"}  # arguments of callbacks, of type void*


# ---- the headers ----

def blank(text):
    """A comment's lines, without its words."""
    return "\n" * text.count("\n")


def clean(text):
    """The declarations of a header, one a line or more, without comments and directives."""
    text = re.sub(r"/\*.*?\*/", lambda m: " " + blank(m[0]), text, flags=re.S)
    text = re.sub(r"^static inline [^{]*\{.*?^\}", lambda m: blank(m[0]), text, flags=re.M | re.S)
    text = re.sub(r"#ifdef __cplusplus.*?#endif", lambda m: blank(m[0]), text, flags=re.S)
    return re.sub(r"^[ \t]*#(?:.*\\\n)*.*$", lambda m: blank(m[0]), text, flags=re.M)


def statements(text):
    """(line, text) of each declaration: text that ends in a semicolon outside of braces."""
    depth, begin, found, line, first = 0, 0, [], 1, 1
    for i, c in enumerate(text):
        if c == "\n":
            line += 1
        depth += {"{": 1, "}": -1}.get(c, 0)
        if c == ";" and depth == 0:
            found.append((first, " ".join(text[begin:i].split())))
            begin = i + 1
        if not text[begin:i + 1].strip():
            first = line
    return found


def split_list(text):
    """Returns the parts between commas that are outside parentheses."""
    parts, depth, part = [], 0, ""
    for c in text:
        depth += {"(": 1, ")": -1}.get(c, 0)
        if c == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += c
    return parts + [part.strip()] if part.strip() else parts


def declarator(text):
    """{name, type} of "const weft_buffer* in", "void (*release)(void* data)" or "int32_t ranks[16]"."""
    if match := re.match(r"^(.*?)\(\*\s*(\w+)\)\s*(\(.*\))$", text):
        return {"name": match[2], "type": f"{match[1].strip()} (*){match[3]}"}
    match = re.match(r"^(.*?)(\w+)((?:\[\w*\])*)$", text)
    kind = re.sub(r"\s*\*", "*", match[1].strip()).replace("*const", "* const")
    return {"name": match[2], "type": kind + match[3]}


def comment_before(raw, line):
    """The comment that ends above a line, as words; it may also stand above a block of functions."""
    lines = raw.splitlines()
    at = line - 2
    while at >= 0 and lines[at].strip() and not lines[at].rstrip().endswith("*/"):
        at -= 1
    if at < 0 or not lines[at].rstrip().endswith("*/"):
        return ""
    begin = at
    while begin > 0 and "/*" not in lines[begin]:
        begin -= 1
    text = " ".join(l.strip().lstrip("/").strip("*").strip() for l in lines[begin:at + 1])
    return text.replace("*/", "").strip()


def read_header(path, library, root=ROOT):
    raw = path.read_text(encoding="utf-8")
    header = path.relative_to(root / "include").as_posix()
    functions, structs, constants, types, enums = [], [], {}, {}, {}
    before = None  # the type that the declaration before this one named, whose values an enum has
    for line, text in statements(clean(raw)):
        of, before = before, None
        if match := re.match(r"^(?:typedef )?enum\s*\w*\s*\{(.*)\}\s*\w*$", text):
            value = -1
            for entry in split_list(match[1]):
                name, _, number = (s.strip() for s in entry.partition("="))
                value = int(number, 0) if number else value + 1
                constants[name] = value
                if of:
                    enums.setdefault(of, []).append(value)
        elif match := re.match(r"^typedef struct (\w+) \{(.*)\} (\w+)$", text):
            fields = []
            for field in match[2].split(";"):
                parts = split_list(field.strip())
                if not parts:
                    continue
                first = declarator(parts[0])
                fields.append(first)
                base = re.sub(r"[\*\s]+$", "", re.sub(r"\[.*", "", first["type"]))
                fields += [{"name": p.lstrip("*"), "type": base + ("*" if p.startswith("*") else "")} for p in parts[1:]]
            structs.append({"name": match[3], "header": header, "library": library, "fields": fields})
        elif match := re.match(r"^typedef struct (\w+) (\w+)$", text):
            types[match[2]] = "handle"
        elif match := re.match(r"^typedef (.*?)\(\*\s*(\w+)\)\s*\(.*\)$", text):
            types[match[2]] = "function"
        elif match := re.match(r"^typedef (\w+) (\w+)$", text):
            types[match[2]] = match[1]
            before = match[2]
        elif match := re.match(r"^([\w\s\*]+?)\b(weft_\w+)\((.*)\)$", text):
            params = [] if match[3].strip() == "void" else [declarator(p) for p in split_list(match[3])]
            functions.append({"name": match[2], "header": header, "library": library, "line": line,
                              "returns": re.sub(r"\s*\*", "*", match[1].strip()), "params": params, "comment": comment_before(raw, line)})
        elif not re.match(r"^struct \w+$", text):
            sys.exit(f"c_api: {header}:{line}: this declaration is not understood: {text}")
    return functions, structs, constants, types, enums


def read_headers(root=ROOT):
    api = {"functions": [], "structs": [], "constants": {}, "types": {}, "enums": {}}
    for library, folder in LIBRARIES.items():
        for path in sorted((root / "include/weft" / folder).glob("*.h")):
            functions, structs, constants, types, enums = read_header(path, library, root)
            api["functions"] += functions
            api["structs"] += structs
            api["constants"].update(constants)
            api["types"].update(types)
            api["enums"].update(enums)
    return api


def functions_of(api, library):
    return [f for f in api["functions"] if f["library"] == library]


# ---- the table ----

def read_names(text):
    """C++ operation -> (names in C, words). `*` after `::` stands for all other members of a class, `~`
    before a name for "not yet"."""
    names = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("#")[0].strip()
        if not line:
            continue
        operation, _, rest = line.partition(" ")
        rest = rest.strip()
        if operation in names:
            sys.exit(f"c_api: {NAMES.name}:{number}: {operation} is there twice")
        words = ""
        if rest.startswith("- "):
            rest, words = "", rest[2:]
        elif ": " in rest:
            rest, _, words = rest.partition(": ")
        names[operation] = ([n.strip() for n in rest.split(",") if n.strip()], words)
        if not names[operation][0] and not words:
            sys.exit(f"c_api: {NAMES.name}:{number}: {operation} has neither a name in C nor a reason")
    return names


def tests_of(api, root=ROOT):
    """function -> tests of tests/capi that call it, of one file the name that ctest has."""
    calls = {}
    for path in sorted((root / "tests/capi").glob("*_test.c*")):
        text = path.read_text(encoding="utf-8")
        for name in set(re.findall(r"\b(weft_\w+)\(", text)):
            calls.setdefault(name, []).append(f"capi/{path.stem.removesuffix('_test')}")
    return {f["name"]: calls.get(f["name"], []) for f in api["functions"]}


def known_names(api):
    return {f["name"] for f in api["functions"]} | {s["name"] for s in api["structs"]} | set(api["types"]) | set(api["constants"])


def is_known(name, known):
    return name.lstrip("~").partition(".")[0] in known


def table(api, names, tests):
    lines = ["# The C API, function by function", "",
             f"Made by `{COMMAND}`; the test `house/c_api` compares it with the headers.", "",
             "## Operations of C++ and their names in C", "", "| C++ | C |", "|---|---|"]
    known = known_names(api)
    for operation, (called, words) in names.items():
        cell = ", ".join(f"`{name.lstrip('~')}`" + ("" if is_known(name, known) else " (not yet)") for name in called)
        lines.append(f"| `{operation}` | {cell}{': ' if cell and words else ''}{words if cell else '– ' + words} |")
    for library, folder in LIBRARIES.items():
        functions = functions_of(api, library)
        lines += ["", f"## Functions of lib{library}: {len(functions)}", "", "Each is also in the test of bad arguments.", "",
                  "| function | header | tests |", "|---|---|---|"]
        for f in sorted(functions, key=lambda f: (f["header"], f["line"])):
            header = f["header"].removeprefix("weft/")
            lines.append(f"| `{f['name']}` | {header} | {', '.join(tests[f['name']][:3])} |")
    return "\n".join(lines) + "\n"


def problems(api, names, tests, table_text, exports):
    """The faults, as lines."""
    wrong = []
    known = known_names(api)
    for operation, (called, _) in names.items():
        wrong += [f"{NAMES.name}: {operation} is called {c} in C, which no header declares" for c in called
                  if not c.startswith("~") and not is_known(c, known)]
    wrong += [f"{f['name']} ({f['header']}) is called by no test of tests/capi" for f in api["functions"] if not tests[f["name"]]]
    for library, exported in exports.items():
        declared = {f["name"] for f in functions_of(api, library)}
        wrong += [f"src/{library}.exports lacks {name}" for name in sorted(declared - exported)]
        wrong += [f"src/{library}.exports has {name}, which no header declares" for name in sorted(exported - declared)]
    if table_text != table(api, names, tests):
        wrong.append(f"{TABLE.relative_to(ROOT)} is not what the headers say: {COMMAND}")
    return wrong


def cxx_operations():
    """Public functions and methods of CXX_HEADERS, or None without clang."""
    sys.path.insert(0, str(ROOT / "tools"))
    import exported_symbols
    if exported_symbols.clang() is None:
        return None
    include = ROOT / "include"
    headers = sorted(p.relative_to(include).as_posix() for pattern in CXX_HEADERS for p in (include / "weft").glob(pattern))
    source = "".join(f'#include "{header}"\n' for header in headers)
    dump = exported_symbols.run(exported_symbols.clang(), "-std=c++20", "-I", str(include), "-x", "c++", "-fsyntax-only", "-Xclang",
                                "-ast-dump=json", "-Xclang", "-ast-dump-filter=weft", "-", input=source)
    found, file = set(), [""]

    def see(place):
        file[0] = place.get("spellingLoc", place).get("file", file[0])

    def walk(path, node, hidden):
        kind, name = node.get("kind"), node.get("name", "")
        see(node.get("loc", {}))
        here = file[0]
        for end in ("begin", "end"):
            see(node.get("range", {}).get(end, {}))
        if kind in ("NamespaceDecl", "CXXRecordDecl", "LinkageSpecDecl", "ClassTemplateDecl"):
            if node.get("isImplicit") or name == "detail" or (hidden and kind != "NamespaceDecl"):
                return
            inside = path + [name] if name and kind != "ClassTemplateDecl" else path
            hidden = node.get("tagUsed") == "class"
            for inner in node.get("inner", []):
                if inner.get("kind") == "AccessSpecDecl":
                    hidden = inner["access"] != "public"
                else:
                    walk(inside, inner, hidden)
        elif kind in ("FunctionDecl", "CXXMethodDecl", "FunctionTemplateDecl"):
            if not hidden and not node.get("isImplicit") and not name.startswith("operator") and any(here.endswith("/" + h) for h in headers):
                found.add("::".join(path[1:] + [name]))

    for tree in exported_symbols.trees(dump):
        walk([], tree, False)
    return found


def unlisted(operations, names):
    whole = {operation[:-3] for operation in names if operation.endswith("::*")}
    lines = [f"{NAMES.name} lacks {o}: what is it called in C?" for o in sorted(operations)
             if o not in names and o.rpartition("::")[0] not in whole]
    return lines + [f"{NAMES.name} has {o}, which no public header of C++ declares" for o in names
                    if o not in operations and not (o.endswith("::*") and any(x.startswith(o[:-1]) for x in operations))]


def exports_of(library):
    path = ROOT / "src" / f"{library}.exports"
    return {line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("weft_")} if path.exists() else set()


def python_api():
    """The module in this folder that makes the Python binding; it uses this one."""
    sys.modules.setdefault("c_api", sys.modules[__name__])
    sys.path.insert(0, str(ROOT / "tools"))
    import python_api as module
    return module


def check():
    api = read_headers()
    names = read_names(NAMES.read_text(encoding="utf-8"))
    text = TABLE.read_text(encoding="utf-8") if TABLE.exists() else ""
    lines = problems(api, names, tests_of(api), text, {library: exports_of(library) for library in LIBRARIES})
    operations = cxx_operations()
    if operations is not None:
        lines += unlisted(operations, names)
    python = python_api()
    for library, file in python.FILES.items():
        if not file.exists() or file.read_text(encoding="utf-8") != python.text(library):
            lines.append(f"{file.relative_to(ROOT)} is not what the headers say: {COMMAND}")
    missing = sum(not is_known(name, known_names(api)) for called, _ in names.values() for name in called)
    print("\n".join(lines) or f"{len(api['functions'])} functions in C, {len(names)} lines of names, {missing} of them not there yet"
          + (" (without clang, operations of C++ are not looked for)" if operations is None else ""))
    return 1 if lines else 0


def write():
    sys.path.insert(0, str(ROOT / "tools"))
    import exported_symbols
    api = read_headers()
    TABLE.write_text(table(api, read_names(NAMES.read_text(encoding="utf-8")), tests_of(api)), encoding="utf-8")
    for library, file in python_api().FILES.items():
        file.write_text(python_api().text(library), encoding="utf-8")
    for library in LIBRARIES:
        path = exported_symbols.list_of(library)
        parts = exported_symbols.read_list(path.read_text(encoding="utf-8"))
        declared = {f["name"] for f in functions_of(api, library)}
        parts["public"] = {name for name in parts["public"] if not name.startswith("weft_")} | declared
        path.write_text(exported_symbols.write_list(parts), encoding="utf-8")


# ---- bad arguments ----

def no_handle(kind):
    return f"is no live {kind}: it is destroyed, or another libweft made it"



class Cases:
    """The calls with bad arguments, as C. `good` has the names that tests/capi/bad_arguments.h defines."""

    def __init__(self, api, good):
        self.api, self.good = api, good
        self.structs = {s["name"]: s for s in api["structs"]}
        self.lines, self.count = [], 0

    def type_of(self, name):
        return self.api["types"].get(name, "")

    def good_value(self, function, param):
        """A C expression that function accepts for param. None if there is none."""
        kind = param["type"]
        if f"good_{function['name']}_{param['name']}" in self.good:
            return f"good_{function['name']}_{param['name']}"
        if kind == "weft_error*":
            return "&error"
        if re.fullmatch(NULLABLE_TYPES, kind) or self.nullable(function, param):
            return "NULL"
        if self.is_output(kind):
            return "(memset(&room, 0, sizeof room), (void*)&room)"
        for name in (f"good_{self.key(kind)}", f"good_{param['name']}"):
            if name in self.good:
                return name
        numbers = ("int32_t", "int64_t", "size_t", "uint64_t", "double", "float", "bool", "uint32_t")
        return "0" if kind in numbers or self.type_of(kind) in numbers else None

    def is_output(self, kind):
        """Memory that a function writes to, of any size up to that of `room`; not structs that state their
        own size."""
        if kind.startswith("const ") and not kind.endswith("**") or not kind.endswith("*"):
            return False
        base = kind[:-1]
        if struct := self.structs.get(base):
            return all(field["name"] != "struct_size" for field in struct["fields"])
        return base.endswith("*") and not base.endswith("const*") or self.type_of(base) == "int32_t" or \
            base in ("bool", "char", "int32_t", "int64_t", "double", "float", "size_t", "uint64_t")

    @staticmethod
    def key(kind):
        """"const weft_buffer*" -> "weft_buffer"."""
        kind = kind.removeprefix("const ").removeprefix("struct ")
        return kind[:-1] if kind.endswith("*") and not kind.endswith("**") and kind.startswith(("weft_", "DL")) else "no_such_type"

    def nullable(self, function, param):
        return (f"null_{function['name']}_{param['name']}" in self.good or
                (param["type"] == "void*" and param["name"] in NULLABLE_NAMES) or
                (param["name"] == "release" and "(*)" in param["type"]))

    def call(self, function, changed=None, error=None):
        values = []
        for param in function["params"]:
            if changed and param["name"] == changed[0]:
                values.append(changed[1])
            elif error and param["type"] == "weft_error*":
                values.append(error)
            else:
                values.append(self.good_value(function, param))
        return f"{function['name']}({', '.join(values)})"

    def refuses(self, function, param, value, text):
        self.lines.append(f"  REFUSES({self.call(function, (param['name'], value))}, {json.dumps(text)});")
        self.count += 1

    def handle(self, kind):
        """"const weft_group*" -> "weft_group"; None: a pointer to something else."""
        base = kind.removeprefix("const ").removesuffix("*")
        return base if kind.endswith("*") and base.startswith("weft_") and self.type_of(base) == "handle" else None

    @staticmethod
    def other_handle(handle):
        """A kind of handle that is another one."""
        return "weft_store" if handle != "weft_store" else "weft_context"

    def of_handle(self, function, param, handle):
        """A good handle of another kind, and memory that is no handle."""
        name, what, other = function["name"], param["name"], self.other_handle(handle)
        self.refuses(function, param, f"({handle}*)(void*)good_{other}", f"{name}: {what} is a {other}; expected a {handle}")
        self.refuses(function, param, f"({handle}*)(void*)no_handle", f"{name}: {what} {no_handle(handle)}")

    def number(self, function, param):
        return (param["type"] in ("int32_t", "int64_t") or self.type_of(param["type"]) == "int32_t") and \
            f"any_{function['name']}_{param['name']}" not in self.good

    def of(self, function):
        """The cases of one function, as the C function that runs them."""
        name, params = function["name"], function["params"]
        self.lines, self.count = [f"static void bad_{name}(void) {{"], 0
        if function["returns"] != "weft_status":
            return self.plain(function)
        unknown = [p for p in params if self.good_value(function, p) is None]
        if unknown:
            self.lines += [f'  failed(__FILE__, __LINE__, "{name}: tests/capi/bad_arguments.h does not say what is good for {p["name"]} ({p["type"]}): '
                           f'expected good_{self.key(p["type"])}, good_{name}_{p["name"]} or good_{p["name"]}");' for p in unknown]
            return self.lines + ["}"]
        for p in params:
            kind, what = p["type"], p["name"]
            pointer = kind.endswith("*") or "(*)" in kind or self.type_of(kind) == "function"
            if pointer and kind != "weft_error*" and not re.fullmatch(NULLABLE_TYPES, kind) and not self.nullable(function, p):
                self.refuses(function, p, "NULL", f"{name}: {what} is NULL")
            if handle := self.handle(kind):
                self.of_handle(function, p, handle)
            elif (handles := kind.removesuffix(" const*")) != kind and (handle := self.handle(handles)):
                self.lines += ["  {", f"    {handle}* const bad[] = {{({handle}*)(void*)no_handle}};"]
                self.refuses(function, p, "bad", f"{what}[0] {no_handle(handle)}")
                self.lines.append("  }")
            struct = self.structs.get(self.key(kind)) if kind.endswith("*") else None
            if struct and kind != "weft_error*" and not self.is_output(kind):
                self.of_struct(function, p, struct)
            elif self.number(function, p):
                self.refuses(function, p, "-7", f"{what} is -7" if what.endswith("_ns") else "-7")
                if self.type_of(kind) == "int32_t":
                    self.refuses(function, p, "1000000", "1000000")
        if any(p["type"] == "weft_error*" for p in params):
            # An error without its initialiser: the function must not write to it, and must do nothing.
            self.lines += ["  memset(&raw_error, 0, sizeof raw_error);",
                           f"  CHECK({self.call(function, None, '&raw_error')} == WEFT_BAD_ARGUMENT && raw_error.text[0] == 0);"]
            self.count += 1
        if self.count == 0:
            self.lines.append(f'  failed(__FILE__, __LINE__, "{name} has no case");')
        return self.lines + ["}"]

    def of_struct(self, function, param, struct):
        what, kind = param["name"], struct["name"]
        fields = {f["name"]: f["type"] for f in struct["fields"]}
        value = f"good_{kind}" if f"good_{kind}" in self.good else None
        begin = f"    {kind} bad;\n    memset(&bad, 0, sizeof bad);"
        copy = f"    bad = *{value};" if value else None
        if "struct_size" in fields:
            self.lines += ["  {", begin]
            self.refuses(function, param, "&bad", "struct_size is 0")
            self.lines.append("    bad.struct_size = 1u << 20;")
            self.refuses(function, param, "&bad", "struct_size is 1048576")
            self.lines.append("  }")
        for field, handle in fields.items():
            if value and (handle := self.handle(handle)):
                self.lines += ["  {", begin, copy, f"    bad.{field} = (void*)no_handle;"]
                self.refuses(function, param, "&bad", f"{field} {no_handle(handle)}")
                self.lines.append("  }")
        if kind == "weft_buffer":
            for field, wrong in (("count", -1), ("dtype", -1), ("dtype", 99), ("device", -3)):
                self.lines += ["  {", begin, copy, f"    bad.{field} = {wrong};"]
                self.refuses(function, param, "&bad", f"{what}->{field} is {wrong}")
                self.lines.append("  }")
        if kind == "weft_blocks":
            for field, wrong in (("size", -1), ("counts", "NULL")):
                self.lines += ["  {", begin, copy, f"    bad.{field} = {wrong};"]
                self.refuses(function, param, "&bad", f"{what}->{field} is {wrong}")
                self.lines.append("  }")

    def plain(self, function):
        """A function that returns no status accepts anything: a name, a size, nothing."""
        name, params = function["name"], function["params"]
        if not params:
            return [f"static void bad_{name}(void) {{ (void){name}(); }}"]
        if len(params) == 1 and (handle := self.handle(params[0]["type"])):
            return self.plain_of_handle(function, handle)
        for value in ("-1", "INT32_MAX", "NULL"):
            values = []
            for p in params:
                pointer = p["type"].endswith("*")
                values.append("NULL" if pointer else f"({p['type']})-7" if value == "NULL" else f"({p['type']}){value}")
            call = f"{name}({', '.join(values)})"
            self.lines.append(f"  CHECK({call} != NULL);" if function["returns"] == "const char*" else f"  {'' if function['returns'] == 'void' else '(void)'}{call};")
        return self.lines + ["}"]


    def plain_of_handle(self, function, handle):
        """A function that destroys a handle ignores an invalid address, and reports it on stderr; a
        query answers as for NULL."""
        name, what, other = function["name"], function["params"][0]["name"], self.other_handle(handle)
        call = "(void)" if function["returns"] != "void" else ""
        self.lines.append(f"  {call}{name}(NULL);")
        for wrong, words in ((f"good_{other}", f"is a {other}; expected a {handle}"), ("no_handle", no_handle(handle))):
            value = f"({handle}*)(void*){wrong}"
            if function["returns"] == "void":
                self.lines.append(f'  SAYS({name}({value}), "weft error: {name}: {what} {words}; nothing is destroyed\\n");')
            else:
                zero = '[0] == 0' if function["returns"] == "const char*" else " == 0"
                self.lines.append(f"  CHECK({name}({value}){zero});")
        return self.lines + ["}"]

    def gone(self, functions):
        """Handles that are destroyed: each is refused by a function that takes it first, and cannot be
        destroyed again."""
        self.lines = ["static void gone(void) {"]
        for destroy in functions:
            handle = self.handle(destroy["params"][0]["type"]) if destroy["name"].endswith("_destroy") else None
            if handle is None or f"good_{handle}" not in self.good:
                continue
            words = no_handle(handle)
            user = next((f for f in functions if f["returns"] == "weft_status" and self.handle(f["params"][0]["type"]) == handle), None)
            if user:
                self.refuses(user, user["params"][0], f"good_{handle}", f"{user['name']}: {user['params'][0]['name']} {words}")
            self.lines.append(f'  SAYS({destroy["name"]}(good_{handle}), "weft error: {destroy["name"]}: {destroy["params"][0]["name"]} {words}; '
                              'nothing is destroyed\\n");')
        return self.lines + ["}"]


def bad_arguments(api, library, setup):
    good = set(re.findall(r"\b((?:good|any|null)_\w+)", setup))
    cases = Cases(api, good)
    functions = functions_of(api, library)
    lines = [f"/* Made by tools/c_api.py from the headers of lib{library}: every function, every kind of bad argument. */",
             f'#define LIBRARY_{library} 1', '#include "bad_arguments.h"', ""]
    for f in functions:
        lines += cases.of(f) + [""]
    lines += cases.gone(functions) + [""]
    lines += ["int main(int argc, char** argv) {", "  static const named_test tests[] = {"]
    lines += [f'      {{"{f["name"]}", bad_{f["name"]}}},' for f in functions]
    lines += ["  };", "  make_good();", "  const int status = run_tests(tests, LENGTH(tests), argc, argv);", "  destroy_good();", "  gone();", "  return status;", "}"]
    return "\n".join(lines) + "\n"


# ---- tests of this program ----

def self_test():
    text = """
/* A header. */
#ifdef __cplusplus
extern "C" {
#endif
#define WEFT_A_INIT \\
  { 1, 2 }
typedef int32_t weft_kind;
enum { WEFT_ONE = 1, WEFT_TWO, WEFT_FIVE = 5 };
typedef struct weft_thing weft_thing;
typedef struct weft_pair {
  weft_kind first, *second; /* both; or none */
  int32_t ranks[16];
  void (*log)(void* data, int32_t level);
} weft_pair;
/* Makes
 * one. */
weft_status weft_thing_create(const weft_pair* pair, void (*release)(void* data), weft_thing** thing,
                              weft_error* error);
void weft_thing_destroy(weft_thing* thing);
const char* weft_kind_name(weft_kind kind);
"""
    import tempfile
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        (root / "include/weft/c").mkdir(parents=True)
        (root / "include/weft/c/thing.h").write_text(text, encoding="utf-8")
        api = read_headers(root)
    create, destroy, name = api["functions"]
    assert create["name"] == "weft_thing_create" and create["comment"] == "Makes one.", create
    assert [p["type"] for p in create["params"]] == ["const weft_pair*", "void (*)(void* data)", "weft_thing**", "weft_error*"], create
    assert destroy["returns"] == "void" and name["returns"] == "const char*" and name["params"] == [{"name": "kind", "type": "weft_kind"}]
    assert api["constants"] == {"WEFT_ONE": 1, "WEFT_TWO": 2, "WEFT_FIVE": 5} and api["types"]["weft_thing"] == "handle"
    fields = {f["name"]: f["type"] for f in api["structs"][0]["fields"]}
    assert fields == {"first": "weft_kind", "second": "weft_kind*", "ranks": "int32_t[16]", "log": "void (*)(void* data, int32_t level)"}, fields
    names = read_names("Thing::make  weft_thing_create\nThing::gone weft_thing_leave  # not there\nThing::other  - has no use\n")
    assert names["Thing::other"] == ([], "has no use")
    tests = {"weft_thing_create": ["capi/thing"], "weft_thing_destroy": ["capi/thing"], "weft_kind_name": []}
    lines = problems(api, names, tests, table(api, names, tests), {"weft": {"weft_thing_create", "weft_kind_name", "weft_old"}})
    assert len(lines) == 4 and "weft_thing_leave in C, which no header declares" in lines[0] and "weft_kind_name" in lines[1], lines
    assert "lacks weft_thing_destroy" in lines[2] and "weft_old, which no header declares" in lines[3], lines
    assert any("is not what the headers say" in line for line in problems(api, names, tests, "", {}))
    assert unlisted({"Thing::make", "Thing::b"}, {"Thing::*": ([], "x")}) == []
    assert unlisted({"Thing::make"}, {}) == ["c_api_names.txt lacks Thing::make: what is it called in C?"]
    assert "no public header" in unlisted(set(), {"Thing::make": ([], "x")})[0]
    program = bad_arguments(api, "weft", "static weft_pair* good_weft_pair;")
    assert 'REFUSES(weft_thing_create(NULL, NULL, (memset(&room' in program and '"weft_thing_create: pair is NULL"' in program, program
    assert 'CHECK(weft_kind_name((weft_kind)-1) != NULL);' in program and "weft_thing_destroy(NULL);" in program, program
    program = bad_arguments(api, "weft", "")
    assert "does not say what is good for pair (const weft_pair*): expected good_weft_pair" in program, program
    import c_api_calls
    program = c_api_calls.calls(api, "weft", "void fill(Call& c, weft_pair& p);\n")
    for line in ('a.pair = c.pointer<weft_pair>("pair");', 'a.thing = c.out_handle<weft_thing>("weft_thing", "thing");',
                 'a.thing = c.taken<weft_thing>("weft_thing");', 'c.choice<weft_kind>({1, 2, 5}, "kind")', '{"weft_thing_create", call_weft_thing_create, true},'):
        assert line in program, program
    try:
        c_api_calls.calls(api, "weft", "")
        assert False
    except ValueError as e:
        assert "weft_pair.second is a weft_kind*" in str(e), e


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    for option in ("json", "check", "write", "self-test"):
        what.add_argument(f"--{option}", action="store_true")
    for option in ("bad-arguments", "calls"):
        what.add_argument(f"--{option}", nargs=2, metavar=("LIBRARY", "FILE"))
    given = parser.parse_args()
    if given.json:
        print(json.dumps(read_headers(), indent=1))
    elif given.check:
        sys.exit(check())
    elif given.write:
        write()
    elif given.self_test:
        self_test()
    elif given.calls:
        library, file = given.calls
        import c_api_calls
        harness = (ROOT / c_api_calls.HARNESS).read_text(encoding="utf-8")
        pathlib.Path(file).write_text(c_api_calls.calls(read_headers(), library, harness), encoding="utf-8")
    else:
        library, file = given.bad_arguments
        setup = (ROOT / "tests/capi/bad_arguments.h").read_text(encoding="utf-8")
        pathlib.Path(file).write_text(bad_arguments(read_headers(), library, setup), encoding="utf-8")


if __name__ == "__main__":
    main()
