"""Checkpoints beyond save and load: in the background, whole tensors one by one, functions of the
program's that weft calls."""
import os
import subprocess
import sys
import textwrap
import threading
import weakref

import numpy as np
import pytest

import weft


def parts(group, whole):
    """(this rank's rows, their layout) on a mesh of all ranks."""
    mesh = weft.Mesh(group, x=-1)
    layout = weft.Layout(mesh, whole.shape, x=weft.shard(0))
    (offsets, extents), = layout.parts()
    return whole[offsets[0]:offsets[0] + extents[0]].copy(), layout, mesh


WHOLE = np.arange(35.0).reshape(7, 5)


def test_saver(ranks, tmp_path):
    """A save has the values of the arrays at the call; stages are reported; a second save waits; wait()
    gives errors once."""
    def program(group):
        part, layout, mesh = parts(group, WHOLE)
        stages = []
        with weft.checkpoint.Saver(mesh) as saver:
            for step in (1, 2, 3):
                part[...] = WHOLE[layout.parts()[0][0][0]:][:len(part)] + step
                assert saver.save(tmp_path, {"w": (part, layout)}, step, extra={"at": str(step)}, keep=2, on_stage=stages.append)
                part[...] = -1
            saver.wait()
            saver.wait()
            assert "data" in stages and ("latest" in stages) == (group.rank == 0)
    ranks(2, program)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000002", "step-00000003"]
    with weft.checkpoint.Reader(tmp_path) as reader:
        assert reader.extra == {"at": "3"} and reader.hashed
        np.testing.assert_array_equal(reader["w"], WHOLE + 3)


def test_saver_that_refuses_and_that_fails(tmp_path):
    go, reached = threading.Event(), threading.Event()

    def stop(stage):
        if stage == "data":
            reached.set()
            go.wait(20)
    with weft.checkpoint.Saver(refuse=True) as saver:
        assert saver.save(tmp_path, {"w": np.ones(3)}, 1, on_stage=stop)
        reached.wait(20)
        assert saver.save(tmp_path, {"w": np.ones(3)}, 2) is False
        go.set()
        saver.wait()
        assert saver.save(tmp_path, {"w": np.ones(3)}, 2)

        def fail(stage):
            raise KeyError("told")
        saver.wait()
        assert saver.save(tmp_path, {"w": np.ones(3)}, 3, on_stage=fail)
        with pytest.raises(KeyError, match="told"):
            saver.wait()
        (tmp_path / "file").write_text("no folder")
        saver.save(tmp_path / "file", {"w": np.ones(3)}, 4)
        with pytest.raises(weft.Error, match="file"):
            saver.wait()
        saver.wait()
    with pytest.raises(weft.BadArgumentError, match="the Saver is closed"):
        saver.save(tmp_path, {}, 5)
    assert weft.checkpoint.latest(tmp_path)[1] == 3


