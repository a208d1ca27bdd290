from typing import final

from .limits import Limits

@final
class Keys:
    def __init__(self, limits: Limits, nbytes: int | None = None) -> None: ...
