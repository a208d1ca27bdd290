"""Batches to where they are wanted: into page-locked memory, and to a device, beside what the device computes."""

from ..importing import importing
from .tree import map_leaves


class Transfer:
    """Moves the tensors of a batch to ``device`` (None: they stay). ``pin_memory`` has those on the CPU page-locked first.

    ``start`` is called where the batch was made, on a thread of a loader, and ``finish`` where it is used. To a CUDA device
    batches are copied on a stream of their own, out of page-locked memory, so that neither the CPU nor the device's other work
    waits; ``finish`` has the caller's stream wait for the copy, not the caller. Everything else moves with ``to``, at once.
    Raises RuntimeError for pin_memory without an accelerator, and for a CUDA device that is not there.
    """

    def __init__(self, device=None, pin_memory=False):
        self.device = self._stream = None
        self.pins = pin_memory
        if device is None and not pin_memory:
            return
        with importing:
            import torch

        if pin_memory and not torch.accelerator.is_available():
            raise RuntimeError("pin_memory=True needs an accelerator, such as CUDA")
        if device is not None:
            self.device = torch.device(device)
            check_available(self.device)
            self.pins = pin_memory or self.device.type == "cuda"

    def start(self, batch):
        """The batch on its way, and what is to be waited for; for ``finish``."""
        if self.pins:
            batch = map_leaves(pinned, batch)
        if self.device is None:
            return batch, None
        if self.device.type != "cuda":
            return map_leaves(self._moved, batch), None
        with importing:
            import torch

        with torch.cuda.stream(self._copying()):
            batch = map_leaves(self._moved, batch)
            arrived = torch.cuda.Event()
            arrived.record()
        return batch, arrived

    def finish(self, batch, arrived):
        """The batch, to be used on the caller's current stream."""
        if arrived is None:
            return batch
        with importing:
            import torch

        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(arrived)
        # The allocator knows the copying stream alone: without this it would give the memory away too early.
        map_leaves(lambda leaf: leaf.record_stream(stream) if is_tensor(leaf) else None, batch)
        return batch

    def move(self, batch):
        """Start and finish."""
        return self.finish(*self.start(batch))

    def _moved(self, leaf):
        return leaf.to(self.device, non_blocking=True) if hasattr(leaf, "to") else leaf

    def _copying(self):
        if self._stream is None:
            with importing:
                import torch

            self._stream = torch.cuda.Stream(self.device)
        return self._stream

    def __getstate__(self):
        return self.__dict__ | {"_stream": None}


def check_available(device):
    """Raise RuntimeError for a CUDA device that is not there: on a thread of a loader it would be said late, and again and again."""
    if device.type != "cuda":
        return
    with importing:
        import torch

    # Not is_available: device_count asks the driver's library first, which leaves CUDA unused, so that children may be forked yet.
    count = torch.cuda.device_count()
    if (device.index or 0) < count:
        return
    if torch.backends.cuda.is_built():
        found = f"torch sees {count} CUDA devices; look at nvidia-smi and CUDA_VISIBLE_DEVICES"
    else:
        found = f"torch {torch.__version__} was built without CUDA; install one with it"
    raise RuntimeError(
        f"device={str(device)!r}: {found}, or leave batches on the CPU (device=None)"
    )


def pinned(leaf):
    """A leaf in page-locked memory; what has no such thing, or is on a device, stays."""
    if getattr(getattr(leaf, "device", None), "type", "cpu") != "cpu":
        return leaf
    return leaf.pin_memory() if hasattr(leaf, "pin_memory") else leaf


def is_tensor(leaf):
    return hasattr(leaf, "record_stream")
