"""Fuzzers: damaged and deceitful checkpoints by the thousand, and what must hold of every one of them.

``python -m fuzz`` mutates fixtures with their structure in mind; ``python -m fuzz.covered`` lets coverage lead.

    seeds -> mutate (zips, streams, pickles, raw) -> ways to read -> contract, compare -> findings
"""
