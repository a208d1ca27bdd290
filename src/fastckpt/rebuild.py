"""The table of every class and function that a checkpoint may name, and what we make of each.

A row turns the arguments that the pickle gives into plain data, a spec or a node. Nothing is looked up on the file's
word: a name that is not in ``TABLE`` becomes an Opaque.
"""

from . import numpy_nodes
from .known import Known
from .python_rows import python_rows
from .torch_rows import torch_rows


def _numpy_rows():
    for core in ("numpy.core", "numpy._core"):
        yield f"{core}.multiarray _reconstruct", Known(numpy_nodes.reconstruct)
        # of an object dtype, up to NumPy 2.2
        yield f"{core}.multiarray scalar", Known(numpy_nodes.scalar, gives_back=1)
        yield f"{core}.numeric _frombuffer", Known(numpy_nodes.frombuffer)
    yield "numpy dtype", Known(numpy_nodes.make_dtype, numpy_nodes.np.dtype)
    yield "numpy ndarray", Known(None, numpy_nodes.np.ndarray)
    for name in "bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128 str_ bytes_".split():
        yield f"numpy {name}", Known(None, getattr(numpy_nodes.np, name))


TABLE = {
    tuple(name.split(" ")): row
    for rows in (python_rows, _numpy_rows, torch_rows)
    for name, row in rows()
}
