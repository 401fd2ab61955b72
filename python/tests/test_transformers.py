"""Models to and from the transformers library: exported logits equal its own to 1e-4, and a folder that it
has saved gives its logits. Skips where it is not installed."""
import json
import os
import subprocess

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import weft  # noqa: E402  pylint: disable=wrong-import-position

try:
    from weft import train
except ImportError as reason:
    pytest.skip(f"libweft_train is not there: {reason}", allow_module_level=True)

TOKENS = np.random.default_rng(1).integers(0, 256, (3, 40))


def tool(*command):
    environment = {name: value for name, value in os.environ.items() if name not in ("WEFT_RANK", "RANK")}
    done = subprocess.run(["weft", *map(str, command)], capture_output=True, text=True, timeout=200, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def logits_of_weft(ranks, folder, config):
    """The logits of the checkpoint in `folder`, of a model with the sizes of a config.json."""
    sizes = {"dim": config["hidden_size"], "layers": config["num_hidden_layers"], "heads": config["num_attention_heads"],
             "kv_heads": config["num_key_value_heads"], "ffn_hidden": config["intermediate_size"], "vocab": config["vocab_size"], "max_seq": 64,
             "norm_eps": config["rms_norm_eps"], "tied": config["tie_word_embeddings"]}

    def one(group):
        model = train.build_parallel_model(train.transformer(**sizes), weft.Mesh(group, dp=1, tp=1), seed=9)
        model.load(folder)
        return model.forward(train.Batch(TOKENS.astype(np.int64)))[0].reshape(*TOKENS.shape, -1)
    [logits] = ranks(1, one)
    return logits


def logits_of_transformers(model):
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)).logits.float().numpy()


def expect_equal(ours, theirs):
    assert ours.shape == theirs.shape and np.abs(theirs).max() > 0.5
    assert np.abs(ours - theirs).max() < 1e-4


@pytest.mark.parametrize("tied", [False, True])
def test_exported_logits(ranks, tmp_path, tied):
    (tmp_path / "text").write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 40)
    (tmp_path / "run.toml").write_text(f"[model]\ndim = 32\nlayers = 2\nheads = 4\nkv_heads = 2\nffn_hidden = 64\nmax_seq = 64\ntied = {str(tied).lower()}\n")
    tool("train", "--config", tmp_path / "run.toml", "--text", tmp_path / "text", "--seq", 40, "--batch", 8, "--steps", 40, "--lr", 0.01, "--ranks", 2,
         "--tp", 2, "--save", tmp_path / "run", "--progress", "none")
    tool("checkpoint", "export", tmp_path / "run", tmp_path / "there", "--as", "llama")
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "there", dtype=torch.float32).eval()
    config = json.loads((tmp_path / "there" / "config.json").read_text())
    expect_equal(logits_of_weft(ranks, tmp_path / "run", config), logits_of_transformers(theirs))


@pytest.mark.parametrize("tied", [False, True])
def test_an_import_of_a_model_that_transformers_made(ranks, tmp_path, tied):
    torch.manual_seed(3)
    config = transformers.LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
                                      num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied, initializer_range=0.2)
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "there", max_shard_size="40KB")
    assert len(list((tmp_path / "there").glob("*.safetensors"))) > 2
    tool("checkpoint", "convert", tmp_path / "there", tmp_path / "run", "--as", "llama")
    saved = json.loads((tmp_path / "there" / "config.json").read_text())
    expect_equal(logits_of_weft(ranks, tmp_path / "run", saved), logits_of_transformers(theirs))
    tool("checkpoint", "export", tmp_path / "run", tmp_path / "back", "--as", "llama")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
    for name, value in theirs.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
