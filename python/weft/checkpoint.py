"""Checkpoints: arrays of the program's saved and loaded on any mesh, and what a checkpoint holds.
docs/checkpoints.md has the format.

Lists of tensors are {name: (array, layout)}, or {name: array} on one rank, in the same order on all ranks."""
import atexit
import ctypes
import os
import weakref

from . import _api, arrays, dtypes, errors
from ._arguments import text
from ._handle import Handle, blocking
from ._library import lib
from .meshes.layout import tensors
from .meshes.mesh import Mesh

__all__ = ["Reader", "Saver", "convert", "export", "gather_full_state", "latest", "load", "save", "set_full_state", "verify"]

_byref = ctypes.byref


class _Asked:
    """A function of the program's that the library calls, perhaps from another thread: what it raises is
    raised by the call that it belongs to."""

    def __init__(self, function, kind, refusal):
        self._failures = failures = []  # at most one

        def ask(_, *args):  # refers to `failures` alone: not to this object, which refers to it
            if failures:
                return refusal
            try:
                return function(*args)
            except BaseException as error:  # pylint: disable=broad-except
                failures.append(error)
                return refusal
        self.function = kind(ask)

    def failed(self):
        """Whether the function has raised an exception that no call has raised yet."""
        return bool(self._failures)

    def raise_failure(self, error=None):
        """The exception of the function; otherwise `error`, if there is one."""
        failure = self._failures.pop() if self._failures else error
        if failure is not None:
            try:
                raise failure
            finally:
                del failure, error  # the error refers to this frame


def _path(value, name):
    """A path as C takes it: that of str, bytes or os.PathLike, as the file system has it."""
    try:
        path = os.fsencode(value)
    except (TypeError, ValueError):
        path = None
    if not path or b"\0" in path:
        raise errors.BadArgumentError(f"{name} is {value!r}; expected a path (str, bytes or os.PathLike) without zeros, not empty")
    return path


def _given(mesh):
    return errors.instance(mesh, Mesh, "mesh", none=True)


def _save_args(directory, named, step, extra, keep, on_stage):
    """The arguments of a save after its mesh, which comes second; what keeps them alive; the _Asked of
    on_stage, or None."""
    options, asked = _api.make(_api.weft_checkpoint_save_options), None
    options.keep = errors.integer(keep, "keep")
    if on_stage is not None:
        asked = _Asked(lambda stage: on_stage(stage.decode()), type(options.on_stage), None)
        options.on_stage = asked.function
    array, count, owners = tensors(named, False)
    pairs = [(text(key, "key"), text(value, "value")) for key, value in (extra or {}).items()]
    strings = (_api.weft_checkpoint_string * max(1, len(pairs)))(*pairs)
    rest = errors.integer(step, "step", 64), array, count, strings, len(pairs), _byref(options)
    return _path(directory, "directory"), rest, (owners, asked), asked


def save(directory, named, step, *, mesh=None, extra=None, keep=0, on_stage=None):
    """Writes directory/step-N and names it in directory/latest; the checkpoint of before stays whole
    whatever happens. Collective among the ranks of `mesh` (None: one rank). The directory, as all paths
    here, is a str, bytes or os.PathLike; a relative one is that of the moment of the call. extra: {key:
    string}; keep: how many checkpoints stay, 0: all; on_stage: called with "folder", "data", "file", ...
    as each is reached. Blocks until all is on the disk."""
    first, rest, owners, asked = _save_args(directory, named, step, extra, keep, on_stage)
    blocking(lib.checkpoint_save, first, _given(mesh), *rest, keep=owners)
    if asked is not None:
        asked.raise_failure()


# Handle of a Saver -> the _Asked of saves that its thread may still call, or whose failures wait() is to
# raise.
_telling = {}
_with_stages = weakref.WeakSet()  # Savers that have such


def _end_saver(handle):
    lib.checkpoint_saver_destroy(handle)  # waits for the thread
    _telling.pop(handle, None)


@atexit.register
def _at_exit():
    """A thread that writes would call Python when there is none any more."""
    for saver in list(_with_stages):
        saver.close()


