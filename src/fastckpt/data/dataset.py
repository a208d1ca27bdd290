"""Dataset: what lies between a reader and a training loop: checks, a transform, a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .collate import collate
from .device import Transfer
from .forms import difference, form_of
from .reader import Reader


class Dataset:
    """The samples of a reader: checked, transformed, and on a device. A map-style dataset for any loader.

    device: where tensors go, last of all; None leaves them. A DataLoader moves whole batches instead of samples, in
        page-locked memory and on a stream of its own where the device is CUDA. RuntimeError for a CUDA device that is not there.
    transform: ``sample -> sample``, on the CPU. A note on what it raises says which sample it was, ``error.__notes__``.
    validate: whether each sample has the form of sample 0, which is read once for that: fields, types, dtypes and numbers of
        axes, not sizes. A callable is called with each sample besides, and raises for one that it refuses, or gives False (what is
        false; None is not). Checks come before the transform. A sample of another form, or refused, is a ValueError that names its index.
    skip_validation: leave out all checks, whatever ``validate`` says: for a store that was checked when it was written.

    ``read_many`` and ``read_batch`` give what ``dataset[i]`` gives before it goes to the device.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        device: Any = None,
        transform: Callable[[Any], Any] | None = None,
        validate: bool | Callable[[Any], Any] = True,
        skip_validation: bool = False,
    ):
        if not isinstance(reader, Reader):
            raise TypeError(f"Dataset: a Reader is expected, not {type(reader).__name__}")
        if device is not None and reader.framework != "torch":
            raise ValueError(
                f"Dataset: {reader!r} gives {reader.framework} arrays, which stay on the CPU; open it with framework='torch' for device="
            )
        if not isinstance(validate, bool) and not callable(validate):
            raise TypeError(f"validate={validate!r}: True, False or a callable is expected")
        if transform is not None and not callable(transform):
            raise TypeError(f"transform={transform!r:.100}: a callable, or None, is expected")
        self.reader, self.transform = reader, transform
        self.device, self._transfer = device, Transfer(device)
        self._compares = bool(validate) and not skip_validation
        self._check = validate if callable(validate) and not skip_validation else None
        self._forms: dict[str, Any] = {}  # of sample 0, and of a batch of it

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> Any:
        return self._transfer.move(self.read_many([index])[0])

    def __getitems__(self, indices: Iterable[int]) -> list[Any]:
        return [self._transfer.move(sample) for sample in self.read_many(indices)]

    @property
    def framework(self) -> str:
        return self.reader.framework

    @property
    def supports_batch(self) -> bool:
        """Whether batches come stacked from the reader: where nothing wants to see each sample."""
        return self.reader.supports_batch and self.transform is None and self._check is None

    def read_many(self, indices: Iterable[int]) -> list[Any]:
        """Samples in the order that is asked for, checked and transformed."""
        if not hasattr(indices, "__len__") and isinstance(indices, Iterable):
            indices = list(indices)
        return self.prepare(self.reader.read_many(indices), indices)

    def read_batch(self, indices: Iterable[int]) -> Any:
        """Samples stacked by the reader, checked as a whole. Without ``supports_batch`` they are read one by one."""
        if self.supports_batch:
            return self.check_batch(self.reader.read_batch(indices))
        return collate(self.read_many(indices), self.framework)

    def prepare(self, samples: list[Any], indices: Iterable[int]) -> list[Any]:
        """Samples that the reader gave for ``indices``: checked and transformed."""
        if self._compares:
            expected = self._form("sample")
            for index, sample in zip(indices, samples, strict=True):
                self._compare(expected, sample, index)
        if self.transform is None:
            return samples
        pairs = zip(indices, samples, strict=True)
        return [self._called("transform", self.transform, *pair) for pair in pairs]

    def check_batch(self, batch: Any) -> Any:
        """A batch that the reader stacked, if it has the form of sample 0."""
        if self._compares and (said := difference(self._form("batch"), form_of(batch))):
            raise ValueError(f"{self.reader!r}: a batch does not have the form of sample 0: {said}")
        return batch

    def _form(self, kind):
        """The form of sample 0, or of a batch of it; read on first use, and perhaps by two threads at once."""
        if kind not in self._forms:
            read = self.reader.read_batch if kind == "batch" else self.reader.read_many
            first = read([0])
            self._forms[kind] = form_of(first if kind == "batch" else first[0])
        return self._forms[kind]

    def _compare(self, expected, sample, index):
        if said := difference(expected, form_of(sample)):
            raise ValueError(
                f"{self.reader!r}: sample {int(index)} does not have the form of sample 0: {said} (validate=False does not look)"
            )
        if self._check is not None:
            said = self._called("validate", self._check, index, sample)
            if said is not None and not said:
                raise ValueError(
                    f"{self.reader!r}: validate= gave {said!r:.100} for sample {int(index)}"
                )

    def _called(self, name, function, index, sample):
        """What a function of the caller's gives; an error of its own keeps its type, and says of which sample it is."""
        try:
            return function(sample)
        except Exception as error:
            error.add_note(f"in {name}= of sample {int(index)} of {self.reader!r}")
            raise

    @property
    def closed(self) -> bool:
        return self.reader.closed

    def close(self) -> None:
        """Close the reader."""
        self.reader.close()

    def __enter__(self) -> Dataset:
        self.reader.check_open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self):
        return f"<{type(self).__name__} of {self.reader!r}>"
