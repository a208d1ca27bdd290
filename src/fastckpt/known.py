"""A row of the table of known names (see rebuild.py)."""

from .errors import FormatError
from .nodes import MISSING, short

REBUILD_OTHER, REBUILD_TENSOR, REBUILD_TENSOR_V2, REBUILD_TENSOR_V3, REBUILD_ORDERED_DICT = range(5)


class Known:
    """A row: ``call(machine, args)`` is what a call of it gives, ``value`` what the bare name stands for.

    ``gives_back`` is the place of the argument that Python's own function may give back as it is, None where it gives none.
    """

    __slots__ = ("call", "gives_back", "rebuild", "storage_dtype", "value")

    def __init__(
        self, call=None, value=MISSING, storage_dtype=-1, rebuild=REBUILD_OTHER, gives_back=None
    ):
        self.call, self.value, self.storage_dtype = call, value, storage_dtype
        self.rebuild, self.gives_back = rebuild, gives_back


def expect(condition, what, found):
    if not condition:
        raise FormatError(f"{what} is expected, the pickle has {short(found)}")
