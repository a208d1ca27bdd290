"""LitDataReader: the samples of a data set that LitData has optimized, read where they lie."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

import numpy as np

from ..arguments import at_least, kind_of
from . import _litdata as native
from ._litdata_batch import Batch
from ._litdata_layout import BYTES, CALL, TEXT, Layout, unflatten
from .collate import collate
from .litdata_chunks import Chunks
from .litdata_codecs import Fernet, Zstd
from .litdata_errors import BadItem, Uneven
from .litdata_index import read_index
from .litdata_leaves import Elements
from .litdata_tree import batch_tree
from .reader import Reader, counted

# Iterating reads so many samples at a time, or fewer where they are large.
ITERATED_ITEMS, ITERATED_NBYTES = 256, 8 << 20


class LitDataReader(Reader):
    """The samples of a folder that LitData's ``optimize`` wrote (index.json, chunks, PyTreeLoader), in the order of the index.

        reader = LitDataReader("train/")
        reader[0]                          # {"x": tensor([...]), "label": 3}
        reader.read_batch(range(64))       # {"x": a tensor of 64 rows, "label": a tensor of 64}
        torch.utils.data.DataLoader(reader, batch_size=64, shuffle=True)

    ``path``: the folder, of which nothing is ever written, deleted or replaced. ``mmap``: map chunks instead of reading them, all
    (True) or those of these numbers; only such that nobody cuts short while they are read. All that is compared before each read is
    the size of the chunk: whoever cuts the mapped file in that instant ends the process (SIGBUS), and ``mmap=False`` never does.
    Chunks that are compressed or encrypted are read all the same, and samples are the same either way. ``framework``: "torch" makes
    tensors of tensors, "numpy" NumPy arrays. ``key``: of a data set that is encrypted, as ``fernet_key`` derives it. ``decoders``:
    callables that make something of the bytes of a leaf, by the name of its serializer ("jpeg"); those of media are else handed out as
    bytes. ``types``: classes of namedtuples, by the name they were registered with. ``allow_pickle`` runs the pickles in a data set,
    which is as trusting its writer with this process. ``cache_nbytes`` bounds what is kept of chunks: offsets, and what was inflated
    or decrypted.

    Raises FormatError for what is no such data set or damaged, UnsupportedError for what is not read here, UnsafePickleError for
    pickles, ModuleNotFoundError that names the extra where a library is missing (zstandard, cryptography, pyarrow), OSError; TypeError
    and ValueError for arguments, also for a key where nothing is encrypted.
    Reading raises them too: a chunk is looked at when a sample of it is wanted. An item that is not as the index says is a
    FormatError, and hides no other item.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        mmap: bool | Iterable[int] = False,
        *,
        framework: str = "torch",
        key: bytes | str | None = None,
        decoders: Mapping[str, Callable[[bytes], Any]] | None = None,
        types: Mapping[str, Callable[..., Any]] | None = None,
        allow_pickle: bool = False,
        cache_nbytes: int = 64 << 20,
    ) -> None:
        if framework not in ("torch", "numpy"):
            raise ValueError(f"framework={framework!r} is neither 'torch' nor 'numpy'")
        self.framework = framework
        self._folder = os.path.abspath(os.fsdecode(path))
        cache_nbytes = at_least(0, "cache_nbytes", cache_nbytes)
        index = read_index(
            self._folder,
            decoders=callables("decoders", decoders),
            types=callables("types", types),
            allow_pickle=allow_pickle,
        )
        elements = Elements(framework)
        self._layout = Layout(
            index.leaves, index.tree, elements.rows, elements.new, elements.from_dlpack
        )
        self._batch_tree = batch_tree(index.tree, framework)
        kinds = enumerate(leaf[1] for leaf in index.leaves)
        self._listed = [(leaf, kind) for leaf, kind in kinds if kind in (TEXT, BYTES, CALL)]
        self._ends = [0, *accumulate(chunk.count for chunk in index.chunks)]
        self._begins = np.array(self._ends, dtype=np.int64)
        self._length = self._ends[-1]
        self._chunks = Chunks(
            self._folder,
            index,
            mapped=chunks_to_map(mmap, len(index.chunks)),
            inflate=Zstd() if index.compression else None,
            decrypt=self._decrypt(index, key),
            cache_nbytes=cache_nbytes,
        )
        self._cache = self._chunks.cache

    @staticmethod
    def _decrypt(index, key):
        if not isinstance(key, (bytes, str, type(None))):
            raise TypeError(f"key: what fernet_key() gives is expected, not {kind_of(key)}")
        if index.encryption is None:
            # Whoever gives one counts on data that only its owner can have written.
            if key is not None:
                raise ValueError(f"{index.path}: the data set is not encrypted, and key= is given")
            return None
        if key is None:
            raise ValueError(
                f"{index.path}: the data set is encrypted; key= is needed, which fernet_key(key_file, password) derives"
            )
        return Fernet(key)

    def __len__(self):
        return self._length

    def __iter__(self) -> Iterator[Any]:
        """All samples in order, read some at a time."""
        for number, chunk in enumerate(self._chunks.index.chunks):
            step = ITERATED_ITEMS
            if chunk.nbytes and chunk.count:
                step = min(step, max(1, ITERATED_NBYTES * chunk.count // chunk.nbytes))
            for first in range(self._ends[number], self._ends[number + 1], step):
                self.check_open()
                last = min(first + step, self._ends[number + 1])
                yield from self._take(np.arange(first, last, dtype=np.int64))

    def _read(self, positions):
        samples = [None] * len(positions)
        groups, columns = self._split(positions)
        for number, start, stop in groups:
            try:
                self._chunks[number].read(self._layout, columns, start, stop, samples)
            except BadItem as error:
                raise self._chunks.bad_item(number, error) from None
        return samples

    def __getitem__(self, index):
        # Again of the same chunk: nothing but the reading. Half of the time of a small sample went into finding out.
        if type(index) is int:
            first, end, chunk = self._cache.latest
            if first <= index < end:
                try:
                    return chunk.read_one(self._layout, index - first)
                except BadItem:
                    pass  # said below
        return super().__getitem__(index)

    def _read_one(self, position):
        number = bisect_right(self._ends, position) - 1
        first, end = self._ends[number : number + 2]
        try:
            chunk = self._chunks[number]
            self._cache.latest = (first, end, chunk)
            if self._closed:  # meanwhile
                self._close()
            return chunk.read_one(self._layout, position - first)
        except BadItem as error:
            raise self._chunks.bad_item(number, error) from None

    @counted
    def _read_batch(self, positions):
        columns = self._stack(positions)
        if columns is None:
            return collate(self._take(positions), self.framework)
        tree, in_tuples = self._batch_tree
        for leaf, kind in self._listed:
            column = tuple(columns[leaf]) if in_tuples[leaf] else columns[leaf]
            columns[leaf] = collate(column, self.framework) if kind == CALL else column
        return unflatten(tree, columns)

    def _stack(self, positions):
        """The columns of a batch, by leaf; None where samples do not fit together, or are to be looked at one by one."""
        if self._batch_tree is None:
            return None
        batch = Batch(self._layout, len(positions))
        groups, columns = self._split(positions)
        for number, start, stop in groups:
            try:
                self._chunks[number].stack(batch, columns, start, stop)
            except Uneven:
                return None
            except BadItem as error:
                raise self._chunks.bad_item(number, error) from None
        return batch.columns

    def _split(self, positions):
        """The chunks that positions lie in, and the columns (items, slots) that say which of its items go where."""
        positions = np.ascontiguousarray(positions)
        columns = items, slots = np.empty((2, len(positions)), dtype=np.int64)
        groups = native.split(self._begins, positions, items, slots, False)
        if groups is None:
            slots[:] = positions.argsort(kind="stable")
            groups = native.split(self._begins, positions, items, slots, True)
        return groups, columns

    def _close(self):
        self._cache.clear()


def chunks_to_map(mmap, count):
    """The numbers that ``mmap`` means, of so many chunks."""
    if isinstance(mmap, bool):
        return range(count if mmap else 0)
    if isinstance(mmap, (str, bytes)) or not isinstance(mmap, Iterable):
        raise TypeError(f"mmap={mmap!r:.100}: True, False, or numbers of chunks are expected")
    numbers = frozenset([at_least(0, "mmap: chunk", number) for number in mmap])
    if numbers and max(numbers) >= count:
        raise ValueError(f"mmap: chunk {max(numbers)} is asked for, and there are {count}")
    return numbers


def callables(name, given):
    """A dict of callables, as a caller has given it; none for None."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(map(callable, given.values())):
        raise TypeError(f"{name}={given!r:.100}: a dict of names to callables is expected")
    return given
