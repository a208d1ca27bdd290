"""What containers are taken apart into."""

import dataclasses


@dataclasses.dataclass
class Part:
    """One piece of a file: ``kind`` is "pickle", "number" (8 bytes), "data" or "text"; ``name`` is that of its record or member."""

    name: str
    kind: str
    data: bytes
