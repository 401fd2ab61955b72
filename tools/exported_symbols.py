#!/usr/bin/env python3
"""Which symbols libweft and libweft_train export: maintains the lists src/<library>.exports, by which the
installed libraries are linked.

    exported_symbols.py --check BUILD     compares the lists with the public headers and with the libraries of a build
    exported_symbols.py --write BUILD     writes the lists so
    exported_symbols.py --against-release fails if a symbol of the last release is gone and the soname is unchanged
    exported_symbols.py --release         writes src/released/<library>.exports, the lists of a release, from today's
    exported_symbols.py --self-test

A list has two parts. [public]: the symbols that public headers declare and the library defines (clang lists
the declarations: functions that are no templates and not inline, variables; of private members only those
that a derived class or an inline function may need), and the vtables and type information of public classes.
[own]: the further symbols that weft's own tool, plug-ins and benchmarks need; they belong to one version of
weft, and nobody else may use them. A build's own library has all symbols, for its tests.
"""
import argparse
import collections
import contextlib
import io
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIBRARIES = ["weft", "weft_train"]  # each library may need the earlier ones
COMMAND = "tools/exported_symbols.py --write BUILD"
# bench/CMakeLists.txt does not install them.
STAY_IN_THE_BUILD = {"paths_bench", "reduce_bench", "transformer_bench"}


def run(*command, **more):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **more).stdout


def clang():
    return next((tool for tool in ("clang++-14", "clang++") if shutil.which(tool)), None)


class Declared:
    """The declarations of public headers in namespace weft and in C."""

    def __init__(self, dump):
        self.functions = set()  # mangled, of functions and variables
        self.classes = set()    # as c++filt writes them
        private, used, names = {}, set(), set()
        for tree in dump:
            self._read([], tree, False, private)
            self._uses(tree, used, names)
        overloads = collections.Counter(name for _, name in private.values())
        self.functions |= {mangled for mangled, (ident, name) in private.items()
                           if ident in used or name[-1] in names or (overloads[name] > 1 and "overloads" in names)}

    def _read(self, path, node, hidden, private):
        kind, name = node.get("kind"), node.get("name", "")
        if kind in ("NamespaceDecl", "CXXRecordDecl", "LinkageSpecDecl"):
            if kind == "CXXRecordDecl":
                if node.get("isImplicit"):
                    return
                if node.get("completeDefinition"):
                    self.classes.add("::".join(path + [name]))
            hidden = node.get("tagUsed") == "class"
            for inner in node.get("inner", []):
                if inner.get("kind") == "AccessSpecDecl":
                    hidden = inner["access"] == "private"
                elif inner.get("kind") == "FriendDecl":  # operators that are declared nowhere else
                    self.functions |= {plain(f["mangledName"]) for f in inner.get("inner", [])
                                       if f.get("name", "").startswith("operator") and "mangledName" in f}
                else:
                    self._read(path + [name] if name else path, inner, hidden, private)
        elif "mangledName" in node and not node.get("isImplicit"):
            special = kind in ("CXXConstructorDecl", "CXXDestructorDecl") or node.get("virtual") or self._overrides(node)
            if hidden and not special:
                private[plain(node["mangledName"])] = (node["id"], (*path, name))
            else:
                self.functions.add(plain(node["mangledName"]))

    @staticmethod
    def _overrides(node):
        return any(inner.get("kind") in ("OverrideAttr", "FinalAttr", "OverridesAttr") for inner in node.get("inner", []))

    def _uses(self, node, used, names):
        """Members and functions that the bodies of inline functions and templates refer to."""
        used.add(node.get("referencedMemberDecl"))
        used.add(node.get("referencedDecl", {}).get("id"))
        if node.get("kind") == "UnresolvedMemberExpr":
            names.add("overloads")  # one of several of a name: the dump does not say which name
        names.add(node.get("member"))
        names.add(node.get("name") if node.get("kind") == "UnresolvedLookupExpr" else None)
        for inner in node.get("inner", []):
            self._uses(inner, used, names)


def plain(symbol):
    """One name for the several symbols of a constructor or destructor, and for a thunk and its function."""
    symbol = re.sub(r"^_ZT(?:h|v|c)[n_\d]*?_(?=N)", "_Z", symbol)
    return re.sub(r"([CD])[0-5]((?:B\w+?)?E)", r"\1X\2", symbol)


