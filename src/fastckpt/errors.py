"""The exceptions, and the form of the sentences they say: where - found - expected - what to do.

Operating-system errors are not wrapped: they stay OSError, with errno and file name.
"""

import collections
import pickle


class CheckpointError(ValueError):
    """Something about a checkpoint that cannot be honoured; the base of every error below.

    Attributes that are known are set, the others are None: ``path`` (name of the source), ``record``
    (name of the piece inside it) and ``offset`` (bytes from the start of the source).
    """

    def __init__(self, message, *, path=None, record=None, offset=None):
        super().__init__(message)
        self.path = path
        self.record = record
        self.offset = offset


class FormatError(CheckpointError):
    """The bytes are not a checkpoint, or contradict themselves; ``cut`` says whether they end too early."""

    def __init__(self, message, *, cut=False, **where):
        super().__init__(message, **where)
        self.cut = cut


class ChecksumError(FormatError):
    """A record's CRC-32 is not the one that its directory gives (``expected``, ``actual``)."""

    def __init__(self, message, *, expected=None, actual=None, **where):
        super().__init__(message, **where)
        self.expected = expected
        self.actual = actual


class UnsupportedError(CheckpointError):
    """A legal file that uses something which is not handled."""


class UnsafePickleError(CheckpointError, pickle.UnpicklingError):
    """The pickle names a class or function (``qualname``) that is not known to be plain data, or makes of one what is not made here."""

    def __init__(self, message, *, qualname=None, **where):
        super().__init__(message, **where)
        self.qualname = qualname


class LimitError(CheckpointError):
    """Reading on would take work or memory out of proportion to the bytes that are there."""


def without_object(why, more="", **where):
    """The refusal to salvage anything of a file whose object is damaged; ``why`` says how, ``more`` what is there."""
    return FormatError(
        f"{why}. The object's pickle says which tensors there are and what they are called; without it nothing can be "
        f"salvaged{more}",
        **where,
    )


_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)


def short(value, limit=60):
    """A repr that ends soon, whatever the value holds.

    That of a container may have 2**depth characters, where members are shared; so may that of an object with attributes.
    """
    kind = type(value).__name__
    if isinstance(value, _CONTAINERS):
        if len(value) > 3:
            return f"<{kind} of {len(value)}>"
        inner = ", ".join(
            type(v).__name__ for v in (value.values() if isinstance(value, dict) else value)
        )
        return f"<{kind} of {inner or 'nothing'}>"
    if isinstance(value, (str, bytes, bytearray)):
        value = value[:limit]
    elif (
        isinstance(value, int) and value.bit_length() > 1000
    ):  # Python refuses to write very long ones
        return f"<int of {value.bit_length()} bits>"
    elif hasattr(value, "__array_interface__") or (
        hasattr(value, "__dict__") and not isinstance(value, type)
    ):
        return f"<{kind}>"
    try:
        text = repr(value)
    except ValueError:  # such an int inside, of a slice
        return f"<{kind}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."
