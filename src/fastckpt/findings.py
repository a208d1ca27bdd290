"""What reports consist of: one thing that was found in a file, as a sentence and for programs."""

from dataclasses import asdict, dataclass
from typing import Any

from .terminal import printable


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check found.

    kind: a short word for programs, such as "crc_mismatch".
    message: a whole sentence, in the form of the errors: where, what was found, what was expected.
    record, offset: the name of the piece and the byte in the file that it is about, where there is one.
    """

    kind: str
    message: str
    record: str | None = None
    offset: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return printable(self.message)
