from typing import Any

import numpy as np

def column_of(values: tuple[Any, ...]) -> np.ndarray | None: ...