class Saver(Handle):
    """Saves in the background: `save` returns when this rank's part is copied, and a thread writes the
    copy. For one thread at a time.

    Collective among the ranks of `mesh` (None: one rank). refuse: a save while the one before it is being
    written is refused on all ranks; else it waits. Closing it waits for what is being written.
    """
    __slots__ = ("_mesh",)
    _destroy = staticmethod(_end_saver)

    def __init__(self, mesh=None, *, refuse=False):
        handle = ctypes.c_void_p()
        errors.call(lib.checkpoint_saver_create, None if _given(mesh) is None else mesh._handle, bool(refuse), _byref(handle))
        Handle.__init__(self, handle.value)
        self._mesh = mesh

    def save(self, directory, named, step, *, extra=None, keep=0, on_stage=None):
        """As checkpoint.save; arrays may be changed at once. False: it was refused. Where the save before
        this one has failed: its error, on all ranks, and nothing is begun; the next one is. on_stage is
        called by the thread that writes; what it raises is raised by `wait`."""
        first, rest, owners, asked = _save_args(directory, named, step, extra, keep, on_stage)
        begun, before = ctypes.c_bool(), _telling.get(self._open(), [])
        if asked is not None:
            _telling[self._handle] = [*before, asked]
            _with_stages.add(self)
        try:
            blocking(lib.checkpoint_saver_save, self, first, *rest, _byref(begun), keep=owners)
        except errors.Error:
            self._only(before)
            raise
        if begun:  # the saves before have ended
            before = [each for each in before if each.failed()][:1]
        self._only(before + [asked] if begun and asked is not None else before)
        return begun.value

    def _only(self, asked):
        """The functions of the program that are still needed."""
        if asked:
            _telling[self._handle] = asked
        else:
            _telling.pop(self._handle, None)

    def wait(self):
        """Until the last save is written, on all ranks; its error, unless that was raised before."""
        blocking(lib.checkpoint_saver_wait, self)
        for asked in _telling.pop(self._handle, []):
            asked.raise_failure()


def load(directory, named, *, mesh=None, may_leave=None):
    """Fills the arrays from directory's latest checkpoint, or from `directory` itself where that is one,
    whatever mesh wrote it. (step, folder). BadArgumentError, before anything is written and on all ranks,
    where a tensor is missing, is there and not in the list, or has another shape or dtype; CorruptError
    where a file is damaged; MismatchError where a rank sees another checkpoint than rank 0.
    may_leave(name): whether a tensor that is not in the list may stay there."""
    options = _api.make(_api.weft_checkpoint_load_options)
    asked = _Asked(lambda name: bool(may_leave(name.decode())), type(options.may_leave), False)
    if may_leave is not None:
        options.may_leave = asked.function
    array, count, owners = tensors(named, True)
    step, folder = ctypes.c_int64(), ctypes.c_void_p()
    try:
        blocking(lib.checkpoint_load, _path(directory, "directory"), _given(mesh), array, count, _byref(options), _byref(step),
                 _byref(folder), keep=(owners, asked))
    except errors.Error as error:
        asked.raise_failure(error)
    return step.value, os.fsdecode(errors.take_text(folder))


def _wholes(function, named, mesh, root, writes, visit):
    """Passes each whole, as a numpy array, to visit(name, array): on `root`, or on every rank (None)."""
    import numpy
    array, count, owners = tensors(named, writes)
    shapes = {}
    for name, *rest in named.items() if isinstance(named, dict) else named:
        given = rest[0] if isinstance(rest[0], tuple) else tuple(rest)
        shapes[name] = given[1].shape if len(given) > 1 and given[1] is not None else arrays.shape_of(given[0])

    def show(name, whole):
        name, buffer = name.decode(), whole.contents
        size = buffer.count * dtypes.SIZES[buffer.dtype]
        memory = (ctypes.c_char * size).from_address(buffer.data) if size else b""
        visit(name, numpy.frombuffer(memory, dtypes.to_numpy(buffer.dtype)).reshape(shapes[name]))
        return True
    asked = _Asked(show, _api.weft_whole_function, False)
    try:
        blocking(function, _given(mesh), array, count, _api.EVERY_RANK if root is None else errors.integer(root, "root"), asked.function, None, keep=(owners, asked))
    except errors.Error as error:
        asked.raise_failure(error)


def gather_full_state(named, *, mesh=None, root=0, see=None):
    """Shows each tensor, whole, to see(name, array) on rank `root` of the mesh, None: on every rank; one
    after the other, so that no more than one whole is in memory. The array is good until `see` returns,
    and only read. see None: {name: a copy} there, {} on other ranks. An exception of `see` ends the call
    on all ranks: with SystemError on the others. Collective among the ranks of `mesh`; blocks."""
    found = {}
    if see is None:
        def see(name, array):
            found[name] = array.copy()

    def visit(name, array):
        array.flags.writeable = False
        see(name, array)
    _wholes(lib.gather_full_state, named, mesh, root, False, visit)
    return found


def set_full_state(named, give, *, mesh=None, root=0):
    """The other way: give[name], or give(name), is the whole of each tensor on rank `root`, which sends
    the others what they hold of it; root None: each rank asks its own, which give the same. Collective
    among the ranks of `mesh`; blocks. After an error the arrays' values are undefined."""
    def visit(name, array):
        import numpy
        whole = numpy.asarray(give[name] if hasattr(give, "__getitem__") else give(name))
        if whole.shape != array.shape or whole.dtype != array.dtype:
            raise errors.BadArgumentError(f"the whole of {name!r} is {whole.dtype} of the shape {whole.shape}; expected {array.dtype}, {array.shape}")
        array[...] = whole
    _wholes(lib.set_full_state, named, mesh, root, True, visit)


