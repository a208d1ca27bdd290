"""Write fixtures/litdata and fixtures/zarr with LitData and nvalchemi themselves. They are written once, and never again.

    python tests/make_sample_fixtures.py litdata|zarr

Made with litdata 0.2.76 (and pyarrow, for the last one), and with nvalchemi-toolkit 0.3.0.
"""

import sys
from pathlib import Path

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
PASSWORD = "secret"
GRAPHS = [3, 2, 5]  # atoms of those that are written first
APPENDED = [4, 2]
DELETED = 1


def make_litdata():
    from litdata.utilities.encryption import FernetEncryption

    from test_data_litdata import litdata_rows, plain_rows, write_with_litdata

    forms = {
        "plain": {},
        "framed": {"compression": "zstd"},
        "zstd_sample": {"compression": "zstd", "compression_level": "sample"},
        "zstd_chunk": {"compression": "zstd", "compression_level": "chunk"},
    }
    for level in ("sample", "chunk"):
        forms[f"fernet_{level}"] = {"encryption": FernetEncryption(PASSWORD, level)}
    for name, options in forms.items():
        folder = FIXTURES / "litdata" / name
        write_with_litdata(folder, map(litdata_rows, range(6)), **options)
        if "encryption" in options:
            options["encryption"].save(folder / "key.json")
    write_with_litdata(FIXTURES / "litdata" / "arrow", map(plain_rows, range(6)))


def graph(atoms):
    """Fields of a graph whose numbers say where they belong, whose atoms have edges to themselves and to the first."""
    import numpy as np

    numbers = np.arange(atoms)
    return {
        "atomic_numbers": numbers + atoms,
        "positions": (numbers[:, None] + np.arange(3) / 4).astype("f4"),
        "neighbor_list": np.stack([numbers, numbers * 0], axis=1),
        "cell": np.full((1, 3, 3), atoms, "f4"),
        "pbc": np.array([[True, False, True]]),
        "energy": np.array([[atoms / 2]], "f4"),
    }


def make_zarr():
    import torch
    from nvalchemi.data import AtomicData
    from nvalchemi.data.datapipes.backends.zarr import AtomicDataZarrWriter

    def data(atoms):
        return AtomicData(**{name: torch.from_numpy(x) for name, x in graph(atoms).items()})

    writer = AtomicDataZarrWriter(str(FIXTURES / "zarr" / "nvalchemi.zarr"))
    writer.write([data(atoms) for atoms in GRAPHS])
    writer.append([data(atoms) for atoms in APPENDED])
    writer.delete([DELETED])


if __name__ == "__main__":
    {"litdata": make_litdata, "zarr": make_zarr}[sys.argv[1]]()
