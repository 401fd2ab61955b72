"""ParallelModel.generate: prompts of different lengths, stops, seeds; the same tokens on every mesh, as the
logits say."""
import os
import pathlib
import subprocess

import numpy as np
import pytest

import weft

try:
    from weft import train
except ImportError as reason:
    pytest.skip(f"libweft_train is not there: {reason}", allow_module_level=True)

SIZES = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_hidden": 64, "vocab": 256, "max_seq": 40}
TEXT = b"the quick brown fox jumps over the lazy dog\n" * 40
PROMPTS = [b"the quick", b"over the lazy d", b"f"]


def trained(group, folder, steps=60, **mesh):
    """A model that has learned a text; the first caller trains it, the others load it."""
    model = train.build_parallel_model(train.transformer(**SIZES), weft.Mesh(group, **mesh), exact=True, seed=3)
    if (folder / "latest").exists():
        model.load(folder)
        return model
    trainer = train.Trainer(model, seed=1)
    text = np.frombuffer(TEXT, np.uint8).astype(np.int64)
    for step in range(steps):
        starts = np.random.default_rng(step).integers(0, len(text) - 33, 8)
        rows = np.stack([text[s:s + 33] for s in starts])
        trainer.step(train.Batch(np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])), rate=0.01)
    model.save(folder)
    return model


def greedy_by_logits(model, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        logits = model.forward(train.Batch(np.array([tokens], np.int64)))[0]
        tokens.append(int(logits.reshape(-1, 256)[-1].argmax()))
    return tokens[len(prompt):]


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


def test_greedy_tokens_are_those_of_the_logits(ranks, folder):
    def one(group):
        model = trained(group, folder, dp=1, tp=1)
        made = model.generate(PROMPTS, new_tokens=12, temperature=0)
        assert made == [greedy_by_logits(model, p, 12) for p in PROMPTS]
        assert made == model.generate([list(p) for p in PROMPTS], new_tokens=12, temperature=0, cache=False)
        assert bytes(made[0]) == b" brown fox j"
    ranks(1, one)


def test_every_mesh_gives_the_same_tokens(ranks, folder):
    options = {"new_tokens": 15, "temperature": 0.9, "top_k": 20, "top_p": 0.95, "seed": 7}

    def on(mesh):
        return lambda group: trained(group, folder, **mesh).generate(PROMPTS, **options)
    [whole] = ranks(1, on({"dp": 1, "tp": 1}))
    assert [len(tokens) for tokens in whole] == [15, 15, 15]
    for size, mesh in ((2, {"dp": 1, "tp": 2}), (4, {"dp": 2, "tp": 2})):
        for made in ranks(size, on(mesh)):
            assert made == whole


def test_seeds_stops_and_ends(ranks, folder):
    def one(group):
        model = trained(group, folder, dp=1, tp=1)
        a, b, c = (model.generate(PROMPTS, new_tokens=20, temperature=1.5, seed=seed) for seed in (1, 1, 2))
        assert a == b != c
        assert model.generate(PROMPTS, new_tokens=20, temperature=1.5, seed=(1 << 64) - 1) != a
        likeliest = model.generate(PROMPTS, new_tokens=20, temperature=5.0, top_k=1, seed=5)
        assert likeliest == model.generate(PROMPTS, new_tokens=20, temperature=0)
        prompts, stops = [b"the quick", b"the lazy"], [b"fox", b"zzz"]
        [stopped, other] = model.generate(prompts, new_tokens=20, temperature=0, stops=stops)
        assert bytes(stopped) == b" brown fox" and len(other) == 20
        [to_max_seq] = model.generate([b"the quick brown fox jumps over "], new_tokens=100)
        assert len(to_max_seq) == 40 - 31
    ranks(1, one)


def test_what_is_wrong_is_named(ranks, folder):
    def one(group):
        model = trained(group, folder, dp=1, tp=1)
        for arguments, options, text in (
                (["text"], {}, "prompts[0] is a str; expected tokens: a list of integers, or"),
                (b"text", {}, "prompts is of type bytes; expected a list of lists of tokens"),
                ([[1.5]], {}, "prompts[0]"),
                ([], {}, "generate: no prompt; expected 1 or more"),
                ([[256]], {}, "256"),
                ([b"a"], {"stops": ["x"]}, "stops[0] is a str"),
                ([b"a"], {"seed": -1}, "seed is -1; expected an integer from 0 to 2^64 - 1"),
                ([b"a"], {"temperature": -1}, "temperature"),
                ([b"a"], {"top_p": 2}, "top_p"),
                ([b"a"], {"top_k": -1}, "top_k"),
                ([b"a"], {"new_tokens": -1}, "new_tokens")):
            with pytest.raises(weft.BadArgumentError) as raised:
                model.generate(arguments, **options)
            assert text in str(raised.value), raised.value
    ranks(1, one)


def test_a_checkpoint_of_weft_train(ranks, tmp_path):
    """The tokens of `weft sample`."""
    (tmp_path / "text").write_bytes(TEXT)
    words = ["--dim", "32", "--layers", "2", "--heads", "4", "--kv-heads", "2", "--ffn", "64", "--seq", "40", "--batch", "8", "--steps", "60", "--lr", "0.01"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("WEFT_RANK", "RANK"))}

    def tool(*command):
        return subprocess.run(["weft", *map(str, command)], check=True, capture_output=True, timeout=100, env=environment).stdout
    tool("train", "--text", tmp_path / "text", *words, "--save", tmp_path / "run", "--progress", "none")
    said = tool("sample", tmp_path / "run", "--prompt", "the quick", "--tokens", 20, "--temperature", "0.8", "--seed", 3)

    def one(group):
        model = train.build_parallel_model(train.transformer(**SIZES), weft.Mesh(group, dp=1, tp=1), seed=1)
        model.load(pathlib.Path(tmp_path / "run"))
        return model.generate([b"the quick"], new_tokens=20, temperature=0.8, seed=3)
    [[made]] = ranks(1, one)
    assert b"the quick" + bytes(made) + b"\n" == said
