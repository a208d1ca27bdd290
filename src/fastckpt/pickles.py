"""Every pickle in a source, whoever would read it: those of a checkpoint, and those that stand beside, before and behind.

Each is executed by the data-only machine in its symbolic mode, which tells an observer what it says. Nothing is refused:
where one thing cannot be read, the next one is.
"""

import zlib

import numpy as np

from . import _zip
from .containers import sniff
from .containers._tar_members import NEEDED, tar_members
from .containers._zip_directory import DIRECTORY_PROBLEMS, LOCAL_NBYTES, MOST_INFLATION
from .containers._zip_end import CENTRAL_NBYTES, end_record_64, find_end
from .containers._zip_names import PICKLE, STORAGE_FOLDERS, RecordNames
from .containers.legacy import LegacyContainer
from .containers.stream import PickleStream
from .containers.tar import TarContainer
from .containers.zip import inflate
from .containers.zip_walk import MOST_STEPS
from .errors import CheckpointError, FormatError
from .local_headers import gaps, record_ends
from .records import DEFLATED, STORED
from .source import MemorySource
from .unlisted import find_header, is_whole, local_header, records_between

PICKLE_SUFFIXES = (".pkl", ".pickle", ".pck", ".pcl", ".dill", ".joblib", "_pkl")
TAR_PICKLES = ("sys_info", *NEEDED)
RAW_FOLDERS = (*STORAGE_FOLDERS, "constants/")
NPY_MAGIC = b"\x93NUMPY"
MOST_EXTRA_NBYTES, ENCRYPTED = 0xFFFF, 1
HEAD_NBYTES = 1024
MOST_NESTING = 4  # archives in archives
MOST_ARCHIVES = 8  # in one file
MOST_PICKLES = 10_000  # one behind the other
MOST_GAPS = 1000  # between the records of an archive
FIRST_WINDOW = SPARE_NBYTES = 1 << 20


