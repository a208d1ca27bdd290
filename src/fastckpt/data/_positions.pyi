from typing import Any

import numpy as np

INT64: np.dtype[np.int64]

def resolve(indices: Any, length: int) -> np.ndarray | None: ...