def declared_in(include):
    # weft_mpi.h is left out, because its functions are inline.
    headers = sorted(p.relative_to(include).as_posix() for p in include.rglob("*.h*") if p.name != "weft_mpi.h")
    source = "".join(f'#include "{header}"\n' for header in headers)
    text = run(clang(), "-std=c++20", "-I", str(include), "-x", "c++", "-fsyntax-only", "-Xclang", "-ast-dump=json", "-Xclang",
               "-ast-dump-filter=weft", "-", input=source)
    return Declared(trees(text))


def trees(text):
    decoder, at = json.JSONDecoder(), 0
    while (match := re.compile(r"\S").search(text, at)) is not None:
        tree, at = decoder.raw_decode(text, match.start())
        yield tree


def symbols(*command):
    """name -> letter of nm."""
    found = {}
    for line in run("nm", "-D", *command).splitlines():
        *_, letter, name = line.split()
        if letter != "A":  # the versions themselves
            found[name.split("@")[0]] = letter
    return found


def demangle(names):
    names = sorted(names)
    return dict(zip(names, run("c++filt", input="\n".join(names)).splitlines()))


def public_symbols(declared, defined):
    public = {name for name, letter in defined.items() if letter in "TDBR" and plain(name) in declared.functions}
    for name, words in demangle(n for n in defined if re.match(r"_ZT[VIST]", n)).items():
        match = re.match(r"(?:vtable|typeinfo|typeinfo name|VTT) for (.*)$", words)
        if match and match[1] in declared.classes:
            public.add(name)
    return public


def own_users(build):
    """weft's programs and plug-ins in a build that are installed."""
    users = [build / "bin/weft", *sorted((build / "lib/weft").glob("libweft_backend_*.so"))]
    for benchmarks in ("*_bench", "*_collectives", "mpi_collectives_*[a-z]", "mpi_experts_*[a-z]"):
        users += sorted(u for u in (build / "bin").glob(benchmarks) if u.name not in STAY_IN_THE_BUILD)
    return [u for u in users if u.exists() and not u.name.endswith(".root")]


def soname(library):
    return re.search(r"SONAME.*\[(.*)\]", run("readelf", "-d", str(library)))[1]


def list_of(name, root=ROOT):
    return root / "src" / f"{name}.exports"


def read_list(text):
    parts, part = {"soname": "", "public": set(), "own": set()}, None
    for line in text.splitlines():
        line = line.split("#")[0].strip()
        if line.startswith("soname "):
            parts["soname"] = line.split()[1]
        elif line in ("[public]", "[own]"):
            part = line[1:-1]
        elif line:
            parts[part].add(line)
    return parts


def write_list(parts):
    head = "# What the library exports, for the linker. Made by tools/exported_symbols.py, which says what the parts are.\n"
    return head + f"soname {parts['soname']}\n" + "".join(
        f"[{part}]\n" + "".join(f"{name}\n" for name in sorted(parts[part])) for part in ("public", "own"))


def wanted(build, declared):
    """The correct lists, from headers and from the symbols that a build's own libraries define and their
    users need."""
    defined = {name: symbols("--defined-only", str(build / f"lib/lib{name}.so")) for name in LIBRARIES if (build / f"lib/lib{name}.so").exists()}
    lists = {}
    for name in defined:
        public = public_symbols(declared, defined[name])
        lists[name] = {"soname": soname(build / f"lib/lib{name}.so"), "public": public, "own": set()}
    for user in own_users(build) + [build / f"lib/lib{name}.so" for name in defined]:
        needed = {n for n, letter in symbols("--undefined-only", str(user)).items()}
        for name in defined:
            if user.name != f"lib{name}.so":
                lists[name]["own"] |= (needed & set(defined[name])) - lists[name]["public"]
    return lists


def private_needs(build, lists):
    """The symbols that the examples need and no user has, as lines."""
    lines = []
    for example in sorted(p.name for p in (ROOT / "examples").iterdir() if (build / "bin" / p.name).is_file()):
        needed = set(symbols("--undefined-only", str(build / "bin" / example)))
        for name, want in lists.items():
            hidden = (needed & set(symbols("--defined-only", str(build / f"lib/lib{name}.so")))) - want["public"]
            lines += told(f"needed by examples/{example}, not declared in a public header", hidden, demangle(hidden))
    return lines


def told(words, names, demangled):
    return [f"  {words}: {demangled[n]}  ({n})" for n in sorted(names, key=lambda n: demangled[n])]


