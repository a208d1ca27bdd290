"""Plain tensors over memory that is there: dtypes as torch has them, views, and bytes."""

from .dtypes import DTYPES
from .errors import UnsupportedError
from .needs_torch import torch

DTYPE_OF = [getattr(torch, row.name, None) for row in DTYPES]

# What DLPack calls the dtypes that every torch since 2.4 takes from it, as (code, bits), by our code.
_DLPACK_NAMES = {
    "int8": (0, 8), "int16": (0, 16), "int32": (0, 32), "int64": (0, 64), "uint8": (1, 8), "bool": (6, 8),
    "float16": (2, 16), "float32": (2, 32), "float64": (2, 64), "bfloat16": (4, 16),
    "complex64": (5, 64), "complex128": (5, 128),
}  # fmt: skip
DLPACK = tuple(_DLPACK_NAMES.get(row.name) for row in DTYPES)
# torch.utils.dlpack.from_dlpack without its Python front, which takes longer than all the rest.
FROM_DLPACK = torch._C._from_dlpack


# A subclass, such as a DTensor, may have its memory elsewhere, or none.
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.nn.Parameter))


def torch_dtype(code):
    dtype = DTYPE_OF[code]
    if dtype is None:
        raise UnsupportedError(
            f"torch {torch.__version__} has no {DTYPES[code].name}; a newer torch does"
        )
    return dtype


def empty_tensor(shape, dtype):
    """Memory for a tensor on the CPU, whatever torch's default device is."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def view_tensor(owner, start, shape, stride, spec, placement):
    """A tensor of the values of ``spec`` in a buffer (None: it has no values), from element ``start`` on."""
    storage = (
        torch.UntypedStorage(0)
        if owner is None
        else torch.frombuffer(owner, dtype=torch.uint8).untyped_storage()
    )
    storage = placement.place(storage, spec.storage.location)
    tensor = torch.empty(0, dtype=torch_dtype(spec.dtype), device=storage.device).set_(
        storage, start, shape, stride
    )
    if spec.conj or spec.neg:
        torch._utils.set_tensor_metadata(
            tensor, {name: True for name in ("conj", "neg") if getattr(spec, name)}
        )
    return tensor.requires_grad_(True) if spec.requires_grad else tensor


def dense_tensor(owner, code, shape):
    """A contiguous tensor on the CPU over a buffer of exactly its bytes (None: it has none)."""
    dtype = torch_dtype(code)
    if owner is None:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(owner, dtype=torch.uint8).view(dtype).view(shape)


def reach(tensor):
    """How many elements of its storage lie between the first and the last of a strided tensor that has any, both counted."""
    if tensor.is_contiguous():
        return tensor.numel()
    return 1 + sum([(n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)])


def memory_problem(tensor):
    """What is wrong with the memory of a tensor that is to be written to, None where all of its elements have some.

    ``storage.resize_`` takes memory away from tensors that stay as large as they were (FSDP does so), and torch's own
    functions write to it all the same.
    """
    plain = type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided
    if not plain or tensor.is_nested or tensor.is_meta or not tensor.numel():
        return None
    needed = (tensor.storage_offset() + reach(tensor)) * tensor.element_size()
    there = tensor.untyped_storage().nbytes()
    if needed <= there:
        return None
    return f"its storage was freed or resized: it has {there} bytes, and the elements need {needed}"


def bytes_of(out, spec):
    """The memory of a CPU tensor that takes the values of ``spec``, as flat bytes."""
    if out.dtype is not torch_dtype(spec.dtype) or tuple(out.shape) != spec.shape:
        raise ValueError(
            f"out: a tensor of {out.dtype} and {tuple(out.shape)}, the one in the file is of "
            f"{torch_dtype(spec.dtype)} and {spec.shape}"
        )
    if out.device.type != "cpu" or not out.is_contiguous() or out.is_conj() or out.is_neg():
        raise ValueError(
            "out: a contiguous tensor on the CPU, with values as they lie there, is needed"
        )
    if problem := memory_problem(out):
        raise ValueError(f"out: {problem}")
    return out.detach().reshape(-1).view(torch.uint8).numpy()
