"""The functions, structs and constants of weft.h and weft_train.h in the form for Python's ctypes:
python/weft/_api.py and _train_api.py. tools/c_api.py --write writes these files and --check compares them
with the headers; this module makes their text."""
import pathlib
import re

import c_api

ROOT = pathlib.Path(__file__).resolve().parent.parent
FILES = {"weft": ROOT / "python/weft/_api.py", "weft_train": ROOT / "python/weft/_train_api.py"}

PLAIN = {"bool": "c_bool", "char": "c_char", "double": "c_double", "float": "c_float", "int32_t": "c_int32", "int64_t": "c_int64", "size_t": "c_size_t",
         "uint8_t": "c_uint8", "uint16_t": "c_uint16", "uint32_t": "c_uint32", "uint64_t": "c_uint64", "void": "None"}
LIMITS = {"INT32_MIN": -2**31, "UINT64_MAX": 2**64 - 1, "NULL": None, "true": True, "false": False}
BYTES = {"weft_text_data"}  # give bytes that may contain zeros: an address, not a string


class Types:
    """C types as expressions of ctypes. `callbacks`: the signatures of functions that programs pass, by their
    names."""

    def __init__(self, api, callbacks):
        self.aliases = api["types"]
        self.structs = {s["name"] for s in api["structs"]}
        self.callbacks = callbacks

    def function(self, text):
        """CFUNCTYPE of "int32_t (*)(void* data, size_t bytes)"."""
        match = re.match(r"^(.*?)\(\*\)\((.*)\)$", text)
        params = [] if match[2].strip() in ("", "void") else [c_api.declarator(p)["type"] for p in c_api.split_list(match[2])]
        return f"CFUNCTYPE({', '.join(self.of(t) for t in [match[1].strip(), *params])})"

    def of(self, text):
        """The expression for a C type, of a parameter, a result or a field."""
        if "(*)" in text:
            return self.function(text)
        if match := re.match(r"^(.*)\[(\w+)\]$", text):
            return f"{self.of(match[1])} * {match[2] if match[2].isdigit() else match[2].removeprefix('WEFT_')}"
        words = text.replace("*", " * ").split()
        stars = words.count("*")
        base = next(w for w in words if w not in ("const", "struct", "*"))
        base_is = self.aliases.get(base, base)
        if base in self.callbacks:
            return base
        if base_is in PLAIN:
            if stars and base_is == "char":
                base, stars = "c_char_p", stars - 1
            elif stars and base_is == "void":
                base, stars = "c_void_p", stars - 1
            else:
                base = PLAIN[base_is]
        elif base not in self.structs:  # a handle, or a struct of dlpack.h
            base, stars = "c_void_p", stars - 1
        return "POINTER(" * stars + base + ")" * stars


def initial(text):
    """The fields that `{...}` of an initialiser sets, as nested lists of numbers; NULL becomes None."""
    text = re.sub(r"sizeof\(\w+\)", "0", text.replace("\\\n", " "))
    items = c_api.split_list(re.sub(r"[{}]", lambda m: "(" if m[0] == "{" else ")", text).strip()[1:-1])

    def value(item):
        item = item.strip()
        if item.startswith("("):
            return [value(i) for i in c_api.split_list(item[1:-1])]
        if item == '""':
            return None
        if item in LIMITS:
            return LIMITS[item]
        if match := re.fullmatch(r"([\d.]+) / ([\d.]+)", item):
            return float(match[1]) / float(match[2])
        return int(item) if re.fullmatch(r"-?\d+", item) else float(item) if re.fullmatch(r"-?\d[\d.]*(e-?\d+)?", item) else item
    return [value(i) for i in items]


def read(library, root=ROOT):
    """The declarations of the headers of a library: c_api's lists, macros that are numbers, initialisers,
    and signatures of callbacks."""
    api = {"functions": [], "structs": [], "constants": {}, "types": {}, "macros": {}, "initials": {}, "callbacks": {}}
    for path in sorted((root / "include/weft" / c_api.LIBRARIES[library]).glob("*.h")):
        functions, structs, constants, types, _ = c_api.read_header(path, library, root)
        api["functions"] += functions
        api["structs"] += structs
        api["constants"].update(constants)
        api["types"].update(types)
        raw = path.read_text(encoding="utf-8")
        for name, body in re.findall(r"^#define (WEFT_\w+)\b(?!\()((?:.*\\\n)*.*)$", re.sub(r"/\*.*?\*/", "", raw, flags=re.S), flags=re.M):
            body = body.replace("\\\n", " ").strip()
            if name.endswith("_INIT"):
                api["initials"]["weft_" + name.removeprefix("WEFT_").removesuffix("_INIT").lower()] = initial(body)
            elif body in LIMITS:
                api["macros"][name] = LIMITS[body]
            elif match := re.fullmatch(r"\(?(-?\d+)(\.0)?\)?", body):
                api["macros"][name] = float(match[1]) if match[2] else int(match[1])
        for _, line in c_api.statements(c_api.clean(raw)):
            if match := re.match(r"^typedef (.*?)\(\*\s*(\w+)\)\s*\((.*)\)$", line):
                api["callbacks"][match[2]] = f"{match[1].strip()} (*)({match[3]})"
    return api


def field_name(field):
    """`in` is a word of Python's."""
    return {"in": "in_"}.get(field["name"], field["name"])