class PickleWalk:
    """Finds the pickles of ``source`` and shows them to an Observer. ``path`` names the records that lead to an archive in an
    archive; ``in_file`` tells whether offsets in the source are those of the file itself.
    """

    def __init__(self, observer, source, limits, *, path=(), in_file=True, budget=None):
        self.observer, self.top, self.limits = observer, source, limits
        self.path, self.in_file = path, in_file
        # Entries of an archive may all mean the same bytes, and inflate a thousandfold, and again inside.
        self.budget = budget or {
            "read": 4 * source.nbytes + SPARE_NBYTES,
            "inflate": MOST_INFLATION * source.nbytes + SPARE_NBYTES,
            "steps": MOST_STEPS,  # from one local header to the next
        }
        self.options = {"limits": limits, "symbolic": True}

    def run(self):
        """Look at everything; what kind of file it is. Raises FormatError where there is no pickle in it."""
        source = self.top
        try:
            kind = sniff.kind(source)
        except FormatError:
            if sniff.ends_in_archive(source):  # behind something that begins like another format
                self.zip()
                return sniff.ZIP
            if self.array(source, 0, source.nbytes, None) or self.pickles(
                source, 0, source.nbytes, None
            ):
                return "pickle"
            raise
        {sniff.ZIP: self.zip, sniff.LEGACY: self.legacy, sniff.TAR: self.tar}[kind]()
        return kind

    def named(self, record):
        return ": ".join([*self.path, record] if record else self.path) or None

    def begin(self, record, in_file=True):
        """The ``watch`` of a PickleStream."""
        known, name = in_file and self.in_file, self.named(record)
        return lambda what, offset: self.observer.begin(name, what, offset, known)

    def damage(self, error, record=None):
        self.observer.damage(error, self.named(record), self.in_file)

    # -- pickles that stand one behind the other

    def pickles(self, source, offset, end, record, *, certain=False):
        """Execute what is a pickle, and those behind it, up to ``end``; how many. Bytes that look like none are only noted.

        Those that name something or are marked by their protocol and end with STOP are; with ``certain`` the first is one anyway.
        """
        in_file = source is self.top
        stream = PickleStream(
            source, offset, end, watch=self.begin(record, in_file), **self.options
        )
        count = 0
        while stream.offset < end:
            at, error = stream.offset, None
            head = source.read(at, min(2, end - at))
            try:
                if count:
                    stream.pickle(f"pickle {count + 1}")
                else:
                    stream.pickle("pickle", FIRST_WINDOW)
            except CheckpointError as caught:
                error = caught
            is_one = certain and not count or is_marked(head) and error is None
            if not is_one and not self.observer.last().telling:
                self.observer.forget()
                stream.offset = at
                break
            count += 1
            if error:
                self.damage(error, record)
                return count
            if count == MOST_PICKLES:
                self.damage(f"there are more than {count} pickles one behind the other", record)
                return count
        if count and stream.offset < end:
            self.trailing(record, stream.offset, end, in_file)
        return count

    def behind(self, offset, end, record=None):
        """Look at bytes of the file that nothing accounts for."""
        if offset < end and not self.pickles(self.top, offset, end, record):
            self.trailing(record, offset, end, True)

    def between(self, begins, ends):
        """Look at what no record and no directory takes, given where those begin and end."""
        unlisted = gaps(begins, ends)
        if len(unlisted) > MOST_GAPS:
            self.damage(
                f"{len(unlisted)} stretches of bytes belong to no record; only {MOST_GAPS} were looked at"
            )
        for begin, end in unlisted[:MOST_GAPS]:
            self.behind(begin, end)
            self.unlisted(begin, end)

    def unlisted(self, begin, end, listed=()):
        """Look at the records between two bytes by their local headers, but for those whose headers are at ``listed`` bytes."""
        first = find_header(self.top, begin, end)
        if first is None:
            return
        records, self.budget["steps"], error = records_between(
            self.top, first, end, self.budget["steps"]
        )
        if error:
            self.damage(error)
        if listed:
            records = [record for record in records if record[1] not in listed]
            first = records[0][1] if records else None
        if first is not None:
            self.damage(
                f"the record that begins at byte {first} is in no directory, nor are others up to byte {end}: another reader may "
                f"take them, and salvage may; they were looked at as far as their local headers tell where they lie"
            )
        folders = raw_folders([name for name, *_ in records])
        for name, _, method, offset, stored, nbytes in records:
            if not name.lower().endswith(PICKLE_SUFFIXES) and name.startswith(folders):
                continue
            if method == STORED:
                self.record(self.top, name, offset, stored)
            elif nbytes is not None:
                self._deflated(name, offset, stored, nbytes)
            else:
                self.damage(f"record {name!r:.200} is not whole: it was not looked at", name)

    def trailing(self, record, offset, end, in_file):
        known = in_file and self.in_file
        self.observer.trailing(self.named(record), offset if known else None, end - offset)

    # -- the older containers

    def legacy(self):
        """The five pickles of a legacy stream; where it stops being one, whatever pickles follow."""
        try:
            end = LegacyContainer(self.top, watch=self.begin(None), **self.options).end
        except CheckpointError as error:
            self.damage(error)
            last = self.observer.last()
            if not last.nbytes:
                return
            end = last.at + last.nbytes
        self.behind(end, self.top.nbytes)

    def tar(self):
        """The members of a tar: those of a checkpoint, and all others. A pickle may look like a tar, too."""
        self.pickles(self.top, 0, self.top.nbytes, None)
        try:
            members = tar_members(self.top)
        except CheckpointError as error:
            self.damage(error)
            return
        done = set()
        if all(name in members for name in NEEDED):
            done = self._tar_checkpoint(members)
        for name, (offset, nbytes) in members.items():
            if name not in done:
                self.record(self.top, name, offset, nbytes, certain=name in TAR_PICKLES)

    def _tar_checkpoint(self, members):
        """Read the members of a checkpoint as torch does; which were begun."""
        begun = set()

        def begin(what, offset):
            name = next(n for n in NEEDED if 0 <= offset - members[n][0] <= members[n][1])
            begun.add(name)
            return self.begin(name)(what, offset)

        try:
            container = TarContainer(self.top, watch=begin, **self.options)
        except CheckpointError as error:
            self.damage(error)
        else:
            offset, nbytes = members["pickle"]
            self.behind(offset + container.unpickled.end, offset + nbytes, "pickle")
        return begun

    # -- ZIP

    def zip(self):
        """The records of an archive, of each directory that there is, and what stands around it."""
        source = self.top
        try:
            end, others, tail = find_end(source)
        except CheckpointError as error:
            self.damage(error)
            if not sniff.is_archive(source.read(0, min(8, source.nbytes))):
                self.pickles(source, 0, source.nbytes, None)
            self.unlisted(0, source.nbytes)
            return
        if len(others) >= MOST_ARCHIVES:
            self.damage(f"there are {len(others) + 1} ZIP end records, each with a directory")
        seen, own = {}, np.zeros((_zip.COLUMNS, 0), dtype=np.int64)
        begins, ends = [[source.nbytes]], [[source.nbytes]]
        for archive in (end, *others[: MOST_ARCHIVES - 1]):
            if lies_inside(archive, own):
                continue  # an archive that is a record, and looked at as one
            directory = tail.bytes(archive.directory, archive.nbytes)
            columns = self._directory(directory, archive)
            own = columns if archive is end else own
            end_records, _ = end_record_64(archive, tail) or (archive.at, None)
            begins += [columns[_zip.HEADER], [archive.directory, end_records]]
            ends += [record_ends(source, directory, columns)]
            ends += [[archive.directory + archive.nbytes, archive.end]]
            names = list(RecordNames(directory, columns, 0))
            folders = raw_folders(names)
            for name, entry in zip(names, columns.T.tolist(), strict=True):
                if (name, entry[_zip.HEADER]) not in seen and not name.endswith("/"):
                    seen[name, entry[_zip.HEADER]] = entry
                    if name.lower().endswith(PICKLE_SUFFIXES) or not name.startswith(folders):
                        self._entry(name, entry)
        self.between(np.concatenate(begins), np.concatenate(ends))
        objects = [entry for name, entry in seen.items() if f"/{name[0]}".endswith(f"/{PICKLE}")]
        # Where the object is damaged, salvage looks for another.
        if objects and not any(is_whole(source, entry) for entry in objects):
            self.unlisted(0, source.nbytes, listed={header for _, header in seen})

    def _directory(self, directory, end):
        """The columns of all entries up to the first that makes no sense."""
        room = end.nbytes // CENTRAL_NBYTES
        columns = np.zeros((_zip.COLUMNS, room), dtype=np.int64)
        status, count, at = _zip.read_directory(directory, columns, room, end.directory, end.bias)
        if status == _zip.OK:
            count = room
        elif at < end.nbytes:
            self.damage(
                f"ZIP directory entry {count} at byte {end.directory + at}: {DIRECTORY_PROBLEMS[status]}; the file is damaged"
            )
        columns = np.ascontiguousarray(columns[:, :count])
        order = np.argsort(columns[_zip.HEADER], kind="stable")
        _zip.set_limits(columns, order, count, end.directory)
        return columns

    def _entry(self, name, entry):
        """Look at one entry of a ZIP, given by its columns."""
        source, header = self.top, entry[_zip.HEADER]
        method, stored, nbytes = (entry[c] for c in (_zip.METHOD, _zip.STORED, _zip.NBYTES))
        local, offset = local_header(source, header)
        if not local.startswith(sniff.LOCAL_HEADER) or stored > source.nbytes - offset:
            problem = "is not there in full, or has no local header"
        elif entry[_zip.FLAGS] & ENCRYPTED or method not in (STORED, DEFLATED):
            problem = f"is encrypted, or packed with method {method}"
        elif method == DEFLATED and nbytes // MOST_INFLATION > stored:
            problem = f"says of {stored} bytes that they inflate to {nbytes}"
        elif method == STORED:
            return self.record(source, name, offset, stored)
        else:
            return self._deflated(name, offset, stored, nbytes)
        return self.damage(f"record {name!r:.200} {problem}: it was not looked at", name)

    def _deflated(self, name, offset, stored, nbytes):
        """Inflate a record that holds a pickle or an archive, to judge from its name and its first bytes."""
        start = self.top.read(offset, min(stored, HEAD_NBYTES))
        try:
            head = zlib.decompressobj(-zlib.MAX_WBITS).decompress(start, HEAD_NBYTES)
        except zlib.error:
            head = b""
        if self.is_interesting(name, head):
            data = None
            if self.afford("read", stored, name) and self.afford("inflate", nbytes, name):
                data = inflate(self.top.read(offset, stored), nbytes)
                if data is None:
                    self.damage(f"record {name!r:.200} does not inflate to {nbytes} bytes", name)
            if data is not None:
                self.record(MemorySource(data, self.top.name), name, 0, nbytes)

    # -- records of archives

    def is_interesting(self, name, head):
        return (
            name.lower().endswith(PICKLE_SUFFIXES)
            or is_marked(head)
            or head.startswith(NPY_MAGIC)
            or is_container(head)
            or sniff.packing(head) is not None
        )

    def afford(self, what, nbytes, name):
        self.budget[what] -= nbytes
        if self.budget[what] < 0:
            self.damage(
                f"record {name!r:.200} was not looked at: the records of this file come to more than it has bytes for",
                name,
            )
        return self.budget[what] >= 0

    def record(self, source, name, offset, nbytes, *, certain=False):
        """Look at a record that lies in ``source`` as it is: for a pickle, an archive, an array of objects."""
        head = bytes(source.read(offset, min(nbytes, HEAD_NBYTES)))
        certain = certain or name.lower().endswith(PICKLE_SUFFIXES)
        if not certain and not self.is_interesting(name, head):
            return
        if source is self.top and not self.afford("read", nbytes, name):
            return
        if head.startswith(NPY_MAGIC):
            self.array(source, offset, offset + nbytes, name)
        elif is_container(head):
            self.nested(source, name, offset, nbytes)
        elif (how := sniff.packing(head)) is not None:
            self.damage(
                f"record {name!r:.200} is {how}: it was not looked at; unpack it, and scan what was in it",
                name,
            )
        else:
            self.pickles(source, offset, offset + nbytes, name, certain=certain)

    def array(self, source, offset, end, name):
        """Look at an array in the .npy format: one of objects is a pickle, and its header may hide that; how many pickles."""
        head = bytes(source.read(offset, min(end - offset, HEAD_NBYTES)))
        at = 10 if head[6:7] == b"\1" else 12  # where the header's text begins
        begin = at + int.from_bytes(head[8:at], "little")
        if not head.startswith(NPY_MAGIC):
            return 0
        objects = b"O" in head[at:begin].partition(b"shape")[0]
        return self.pickles(source, min(end, offset + begin), end, name, certain=objects)

    def nested(self, source, name, offset, nbytes):
        """Look at a file of its own inside of an archive."""
        if len(self.path) >= MOST_NESTING:
            self.damage(
                f"record {name!r:.200} lies {MOST_NESTING} archives deep: it was not looked at",
                name,
            )
            return
        inner = MemorySource(source.read(offset, nbytes), source.name)
        walk = PickleWalk(
            self.observer,
            inner,
            self.limits,
            path=(*self.path, name),
            in_file=False,
            budget=self.budget,
        )
        try:
            walk.run()
        except FormatError as error:
            self.damage(error, name)


def lies_inside(archive, columns):
    """Tell whether an archive lies in the data of an entry, as far as the directory says where that is."""
    begin = columns[_zip.HEADER]
    most = LOCAL_NBYTES + columns[_zip.NAME_NBYTES] + MOST_EXTRA_NBYTES + columns[_zip.STORED]
    return bool(((begin < archive.directory) & (archive.end <= begin + most)).any())


def is_marked(head):
    """Tell whether a pickle of protocol 2 or later begins with its protocol."""
    return len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5


def is_container(head):
    return sniff.is_archive(head) or sniff.first_integer(head) == sniff.MAGIC or sniff.is_tar(head)


def raw_folders(names):
    """The folders of an archive that hold the bytes of tensors, for as many checkpoints as an honest one has in it."""
    roots = {name[: -len(PICKLE)] for name in names if name.lower().endswith(PICKLE)}
    return tuple(root + folder for root in sorted(roots)[:MOST_ARCHIVES] for folder in RAW_FOLDERS)
