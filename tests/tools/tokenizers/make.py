#!/usr/bin/env python3
"""Writes the tokenizers of this folder and, for random texts, the tokens that the tokenizers library gives.

  python3 -m venv venv; venv/bin/pip install tokenizers; venv/bin/python make.py FOLDER

The seed is fixed: the files change only with the library. Run it with Python 3.11 (Unicode 14): the tables of
PCRE2 in Debian 12 know the characters of its texts.
"""
import json, random, sys, unicodedata
from pathlib import Path
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

folder = Path(sys.argv[1])
TEXT = """The quick brown fox jumps over the lazy dog. It's what they've said, and we'll see: 12345 foxes, 678 dogs.
Grüße aus Köln! Où est l'élève? 日本語のテキスト、中文文本。 Привет, мир! 🙂🙃 family 👨‍👩‍👧
    def f(x):\n        return x ** 2  # a comment\n\n\n\ttabs\tand   spaces   \r\n"""
LLAMA = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), behavior=behavior, invert=invert),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def make(name, pre, added, size, **model):
    t = Tokenizer(models.BPE(**model))
    t.pre_tokenizer = pre
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator([TEXT], trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=["<|endoftext|>"]))
    for token in added:
        (t.add_special_tokens if token.special else t.add_tokens)([token])
    return name, t


ALL = [
    make("gpt2", pre_tokenizers.ByteLevel(add_prefix_space=False), [], 400),
    make("llama3", split(LLAMA),
         [AddedToken("<|eot|>", special=True), AddedToken("<|eot|>x", special=True),
          AddedToken("<left>", lstrip=True, special=True), AddedToken("<right>", rstrip=True, special=True),
          AddedToken("fox", single_word=True, normalized=True), AddedToken("two words", normalized=True)], 420,
         ignore_merges=True),
    make("spaced", pre_tokenizers.ByteLevel(add_prefix_space=True), [AddedToken("ß", special=True)], 330),
    make("o200k", split(O200K, "removed", True), [], 380),
]

random.seed(20261128)
ASSIGNED = [c for c in range(0x110000)
            if unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co")]
SPACES = " \t\n\r\u00a0\u0085\u2028\u2029\u3000\u200a\u200b\u180e\v\f\x1c\x1f"
PIECES = ["'s", "'S", "'LL", "'\u017f", "'ve", "<|endoftext|>", "<|eot|>", "<|eot|>x", "<left>", "<right>", "fox", "two words",
          "foxes", "12", "3", "  ", "\n\n", "\r\n", "the ", "The", "É", "e\u0301", "ß", "日本", "🙂", "👨‍👩‍👧", "_", "½", "Ⅷ", "ǅ"]


def text():
    kind = random.randrange(4)
    n = random.randrange(1, 40)
    if kind == 0:
        return "".join(chr(random.choice(ASSIGNED)) for _ in range(n))
    if kind == 1:
        return "".join(random.choice(PIECES) for _ in range(n))
    if kind == 2:
        return "".join(random.choice(PIECES + list(SPACES) + list("abcT.,!?9")) for _ in range(n))
    at = random.randrange(len(TEXT))
    return TEXT[at:at + n] + random.choice(SPACES) + chr(random.choice(ASSIGNED))


cases = {}
for name, t in ALL:
    (folder / f"{name}.json").write_text(json.dumps(json.loads(t.to_str()), ensure_ascii=True, separators=(",", ":")) + "\n")
    t = Tokenizer.from_file(str(folder / f"{name}.json"))
    texts = ["", " ", "a", "\n", TEXT, "a" * 300, " " * 77 + "x", "<|eot|><|eot|>x<|eot|>", "a fox, foxes fox"]
    texts += [text() for _ in range(int(sys.argv[2]) if len(sys.argv) > 2 else 70)]
    encoded = [[x, t.encode(x, add_special_tokens=False).ids] for x in texts]
    size = t.get_vocab_size(with_added_tokens=True)
    drawn = [[random.randrange(size) for _ in range(random.randrange(1, 12))] for _ in range(60)]
    cases[name] = {"size": size, "encode": encoded,
                   "decode": [[ids, t.decode(ids, skip_special_tokens=False)] for ids in drawn]}
(folder / "cases.json").write_text(json.dumps(cases, ensure_ascii=True, separators=(",", ":")) + "\n")
