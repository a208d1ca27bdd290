"""Names for what public functions take; there for type checkers alone."""

import os
import socket
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO, Literal

import torch
from _typeshed import ReadableBuffer

CheckpointFile = str | bytes | os.PathLike[str] | int | ReadableBuffer | BinaryIO
MapLocation = (
    str
    | torch.device
    | dict[str, str]
    | Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None]
    | None
)
Keys = str | Iterable[str] | Callable[[str], bool]
Framework = Literal["torch", "numpy"]
Mmap = bool | Literal["willneed"] | None
Unknown = Literal["error", "opaque"]
Progress = bool | Callable[[int, int, str], Any]
CheckpointDestination = str | bytes | os.PathLike[str] | int | BinaryIO
StreamEnd = int | socket.socket | BinaryIO
