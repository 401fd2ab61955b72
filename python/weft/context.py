"""The process: its log and the memory that ranks of one host share; and the ways to a group."""
import ctypes

from . import _api, arrays, dtypes, errors
from ._arguments import choice, text
from ._handle import Handle, Made, blocking
from ._library import lib
from .group import Group
from .operations import ORDERS
from .store import Store
from .traits import read_traits
from .transport import group_over

LEVELS = {"error": _api.LOG_ERROR, "warning": _api.LOG_WARNING, "info": _api.LOG_INFO, "debug": _api.LOG_DEBUG}
PROGRESS = {"caller": _api.PROGRESS_CALLER, "thread": _api.PROGRESS_THREAD}


class Context(Handle):
    """The one object of a process; threads that are ranks of one job share one.

    log_level: the least important line that is still logged, "error", "warning", "info" or "debug"
    (WEFT_LOG in the environment overrides it); log: a function of (level, line) that gets the lines,
    instead of standard error; segment_bytes: address space of each shared segment, 0: 1 GiB. Any thread
    may use it.
    """
    __slots__ = ("_log",)
    _destroy = lib.context_destroy

    def __init__(self, *, log_level="warning", log=None, segment_bytes=0):
        options = _api.make(_api.weft_context_options)
        options.log_level = choice(log_level, LEVELS, "log_level")
        options.segment_bytes = errors.integer(segment_bytes, "segment_bytes", 64)
        if segment_bytes < 0:
            raise errors.BadArgumentError(f"segment_bytes is {segment_bytes}; expected 0 or more")
        if log is not None and not callable(log):
            raise errors.BadArgumentError(f"log is {log!r}; expected a function of (level, line), or None")
        self._log = None
        if log is not None:
            names = {number: name for name, number in LEVELS.items()}
            self._log = type(options.log)(lambda data, level, line: log(names.get(level, "debug"), line.decode("utf-8", "replace")))
            options.log = self._log
        handle = ctypes.c_void_p()
        errors.call(lib.context_create, ctypes.byref(options), ctypes.byref(handle))
        super().__init__(handle.value)

    def empty(self, shape, dtype="f32", kind="numpy"):
        """An array in memory that ranks of this host may map, so that collectives on it copy nothing; its
        values are undefined.

        dtype: "f32", numpy.float32, torch.float32, ...; kind: "numpy", "torch", or "dlpack" for an object
        that others take by DLPack. Freed with the last array over it, not while a call that uses it is in
        flight.
        """
        made = choice(kind, {"numpy": arrays.SharedTensor.numpy, "torch": arrays.SharedTensor.torch, "dlpack": lambda shared: shared}, "kind")
        return made(arrays.SharedTensor(self, shape, dtypes.of(dtype)))

    def group(self, *, backend=None, name=None, deadline=None, progress="caller", order="native", process_rank=None):
        """The group of all processes of a job: `python -m weft.run`, torchrun, mpirun or srun say in the
        environment who takes part; without them it is a group of one. Blocks until all ranks have called
        it.

        backend: None is "auto": what WEFT_BACKEND (`weft run --backend`) says; else shm where all ranks
        share this host, else the MPI under whose mpirun the program runs, else gloo. Or "shm", "gloo",
        "mpi-openmpi", "mpi-mpich", "nccl" by name. deadline: seconds, of each call and of this one; None:
        five minutes. progress: "thread" for a helper thread that carries on calls while the program
        computes. order: "canonical" gives every reduction of the group the canonical order, so that all
        transports give the same bits (exact mode needs it).
        """
        return self._make(lib.group_from_env, (), backend, name, deadline, progress, order, process_rank)

    def group_in(self, store, rank, size, *, backend=None, name=None, deadline=None, progress="caller", order="native", process_rank=None):
        """The group of `size` ranks that meet in `store` (weft.store), threads or processes; this one is
        rank `rank`. Processes of one rank each give process_rank=0; None: all ranks are threads of this
        process."""
        return self._make(lib.group_create, (errors.instance(store, Store, "store", none=True), errors.integer(rank, "rank"), errors.integer(size, "size")), backend, name, deadline, progress, order, process_rank)

    def group_at(self, host, port, rank, size, *, secret=None, backend=None, name=None, deadline=None, progress="caller", order="native", process_rank=None):
        """A group of processes that meet by TCP: rank 0 serves at host:port, and the others join there.
        Off loopback all need the same secret."""
        return self._make(lib.group_create_tcp, (text(host, "host"), errors.integer(port, "port"), text(secret, "secret"),
                                                         errors.integer(rank, "rank"), errors.integer(size, "size")), backend, name, deadline, progress,
                          order, process_rank)

    def group_by_broadcast(self, broadcast, rank, size, *, host=None, backend=None, name=None, deadline=None, progress="caller", order="native", process_rank=None):
        """The group of ranks that another library connects already: `broadcast` of a memoryview copies
        rank 0's bytes to the others. `host`: an address of rank 0's host that the others reach; None: all
        are on one host."""
        if not callable(broadcast):
            raise errors.BadArgumentError(f"broadcast is {broadcast!r}; expected a function of (memoryview)")
        failure = []

        def copy(data, memory, count):
            try:
                broadcast(memoryview((ctypes.c_char * count).from_address(memory)).cast("B"))
                return 0
            except BaseException as error:  # pylint: disable=broad-except
                failure.append(error)
                return 1
        function = _api.weft_broadcast_fn(copy)
        try:
            return self._make(lib.group_create_by_broadcast, (text(host, "host"), errors.integer(rank, "rank"), errors.integer(size, "size"), function,
                                                                     None), backend, name, deadline, progress,
                              order, process_rank)
        except errors.Error as error:
            if failure:
                raise error from failure.pop()
            raise

    def group_over(self, transport, store, rank, size, *, name=None, deadline=None, order="native", process_rank=None):
        """The group of `size` ranks that meet in `store` and talk over `transport`, a weft.Transport of
        the program's own, from which weft composes all operations. Calls go on while a thread of the rank
        is inside of weft."""
        return group_over(self, transport, store, rank, size, self._group_options(None, name, deadline, "caller", order, process_rank))

    def backend_traits(self, backend):
        """The Traits of a backend by its name, before there is a group; loads it where it must."""
        return read_traits(lib.backend_traits, self, text(backend, "backend"))

    @staticmethod
    def _group_options(backend, name, deadline, progress, order, process_rank):
        options = _api.make(_api.weft_group_options)
        options.backend, options.name = text(backend, "backend"), text(name, "name")
        options.deadline_ns = errors.nanoseconds(deadline, "deadline")
        options.progress = choice(progress, PROGRESS, "progress")
        options.order = choice(order, ORDERS, "order")
        if process_rank is not None:
            options.process_rank = errors.integer(process_rank, "process_rank")
        return options

    def _make(self, function, before, backend, name, deadline, progress, order, process_rank):
        options = self._group_options(backend, name, deadline, progress, order, process_rank)
        made = Made(lib.group_destroy)
        blocking(function, self, *before, ctypes.byref(options), ctypes.byref(made), keep=self._log)
        return Group(made, self)


def version():
    """The version of the library that is loaded, "0.1.0"."""
    return lib.version().decode()
