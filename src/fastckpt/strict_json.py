"""JSON as its standard has it: every number is one, so that what was read can be written again."""

import json
import math


def parse(data, **hooks):
    """What UTF-8 bytes say; ``hooks`` are those of json.loads. Raises ValueError or RecursionError for anything but JSON."""
    return json.loads(data.decode(), parse_constant=refuse, parse_float=finite, **hooks)


def refuse(text):
    raise ValueError(f"{text} is no number in JSON")


def finite(text):
    number = float(text)
    if not math.isfinite(number):
        refuse(text[:40])
    return number
