"""Pickles that stand one behind the other, with raw data between them: what the legacy and tar formats are made of."""

from .._unpickler import Truncated, unpickle
from ..errors import FormatError

FIRST_WINDOW = 1 << 12  # bytes; most pickles of such files are shorter


class PickleStream:
    """Reads pickles and integers of ``source`` between ``offset`` (which moves on) and ``end``.

    ``watch(what, offset)`` is called at each attempt at a pickle; it gives the ``observe`` of unpickle, whose ``finish`` is
    called with the Unpickled.
    """

    def __init__(self, source, offset, end, watch=None, **options):
        self.source, self.offset, self.end, self.options = source, offset, end, options
        self.watch = watch
        self.unknown = []  # names that are not known to be plain data, in any of the pickles
        self.places = []  # (what, offset, nbytes, names, string that cannot be decoded) of the pickles that were read

    def pickle(self, what, window=FIRST_WINDOW, **options):
        """Execute the pickle at ``offset`` and move behind it; an Unpickled."""
        where = f"{self.source.name}: {what}"
        left = self.end - self.offset
        while True:
            if self.watch:
                options["observe"] = self.watch(what, self.offset)
            try:
                # Let go at once: an error that somebody keeps must not keep the caller's buffer from changing its size.
                with memoryview(self.peek(min(window, left))) as data:
                    options = {**self.options, **options}
                    result = unpickle(data, where=where, offset=self.offset, **options)
            except Truncated as error:
                if window >= left:
                    raise FormatError(
                        f"{error}; the file ends after {self.end} bytes, an interrupted copy or download?",
                        path=self.source.name,
                        offset=self.offset,
                    ) from None
                window *= 8
            else:
                self.places.append(
                    (what, self.offset, result.end, result.names, result.undecodable)
                )
                self.offset += result.end
                self.unknown += result.unknown
                if self.watch:
                    options["observe"].finish(result)
                return result

    def peek(self, nbytes):
        """The next bytes, without a copy where they are in memory."""
        if self.source.view is not None:
            self.source.check_open()
            return self.source.view[self.offset : self.offset + nbytes]
        return self.source.read(self.offset, nbytes)

    def take(self, nbytes, what):
        """The next bytes, and move behind them."""
        if nbytes > self.end - self.offset:
            raise self.cut_short(what, nbytes)
        data = self.source.read(self.offset, nbytes)
        self.offset += nbytes
        return data

    def skip(self, nbytes, what):
        """Move behind bytes that must be there; where they begin."""
        if nbytes > self.end - self.offset:
            raise self.cut_short(what, nbytes)
        self.offset += nbytes
        return self.offset - nbytes

    def int64(self, what):
        return int.from_bytes(self.take(8, what), "little", signed=True)

    def int64s(self, count, what):
        data = self.take(8 * count, what)
        return tuple(
            int.from_bytes(data[i : i + 8], "little", signed=True) for i in range(0, 8 * count, 8)
        )

    def cut_short(self, what, nbytes, record=None):
        return FormatError(
            f"{self.source.name}: {what} at byte {self.offset} takes {nbytes} bytes, {self.end - self.offset} are left; "
            f"the file is cut short, an interrupted copy or download?",
            cut=True,
            path=self.source.name,
            record=record,
            offset=self.offset,
        )

    def error(self, problem, kind=FormatError, record=None):
        return kind(
            f"{self.source.name}: {problem}",
            path=self.source.name,
            record=record,
            offset=self.offset,
        )
