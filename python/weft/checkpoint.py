"""Checkpoints: arrays of the program's saved and loaded on any mesh, and what a checkpoint holds. docs/checkpoints.md has the format.

Lists of tensors are {name: (array, layout)}, or {name: array} on one rank, in the same order on all ranks."""
import ctypes

from . import _api, arrays, dtypes, errors
from ._handle import Handle, blocking
from ._library import lib
from .context import text
from .layout import tensors

__all__ = ["Reader", "export", "latest", "load", "save", "verify"]

_byref = ctypes.byref


def save(directory, named, step, *, mesh=None, extra=None, keep=0):
    """Writes directory/step-N and names it in directory/latest; the checkpoint of before stays whole whatever happens. Collective among the ranks of `mesh`
    (None: one rank). extra: {key: string}; keep: how many checkpoints stay, 0: all. Blocks until all is on the disk."""
    options = _api.make(_api.weft_checkpoint_save_options)
    options.keep = keep
    array, count, owners = tensors(named, False)
    pairs = [(text(key, "key"), text(value, "value")) for key, value in (extra or {}).items()]
    strings = (_api.weft_checkpoint_string * max(1, len(pairs)))(*pairs)
    blocking(lib.checkpoint_save, text(str(directory), "directory"), mesh, step, array, count, strings, len(pairs),
             _byref(options), keep=owners)


def load(directory, named, *, mesh=None, may_leave=None):
    """Fills the arrays from directory's latest checkpoint, or from `directory` itself where that is one, whatever mesh wrote it. (step, folder).
    BadArgumentError, before anything is written and on all ranks, where a tensor is missing, is there and not in the list, or has another shape or dtype;
    may_leave(name): whether a tensor that is not in the list may stay there."""
    options = _api.make(_api.weft_checkpoint_load_options)
    if may_leave is not None:
        options.may_leave = type(options.may_leave)(lambda _, name: bool(may_leave(name.decode())))
    array, count, owners = tensors(named, True)
    step, folder = ctypes.c_int64(), ctypes.c_void_p()
    blocking(lib.checkpoint_load, text(str(directory), "directory"), mesh, array, count, _byref(options), _byref(step),
             _byref(folder), keep=owners)
    return step.value, errors.take_text(folder).decode()


def latest(directory):
    """(folder, step) that directory/latest names; None where there is no such file."""
    folder, step = ctypes.c_void_p(), ctypes.c_int64()
    errors.call(lib.checkpoint_latest, text(str(directory), "directory"), _byref(folder), _byref(step))
    return (errors.take_text(folder).decode(), step.value) if folder.value else None


def verify(directory):
    """Reads all of a checkpoint: what is wrong with it, a list of lines; empty: it is whole."""
    faults = ctypes.c_void_p()
    blocking(lib.checkpoint_verify, text(str(directory), "directory"), _api.FUNCTIONS["weft_checkpoint_verify"][1][1](), None, _byref(faults))
    return errors.take_text(faults).decode().splitlines()


def export(directory, file):
    """Writes the tensors of a checkpoint, whole, into one safetensors file; their number."""
    written = ctypes.c_int64()
    blocking(lib.checkpoint_export, text(str(directory), "directory"), text(str(file), "file"), None, _byref(written))
    return written.value


class Reader(Handle):
    """An open checkpoint, read by one process, without a mesh. reader["name"] is the whole of a tensor, a numpy array."""
    __slots__ = ("step", "folder", "mesh", "extra", "tensors")
    _destroy = lib.checkpoint_reader_destroy

    def __init__(self, directory):
        handle = ctypes.c_void_p()
        errors.call(lib.checkpoint_reader_open, text(str(directory), "directory"), _byref(handle))
        Handle.__init__(self, handle.value)
        step, words, count = ctypes.c_int64(), ctypes.c_char_p(), ctypes.c_int32()
        errors.call(lib.checkpoint_reader_step, self._handle, _byref(step))
        self.step = step.value
        for name in ("folder", "mesh"):
            errors.call(getattr(lib, f"checkpoint_reader_{name}"), self._handle, _byref(words))
            setattr(self, name, words.value.decode())
        errors.call(lib.checkpoint_reader_extra_count, self._handle, _byref(count))
        self.extra, pair = {}, _api.weft_checkpoint_string()
        for index in range(count.value):
            errors.call(lib.checkpoint_reader_extra, self._handle, index, _byref(pair))
            self.extra[pair.key.decode()] = pair.value.decode()
        errors.call(lib.checkpoint_reader_tensor_count, self._handle, _byref(count))
        self.tensors, raw = {}, _api.weft_checkpoint_tensor()  # name -> (shape, dtype)
        for index in range(count.value):
            errors.call(lib.checkpoint_reader_tensor, self._handle, index, _byref(raw))
            self.tensors[raw.name.decode()] = tuple(raw.extents[:raw.dim_count]), dtypes.name_of(raw.dtype)

    def read(self, name, out):
        """The whole of a tensor into `out`, of its dtype and with room for just as many elements; `out`."""
        index = ctypes.c_int32()
        errors.call(lib.checkpoint_reader_find, self._handle, text(name, "name"), _byref(index))
        if index.value < 0:
            raise errors.BadArgumentError(f"name is {name!r}; expected a tensor of {self.folder}: {', '.join(list(self.tensors)[:10])}")
        buffer, owner = arrays.view(out, "out", True)
        blocking(lib.checkpoint_reader_read, self, index.value, _byref(buffer), keep=owner)
        return out

    def __getitem__(self, name):
        import numpy
        if name not in self.tensors:
            raise KeyError(name)
        shape, dtype = self.tensors[name]
        return self.read(name, numpy.empty(shape, dtypes.to_numpy(dtypes.NAMES[dtype])))
