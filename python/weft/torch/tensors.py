"""Tensors of torch as what weft's calls take: where their elements lie, how many, of which dtype. Lists of
tensors that do not lie in a row go through one copy."""
import ctypes

import torch

from .. import _api, dtypes, errors
from .._api import weft_buffer

_CODES = {}  # torch.dtype -> weft_dtype
_OF_BYTES = {1: _api.U8, 2: _api.U16, 4: _api.U32, 8: _api.U64}


def _code(tensor, name, moves):
    code = _CODES.get(tensor.dtype)
    if code is None:
        code = dtypes.of_torch(tensor.dtype)
        if code is None and moves and not tensor.is_quantized:
            return _OF_BYTES[tensor.element_size()]
        if code is None:
            raise errors.UnsupportedError(f"{name} is of dtype {tensor.dtype}; expected one of {', '.join(dtypes.NAMES)}")
        _CODES[tensor.dtype] = code
    return code


def _is_dense(tensor):
    """Whether the elements lie in a row, in whatever order of dimensions."""
    expected = 1
    for stride, extent in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape) if n != 1):
        if stride != expected:
            return False
        expected *= extent
    return True


_no_tensors = set()  # types of arguments that are no tensors


def expect_plain(tensor, name):
    """Checks that memory holds the values themselves: a view of conj() or .imag may stand for conjugated,
    or negated, ones."""
    if tensor.is_neg() or tensor.is_conj():
        raise errors.LayoutError(f"{name} is a conjugate or negative view; expected its values in memory: resolve_conj() or resolve_neg() first")


def expect_plain_each(arguments):
    """The same of all tensors among the arguments of an operation, also in lists and lists of lists.
    Before torch's dispatcher: it would give the operation copies of such views, and drop what becomes of
    these."""
    for argument in arguments:
        kind = type(argument)
        if kind is torch.Tensor:
            if argument.is_neg() or argument.is_conj():
                expect_plain(argument, "tensor")
        elif kind is list or kind is tuple:
            expect_plain_each(argument)
        elif kind not in _no_tensors:
            if isinstance(argument, torch.Tensor):
                expect_plain(argument, "tensor")
            else:
                _no_tensors.add(kind)


def buffer(tensor, name="tensor", any_dense=False, moves=False):
    """A tensor's elements as they lie. `any_dense`: in whatever order of dimensions, where all ranks have
    the same. `moves`: nothing is computed with them, so that they may be of a dtype which weft does not
    know."""
    if not tensor.is_cpu or tensor.is_sparse:
        raise errors.UnsupportedError(f"{name} is on {tensor.device}{' and sparse' if tensor.is_sparse else ''}; expected a dense tensor on cpu")
    if not tensor.is_contiguous() and not (any_dense and _is_dense(tensor)):
        raise errors.LayoutError(f"{name} is not contiguous; tensors must be contiguous: .contiguous() first")
    return weft_buffer(tensor.data_ptr(), tensor.numel(), _code(tensor, name, moves), 0)


def blocks(counts, keep):
    """Elements of each rank as a weft_blocks, whose memory goes into the list `keep`."""
    array = (ctypes.c_int64 * len(counts))(*counts)
    keep.append(array)
    return _api.weft_blocks(array, None, len(counts))


def one(tensors, name="tensors"):
    """The one tensor of a list."""
    if len(tensors) != 1:
        raise errors.BadArgumentError(f"{name} has {len(tensors)} tensors; expected 1")
    return tensors[0]


def expect_count(tensor, count, name, reached):
    """That a tensor has so many elements; `reached`: where the number comes from."""
    if tensor.numel() != count:
        raise errors.BadArgumentError(f"{name} has {tensor.numel()} elements; expected {count}: {reached}")


def expect_each(tensors, ranks, name):
    """One tensor for each rank."""
    if len(tensors) != ranks:
        raise errors.BadArgumentError(f"{name} has {len(tensors)} tensors; expected {ranks}, one for each rank")


def expect_alike(tensors, ranks, like, name):
    """One tensor for each rank, all of the size and dtype of `like`."""
    expect_each(tensors, ranks, name)
    for i, tensor in enumerate(tensors):
        if tensor.numel() != like.numel() or tensor.dtype != like.dtype:
            raise errors.BadArgumentError(f"{name}[{i}] has {tensor.numel()} elements of {tensor.dtype}; expected {like.numel()} of {like.dtype}: "
                                          "tensors of all ranks have the same size and dtype")


def split_counts(tensor, sizes, ranks, name):
    """Elements for each rank of a tensor that is cut along its first dimension into so many rows, or
    evenly."""
    rows = tensor.size(0) if tensor.dim() else 1
    if not sizes:
        if rows % ranks:
            raise errors.BadArgumentError(f"{name} has {rows} rows; expected a number that {ranks} (group size) divides, or split sizes")
        sizes = [rows // ranks] * ranks
    if len(sizes) != ranks:
        raise errors.BadArgumentError(f"{name}_split_sizes has {len(sizes)} numbers; expected {ranks}, one for each rank")
    if sum(sizes) != rows:
        raise errors.BadArgumentError(f"{name}_split_sizes adds up to {sum(sizes)}; expected {rows}, the rows of {name}")
    row = tensor.numel() // rows if rows else 0
    return [size * row for size in sizes]


def _row_of(tensors):
    """One tensor over the memory of several that follow one another in one storage; None where they do
    not."""
    first = tensors[0]
    storage, offset = first.untyped_storage().data_ptr(), first.storage_offset()
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.storage_offset() != offset or tensor.untyped_storage().data_ptr() != storage or tensor.dtype != first.dtype:
            return None
        offset += tensor.numel()
    return first.detach().as_strided((offset - first.storage_offset(),), (1,), first.storage_offset())


def in_a_row(tensors):
    """One tensor with the elements of all: their own memory, or a copy."""
    row = _row_of(tensors)
    return row if row is not None else torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def expect_apart(outputs):
    """That no two of them share memory: one would overwrite the other."""
    extents = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size(), i) for i, tensor in enumerate(outputs)
                     if tensor.is_contiguous() and tensor.numel())
    for (_, end, one_of), (begin, _, other) in zip(extents, extents[1:]):
        if begin < end:
            one_of, other = sorted((one_of, other))
            raise errors.BadArgumentError(f"output_tensors[{other}] overlaps output_tensors[{one_of}]; expected memory of its own")


def gathered_into(outputs):
    """(where blocks of all ranks go, what then brings them to `outputs`, None where they are there)."""
    row = _row_of(outputs)
    if row is not None:
        return row, None
    expect_apart(outputs)
    counts = [tensor.numel() for tensor in outputs]
    flat = torch.empty(sum(counts), dtype=outputs[0].dtype)

    def after():
        with torch.no_grad():
            for tensor, part in zip(outputs, flat.split(counts)):
                tensor.detach().copy_(part.view(tensor.shape))
    return flat, after
