#!/usr/bin/env python3
"""Fails on comments and pages that are too wide, and on words that a reader meets twice before they mean
something.

    tools/check_words.py [TREE]                  checks the tree (default: the one this file lies in)
    tools/check_words.py --all [TREE]            also checks the rooms that are not in DONE yet
    tools/check_words.py --draw N --seed COMMIT  prints N sentences: a third each of pages, public headers, comments
    tools/check_words.py --self-test             checks itself on a small tree of known faults

A finding is one line, `file:line: what; the rule`. Exit status 1 if there is any. The rules:

1. A line of a comment, a docstring or a page has at most 110 columns. Tables, code, and lines that one
   word fills
   are excepted.
2. A sentence names its actor first. It does not open with "Of", "That of", "Those of", "What", "Who",
   "Whoever",
   "Whose" or "Whom" in place of a noun. Questions, titles, bold labels and OPENINGS are excepted.
3. Words of WORDS give way to the term of the field that stands beside them there. Code spans are excepted.
"""
import ast
import io
import pathlib
import random
import re
import sys
import tempfile
import tokenize

COLUMNS = 110

# The rooms that hold rules 2 and 3, files or folders. Rule 1 holds in ALL_COLUMNS.
DONE = ["README.md", "CONTRIBUTING.md", "docs", "include", "src", "tools", "bench", "tests", "examples", "python", "cmake"]
ALL_COLUMNS = DONE
# Rules 2 and 3 leave records of their day alone.
RECORDS = ["docs/decisions", "bench/results"]
# Not swept yet.
NOT_YET = ["CMakeLists.txt", "tools/demo.sh", "tools/test.sh", "tools/check_words.py"]
# Generated pages, and the list of changes.
LEFT_OUT = ("docs/c_api_table.md", "docs/agreement.md", "docs/support.md", "docs/torch_suite.md", "CHANGELOG.md")

OPENING = re.compile(r"[\s*_(\"'`]*(Of|That of|Those of|What|Who|Whoever|Whose|Whom)\s")
# Sentences that open so and are right.
OPENINGS = re.compile(r"[\s*_(\"'`]*(Of course\b|Whose turn)")

# A word of the house (a pattern) and the field's terms for it.
WORDS = {
    r"told": "notified, reported, given",
    r"stor(y|ies)": "protocol, sequence, text",
    r"wish(es|ed)?": "request, want",
    r"judg(e|es|ed|ing)": "validate, check, decide",
    r"whoever": "the rank that, the caller, code that",
    r"but for": "except for",
    r"hearings?": "synchronisation",
    r"now and then": "from time to time",
    r"the other way (round|about)": "in the opposite direction, or the sentence in full",
    r"in vain": "without success",
    r"for ever": "without end",
    r"to be called": "call this",
    r"that (is|are) none": "invalid",
}
WORD = re.compile(r"\b(" + "|".join(WORDS) + r")\b", re.I)

C_LIKE = (".hpp", ".cpp", ".h", ".c", ".inl", ".cu")
TOPS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CMakeLists.txt", "include", "src", "tests", "tools", "bench", "examples", "python", "docs", "cmake")


class Block:
    """One paragraph of prose: its lines as (number, text without the comment's sign)."""

    def __init__(self, lines):
        self.lines = lines

    def text(self):
        return re.sub(r"\s+", " ", " ".join(text for _, text in self.lines)).strip()

    def sentences(self):
        """(line, sentence) of each. A sentence ends at ". ", "! ", "? " or ": " before a capital."""
        text, starts, at = "", [], 0
        for number, part in self.lines:
            starts.append((at, number))
            part = re.sub(r"\s+", " ", part.strip()) + " "
            text += part
            at += len(part)
        begin = 0
        ends = [m.end() for m in re.finditer(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bvs)[.!?][)\"*]*\s+(?=[*(\"]*[A-Z`])", text)] + [len(text)]
        for end in ends:
            sentence = text[begin:end].strip()
            if sentence:
                yield max(n for a, n in starts if a <= begin), sentence
            begin = end


def blocks_of_page(text):
    """Paragraphs, items and cells of a page in Markdown; and the lines that rule 1 holds."""
    blocks, current, wide, fence = [], [], [], False

    def end():
        nonlocal current
        if current:
            blocks.append(Block(current))
        current = []

    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fence = not fence
            end()
            continue
        if fence or line.startswith("    ") and not current or line.startswith(("#", "<", "![")) or not line.strip():
            end()
            continue
        if line.lstrip().startswith("|"):
            end()
            if not re.fullmatch(r"[|:\- ]+", line.strip()):
                blocks.extend(Block([(number, cell)]) for cell in re.split(r"(?<!\\)\|", line.strip().strip("|")) if cell.strip())
            continue
        wide.append((number, line))
        item = re.match(r"\s*([-*]|\d+\.)\s+(.*)", line)
        if item:
            end()
            line = item.group(2)
        current.append((number, line))
    end()
    return blocks, wide


