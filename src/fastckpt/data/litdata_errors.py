"""What is wrong with a piece of a LitData data set, before it is known where the piece lies."""


class BadItem(Exception):
    """An item (``item``: its number in the chunk, where known) is not what its data set says; never leaves the package."""

    item = None


class Uneven(Exception):
    """Items cannot be stacked without looking at each; never leaves the package."""
