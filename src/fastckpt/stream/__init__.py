"""Objects with tensors over a pipe or a socket: nothing waits for the whole, and no byte of it is there twice.

dump(model.state_dict(), sock)     # any object that torch.save takes
state = load(sock)                 # on the other side; no code of the sender's is run
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..containers.sniff import LOCAL_HEADER, SIGNATURES, by_signature
from ..contents import storage_rows
from ..importing import importing
from ..limits import Limits
from ..loading import check_options, check_types, only_weights
from ..plan import roots_of, with_bytes
from ..progress import check as check_progress
from ..progress import reporting
from . import entries, native, pytree
from .contents import error
from .ends import open_inlet, open_outlet
from .receiving import StreamReader
from .sending import send

if TYPE_CHECKING:
    from .._annotations import Framework, MapLocation, Progress, StreamEnd, Unknown

FORMATS = {"native": native, "torch": entries, "pytree": pytree}
BEGIN_NBYTES = 8  # what tells formats apart


def dump(
    obj: Any,
    f: StreamEnd,
    *,
    format: str = "native",
    crc32: bool = True,
    pickle_protocol: int = 2,
    progress: Progress | None = None,
) -> None:
    """Write an object to a stream, from which ``load`` reads it on the other side.

    obj: what torch.save takes; tensors that share a storage share it on the other side.
    f: descriptor, socket, or binary file object with ``write``, which is flushed at the end. What would have to wait is waited
        for; a socket's timeout counts for each wait.
    format: "native"; "torch" for torch.distributed._serialization's (torch 2.7 and later read it with _streaming_load);
        "pytree" for the read_state_dict of torchft's first checkpoints, where tensors are strided and share nothing.
    crc32: send a CRC-32 of each storage ("native" alone has them).
    pickle_protocol: 2 to 5.
    progress: True for a bar (tqdm's), or a callable(bytes done, bytes in all, name of the stream).

    Peak memory: 16 MiB beyond the object and its pickle. Raises what ``save`` raises; OSError, and TimeoutError of a socket,
    after which the stream is broken: part of the object was sent.
    Source: github.com/pytorch/pytorch, torch/distributed/_serialization.py, for the format "torch".
    """
    check_progress(progress)
    if format not in FORMATS:
        raise ValueError(f"format={format!r} is invalid (expected one of: {', '.join(FORMATS)})")
    with open_outlet(f) as outlet:
        outgoing = FORMATS[format].write(obj, crc32=crc32, pickle_protocol=pickle_protocol)
        with reporting(progress, outlet.name) as tell:
            send(outlet, outgoing, tell)
        outlet.flush()


def load(
    f: StreamEnd,
    out: Any = None,
    weights_only: bool | None = None,
    *,
    strict: bool = True,
    map_location: MapLocation = None,
    pickle_module: Any = None,
    framework: Framework = "torch",
    unknown: Unknown = "error",
    progress: Progress | None = None,
    limits: Limits | None = None,
) -> Any:
    """Read one object from a stream, of any of the formats of ``dump``, and leave the stream right behind it.

    f: descriptor, socket, or binary file object with ``readinto`` or ``read``.
    out: tensors to fill instead of making new ones: a module, a state dict, or anything else that holds tensors under the same names.
        Names, shapes and dtypes are compared before a byte is overwritten; nothing is cast, as ``load_into`` casts. A module's
        extra states are given to its ``set_extra_state``; hooks of its ``load_state_dict`` do not run.
    strict: with ``out``, raise where names are missing or left over; with False they stay as they are, or are new.
    weights_only: None means True, whatever the environment says of files. False hands the pickle to Python's own unpickler: THE
        SENDER CAN THEN RUN ANY CODE. The format "pytree" is always read as data.
    map_location, pickle_module, framework, unknown: as for ``load`` of files.
    progress: True for a bar (tqdm's), or a callable(bytes done, bytes in all, name of the stream).
    limits: a Limits; ``stream_nbytes`` bounds the memory that is taken on a sender's word.

    Returns the object; with ``out`` its tensors are those of ``out``. Peak memory: the tensors and 16 MiB; with ``out`` the largest
    storage that could not be read into its place.
    Raises EOFError (a FormatError) where the stream had ended before, FormatError where it ends within, and ChecksumError,
    UnsupportedError, UnsafePickleError, LimitError, all ValueErrors; RuntimeError where ``out`` does not fit; OSError, and
    TimeoutError of a socket. After any of them the stream is of no more use. Where tensors of ``out`` were overwritten before it
    came, an error of the stream says which, one of the system in a note.
    """
    weights_only = weights_only is None or only_weights(weights_only)
    check_options(framework, unknown, weights_only, pickle_module, map_location)
    check_types(progress, limits)
    if out is not None and (framework, map_location, unknown) != ("torch", None, "error"):
        raise TypeError(
            "out= says where tensors are: map_location, framework and unknown have no say"
        )
    with open_inlet(f) as inlet, reporting(progress, inlet.name) as tell:
        contents = open_stream(inlet, limits, tolerant=not weights_only)
        options = {"limits": limits, "tell": tell}
        if out is not None:
            if not weights_only:
                raise TypeError("out= needs weights_only=True")
            with importing:
                from .targets import TargetReader

            return TargetReader(contents, out, strict, **options).load(None, limits or Limits())
        reader = StreamReader(contents, framework, unknown, map_location, **options)
        if weights_only or contents.always_data:
            return reader.load(None, limits or Limits())
        with importing:
            from ..trusted import unpickle_trusted

        return unpickle_trusted(reader, None, pickle_module, map_location)


def iter(
    f: StreamEnd,
    *,
    map_location: MapLocation = None,
    framework: Framework = "torch",
    unknown: Unknown = "opaque",
    limits: Limits | None = None,
) -> Iterator[tuple[Any, Any]]:
    """Iterate over (name, tensor) of a stream while it arrives: each as soon as its storage is there, and verified.

    Names are those of ``open``: the keys that lead to a tensor, joined by dots. Only what the caller holds stays in memory. The
    stream is read as far as the iteration has come, and right behind the object once it has ended.
    The arguments and errors are those of ``load``.
    """
    check_options(framework, unknown, True, None, map_location)
    check_types(None, limits)
    contents = open_stream(open_inlet(f), limits)
    reader = StreamReader(contents, framework, unknown, map_location, limits=limits or Limits())
    return reader.iterate()


def open_stream(inlet, limits, tolerant=False):
    """Contents of a stream: what stands in front of its storages, read, and found to agree with their sizes."""
    contents = read_head(inlet, limits, tolerant)
    storage_rows(contents, with_bytes(roots_of(contents.unpickled.storages)))
    return contents


def read_head(inlet, limits, tolerant):
    """Contents of a stream, whose format its first bytes tell."""
    begin = bytes(inlet.read(BEGIN_NBYTES, "its first bytes"))
    if begin == native.MAGIC:
        return native.read(inlet, begin, limits, tolerant)
    if begin[0] == 0x80 and 2 <= begin[1] <= 5 and begin[7]:  # PROTO of a pickle
        return entries.read(inlet, begin, limits, tolerant)
    if not begin[7] and any(begin):  # a number, and not one of 10**17
        return pytree.read(inlet, begin, limits)
    if begin.startswith(LOCAL_HEADER):
        problem = "a ZIP checkpoint of torch.save, not a stream; load() reads it, from a file"
    else:
        problem = (
            by_signature(begin, SIGNATURES)
            or f"no stream of a known kind: it begins with {begin!r}"
        )
    raise error(inlet, problem)