def comment_lines(path, text):
    """(number, column of the comment, its text, the whole line) of each line with a comment; None between
    blocks."""
    if path.suffix in C_LIKE:
        inside, column = False, 0
        for number, line in enumerate(text.splitlines(), 1):
            if inside:
                inside = "*/" not in line
                body = re.sub(r"^\s*\*?\s?|\*/.*$", "", line)
                yield (number, column, body, line) if body.strip() else None
                continue
            plain = re.sub(r'"(\\.|[^"\\])*"', lambda m: '"' * len(m.group()), line)
            found = re.search(r"(?:(?<=\s)|^)//[/!]?<?\s?", plain)
            if found:
                yield number, found.start(), line[found.end():], line
                continue
            found = re.search(r"/\*[*!]?<?\s?", plain)
            if found:
                inside, column = "*/" not in plain[found.end():], found.start()
                yield number, found.start(), re.sub(r"\s*\*/.*$", "", line[found.end():]), line
                continue
            yield None
    else:
        comments = comments_of_python(text) if path.suffix == ".py" else None
        for number, line in enumerate(text.splitlines(), 1):
            if comments is None:
                plain = re.sub(r'"(\\.|[^"\\])*"|\'[^\']*\'', lambda m: '"' * len(m.group()), line)
                found = re.search(r"(?:(?<=\s\s)|^\s*)#(?!!)\s?", plain) if number > 1 or not line.startswith("#!") else None
                at = found and line.index("#", found.start())
            else:
                at = comments.get(number)
            yield None if at is None else (number, at, line[at + 1:].removeprefix(" "), line)


def comments_of_python(text):
    """line -> column of its comment: signs within strings are none."""
    try:
        return {t.start[0]: t.start[1] for t in tokenize.generate_tokens(io.StringIO(text).readline)
                if t.type == tokenize.COMMENT and not t.string.startswith("#!")}
    except (tokenize.TokenError, SyntaxError):
        return {}


def blocks_of_code(path, text):
    blocks, current, wide, column = [], [], [], None

    def end():
        nonlocal current
        if current:
            blocks.append(Block(current))
        current = []

    for found in comment_lines(path, text):
        if found is None:
            end()
            column = None
            continue
        number, at, body, line = found
        table = body.startswith(("   ", "|")) or re.search(r"\S   +\S", body) or body.startswith("  ") and not current
        if not table:
            wide.append((number, line))
        body = re.sub(r"^(NOLINT\w*.*|clang-format (on|off)|@\w+|\\\w+)\s*", "", body)
        item = re.match(r"\s*([-*]|\d+\.)\s+(.*)", body)
        if not body.strip() or at != column or item or table or line[:at].strip() not in ("", "*") and not line.lstrip().startswith("*"):
            end()
        column = at
        if item:
            body = item.group(2)
        if body.strip() and not table:
            current.append((number, body))
    end()
    if path.suffix == ".py":
        try:
            tree = ast.parse(text)
        except SyntaxError:
            return blocks, wide
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node, clean=False):
                first = node.body[0].value
                lines = text.splitlines()[first.lineno - 1:first.end_lineno]
                docs = [(first.lineno + i, line.replace('"""', "").strip() if not line.startswith("    " * 2) or i == 0 else line.strip())
                        for i, line in enumerate(lines)]
                indent = len(lines[0]) - len(lines[0].lstrip()) + 2  # more than that is code
                wide.extend((first.lineno + i, line) for i, line in enumerate(lines)
                            if not re.search(r"\S   +\S", line) and (i == 0 or len(line) - len(line.lstrip()) <= indent))
                current = []
                for number, line in docs:
                    if not line or re.search(r"\S   +\S", line):
                        end()
                    else:
                        current.append((number, line))
                end()
    return blocks, wide


def files_of(tree):
    for top in TOPS:
        place = tree / top
        for file in [place] if place.is_file() else sorted(place.rglob("*")):
            path = file.relative_to(tree)
            if "__pycache__" in path.parts or path.as_posix() in LEFT_OUT or not file.is_file():
                continue
            if file.suffix in (*C_LIKE, ".md", ".py", ".sh", ".cmake") or file.name == "CMakeLists.txt":
                yield path


def blocks_of(tree, path):
    text = (tree / path).read_text(encoding="utf-8")
    return blocks_of_page(text) if path.suffix == ".md" else blocks_of_code(path, text)


def within(path, rooms):
    return any(path.as_posix() == room or path.as_posix().startswith(room.rstrip("/") + "/") for room in rooms)


def too_wide(line):
    return len(line) > COLUMNS and not re.fullmatch(r"\s*`[^`]*`.{0,40}", line) and max(map(len, line.split())) + len(line) - len(line.lstrip()) < COLUMNS - 10 and not re.search(r"https?://\S{60,}|# (noqa|pylint)", line)


def without_code(sentence):
    return re.sub(r"`[^`]*`|\([^()\s]*\.md[^()\s]*\)|\b\w+\(\w*\)", "``", sentence)


