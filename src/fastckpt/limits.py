"""How much work a file may cost beyond what its bytes justify."""

import sys
from dataclasses import dataclass, fields

from .arguments import at_least
from .errors import short

# Beyond the first no file would be safe; of the second there is a C int.
MOST = {"key_depth": 10_000, "object_depth": 2**31 - 1}


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that no honest file meets; a file that does is refused with LimitError. Each is a whole number from 0 on.

    key_items: how many objects may be visited, in one pickle, to hash dict keys and set members; None for a million, or
        four for each of its bytes where that is more. A tuple that holds one tuple twice, two hundred levels deep, has
        2**200 of them in 600 bytes.
    key_collisions: how many different dict keys and set members may have one hash. Python compares each with all others.
    key_depth: how deep tuples may nest in one key, 10,000 at most: Python hashes them on the C stack, which ends somewhere beyond
        40,000 where it has 8 MiB.
    object_depth: how deep objects may nest through constructor arguments (lists, dicts and tuples may nest without limit).
    scan_events: how many names and questionable calls a scan of one file lists before it gives up, and how many harmless calls
        before it only counts them.
    int_digits: decimal digits of an int in a text pickle (turning digits into an int takes quadratic time).
    stream_nbytes: bytes of memory that a stream may ask for by what it announces; None for as many as the machine has.
    zarr_chunks: in how many chunks one sample of an array of a Zarr store may lie, or a pointer. Those that are missing are filled, so
        that a few bytes of metadata can ask for any number of them; each takes some 100 us.
    zarr_nbytes: how many bytes one sample of such an array may take, decoded in whole chunks, or a pointer.
    """

    key_items: int | None = None
    key_collisions: int = 256
    key_depth: int = 500
    object_depth: int = 300
    int_digits: int = 4300
    scan_events: int = 100_000
    stream_nbytes: int | None = None
    zarr_chunks: int = 100_000
    zarr_nbytes: int = 1 << 32

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                number = at_least(0, field.name, value)
                most = MOST.get(field.name, sys.maxsize)  # native code counts in 64 bits
                if number > most:
                    raise ValueError(f"{field.name}={short(number)}: at most {most} is possible")
