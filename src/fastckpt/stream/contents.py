"""What a stream holds, as far as is known before its storages arrive."""

import numpy as np

from ..errors import FormatError, LimitError
from ..limits import Limits
from ..memory import machine_nbytes
from ..records import Records


class Contents:
    """A stream, read up to its storages; see LegacyContainer for what else it offers.

    ``names``: of the records, in their order; ``rows``: {key of a storage: row of its record}.
    """

    kind = "stream"

    def __init__(self, inlet, unpickled, pickled, names, rows, layout, byteorder):
        self.source = self.inlet = inlet
        self.unpickled, self._pickle = unpickled, pickled
        self.layout, self.byteorder = layout, byteorder
        self.start = inlet.position
        self.always_data = False  # whatever weights_only says
        self.records = Records(names, np.full(len(names), -1), layout.nbytes)
        self.rows = rows

    def locate(self, rows):
        """Nothing can be looked for in a stream."""

    def pickle_bytes(self):
        """The bytes of the object's pickle."""
        return self._pickle


def error(inlet, found, kind=FormatError, **more):
    """The error for what a stream says, at the place where it was read."""
    return kind(
        f"{inlet.name} at byte {inlet.position}: {found}",
        path=inlet.name,
        offset=inlet.position,
        **more,
    )


def bounded(inlet, nbytes, what, limits):
    """Raise LimitError where more bytes are announced than can be meant."""
    most = (limits or Limits()).stream_nbytes
    reason = "Limits.stream_nbytes allows"
    if most is None:
        most, reason = machine_nbytes(), "this machine has memory for"
    if nbytes > most:
        raise error(
            inlet,
            f"{what} would take {nbytes} bytes, and {reason} {most} (Limits.stream_nbytes sets the bound)",
            LimitError,
        )