def latest(directory):
    """(folder, step) that directory/latest names; None where there is no such file."""
    folder, step = ctypes.c_void_p(), ctypes.c_int64()
    errors.call(lib.checkpoint_latest, _path(directory, "directory"), _byref(folder), _byref(step))
    return (os.fsdecode(errors.take_text(folder)), step.value) if folder.value else None


def verify(directory, progress=None):
    """Reads all of a checkpoint and gives its faults, a list of lines; empty: it is whole. progress(bytes
    read, bytes in all) is called as it reads."""
    kind, faults = _api.FUNCTIONS["weft_checkpoint_verify"][1][1], ctypes.c_void_p()
    asked = _Asked(progress, kind, None)
    blocking(lib.checkpoint_verify, _path(directory, "directory"), kind() if progress is None else asked.function, None, _byref(faults), keep=asked)
    lines = [line for line in os.fsdecode(errors.take_text(faults)).split("\n") if line]
    asked.raise_failure()
    return lines


def _address(pointer):
    """Where a pointer of ctypes points to. (ctypes.cast would make a reference cycle.)"""
    return ctypes.c_void_p.from_buffer(pointer).value


def _set_rename(options, rename):
    """Makes the program's function the one of `options`; its _Asked."""
    names = {}

    def renamed(name):
        names[name] = rename(name.decode())  # lives until the library has copied it
        names[name] = text(names[name], "what rename gave") or b""
        return _address(ctypes.c_char_p(names[name]))
    asked = _Asked(renamed, ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p), None)
    if rename is not None:
        options.rename = type(options.rename)(_address(asked.function))
    return asked


def export(directory, file, rename=None):
    """Writes the tensors of a checkpoint, whole, into one safetensors file; their number. rename(name):
    the name that a tensor gets there; None: it is left out."""
    options, written = _api.make(_api.weft_checkpoint_export_options), ctypes.c_int64()
    asked = _set_rename(options, rename)
    try:
        blocking(lib.checkpoint_export, _path(directory, "directory"), _path(file, "file"), _byref(options), _byref(written), keep=(asked, options))
    except errors.Error as error:
        asked.raise_failure(error)
    asked.raise_failure()
    return written.value


def convert(directory, to, *, rename=None, dtype=None, files=1, old_names=False):
    """Writes a checkpoint, or a safetensors file of any program, anew into the folder `to`; the number of
    tensors. rename(name): as in `export`. dtype: what tensors of f32 and bf16 become, "f32" or "bf16", or
    a function of a tensor's name (the new one) and its dtype that says so; None: they stay. files: how
    many files the tensors' rows are cut into. old_names: names and shapes of older programs become those
    of today."""
    options, written = _api.make(_api.weft_checkpoint_convert_options), ctypes.c_int64()
    options.files, options.old_names = errors.integer(files, "files"), bool(old_names)
    if options.files == 0:
        raise errors.BadArgumentError("files is 0; expected 1 or more")
    wanted = dtype if callable(dtype) and not isinstance(dtype, type) else lambda name, stored: dtype
    renames = _set_rename(options, rename)
    dtypes_asked = _Asked(lambda name, stored: dtypes.of(wanted(name.decode(), dtypes.name_of(stored))), type(options.dtype), -1)
    if dtype is not None:
        options.dtype = dtypes_asked.function
    try:
        blocking(lib.checkpoint_convert, _path(directory, "directory"), _path(to, "to"), _byref(options), _byref(written),
                 keep=(renames, dtypes_asked, options))
    except errors.Error as error:
        renames.raise_failure()
        dtypes_asked.raise_failure(error)
    renames.raise_failure()
    dtypes_asked.raise_failure()
    return written.value


class Reader(Handle):
    """An open checkpoint, read by one process, without a mesh. reader["name"] is the whole of a tensor, a
    numpy array."""
    __slots__ = ("step", "folder", "mesh", "extra", "tensors", "hashed")
    _destroy = lib.checkpoint_reader_destroy

    def __init__(self, directory):
        handle = ctypes.c_void_p()
        errors.call(lib.checkpoint_reader_open, _path(directory, "directory"), _byref(handle))
        Handle.__init__(self, handle.value)
        step, words, count = ctypes.c_int64(), ctypes.c_char_p(), ctypes.c_int32()
        errors.call(lib.checkpoint_reader_step, self._handle, _byref(step))
        self.step = step.value
        for name in ("folder", "mesh"):
            errors.call(getattr(lib, f"checkpoint_reader_{name}"), self._handle, _byref(words))
            setattr(self, name, os.fsdecode(words.value))
        hashed = ctypes.c_bool()
        errors.call(lib.checkpoint_reader_hashed, self._handle, _byref(hashed))
        self.hashed = hashed.value  # its bytes are compared with hashes as they are read
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
        errors.call(lib.checkpoint_reader_find, self._open(), text(name, "name"), _byref(index))
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
