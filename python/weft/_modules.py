"""Passes of weft.nn.Module, as functions that the library calls."""
import ctypes
import itertools

from . import _api, _train_api, dtypes, errors
from ._train_library import lib, make
from .nn import Constant

_numbers = itertools.count(1)
_alive = {}  # the number that the library has -> _Functions; until the library needs them no more


class _Functions:
    """A module in one model. failures: exceptions of its passes, for the call that runs them."""

    def __init__(self, module, failures):
        self.module, self.failures = module, failures
        self.parameters = list(module.parameters().values())  # in the order that the library knows


class _Pass:
    """A pass that runs."""

    def __init__(self, address):
        self.address, self.of = address, address.contents
        self.inputs = _views(self.of.inputs, self.of.input_count)
        self.saved = _views(self.of.kept, self.of.kept_count)

    def keep(self, array):
        self._make(lib.module_keep, array, "an array to save")

    def output(self, array):
        self._make(lib.module_output, array, "the result of forward")

    def _make(self, function, array, what):
        array = _as_f32(array, what)
        to = _api.weft_tensor()
        errors.call(function, self.address, array.ndim, (ctypes.c_int64 * max(1, array.ndim))(*array.shape), ctypes.byref(to))
        _view(to)[...] = array


def _as_f32(array, what):
    import numpy
    try:
        return numpy.asarray(array, dtype=numpy.float32)
    except (TypeError, ValueError) as error:
        raise errors.BadArgumentError(f"{what} is of type {type(array).__name__}; expected an array of numbers ({error})") from None


_DTYPES = {}  # the dtype of NumPy, by the number of weft's


def _view(tensor, writeable=True):
    """An array over the memory of a weft_tensor; None if it has no memory."""
    import numpy
    if not _DTYPES:
        _DTYPES.update({dtypes.NAMES[of_weft]: name for name, of_weft in dtypes.OTHER.items()})
    shape = tuple(tensor.extents[:tensor.dim_count])
    dtype = numpy.dtype(_DTYPES[tensor.data.dtype])
    if not tensor.data.data:
        return None
    if tensor.data.count == 0:
        return numpy.empty(shape, dtype)
    array = numpy.frombuffer((ctypes.c_char * (tensor.data.count * dtype.itemsize)).from_address(tensor.data.data), dtype).reshape(shape)
    array.flags.writeable = writeable
    return array


def _views(tensors, count, writeable=False):
    return [_view(tensors[i], writeable) for i in range(count)]


def _results(given, count, what):
    """The results of a pass, as a list."""
    listed = list(given) if isinstance(given, (tuple, list)) else [given]
    if count is not None and len(listed) != count:
        raise errors.BadArgumentError(f"{what} returned {len(listed)} arrays; expected {count}")
    return listed


def _forward(module, run):
    for array in _results(module.forward(*run.inputs), None, f"{type(module).__name__}.forward"):
        if array is None:
            raise errors.BadArgumentError(f"{type(module).__name__}.forward returned None; expected an array, or a tuple of arrays")
        run.output(array)


def _backward(module, run):
    into = [view for view in _views(run.of.input_gradients, run.of.input_count, True) if view is not None]
    what = f"{type(module).__name__}.backward"
    given = module.backward(*_views(run.of.gradients, run.of.output_count))
    if given is None:
        return
    for view, array in zip(into, _results(given, len(into), what)):
        if array is None:
            continue
        array = _as_f32(array, f"the result of {what}")
        if array.shape != view.shape:
            raise errors.BadArgumentError(f"{what} returned an array of the shape {array.shape}; expected {view.shape}, that of the input")
        view[...] = array


def _called(number, address, error, run_pass):
    functions = _alive[number]
    module = functions.module
    try:
        with module._lock:
            run = _Pass(address)
            try:
                module._pass = run
                for i, parameter in enumerate(functions.parameters):
                    parameter._value = _view(run.of.parameters[i], False)
                    parameter._gradient = _view(run.of.parameter_gradients[i]) if run.of.backward else None
                run_pass(module, run)
            finally:
                module._pass = None
                for parameter in functions.parameters:
                    parameter._value = parameter._gradient = None
        return 0
    except BaseException as failure:  # pylint: disable=broad-except
        functions.failures.append(failure)
        if error:
            room = len(error.contents.text) - 1
            error.contents.text = f"{type(failure).__name__}: {failure}".encode(errors="replace")[:room]
        return _api.BAD_ARGUMENT


_FIELDS = dict(_train_api.weft_module._fields_)
_FORWARD = _FIELDS["forward"](lambda number, address, error: _called(number, address, error, _forward))
_BACKWARD = _FIELDS["backward"](lambda number, address, error: _called(number, address, error, _backward))
_RELEASE = _FIELDS["release"](lambda number: (_alive.pop(number, None), None)[1])


def structs(modules, failures):
    """Modules by their names as an array of weft_module, and the memory that it refers to. The library calls
    release for each."""
    owners, listed = [], []
    for name, module in modules.items():
        parameters = module.parameters()
        array = (_train_api.weft_module_parameter * max(1, len(parameters)))()
        for to, (of_name, parameter) in zip(array, parameters.items()):
            if len(parameter.shape) > _api.MAX_DIMS:
                raise errors.BadArgumentError(f"{name}: {of_name} has {len(parameter.shape)} dimensions; expected {_api.MAX_DIMS} or fewer")
            to.name, to.dim_count, to.split_dim = of_name.encode(), len(parameter.shape), -1 if parameter.split_dim is None else parameter.split_dim
            to.extents[:len(parameter.shape)] = parameter.shape
            if isinstance(parameter.init, Constant):
                to.mean = parameter.init.value
            else:
                to.std = parameter.init
        struct = make(_train_api.weft_module)
        struct.name, struct.parameters, struct.parameter_count = name.encode(), array, len(parameters)
        struct.forward, struct.backward, struct.release = _FORWARD, _BACKWARD, _RELEASE
        listed.append((struct, module))
        owners.append(array)
    for struct, module in listed:  # when nothing can fail any more
        struct.user = number = next(_numbers)
        _alive[number] = _Functions(module, failures)
    return (_train_api.weft_module * max(1, len(listed)))(*(struct for struct, _ in listed)), owners
