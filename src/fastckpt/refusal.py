"""The refusal of names that a pickle gives, in the words of ``load``: first what is known of the name, then what to do."""

from .errors import UnsafePickleError
from .ratings import DANGEROUS, rate


def unsafe_name(where, qualname, note="", *, scripted=False, path=None, record=None):
    """The refusal of a class or function that is not known to be plain data.

    ``note`` says what is made of a name that is known: no class that is allowed helps then, and scan may find nothing.
    """
    reason = danger_of(qualname)
    found = "which is not known to be plain data"
    run = "weights_only=False runs the pickle, and scan says what that would do"
    if scripted:
        remedy = "This is a TorchScript archive: torch.jit.load runs it, unknown='opaque' gives its tensors as data"
    elif reason:
        remedy = (
            "scan says what else the file would do, unknown='opaque' loads the rest with inert stand-ins; never load it with "
            "weights_only=False"
        )
    elif note:
        found = "which is not made here, whatever it holds"
        remedy = f"unknown='opaque' loads the rest with inert stand-ins; {run}"
    else:
        remedy = (
            f"unknown='opaque' loads the rest with inert stand-ins, torch.serialization.add_safe_globals allows a class you "
            f"trust; {run}"
        )
    if reason:
        found += f" and is dangerous: it {reason}"
    return UnsafePickleError(
        f"{where}the pickle names {qualname}{note and ' ' + note}, {found}; nothing was run. {remedy}",
        qualname=qualname,
        path=path,
        record=record,
    )


def danger_of(qualname):
    """Why a name is dangerous, "" where that is not known. Which part of it is the module, the text does not tell."""
    for module, _, name in (qualname.rpartition("."), qualname.partition(".")):
        rating, reason = rate(module, name)
        if rating == DANGEROUS:
            return reason
    return ""
