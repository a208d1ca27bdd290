"""Benchmarks for asv; ``make bench`` runs them on the installed package and prints a table.

Readers are values of a parameter, so that all of them stand in one graph. Nothing is imported or run before ``setup``.
"""