def compare(name, checked_in, want, exported):
    """Returns the faults of a list, as lines."""
    wrong = []
    if checked_in["soname"] != want["soname"]:
        wrong.append(f"  the soname is {want['soname']}, the list says {checked_in['soname'] or 'nothing'}")
    every = checked_in["public"] | checked_in["own"]
    words = demangle(every | want["public"] | want["own"] | exported)
    wrong += told("declared in a public header, not in the list", want["public"] - checked_in["public"], words)
    wrong += told("in the list, not declared in a public header or not defined any more", checked_in["public"] - want["public"], words)
    wrong += told("needed by weft's own programs, not in the list", want["own"] - checked_in["own"], words)
    lines = [f"src/{name}.exports and weft differ. If the change is meant: {COMMAND}"] + wrong if wrong else []
    if exported != every:
        lines.append(f"the installed lib{name}.so does not export what src/{name}.exports says (is it built?)")
        lines += told("exported, not in the list", exported - every, words) + told("in the list, not exported", every - exported, words)
    return lines


def check(build):
    if clang() is None:
        print("skipped: clang is not installed, which reads the public headers")
        return 0
    lists = wanted(build, declared_in(ROOT / "include"))
    lines = private_needs(build, lists)
    failed = bool(lines)
    print("\n".join(lines), end="\n" if lines else "")
    for name, want in lists.items():
        checked_in = read_list(list_of(name).read_text(encoding="utf-8"))
        exported = set(symbols("--defined-only", str(build / f"lib/installed/lib{name}.so")))
        lines = compare(name, checked_in, want, exported)
        failed |= bool(lines)
        print("\n".join(lines) or f"lib{name}: {len(checked_in['public'])} public symbols and {len(checked_in['own'])} of weft's own")
    return 1 if failed else 0


def write(build):
    if clang() is None:
        sys.exit("exported_symbols: clang is not installed, which reads the public headers")
    missing = [f for f in ("bin/weft", "bin/collectives_bench", "bin/facade_bench", "bin/gradients_bench", "lib/weft/libweft_backend_gloo.so",
                           "lib/weft/libweft_backend_nccl.so", "lib/weft/libweft_backend_mpi-openmpi.so", "lib/libweft_train.so")
               if not (build / f).exists()]
    if missing:
        sys.exit(f"exported_symbols: {build} lacks {', '.join(missing)}, whose needs are a part of the lists; build weft_cli, the benchmarks "
                 "and the plug-ins")
    for name, want in wanted(build, declared_in(ROOT / "include")).items():
        list_of(name).write_text(write_list(want), encoding="utf-8")
        print(f"src/{name}.exports: {len(want['public'])} public, {len(want['own'])} own")


def gone(name, old, new):
    """Lines for public symbols of an older list that a newer list with the same soname does not have."""
    lost = old["public"] - new["public"]
    if not lost or old["soname"] != new["soname"]:
        return []
    return [f"src/{name}.exports: symbols of the last release are gone, and the soname is still {new['soname']}. Keep them, or raise the "
            "version in include/weft/c/version.h (docs/versioning.md)"] + told("gone", lost, demangle(lost))


def released_list(name, root=ROOT):
    return root / "src/released" / f"{name}.exports"


def version(root=ROOT):
    return ".".join(re.findall(r"^#define WEFT_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)$", (root / "include/weft/c/version.h").read_text(encoding="utf-8"), re.M))


def release(root=ROOT):
    for name in LIBRARIES:
        if list_of(name, root).exists():
            parts = read_list(list_of(name, root).read_text(encoding="utf-8"))
            head = f"# What weft {version(root)} promised to programs that were linked to it. Made by tools/exported_symbols.py --release.\n"
            released_list(name, root).parent.mkdir(exist_ok=True)
            released_list(name, root).write_text(head + f"soname {parts['soname']}\n[public]\n" + "".join(f"{n}\n" for n in sorted(parts["public"])),
                                                 encoding="utf-8")


def against_release(root=ROOT):
    lines, last = [], None
    for name in LIBRARIES:
        if released_list(name, root).exists():
            text = released_list(name, root).read_text(encoding="utf-8")
            last = re.match(r"# What weft (\S+)", text)[1]
            lines += gone(name, read_list(text), read_list(list_of(name, root).read_text(encoding="utf-8")))
    if last is None:
        lines.append("src/released has no list; expected that of the last release (docs/versioning.md)")
    print("\n".join(lines) or f"every symbol of {last} is still there, or the soname is another")
    return 1 if lines else 0


