"""Numbers that parsers get wrong."""

EDGES = (
    0, 1, 2, 3, 4, 7, 8, 16, 64, 255, 256, 511, 512, 4095, 4096, 2**15 - 1, 2**15, 2**16 - 1, 2**16, 2**24, 2**31 - 1, 2**31,
    2**32 - 2, 2**32 - 1, 2**32, 2**53, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -1, -2, -(2**31), -(2**62), -(2**63),
)  # fmt: skip


def near(rng, number):
    """Another number: an edge, or one that is close to it or a bit away."""
    change = rng.randrange(6)
    if change == 0:
        return number + rng.choice((-1, 1))
    if change == 1:
        return number + rng.randint(-70, 70)
    if change == 2:
        return number ^ 1 << rng.randrange(64)
    if change == 3:
        return number * rng.choice((-1, 2, 8)) // rng.choice((1, 1, 16))
    return rng.choice(EDGES)


def masked(number, nbytes):
    """The low bytes of a number, little-endian."""
    return (number & (1 << 8 * nbytes) - 1).to_bytes(nbytes, "little")