def wrapped(name, items, closing):
    """Writes `name = (a, b, ...)` over lines of at most 150 characters."""
    lines, line = [], f"{name}"
    for item in items:
        if len(line) + len(item) + 2 > 148:
            lines.append(line.rstrip())
            line = "    "
        line += item + ", "
    return "\n".join(lines + [line.rstrip(", ") + closing])


HEAD = '''"""weft.h for ctypes: constants, structs, and of each function its result and its parameters. Made from the
headers by `tools/c_api.py --write`; the test house/c_api compares it with them."""
from ctypes import (CFUNCTYPE, POINTER, Structure, c_bool, c_char, c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint32,
                    c_uint64, c_void_p, sizeof)
'''
HEAD_OF_TRAIN = '''"""weft_train.h for ctypes, as weft/_api.py has weft.h. Made from the headers by `tools/c_api.py --write`; the
test house/c_api compares it with them."""
from ctypes import {ctypes}

from ._api import {shared}
'''
TAIL = '''

def make(kind, initial=None):
    """A struct as its initialiser in weft.h makes it; initial: the INITIAL of another header."""
    made = kind()
    if hasattr(made, "struct_size"):
        made.struct_size = sizeof(kind)
    for name, value in (INITIAL if initial is None else initial).get(kind, {}).items():
        *path, last = name.split(".")
        inner = made
        for step in path:
            inner = getattr(inner, step)
        setattr(inner, last, value)
    return made
'''


def changes(struct, values, structs, numbers, prefix=""):
    """The fields that an initialiser sets to a value other than zero, with their values."""
    found = {}
    for field, value in zip(struct["fields"], values):
        if isinstance(value, list) and field["type"] in structs:
            found.update(changes(structs[field["type"]], value, structs, numbers, f"{prefix}{field_name(field)}."))
        elif not isinstance(value, list) and numbers.get(value, value) not in (0, None, False):
            found[prefix + field_name(field)] = numbers.get(value, value)
    return found


def class_of(struct, types):
    fields = [f'("{field_name(f)}", {types.of(f["type"])})' for f in struct["fields"]]
    head = f"\n\nclass {struct['name']}(Structure):\n"
    # It has callbacks that take the struct itself.
    if any(f"POINTER({struct['name']})" in field for field in fields):
        return head + "    pass\n\n\n" + wrapped(f"{struct['name']}._fields_ = [", fields, "]")
    return head + wrapped("    _fields_ = [", fields, "]")


def text(library="weft", root=ROOT):
    """All of one of FILES. _train_api.py imports the structs of weft.h from _api.py."""
    api = read(library, root)
    known = read("weft", root)
    types = Types({key: known[key] | api[key] if isinstance(api[key], dict) else known[key] + api[key] for key in api}, known["callbacks"] | api["callbacks"])
    numbers = {**api["macros"], **api["constants"]}
    structs = {s["name"]: s for s in api["structs"]}
    all_structs, all_numbers = {s["name"]: s for s in known["structs"]} | structs, known["macros"] | known["constants"] | numbers
    lines = [f"{name.removeprefix('WEFT_')} = {value}" for name, value in numbers.items()]
    late = [name for name, signature in api["callbacks"].items() if any(struct in signature for struct in structs)]
    lines += [f"{name} = {types.function(signature)}" for name, signature in api["callbacks"].items() if name not in late]
    lines += [class_of(struct, types) for struct in ordered(api["structs"])] + ["\n"]
    lines += [f"{name} = {types.function(api['callbacks'][name])}" for name in late]
    lines += ["\n# The fields that the initialisers of weft.h set to something else than zero.\nINITIAL = {"]
    for name, values in api["initials"].items():
        lines.append(f"    {name}: {changes(structs[name], values, all_structs, all_numbers)!r},".replace("'", '"'))
    lines += ["}\n\n# name: (result, parameters)\nFUNCTIONS = {"]
    for f in api["functions"]:
        result = "c_void_p" if f["name"] in BYTES else types.of(f["returns"])
        params = [types.of(p["type"]) for p in f["params"]]
        lines.append(wrapped(f'    "{f["name"]}": ({result}, (', params, ",)),") if params else f'    "{f["name"]}": ({result}, ()),')
    body = "\n".join(lines + ["}"])
    if library == "weft":
        return "\n".join([HEAD, body, TAIL.rstrip("\n")]) + "\n"
    used = set(re.findall(r"\w+", body))
    ctypes = ", ".join(sorted(w for w in used if w in ("CFUNCTYPE", "POINTER", "Structure") or w in {"c_char_p", "c_void_p", *PLAIN.values()} - {"None"}))
    names = [s["name"] for s in known["structs"]] + [name.removeprefix("WEFT_") for name in known["macros"] | known["constants"]]
    shared = ", ".join(sorted(used & set(names)))
    return HEAD_OF_TRAIN.format(ctypes=ctypes, shared=shared) + "\n" + body + "\n"


def ordered(structs):
    """Each struct comes after the structs that it has as fields or points to in the signature of a
    callback."""
    left, done, out = list(structs), set(), []
    while left:
        names = {s["name"] for s in left}
        ready = [s for s in left if not any(other in names - {s["name"]} for f in s["fields"] for other in re.findall(r"weft_\w+", f["type"]))]
        assert ready, f"structs that need each other: {sorted(names)}"
        out += ready
        done |= {s["name"] for s in ready}
        left = [s for s in left if s["name"] not in done]
    return out
