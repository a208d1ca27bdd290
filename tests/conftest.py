"""What holds for every test."""

import gc


def pytest_collection_finish():
    """Leave the thousands of tests themselves out of what each garbage collection goes through: a third of the time."""
    gc.collect()
    gc.freeze()
