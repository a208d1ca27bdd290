"""Where storages go: what map_location says, and what becomes of devices that are not here."""

import sys
import textwrap
import warnings

from .arguments import kind_of
from .needs_torch import torch


def level_of_caller():
    """The stacklevel at which ``warnings.warn`` names the code that called this package."""
    frame, level = sys._getframe(1), 1
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(f"{__package__}."):
        frame, level = frame.f_back, level + 1
    return level


def is_fake():
    """Whether torch makes fake tensors: in a mode that says so, or while it traces."""
    # Both are quick to ask for; detect_fake_mode goes through all that there is, and nearly always there is nothing.
    if not torch._C._len_torch_dispatch_stack() and torch._guards.TracingContext.try_get() is None:
        return False
    return torch._guards.detect_fake_mode(None) is not None


def checked(moved, storage):
    """What a caller's map_location made of a storage. torch takes what is shorter, and makes it longer by what is in memory."""
    if not torch.is_storage(moved):
        raise TypeError(
            f"map_location(storage, location) gave a {type(moved).__name__}; a storage is expected, or None"
        )
    if moved.nbytes() < storage.nbytes():
        raise ValueError(
            f"map_location(storage, location) gave a storage of {moved.nbytes()} bytes for one of {storage.nbytes()}; all of "
            f"them are needed"
        )
    return moved


class Placement:
    """Where storages go: ``map_location`` as torch.load takes it, and a device that is not here is no error."""

    def __init__(self, map_location):
        if isinstance(map_location, (torch.device, bytes)):
            map_location = (
                str(map_location)
                if isinstance(map_location, torch.device)
                else map_location.decode()
            )
        if not (
            map_location is None or isinstance(map_location, (str, dict)) or callable(map_location)
        ):
            raise TypeError(
                f"map_location is {kind_of(map_location)}; None, a device, a dict or a callable is expected"
            )
        self.map_location = map_location
        self.missing = set()  # locations that were warned about
        # Under FakeTensorMode there is no memory: tensors say where they would be.
        self.fake = is_fake()

    @property
    def reads_nothing(self):
        return self.fake or self.map_location == "meta"

    @property
    def keeps_cpu(self):
        """Whether storages tagged "cpu" stay where they are."""
        return not callable(self.map_location) and self.location("cpu") == "cpu"

    def location(self, location):
        """The location that map_location turns this one into."""
        if isinstance(self.map_location, str):
            return self.map_location
        if isinstance(self.map_location, dict):
            mapped = self.map_location.get(location, location)
            return str(mapped) if isinstance(mapped, torch.device) else mapped
        return location

    def place(self, storage, location):
        """A CPU storage, moved to where it belongs."""
        if callable(self.map_location):
            moved = self.map_location(storage, location)
            return self.restore(storage, location) if moved is None else checked(moved, storage)
        return self.restore(storage, self.location(location), mapped=self.maps(location))

    def maps(self, location):
        return isinstance(self.map_location, str) or (
            isinstance(self.map_location, dict) and location in self.map_location
        )

    def restore(self, storage, location, mapped=False):
        if location == "cpu":
            return storage
        try:
            return torch.serialization.default_restore_location(storage, location)
        except Exception as error:
            if mapped:  # the caller asked for that device
                raise
            self.warn(location, error)
            return storage

    def device(self, location):
        """The device of a tensor that is tagged with a location of its own."""
        if callable(self.map_location):
            raise TypeError(
                "map_location is a callable, and the file has a tensor that is tagged with a device, not a storage"
            )
        try:
            device = torch.device(self.location(location))
            torch.empty(0, device=device)
        except Exception as error:
            if self.maps(location):
                raise
            self.warn(location, error)
            return torch.device("cpu")
        return device

    def warn(self, location, error):
        if location not in self.missing:
            self.missing.add(location)
            # Its first sentence; the others advise what is not needed here.
            reason = textwrap.shorten(str(error).partition(". ")[0], 160, placeholder=" ...")
            warnings.warn(
                f"tensors tagged {location!r} come out on the CPU, that device is not available here ({reason}); "
                f"map_location says where they should go",
                stacklevel=level_of_caller(),
            )
