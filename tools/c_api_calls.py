"""Calls of the C API's functions as C++, for the fuzz target of random calls (tests/fuzz/capi):
`c_api.py --calls LIBRARY FILE`.

For each function of a library it writes a C++ function that takes arguments from a Call
(tests/fuzz/capi/call.hpp), which reads an input's bytes. The type of an argument decides how the argument is
made; if several arguments have one type, their names decide, too:
  a handle                       one of those that are alive: Call::handle
  what is written to             Call::out, out_handle, out_array
  an array and its number        Call::array: the number is the next argument, called ..._count, count, ndim or bytes
  a struct                       fill(Call&, struct&), made here from its members unless call.hpp declares one
  an enum, a number, a string    Call::choice, number, text
  a function                     Call::callback
A type that is not listed is an error, which names it.
"""
import re

HARNESS = "tests/fuzz/capi/call.hpp"
NUMBERS = ("int32_t", "int64_t", "size_t", "uint64_t", "uint32_t", "uint8_t", "uint16_t", "double", "float")
COUNTS = re.compile(r"^(\w+_)?(count|ndim|bytes)$")
# Not called, and why.
NOT_CALLED = {"weft_interrupt_attach": "the thread keeps it, and it would end waits of the harness",
              "weft_callbacks_end": "callbacks of the harness would be called no more"}