def test_a_saver_at_the_end_of_the_program(tmp_path):
    """A save that was begun is written, and reported, though nobody waited."""
    program = """
        import sys, time, numpy as np, weft
        saver = weft.checkpoint.Saver()
        saver.save(sys.argv[1], {"w": np.arange(1 << 16)}, 1, on_stage=lambda stage: time.sleep(0.01) or print(stage, flush=True))
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], capture_output=True, text=True, timeout=60, check=False,
                          env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(weft.__file__))})
    assert done.returncode == 0 and "latest" in done.stdout.split(), done
    assert weft.checkpoint.verify(tmp_path) == []


def test_save_tells_its_stages(tmp_path):
    stages = []
    weft.checkpoint.save(tmp_path, {"w": np.ones(3)}, 1, on_stage=stages.append)
    assert stages[0] == "folder" and stages[-1] == "latest"

    def fail(stage):
        raise KeyError(stage)
    with pytest.raises(KeyError, match="folder"):
        weft.checkpoint.save(tmp_path, {"w": np.ones(3)}, 2, on_stage=fail)


def test_full_state(ranks):
    def program(group):
        part, layout, mesh = parts(group, WHOLE)
        named = {"w": (part, layout), "n": (np.array([group.rank, 5], "i4"), weft.Layout(mesh, (2 * group.size,), x=weft.shard(0)))}
        found = weft.checkpoint.gather_full_state(named, mesh=mesh, root=1)
        assert set(found) == ({"w", "n"} if group.rank == 1 else set())
        everywhere = weft.checkpoint.gather_full_state(named, mesh=mesh, root=None)
        np.testing.assert_array_equal(everywhere["w"], WHOLE)
        assert everywhere["n"].tolist() == [0, 5, 1, 5, 2, 5] and everywhere["n"].dtype == "i4"
        seen = []

        def see(name, array):
            seen.append((name, array.shape, array.flags.writeable))
        weft.checkpoint.gather_full_state(named, mesh=mesh, root=None, see=see)
        assert seen == [("w", (7, 5), False), ("n", (6,), False)]
        weft.checkpoint.set_full_state(named, {"w": WHOLE * 2, "n": np.arange(6, dtype="i4")} if group.rank == 0 else {}, mesh=mesh)
        np.testing.assert_array_equal(part, 2 * WHOLE[layout.parts()[0][0][0]:][:len(part)])
        assert named["n"][0].tolist() == [2 * group.rank, 2 * group.rank + 1]
        weft.checkpoint.set_full_state(named, lambda name: {"w": WHOLE, "n": np.zeros(6, "i4")}[name], mesh=mesh, root=None)
        np.testing.assert_array_equal(part, WHOLE[layout.parts()[0][0][0]:][:len(part)])
    ranks(3, program)


def test_full_state_that_fails_on_one_rank(ranks):
    def program(group):
        part, layout, mesh = parts(group, WHOLE)

        def see(name, array):
            raise KeyError("seen")
        with pytest.raises(KeyError if group.rank == 0 else weft.SystemError):
            weft.checkpoint.gather_full_state({"w": (part, layout)}, mesh=mesh, see=see)
        wrong = {"w": WHOLE.astype("f4")} if group.rank == 0 else {}
        with pytest.raises(weft.BadArgumentError if group.rank == 0 else weft.SystemError) as caught:
            weft.checkpoint.set_full_state({"w": (part, layout)}, wrong, mesh=mesh)
        assert group.rank or str(caught.value) == "the whole of 'w' is float32 of the shape (7, 5); expected float64, (7, 5)"
    ranks(2, program)


def test_functions_that_are_asked(tmp_path):
    weft.checkpoint.save(tmp_path / "run", {"a": np.ones(3), "b": np.zeros((2, 2), "f4")}, 1)
    file = tmp_path / "one.safetensors"
    assert weft.checkpoint.export(tmp_path / "run", file, rename=lambda name: {"a": "model.a"}.get(name)) == 1
    assert b'"model.a"' in file.read_bytes() and b'"b"' not in file.read_bytes()
    told = []
    assert weft.checkpoint.verify(tmp_path / "run", progress=lambda done, all_: told.append((done, all_))) == []
    assert told and told[-1][0] == told[-1][1]

    def fail(*_):
        raise KeyError("asked")
    for call in (lambda: weft.checkpoint.export(tmp_path / "run", file, rename=fail), lambda: weft.checkpoint.verify(tmp_path / "run", progress=fail),
                 lambda: weft.checkpoint.load(tmp_path / "run", {"a": np.ones(3)}, may_leave=fail)):
        with pytest.raises(KeyError, match="asked"):
            call()
    with pytest.raises(weft.BadArgumentError, match="^what rename gave is 7; expected a string without zeros$"):
        weft.checkpoint.export(tmp_path / "run", file, rename=lambda name: 7)


def test_convert(tmp_path):
    whole = np.array([[1, 2.5], [1 + 2**-9, -3]], "f4")
    weft.checkpoint.save(tmp_path / "run", {"w": whole, "n": np.arange(3)}, 4, extra={"k": "v"})
    assert weft.checkpoint.convert(tmp_path / "run", tmp_path / "half", dtype="bf16", files=2) == 2
    half = weft.checkpoint.Reader(tmp_path / "half")
    assert half.tensors == {"n": ((3,), "i64"), "w": ((2, 2), "bf16")} and half.step == 4 and half.extra == {"k": "v"}
    asked = []

    def wide(name, stored):
        asked.append((name, stored))
        return np.float32
    assert weft.checkpoint.convert(tmp_path / "half", tmp_path / "back", dtype=wide, rename=lambda name: {"w": "model.w"}.get(name)) == 1
    assert asked == [("model.w", "bf16")]
    np.testing.assert_array_equal(weft.checkpoint.Reader(tmp_path / "back")["model.w"], [[1, 2.5], [1, -3]])
    old = tmp_path / "old"
    weft.checkpoint.save(old, {"to_qkv.weight_u": np.arange(6, dtype="f4")}, 0)
    weft.checkpoint.convert(old, tmp_path / "new", old_names=True)
    np.testing.assert_array_equal(weft.checkpoint.Reader(tmp_path / "new")["to_k.weight_u"], [2, 3])

    def fail(*_):
        raise KeyError("asked")
    for how in ({"dtype": fail}, {"rename": fail}):
        with pytest.raises(KeyError, match="asked"):
            weft.checkpoint.convert(tmp_path / "run", tmp_path / "x", **how)
    for how, words in (({"dtype": "f9"}, "^dtype is 'f9'; expected one of f64, "), ({"files": 0}, "^files is 0; expected 1 or more$"),
                       ({"files": -1}, "options.files is -1; expected 1 to 99999"), ({"dtype": "f16"}, 'options.dtype of "w" is f16; expected f32 or bf16')):
        with pytest.raises(weft.BadArgumentError, match=words):
            weft.checkpoint.convert(tmp_path / "run", tmp_path / "x", **how)
    assert not (tmp_path / "x").exists()


def test_paths(tmp_path, monkeypatch):
    """Whatever a path is, it is that of os.fspath at the moment of the call; what is none makes no folder
    of its name."""
    monkeypatch.chdir(tmp_path)
    w = {"w": np.arange(3.0)}
    for path in ("with space/run", "ünï/数据", "quote'\"and\nline", "run/", "./a/../b", tmp_path / "path", os.fsdecode(b"latin-\xe9"), b"bytes run", "percent %s {0}"):
        weft.checkpoint.save(path, w, 3)
        assert os.path.isdir(path)
        found = {"w": np.zeros(3)}
        assert weft.checkpoint.load(path, found) == (3, os.path.join(os.fsdecode(path), "step-00000003")) and found["w"].tolist() == [0, 1, 2]
        assert weft.checkpoint.latest(path) == weft.checkpoint.load(path, found)[::-1] and weft.checkpoint.verify(path) == []
        with weft.checkpoint.Reader(path) as reader:
            assert os.path.isdir(reader.folder)
        assert weft.checkpoint.export(path, os.path.join(os.fsdecode(path), "one")) == weft.checkpoint.convert(path, os.fsencode(path) + b".anew") == 1
    before = sorted(os.listdir())
    for wrong in (None, 5, {"a": 1}, "", b"", "a\0b"):
        for call in (lambda path: weft.checkpoint.save(path, w, 1), lambda path: weft.checkpoint.Saver().save(path, w, 1), lambda path: weft.checkpoint.load(path, w),
                     weft.checkpoint.latest, weft.checkpoint.verify, weft.checkpoint.Reader, lambda path: weft.checkpoint.export("b", path),
                     lambda path: weft.checkpoint.convert("b", path)):
            with pytest.raises(weft.BadArgumentError, match=r" is .*; expected a path \(str, bytes or os.PathLike\) without zeros, not empty$"):
                call(wrong)
    assert sorted(os.listdir()) == before


def test_a_saver_and_another_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    moved = threading.Event()
    with weft.checkpoint.Saver() as saver:
        saver.save("run", {"w": np.ones(3)}, 1, on_stage=lambda stage: moved.wait(20))
        os.mkdir("elsewhere")
        os.chdir("elsewhere")
        moved.set()
        saver.wait()
    assert os.listdir(".") == [] and weft.checkpoint.latest(tmp_path / "run")[1] == 1


def test_tied_arrays(ranks, tmp_path):
    """One array under two names is stored once, and loaded into one array or two."""
    def program(group):
        w, layout, mesh = parts(group, WHOLE)
        weft.checkpoint.save(tmp_path, {"embed": (w, layout), "head": (w, layout)}, 1, mesh=mesh)
        for one, other in ((w * 0, None), (w * 0, w * 0)):
            weft.checkpoint.load(tmp_path, {"embed": (one, layout), "head": (one if other is None else other, layout)}, mesh=mesh)
            assert (one == w).all() and (other is None or (other == w).all())
        with pytest.raises(weft.BadArgumentError, match='save_checkpoint: the memory of "b" overlaps that of "a"; expected the same place'):
            weft.checkpoint.save(tmp_path, {"a": (w, layout), "b": (w[:1], weft.Layout(mesh, (group.size, 5), x=weft.shard(0)))}, 2, mesh=mesh)
    ranks(2, program)
    with weft.checkpoint.Reader(tmp_path) as reader:
        np.testing.assert_array_equal(reader["head"], WHOLE)
    assert b'"head"' not in (tmp_path / "step-00000001/rank-00001.safetensors").read_bytes()


def test_damage_and_what_ranks_must_agree_on(ranks, tmp_path):
    def program(group):
        w, layout, mesh = parts(group, WHOLE)
        named = {"w": (w, layout)}
        weft.checkpoint.save(tmp_path / "run", named, 1, mesh=mesh)
        for change in ({"step": 2 + group.rank}, {"extra": {"rank": str(group.rank)}}, {"keep": group.rank}, {"directory": tmp_path / str(group.rank)}):
            arguments = {"directory": tmp_path / "run", "named": named, "step": 2, **change}
            with pytest.raises(weft.MismatchError, match="save_checkpoint: argument . is .* on x rank 0, but .* on x rank 1"):
                weft.checkpoint.save(mesh=mesh, **arguments)
            with weft.checkpoint.Saver(mesh) as saver, pytest.raises(weft.MismatchError, match="on x rank 1"):
                saver.save(**arguments)
        if group.rank == 0:
            file = tmp_path / "run/step-00000001/rank-00001.safetensors"
            file.write_bytes(file.read_bytes()[:-1] + b"x")
        group.barrier().wait()
        with pytest.raises(weft.CorruptError, match='rank-00001.safetensors: bytes .*, of "w", are not those that were written') as caught:
            weft.checkpoint.load(tmp_path / "run", named, mesh=mesh)
        assert caught.value.code == "corrupt" and caught.value.ranks == (() if group.rank == 1 else (1,))
    ranks(2, program)
    with pytest.raises(weft.CorruptError):
        weft.checkpoint.Reader(tmp_path / "run")["w"]  # pylint: disable=expression-not-assigned


def test_a_saver_keeps_the_functions_of_the_save_in_flight_alone(tmp_path):
    """save() waits for the save before it; a program need not call wait()."""
    with weft.checkpoint.Saver() as saver:
        references = []
        for step in range(20):
            def stage(name, held=np.ones(10)):
                pass
            references.append(weakref.ref(stage))
            assert saver.save(tmp_path, {"w": np.ones(3)}, step, keep=1, on_stage=stage)
            del stage
        assert sum(r() is not None for r in references) <= 1

        def fails(name):
            raise KeyError(name)
        assert saver.save(tmp_path, {"w": np.ones(3)}, 20, on_stage=fails)
        assert saver.save(tmp_path, {"w": np.ones(3)}, 21, on_stage=lambda stage: None)
        assert saver.save(tmp_path, {"w": np.ones(3)}, 22)
        with pytest.raises(KeyError):
            saver.wait()
        saver.wait()
        assert saver.save("/dev/null/x", {"w": np.ones(3)}, 23, on_stage=lambda stage: None)
        with pytest.raises(weft.Error):
            saver.save(tmp_path, {"w": np.ones(3)}, 24, on_stage=lambda stage: None)
        saver.wait()
    assert weft.checkpoint._telling == {}
