"""Tensors that share memory, and what is in it when they were filled one after the other."""

import itertools

import pytest
import torch

# Tensors of one array of 16 numbers: (name of the case, functions of the array). Which of two that overlap is filled last shows.
VIEWS_OF_ONE_ARRAY = {
    "the_same": [lambda a: a[:8], lambda a: a[:8]],
    "in_part": [lambda a: a[:8], lambda a: a[4:12]],
    "one_in_the_other": [lambda a: a, lambda a: a[4:12]],
    "beside": [lambda a: a[:8], lambda a: a[8:]],
    "with_gaps": [lambda a: a, lambda a: a[::2]],
    "another_dtype": [lambda a: a, lambda a: a[4:12].view(torch.int32)],
    "transposed": [lambda a: a, lambda a: a.view(4, 4).t()],
    "three": [lambda a: a[2:10], lambda a: a[::2], lambda a: a.view(4, 4).t()],
    "three_in_a_row": [lambda a: a[:8], lambda a: a[4:12], lambda a: a[8:]],
}


def overlapping_cases():
    """(views, order in which they are in the file, order in which they are there) of each case, with ids."""
    for case, views in VIEWS_OF_ONE_ARRAY.items():
        orders = list(itertools.permutations(range(len(views))))
        for sent, there in itertools.product(orders, orders):
            name = f"{case}-{''.join(map(str, sent))}-{''.join(map(str, there))}"
            yield pytest.param(views, sent, there, id=name)


def check_overlapping(views, sent, there, fill):
    """``fill(values, tensors)`` leaves what torch does, which copies one after the other, as they are there."""
    array, reference = torch.zeros(16), torch.zeros(16)
    values = {f"t{i}": torch.full_like(views[i](array), i + 1) for i in sent}
    for i in there:
        views[i](reference).copy_(values[f"t{i}"])
    fill(values, {f"t{i}": views[i](array) for i in there})
    assert torch.equal(array, reference)


OVERLAPPING = list(overlapping_cases())