def findings(tree, everywhere=False):
    found, count = [], 0
    for path in files_of(tree):
        swept = everywhere or not within(path, NOT_YET)
        columns, words = (swept and (everywhere or within(path, rooms)) for rooms in (ALL_COLUMNS, DONE))
        words = words and not within(path, RECORDS)
        if not (columns or words):
            continue
        blocks, wide = blocks_of(tree, path)
        if columns:
            found += [f"{path}:{number}: has {len(line)} columns; expected at most {COLUMNS}" for number, line in wide if too_wide(line)]
        for number, sentence in ((n, s) for block in blocks for n, s in block.sentences() if words):
            count += 1
            opening = OPENING.match(sentence)
            label = re.fullmatch(r"\*\*[^*]+[.:?]\*\*", sentence)
            if opening and not label and not OPENINGS.match(sentence) and not sentence.rstrip("*\"`)").endswith("?"):
                found.append(f'{path}:{number}: "{sentence[:60]}" opens with "{opening.group(1)}"; name the actor first')
            for word in WORD.finditer(without_code(sentence)):
                terms = next(t for w, t in WORDS.items() if re.fullmatch(w, word.group(), re.I))
                found.append(f'{path}:{number}: "{word.group()}" in "{sentence[:60]}"; the field says: {terms}')
    return found, count


def draw(tree, number, seed):
    """As many sentences of pages, public headers and other comments, in an order that the seed decides."""
    kinds = {"page": [], "header": [], "comment": []}
    for path in files_of(tree):
        if within(path, RECORDS):
            continue
        kind = "page" if path.suffix == ".md" else "header" if path.parts[0] == "include" else "comment"
        for block in blocks_of(tree, path)[0]:
            # Whole sentences: notes behind a declaration and cells of a table are read with what they belong to.
            kinds[kind] += [f"{path}:{n}: {s}" for n, s in block.sentences()
                            if len(s.split()) >= 6 and re.match(r"[*(\"]*[A-Z`]", s) and re.search(r"[.!?][)*\"]*$", s)]
    source = random.Random(seed)
    drawn = [source.sample(kinds[kind], min(len(kinds[kind]), (number + i) // 3)) for i, kind in enumerate(kinds)]
    return [sentence for part in drawn for sentence in part]


def self_test():
    sound = {
        "docs/a.md": "# What it costs\n\nA rank waits.\nWhat does it wait for?\n\n| Of a table | x |\n|---|---|\n\n```\n" + "x " * 80 + "\n```\n\nThe `told` flag is set.\n",
        "src/a.cpp": '// The owner polls.\nconst char* s = "// Of a text";  // the text\nint x;  ///< What is the unit?\n',
        "src/a.py": '"""Module of its own.\n\nA line.\n"""\n# A comment.\n',
    }
    faults = {
        ("docs/b.md", 1, "Of a message nobody is notified."): 'opens with "Of"',
        ("docs/c.md", 3, "A rank waits.\n\n- Who is late waits: so be it."): 'opens with "Who"',
        ("docs/d.md", 1, "The ranks are told so."): "the field says: notified",
        ("docs/e.md", 1, "word " * 30): "columns",
        ("src/b.cpp", 2, "int a;\n// A rank waits. What it waits for is\n// written."): 'opens with "What"',
        ("src/c.hpp", 1, "int a;  // " + "word " * 30): "columns",
        ("src/d.cpp", 2, "/** The caller\n *  wishes it. */"): "the field says: request",
        ("src/g.cpp", 1, "// A rank polls now\n// and then."): "the field says: from time to time",
        ("src/h.cpp", 1, "// Throws for a name that is none."): "the field says: invalid",
        ("src/e.py", 2, 'def f():\n    """Who calls it waits."""\n'): 'opens with "Who"',
        ("tools/f.sh", 2, "#!/bin/bash\n# Those of a rank wait.\n"): 'opens with "Those of"',
    }
    sound["docs/a.md"] = sound["docs/a.md"].replace("| Of a table | x |", "| a table | x |")
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder)
        for name, text in [*sound.items(), *((n, t) for n, _, t in faults)]:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_text(text, encoding="utf-8")
        found, _ = findings(tree, everywhere=True)
        for (name, line, _), rule in faults.items():
            matching = [f for f in found if f.startswith(f"{name}:") and rule in f]
            assert len(matching) == 1, (name, rule, found)
            assert abs(int(matching[0].split(":")[1]) - line) <= 1, matching
        assert len(found) == len(faults), found
        assert draw(tree, 3, "x") == draw(tree, 3, "x")
    print(f"check_words: {len(sound)} sound files pass, {len(faults)} faults are found")


def main():
    arguments = sys.argv[1:]
    if arguments == ["--self-test"]:
        self_test()
        return 0
    tree = pathlib.Path(__file__).resolve().parent.parent
    if "--draw" in arguments:
        number, seed = (arguments[arguments.index(flag) + 1] for flag in ("--draw", "--seed"))
        print("\n".join(draw(tree, int(number), seed)))
        return 0
    everywhere = "--all" in arguments
    trees = [a for a in arguments if a != "--all"]
    found, count = findings(pathlib.Path(trees[0]) if trees else tree, everywhere)
    print("\n".join(found) if found else f"check_words: {count} sentences, {len(DONE)} rooms")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
