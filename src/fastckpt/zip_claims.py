"""What the directory of a ZIP claims of its records, entry by entry, where some of it may be damaged."""

import numpy as np

from . import _zip
from .containers._zip_contents import no_pickle
from .containers._zip_directory import LOCAL_NBYTES, unify_separators, unusable_rows
from .containers._zip_end import CENTRAL_NBYTES, find_end
from .containers._zip_names import PICKLE, RecordNames, find_prefixes, two_checkpoints
from .containers.zip_walk import LOCAL_SIGNATURE, Claim, claim_of, read_header
from .containers.zip_writer import data_offset
from .errors import FormatError
from .findings import Finding
from .records import NO_CRC


class DirectoryClaims:
    """The claims of a directory, none where it is of no use.

    ``prefix`` is the folder of the checkpoint with its slash, None where that is not to be told; ``claims`` has lists of Claims
    by name, without the folder. ``guesses`` are others, for records that those are wrong about: torch's writer leaves no choice
    where the data behind a damaged local header begins. ``no_pickle`` is the error for an archive that is no checkpoint;
    ``ends`` says then where its records end, by where their headers stand, if these have the names that the directory gives.
    ``end`` is where the archive ends.
    Raises FormatError where there are two checkpoints.
    """

    def __init__(self, source):
        self.source, self.prefix, self.no_pickle = source, None, None
        self.claims, self.guesses, self.findings, self.ends = {}, {}, [], {}
        self.end = source.nbytes
        try:
            end, _, tail = find_end(source)
        except FormatError as error:
            self.findings.append(Finding("no_directory", str(error), None, error.offset))
            return
        self._read(end, tail.bytes(end.directory, end.nbytes))

    def contradiction(self, name, nbytes, crc32):
        """The Claim that speaks against such a content of a record that was found without the directory; None if there is none."""
        claims = [*self.claims.get(name, ()), *self.guesses.get(name, ())]
        if any(each.nbytes == nbytes and each.crc32 in (crc32, NO_CRC) for each in claims):
            return None
        return claims[0] if claims else None

    def _read(self, end, directory):
        room = max(end.entries, end.nbytes // CENTRAL_NBYTES + 1)
        columns = np.empty((_zip.COLUMNS, room), dtype=np.int64)
        status, places = np.empty(room, dtype=np.int64), np.empty(room, dtype=np.int64)
        count = _zip.survey_directory(
            directory, columns, room, end.directory, end.bias, status, places
        )
        good = np.flatnonzero(status[:count] == _zip.OK)
        if missing := max(count, end.entries) - len(good):
            problem = f"{missing} entries of the ZIP directory at byte {end.directory} are damaged"
            self.findings.append(
                Finding("directory_entry", f"{self.source.name}: {problem}", None, end.directory)
            )
        columns = np.ascontiguousarray(columns[:, good])
        if self._is_of_another(end, columns[_zip.HEADER]):
            return
        text = unify_separators(directory, columns)
        prefixes = find_prefixes(text, columns)
        if len(prefixes) > 1:
            raise FormatError(f"{self.source.name}: a ZIP archive with {two_checkpoints(prefixes)}")
        names = list(RecordNames(text, columns, 0))
        if prefixes and self._is_borne_out(prefixes[0], names, columns[_zip.HEADER]):
            self.prefix, self.end = prefixes[0], end.end
            self._claim(names, columns, end)
        else:
            self.no_pickle = no_pickle(self.source, names)
            for name, at, stored in zip(
                names, columns[_zip.HEADER].tolist(), columns[_zip.STORED].tolist(), strict=True
            ):
                if (header := self._header(name, at)) is not None:
                    self.ends[at] = header.data + stored

    def _is_of_another(self, end, headers):
        """Whether the directory is that of an archive inside of the one that begins at byte 0, or behind it."""
        begin = int(headers.min(initial=end.directory))
        if not begin:
            return False
        inside = self.source.read(0, 4) == LOCAL_SIGNATURE
        problem = f"the ZIP directory at byte {end.directory} is that of an archive that begins at byte {begin}"
        problem += ", and another one begins at byte 0" if inside else ""
        self.findings.append(
            Finding("foreign_directory", f"{self.source.name}: {problem}", None, end.directory)
        )
        return inside

    def _is_borne_out(self, prefix, names, headers):
        """Whether the folder that data.pkl is in, as the directory has it, is that of other records or of its local header."""
        if sum(name.startswith(prefix) for name in names) > 1:
            return True
        return self._header(prefix + PICKLE, int(headers[names.index(prefix + PICKLE)])) is not None

    def _header(self, name, at):
        """The local header of a record, None where it is not there or calls it otherwise."""
        header = read_header(self.source, at)
        return header if header and header.name.replace("\\", "/") == name else None

    def _claim(self, names, columns, end):
        method, stored, nbytes, crc32, headers = (
            columns[getattr(_zip, name)] for name in ("METHOD", "STORED", "NBYTES", "CRC", "HEADER")
        )
        usable = ~unusable_rows(columns)
        # Nothing is read twice, however often a directory speaks of it; local headers tell who is right.
        _zip.set_limits(columns, np.argsort(headers, kind="stable"), len(names), end.directory)
        usable &= stored <= columns[_zip.LIMIT] - headers - LOCAL_NBYTES - columns[_zip.NAME_NBYTES]
        for row in np.flatnonzero(usable).tolist():
            name, at = names[row], int(headers[row])
            if not name.startswith(self.prefix) or name.endswith("/"):
                continue
            said = [int(column[row]) for column in (stored, nbytes, method, crc32)]
            header = self._header(name, at)
            if header is not None:
                self._add(self.claims, name, header.data, said, self._is_sealed(header, *said), end)
            name_nbytes = len(name.encode("utf-8", "surrogateescape"))
            offset = end.bias + data_offset(at - end.bias, name_nbytes, said[1])
            if header is None or header.data != offset:
                self._add(self.guesses, name, offset, said, False, end)

    def _is_sealed(self, header, stored, nbytes, method, crc32):
        """Whether header and descriptor bear an entry out, which matters where no CRC-32 does."""
        if crc32 != NO_CRC:
            return True
        found = claim_of(self.source, header, (stored,))
        return found is not None and found[0].crc32 == NO_CRC

    def _add(self, claims, name, offset, said, sealed, end):
        if said[0] <= end.directory - offset:
            claim = Claim(offset, *said, sealed)
            claims.setdefault(name.removeprefix(self.prefix), []).append(claim)
