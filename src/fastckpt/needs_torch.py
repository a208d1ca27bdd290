"""torch, for the modules that are of no use without it, or an error that says who else is: ``from .needs_torch import torch``."""

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "torch is not installed; pip install torch brings it. Without it, load and open give NumPy arrays "
        "(framework='numpy'), and verify, scan and salvage need none",
        name="torch",
    ) from None

__all__ = ["torch"]
