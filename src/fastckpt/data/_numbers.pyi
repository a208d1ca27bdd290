from typing import Any

import numpy as np

BOOL: np.dtype[np.bool_]
INT64: np.dtype[np.int64]
FLOAT64: np.dtype[np.float64]

def column_of(values: tuple[Any, ...]) -> np.ndarray | None: ...