class Calls:
    def __init__(self, api, library, harness):
        self.api, self.library = api, library
        self.structs = {s["name"]: s for s in api["structs"]}
        self.types, self.enums = api["types"], api["enums"]
        self.by_hand = set(re.findall(r"^void fill\(Call& \w+, (\w+)& \w+\);", harness, flags=re.M))

    def base(self, kind):
        """"const struct DLManagedTensor*" -> "DLManagedTensor"."""
        return re.sub(r"^(const )?(struct )?", "", kind).rstrip("*").removesuffix("* const").strip()

    def is_handle(self, kind):
        return self.types.get(self.base(kind)) == "handle" or self.base(kind).startswith("DLManaged")

    def is_function(self, kind):
        return "(*)" in kind or self.types.get(kind) == "function"

    def value(self, kind, name, where):
        """An argument or a member as an expression, if it needs no statements."""
        quoted = f'"{name}"'
        if self.is_function(kind):
            return f"c.callback<std::decay_t<decltype({where})>>({quoted})"
        if kind == "const char*":
            return f"c.text({quoted})"
        if kind in ("void*", "const void*"):
            return f"c.memory({quoted})"
        if kind == "bool":
            return "c.flag()"
        if kind in self.enums:
            return f"c.choice<{kind}>({{{', '.join(str(v) for v in self.enums[kind])}}}, {quoted})"
        if kind in NUMBERS or self.types.get(kind) in NUMBERS:
            return f"c.number<{kind}>({quoted})"
        if kind.endswith("*") and not kind.endswith("**") and self.is_handle(kind):
            return f'c.handle<{self.cpp(kind)}>("{self.base(kind)}", {quoted})'
        if kind.endswith("*") and self.base(kind) in self.structs and kind.startswith("const "):
            return f"c.pointer<{self.base(kind)}>({quoted})"
        return None

    @staticmethod
    def cpp(kind):
        """The type that a pointer points to, with its const."""
        return kind[:-1].strip()

    def members(self, struct):
        lines = [f"static void fill(Call& c, {struct['name']}& s) {{"]
        for field in struct["fields"]:
            kind, name = field["type"], field["name"]
            if name == "struct_size":
                lines.append("  s.struct_size = c.struct_size(sizeof s);")
            elif kind in self.structs:
                lines.append(f"  fill(c, s.{name});")
            else:
                value = self.value(kind, name, f"s.{name}")
                if value is None:
                    raise ValueError(f"{struct['name']}.{name} is a {kind}, which {HARNESS} has no value for: declare there void fill(Call& c, {struct['name']}& s);")
                lines.append(f"  s.{name} = {value};")
        return lines + ["}"]

    def structs_given(self):
        """Structs that functions take, and those in them, innermost first, without those that call.hpp
        fills."""
        wanted, order = [], []
        for f in self.functions():
            wanted += [self.base(p["type"]) for p in f["params"] if p["type"].startswith("const ") or not p["type"].endswith("*")]

        def visit(name):
            if name not in self.structs or name in order or name in self.by_hand:
                return
            for field in self.structs[name]["fields"]:
                visit(self.base(field["type"]))
            order.append(name)
        for name in wanted:
            visit(name)
        return [self.structs[name] for name in order]

    def functions(self):
        return [f for f in self.api["functions"] if f["library"] == self.library]

    def call(self, f):
        name, params = f["name"], f["params"]
        first, then = [], []  # handles and numbers are made first: the others depend on them
        room = next((p["name"] for p in params if p["name"] == "room" or (p["name"] == "axis_count" and any(
            q["name"] == "coordinates" and not q["type"].startswith("const ") for q in params))), None)
        counted = set()
        for i, p in enumerate(params):
            kind, what = p["type"], p["name"]
            following = params[i + 1] if i + 1 < len(params) else None
            if kind == "weft_error*":
                then.append(f"a.{what} = c.error();")
            elif f["returns"] == "void" and name.endswith("_destroy") and self.is_handle(kind):
                first.append(f'a.{what} = c.taken<{self.cpp(kind)}>("{self.base(kind)}");')
            elif what == room:
                first.append(f"a.{what} = c.room<{kind}>();")
            elif what in counted:
                continue
            elif following and COUNTS.match(following["name"]) and kind.startswith("const ") and kind.endswith("*") and \
                    (following["type"] in NUMBERS) and kind != "const char*":
                counted.add(following["name"])
                then.append(f'a.{what} = c.array(a.{what}, a.{following["name"]}, "{what}");')
            elif following and kind.endswith("* const*") and COUNTS.match(following["name"]):
                counted.add(following["name"])
                then.append(f'a.{what} = c.handles<{self.base(kind)}>("{self.base(kind)}", a.{following["name"]}, "{what}");')
            elif kind.endswith("**") and self.is_handle(kind):
                then.append(f'a.{what} = c.out_handle<{self.cpp(self.cpp(kind))}>("{self.base(kind)}", "{what}");')
            elif kind == "void**":
                then.append(f'a.{what} = c.out_memory("{what}");')
            elif kind.endswith("*") and not kind.startswith("const ") and not self.is_handle(kind) and kind != "void*" or kind == "const char**":
                if kind == "const char**":
                    then.append(f'a.{what} = c.out_text("{what}");')
                elif room and kind not in ("size_t*",):
                    then.append(f'a.{what} = c.out_array<{self.cpp(kind)}>("{what}");')
                else:
                    then.append(f'a.{what} = c.out<{self.cpp(kind)}>("{what}");')
            elif kind in self.structs:
                then.append(f"fill(c, a.{what});")
            else:
                value = self.value(kind, what, f"a.{what}")
                if value is None:
                    raise ValueError(f"{name}: {what} is a {kind}, which {HARNESS} has no value for")
                soon = self.is_handle(kind) and kind.endswith("*") or kind in NUMBERS
                (first if soon else then).append(f"a.{what} = {value};")
        members = " ".join(self.member(p) for p in params)
        given = ", ".join(f"a.{p['name']}" for p in params)
        lines = [f"void call_{name}(World& world, Bytes& bytes) {{", f'  Call c(world, bytes, "{name}");']
        if params:
            lines.append(f"  struct {{ {members} }} a{{}};")
        lines += ["  " + line for line in first + then]
        how = {"weft_status": "status", "const char*": "name", "void": "nothing"}.get(f["returns"], "plain")
        return lines + [f"  c.{how}([&] {{ return {name}({given}); }});", "}"]

    @staticmethod
    def member(p):
        kind, name = p["type"], p["name"]
        if "(*)" in kind:
            return kind.replace("(*)", f"(*{name})", 1) + ";"
        return f"{kind} {name};"

    def file(self):
        lines = [f"// Made by tools/c_api.py from the headers of lib{self.library}: each function with arguments from an input's bytes.",
                 '#include "capi/call.hpp"', "", "namespace weft::fuzz::capi {", ""]
        for struct in self.structs_given():
            lines += self.members(struct) + [""]
        lines += ["namespace {", ""]
        called = [f for f in self.functions() if f["name"] not in NOT_CALLED]
        for f in called:
            lines += self.call(f) + [""]
        handles = {self.base(p["type"]): f["name"] for f in called for p in f["params"] if f["name"].endswith("_destroy")}
        lines += ["}  // namespace", "", f"const std::vector<Function>& {self.library}_functions() {{", "  static const std::vector<Function> all = {"]
        lines += [f'      {{"{f["name"]}", call_{f["name"]}, {"true" if f["returns"] == "weft_status" else "false"}}},' for f in called]
        lines += ["  };", "  return all;", "}", "", f"const std::vector<Destroyer>& {self.library}_destroyers() {{",
                  "  static const std::vector<Destroyer> all = {"]
        lines += [f'      {{"{kind}", [](void* handle) {{ {destroy}(static_cast<{kind}*>(handle)); }}}},' for kind, destroy in handles.items()]
        lines += ["  };", "  return all;", "}", "", "}  // namespace weft::fuzz::capi"]
        return "\n".join(lines) + "\n"


def calls(api, library, harness):
    return Calls(api, library, harness).file()