def self_test_of_releases(one):
    """Tests --release and --against-release in a separate tree."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        (root / "src").mkdir()
        (root / "include/weft/c").mkdir(parents=True)
        (root / "include/weft/c/version.h").write_text(
            "#define WEFT_VERSION_MAJOR 0\n#define WEFT_VERSION_MINOR 3\n#define WEFT_VERSION_PATCH 1\n", encoding="utf-8")

        def write_lists(lists):
            for name, parts in lists.items():
                list_of(name, root).write_text(write_list(parts), encoding="utf-8")

        def compared(lists):
            write_lists(lists)
            words = io.StringIO()
            with contextlib.redirect_stdout(words):
                status = against_release(root)
            return status, words.getvalue()

        fewer = {**one, "public": one["public"] - {"_ZN4weft1bEv"}}
        assert compared({"weft": one}) == (1, "src/released has no list; expected that of the last release (docs/versioning.md)\n")
        write_lists({"weft": one})
        release(root)
        assert compared({"weft": one}) == (0, "every symbol of 0.3.1 is still there, or the soname is another\n")
        status, words = compared({"weft": fewer})
        assert status == 1 and "the soname is still libweft.so.1" in words and "gone: weft::b()" in words, words
        assert compared({"weft": {**fewer, "soname": "libweft.so.2"}})[0] == 0
        assert compared({"weft": one, "weft_train": one})[0] == 0  # a library that the release did not have
        # weft's own symbols are promised to no other user
        assert compared({"weft": {**one, "own": set()}})[0] == 0


def self_test():
    one = {"soname": "libweft.so.1", "public": {"_ZN4weft1aEv", "_ZN4weft1bEv"}, "own": {"_ZN4weft1cEv"}}
    assert read_list(write_list(one)) == one
    fewer = {**one, "public": {"_ZN4weft1aEv"}}
    lines = gone("weft", one, fewer)
    assert len(lines) == 2 and "the soname is still libweft.so.1" in lines[0] and "weft::b()" in lines[1], lines
    assert gone("weft", one, {**fewer, "soname": "libweft.so.2"}) == [] and gone("weft", fewer, one) == []
    assert compare("weft", one, one, one["public"] | one["own"]) == []
    lines = compare("weft", fewer, one, fewer["public"] | {"_ZN4weft1cEv", "_ZN3fmt1xEv"})
    assert COMMAND in lines[0] and any("not in the list: weft::b()" in line for line in lines), lines
    assert any("exported, not in the list: fmt::x()" in line for line in lines), lines
    self_test_of_releases(one)
    assert plain("_ZN4weft5ErrorC2ERKS0_") == plain("_ZN4weft5ErrorC1ERKS0_") and plain("_ZThn16_N4weft1A1fEv") == "_ZN4weft1A1fEv"
    if clang() is None:
        print("skipped: clang is not installed, which reads the public headers")
        return
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "a.hpp").write_text("""
namespace weft {
int given(int);
class A {
 public:
  A();
  virtual ~A();
  void open();
  void inlined() { helper(); }
  template <class T> void generic(T t) { dependent(t); by_template(t); }
  friend bool operator==(const A&, const A&);
 private:
  virtual void step();
  void helper();
  template <class T> void dependent(T);
  void by_template(int);
  void by_template(long);
  void of_sources_alone();
};
}
extern "C" int weft_c(void);
""", encoding="utf-8")
        declared = declared_in(pathlib.Path(folder))
    for name in ("_ZN4weft5givenEi", "_ZN4weft1AC1Ev", "_ZN4weft1AC2Ev", "_ZN4weft1AD0Ev", "_ZN4weft1A4openEv", "_ZN4weft1A4stepEv",
                 "_ZN4weft1A6helperEv", "_ZN4weft1A11by_templateEl", "_ZN4wefteqERKNS_1AES2_", "weft_c"):
        assert plain(name) in declared.functions, (name, declared.functions)
    assert plain("_ZN4weft1A16of_sources_aloneEv") not in declared.functions and "weft::A" in declared.classes, declared.classes
    print("exported_symbols: sound lists pass, faults are found")


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = arguments.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", type=pathlib.Path, metavar="BUILD")
    what.add_argument("--write", type=pathlib.Path, metavar="BUILD")
    what.add_argument("--against-release", action="store_true")
    what.add_argument("--release", action="store_true")
    what.add_argument("--self-test", action="store_true")
    a = arguments.parse_args()
    if a.self_test:
        return self_test()
    if a.against_release:
        return against_release()
    if a.release:
        release()
        return 0
    return check(a.check) if a.check else write(a.write)


if __name__ == "__main__":
    sys.exit(main())
