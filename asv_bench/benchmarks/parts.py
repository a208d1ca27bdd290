"""Parts of a file: its names and shapes, one tensor, rows; a new handle each time, as who wants a part does."""

from .common import LARGE_MB, TENSOR_MB, Repeated, container_for, needed, path_of

READERS = ["torch.load, mmap", "safetensors", "fastckpt"]
LAST = f"layer{max(1, LARGE_MB // TENSOR_MB) - 1}.weight"
PARTS = {
    "100 rows": (slice(40, 140),),
    "every 100th row": (slice(None, None, 100),),
    "one column": (slice(None), 7),
}


class Listing(Repeated):
    """All names and shapes of the file of many small tensors."""

    params = [READERS]
    param_names = ["reader"]

    def setup(self, folder, reader):
        self.path = path_of(folder, "many", container_for(reader))
        self.prepare(lister(reader), self.path)

    def time_open_and_list(self, folder, reader):
        self.measure(self.path)


def lister(reader):
    if reader == "fastckpt":
        import fastckpt

        def shapes(path):
            with fastckpt.open(path) as checkpoint:
                return {name: checkpoint[name].shape for name in checkpoint}

    elif reader == "safetensors":
        safe_open = needed("safetensors").safe_open

        def shapes(path):
            with safe_open(path, "pt") as file:
                return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118

    else:
        import torch

        def shapes(path):
            return {name: tensor.shape for name, tensor in torch.load(path, mmap=True).items()}

    return shapes


class OneOfMany(Repeated):
    """One tensor of 4 MB out of the large file."""

    params = [READERS]
    param_names = ["reader"]

    def setup(self, folder, reader):
        self.path = path_of(folder, "large", container_for(reader))
        self.prepare(picker(reader, LAST), self.path)

    def time_one_of_many(self, folder, reader):
        self.measure(self.path)


class Slices(Repeated):
    """Some elements of one big tensor of rows of 4 KiB."""

    params = [READERS, list(PARTS)]
    param_names = ["reader", "part"]

    def setup(self, folder, reader, part):
        self.path = path_of(folder, "big", container_for(reader))
        self.prepare(picker(reader, "weight", PARTS[part]), self.path)

    def time_slice(self, folder, reader, part):
        self.measure(self.path)


def picker(reader, name, index=None):
    """A callable of a path that reads one tensor, or a part of it, into memory of its own."""
    if reader == "fastckpt":
        import fastckpt

        def read(path):
            with fastckpt.open(path) as checkpoint:
                return checkpoint[name].read() if index is None else checkpoint[name][index]

    elif reader == "safetensors":
        if index and index[0].step:
            raise NotImplementedError("safetensors takes no steps")
        safe_open = needed("safetensors").safe_open

        def read(path):
            with safe_open(path, "pt") as file:
                if index is None:
                    return file.get_tensor(name).clone()
                return file.get_slice(name)[index].clone()

    else:
        import torch

        def read(path):
            tensor = torch.load(path, mmap=True)[name]
            return (tensor if index is None else tensor[index]).clone()

    return read
