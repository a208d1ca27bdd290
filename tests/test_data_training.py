"""Training: the same model comes out of each reader and each loader, torch's own and ours."""

import pytest
import torch

import litdatacraft
from fastckpt.data import CheckpointReader, DataLoader, Dataset, LitDataReader, MultiReader

SAMPLES, BATCH, EPOCHS = 24, 4, 6
torch.manual_seed(0)
X = torch.randn(SAMPLES, 4)
Y = X @ torch.tensor([1.0, -2, 3, 0.5])


def litdata(folder, part):
    rows = [[x, y] for x, y in zip(X[part], Y[part], strict=True)]
    tree = {"x": None, "y": None}
    formats = ["no_header_tensor:1", "tensor"]
    return LitDataReader(litdatacraft.write(folder / "litdata", formats, tree, rows))


def rows_of_a_checkpoint(folder, part):
    torch.save({"x": X[part].clone(), "y": Y[part].clone()}, folder / "rows.pt")
    return CheckpointReader(folder / "rows.pt")


def files(folder, part):
    for i in range(SAMPLES)[part]:
        torch.save({"x": X[i].clone(), "y": Y[i].clone()}, folder / f"sample{i:02}.pt")
    return CheckpointReader(str(folder / "sample*.pt"))


def zarr_rows(folder, part):
    zarr = pytest.importorskip("zarr")
    from fastckpt.data import ZarrReader

    group = zarr.open_group(folder / "rows.zarr", mode="w")
    group.create_array("x", data=X[part].numpy(), chunks=(5, 4))
    group.create_array("y", data=Y[part].numpy(), chunks=(5,))
    return ZarrReader(folder / "rows.zarr")


def several(folder, part):
    """All of the above, a quarter of the samples each."""
    quarter = len(range(SAMPLES)[part]) // 4
    parts = [slice(i * quarter, (i + 1) * quarter) for i in range(4)]
    makers = (litdata, rows_of_a_checkpoint, files, zarr_rows)
    return MultiReader(*(make(folder, part) for make, part in zip(makers, parts, strict=True)))


READERS = [litdata, rows_of_a_checkpoint, files, zarr_rows, several]


def of_torch(start=None):
    if start is None:
        return lambda reader: torch.utils.data.DataLoader(reader, BATCH)
    return lambda reader: torch.utils.data.DataLoader(
        reader, BATCH, num_workers=2, multiprocessing_context=start, persistent_workers=True
    )


LOADERS = {
    "torch, no worker": of_torch(),
    "torch, fork": of_torch("fork"),
    "no worker": lambda reader: DataLoader(reader, BATCH),
    "two workers": lambda reader: DataLoader(reader, BATCH, num_workers=2),
    "two workers, fused, checked": lambda reader: DataLoader(
        Dataset(reader), BATCH, num_workers=2, fuse=4
    ),
}


def train(batches):
    """The weights of a model after some epochs, and its last loss."""
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(EPOCHS):
        for batch in batches:
            loss = torch.nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.weight.detach(), loss.item()


@pytest.fixture(scope="module")
def expected():
    """What comes of the samples in memory."""
    batches = zip(X.split(BATCH), Y.split(BATCH), strict=True)
    weights, loss = train([{"x": x, "y": y} for x, y in batches])
    assert loss < 0.05
    return weights


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize("make", READERS, ids=lambda make: make.__name__)
def test_training(tmp_path, expected, make, loader):
    with make(tmp_path, slice(SAMPLES)) as reader:
        weights, _ = train(loader(reader))
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "make",
    [*(pytest.param(make, marks=pytest.mark.slow) for make in READERS[:-1]), several],
    ids=lambda make: make.__name__,
)
def test_training_with_spawned_workers(tmp_path, expected, make):
    with make(tmp_path, slice(SAMPLES)) as reader:
        weights, _ = train(of_torch("spawn")(reader))
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


@pytest.mark.parametrize("workers", [0, 2])
def test_training_in_random_order(tmp_path, workers):
    with several(tmp_path, slice(SAMPLES)) as reader:
        loader = DataLoader(reader, BATCH, shuffle=True, seed=0, num_workers=workers)
        _, loss = train(loader)
    assert loss < 0.05


GRAPH_LOADERS = {
    "torch, no worker": lambda reader: torch.utils.data.DataLoader(reader, batch_size=None),
    "torch, fork": lambda reader: torch.utils.data.DataLoader(
        reader, batch_size=None, num_workers=2, multiprocessing_context="fork"
    ),
    "no worker": DataLoader,
    "two workers, fused": lambda reader: DataLoader(reader, num_workers=2, fuse=3),
}


@pytest.fixture(scope="module")
def graph_store(tmp_path_factory):
    pytest.importorskip("zarr")
    import zarrcraft

    path = tmp_path_factory.mktemp("graphs") / "graphs.zarr"
    zarrcraft.write(path, zarrcraft.graphs(atoms=(3, 2, 5, 1, 4, 6)))
    return path


@pytest.mark.parametrize("loader", GRAPH_LOADERS.values(), ids=GRAPH_LOADERS)
def test_training_on_graphs(graph_store, loader):
    """One graph at a time, whose energy is the sum over its edges."""
    from fastckpt.data import ZarrReader

    def train(batches):
        torch.manual_seed(1)
        model = torch.nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for batch in batches:
            ends = batch["positions"][batch["neighbor_list"]]
            loss = (model(ends.flatten(1)).sum() - batch["energy"].float()).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return model.weight.detach()

    with ZarrReader(graph_store) as reader:
        found, expected = train(loader(reader)), train(reader[:])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
