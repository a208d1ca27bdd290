"""Memory into torch's objects.

A bridge makes what the inert description of an object asks for: tensors, storages, names, and every node by its kind.
"""

import math

from . import workers
from ._tensors import make_tensors
from .dtypes import QUANTIZED
from .errors import FormatError, UnsafePickleError, UnsupportedError, short
from .needs_torch import torch
from .nodes import MISSING, Opaque, TensorNode, TorchName
from .refusal import unsafe_name
from .torch_tensors import DLPACK, FROM_DLPACK, torch_dtype

# torch refuses these even where a user allows them.
BLOCKED_MODULES = ("sys", "os", "posix", "nt")
TENSOR_ATTRIBUTES = frozenset(dir(torch.Tensor))


def allowed_globals():
    """What the user allowed with torch.serialization.add_safe_globals or safe_globals, by qualified name."""
    found = {}
    for entry in torch.serialization.get_safe_globals():
        obj, name = (
            entry
            if isinstance(entry, tuple)
            else (entry, f"{entry.__module__}.{entry.__qualname__}")
        )
        if name.partition(".")[0] not in BLOCKED_MODULES:
            found[name] = obj
    return found


def is_torchs_own(name, cls):
    """Whether a file may not set this attribute of a tensor of class ``cls``, because torch gives it a meaning.

    A class that the user allowed may define such names anew, and may keep a value where torch.Tensor has a method
    (jagged tensors have ``_values``).
    """
    if name not in TENSOR_ATTRIBUTES or cls in (torch.Tensor, torch.nn.Parameter):
        return name in TENSOR_ATTRIBUTES
    above = cls.__mro__[: cls.__mro__.index(torch.Tensor)]
    setter = hasattr(getattr(torch.Tensor, name), "__set__")
    return name.startswith("__") or (setter and not any(name in vars(each) for each in above))


class TorchBridge:
    """Makes torch objects over the memory that ``places`` (reading.Places) gives.

    ``allowed()`` gives what the user allowed, by qualified name.
    """

    def __init__(self, places, placement, *, allowed=dict, unknown="error", where=""):
        self.places, self.placement, self.where = places, placement, where
        self.allowed = allowed
        self.unknown = unknown
        self.made = {}  # index of a storage -> torch.UntypedStorage
        self.first = []  # the tensors of the native loop, by the index of their storage
        self.typed = {}

    # -- storages and plain tensors

    def untyped(self, spec):
        """The torch.UntypedStorage of a StorageSpec, made once."""
        storage = self.made.get(spec.index)
        if storage is None:
            first = self.first[spec.index] if self.first else None
            storage = self.make_storage(spec) if first is None else first.untyped_storage()
            self.made[spec.index] = storage
        return storage

    def forget(self, index):
        """Let go of a storage, of which no tensor will be made any more."""
        self.made.pop(index, None)
        if self.first:
            self.first[index] = None

    def make_storage(self, spec):
        if self.placement.reads_nothing or spec.location == "meta":
            storage = torch.UntypedStorage(spec.nbytes, device="meta")
            if self.placement.fake:
                storage._fake_device = self.placement.location(
                    spec.location
                )  # where torch's own functions look
            return storage
        if spec.nbytes == 0:
            return self.placement.place(torch.UntypedStorage(0), spec.location)
        if spec.root is not None:  # a storage of its own over a part of another's memory
            return self.untyped(spec.root)[spec.offset : spec.offset + spec.nbytes]
        owner, offset = self.places[spec.index]
        storage = torch.frombuffer(
            owner, dtype=torch.uint8, count=spec.nbytes, offset=offset
        ).untyped_storage()
        return self.placement.place(storage, spec.location)

    def tensors(self, specs):
        """The tensors of many specs: in one native loop those that have a storage for themselves, as most have."""
        tensors = [None] * len(specs)
        if self.placement.keeps_cpu:
            if not self.first:
                self.first = [None] * len(self.places.owners)
            owners, everywhere = self.places.owners, self.placement.map_location == "cpu"
            tensors = make_tensors(
                specs, owners, self.places.address, DLPACK, self.first, FROM_DLPACK, everywhere
            )
        for i, tensor in enumerate(tensors):
            if tensor is None:
                tensors[i] = self.tensor(specs[i])
        return tensors

    def tensor(self, spec):
        storage = self.untyped(spec.storage)
        if spec.dtype in QUANTIZED:
            return None  # its quantizer stands in the node around it
        tensor = torch.empty(0, dtype=torch_dtype(spec.dtype), device=storage.device)
        tensor.set_(storage, spec.offset, spec.shape, spec.stride)
        if self.placement.fake:
            tensor.fake_device = torch.device(self.placement.location(spec.storage.location))
        if spec.requires_grad:
            tensor.requires_grad_(True)
        if spec.conj or spec.neg:
            bits = {name: True for name in ("conj", "neg") if getattr(spec, name)}
            torch._utils.set_tensor_metadata(tensor, bits)
        return tensor

    def storage(self, ref):
        """A bare storage comes out typed, as torch.load gives it."""
        key = (ref.storage.index, ref.dtype)
        if key not in self.typed:
            self.typed[key] = torch.storage.TypedStorage(
                wrap_storage=self.untyped(ref.storage), dtype=torch_dtype(ref.dtype), _internal=True
            )
        return self.typed[key]

    # -- names

    def name(self, path):
        value = torch
        for part in path.split("."):
            value = getattr(value, part, None)
        if value is None:
            raise UnsupportedError(f"torch {torch.__version__} has no torch.{path}")
        return value

    def named(self, name):
        """A class or function that stands in the object itself."""
        value = name.known.value if name.known is not None else MISSING
        if isinstance(value, TorchName):
            return self.name(value.path)
        if value is not MISSING:
            return value
        if name.qualname in self.allowed():
            return self.allowed()[name.qualname]
        return self.opaque(Opaque(name.qualname))

    def size(self, sizes):
        return torch.Size(sizes)

    def device(self, *args):
        try:
            return torch.device(*args)
        except RuntimeError as error:
            raise FormatError(
                f"{self.where}a device is {args!r:.80}: {str(error).partition(chr(10))[0]}"
            ) from None

    # -- other kinds of tensors

    def parameter(self, data, requires_grad):
        data = torch.empty(0) if data is None else data
        if isinstance(data, Opaque):
            return Opaque("torch.nn.parameter.Parameter", (data, requires_grad))
        return torch.nn.Parameter(data, requires_grad)

    def variable(self, data, requires_grad):
        data = torch.empty(0) if data is None else data
        return data.requires_grad_(requires_grad)

    def typed_tensor(self, data, code):
        return torch.empty(0, dtype=torch_dtype(code)) if data is None else data

    # The device is named, or torch.set_default_device would have a say.

    def sparse_coo(self, indices, values, size, is_coalesced):
        options = {} if is_coalesced is None else {"is_coalesced": is_coalesced}
        return self.checked(
            torch.sparse_coo_tensor, indices, values, size, device=values.device, **options
        )

    def sparse_compressed(self, layout, compressed, plain, values, size):
        options = {"layout": getattr(torch, layout), "device": values.device}
        return self.checked(
            torch.sparse_compressed_tensor, compressed, plain, values, size, **options
        )

    def checked(self, make, *args, **kwargs):
        """A sparse tensor with its indices checked (on the meta device there are none to look at)."""
        on_meta = any(isinstance(a, torch.Tensor) and a.device.type == "meta" for a in args)
        try:
            if not on_meta:
                workers.apart(lambda: make(*args, **kwargs, check_invariants=True))
            return make(*args, **kwargs, check_invariants=False)
        except (RuntimeError, ValueError) as error:
            raise FormatError(
                f"{self.where}a sparse tensor contradicts itself: {str(error).partition(chr(10))[0]}"
            ) from None

    def quantized_per_tensor(self, spec, scale, zero_point, requires_grad):
        tensor = torch._empty_affine_quantized(
            (0,),
            scale=scale,
            zero_point=zero_point,
            dtype=torch_dtype(spec.dtype),
            device=self.quantized_device(spec),
        )
        return self.quantized(tensor, spec, requires_grad)

    def quantized_per_channel(self, spec, scheme, scales, zero_points, axis, requires_grad):
        floating = scheme.endswith("float_qparams") or (
            isinstance(scales, torch.Tensor) and scales.dtype is torch.float32
        )
        device = self.quantized_device(spec)
        if not isinstance(scales, torch.Tensor):
            scales = torch.tensor(
                scales, dtype=torch.float if floating else torch.double, device=device
            )
        if not isinstance(zero_points, torch.Tensor):
            zero_points = torch.tensor(
                zero_points, dtype=torch.float if floating else torch.long, device=device
            )
        # No second copy of the values: only the quantizer is wanted, so every other axis has no length.
        shape = [n if i == axis else 0 for i, n in enumerate(spec.shape)]
        tensor = torch._empty_per_channel_affine_quantized(
            shape,
            scales=scales,
            zero_points=zero_points,
            axis=axis,
            dtype=torch_dtype(spec.dtype),
            device=device,
        )
        return self.quantized(tensor, spec, requires_grad)

    def quantized_device(self, spec):
        device = self.untyped(spec.storage).device
        if device.type == "meta":
            raise UnsupportedError(
                f"{self.where}torch has no quantized tensors on the meta device; map them to the CPU"
            )
        return device

    def quantized(self, tensor, spec, requires_grad):
        storage = torch.storage.TypedStorage(
            wrap_storage=self.untyped(spec.storage), dtype=torch_dtype(spec.dtype), _internal=True
        )
        tensor.set_(storage, spec.offset, spec.shape, spec.stride)
        return tensor.requires_grad_() if requires_grad else tensor

    def nested(self, buffer, sizes, strides, offsets):
        if buffer.device.type != "meta":
            self.check_nested(buffer, sizes, strides, offsets)
        return torch._nested_view_from_buffer(buffer, sizes, strides, offsets)

    def check_nested(self, buffer, sizes, strides, offsets):
        """Every constituent must lie inside the buffer; torch does not look."""
        shapes_fit = (
            sizes.dim() == 2 and strides.shape == sizes.shape and offsets.shape == sizes.shape[:1]
        )
        integers = all(t.dtype is torch.int64 for t in (sizes, strides, offsets))
        if not shapes_fit or not integers or buffer.dim() != 1:
            raise FormatError(
                f"{self.where}a nested tensor's sizes, strides and offsets do not fit together"
            )
        for size, stride, offset in zip(
            sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True
        ):
            last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
            if min([offset, *size, *stride], default=0) < 0 or (
                math.prod(size) and last >= buffer.numel()
            ):
                raise FormatError(
                    f"{self.where}a nested tensor's part of size {size} at {offset} lies outside its buffer of {buffer.numel()}"
                )

    def meta(self, code, size, stride, requires_grad):
        return torch.empty_strided(
            size, stride, dtype=torch_dtype(code), device="meta", requires_grad=requires_grad
        )

    def device_tensor(self, data, code, device, requires_grad):
        data = data if isinstance(data, torch.Tensor) else torch.from_numpy(data)
        tensor = data.to(dtype=torch_dtype(code), device=self.placement.device(device))
        tensor.requires_grad = requires_grad
        return tensor

    def wrapper_subclass(self, cls, code, size, stride, offset, layout, device, requires_grad):
        if isinstance(cls, Opaque):
            args = (cls, torch_dtype(code), size, stride, offset, layout, device, requires_grad)
            return Opaque("torch._utils._rebuild_wrapper_subclass", args)
        device = self.placement.device(str(device))
        return torch.Tensor._make_wrapper_subclass(
            cls, size, strides=stride, dtype=torch_dtype(code), storage_offset=offset, layout=layout, device=device,
            requires_grad=requires_grad,
        )  # fmt: skip

    def from_type(self, tensor, cls):
        if isinstance(cls, Opaque) or isinstance(tensor, Opaque):
            return Opaque(
                getattr(cls, "qualname", None) or f"{cls.__module__}.{cls.__qualname__}", (tensor,)
            )
        if not (isinstance(cls, type) and issubclass(cls, torch.Tensor)):
            raise FormatError(
                f"{self.where}a tensor of type {short(cls)}; a subclass of torch.Tensor is expected"
            )
        return tensor if type(tensor) is cls else tensor.as_subclass(cls)

    def generator(self, device="cpu"):
        return torch.Generator(device)

    # -- states, and what is not known

    def set_state(self, node, obj, state):
        if isinstance(obj, Opaque):
            obj.state = state
        elif isinstance(node, TensorNode) and node.kind == "generator":
            self.set_generator_state(obj, state)
        elif isinstance(obj, torch.Tensor) and type(obj).__setstate__ is torch.Tensor.__setstate__:
            self.set_attributes(obj, state)
        else:
            self.set_allowed_state(obj, state)

    def set_generator_state(self, generator, state):
        if state[2].device.type == "meta":
            raise UnsupportedError(
                f"{self.where}a Generator's state is data, which map_location='meta' leaves in the file"
            )
        try:
            generator.__setstate__(state)
        except SystemError as error:  # what torch makes of a state of another size
            raise FormatError(
                f"{self.where}a Generator's state of {len(state[2])} bytes is none"
            ) from error

    def set_attributes(self, tensor, state):
        """Python attributes of a tensor: (dict, slots) or a dict; none that torch itself defines."""
        attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
        for part in (attributes, slots):
            if part is not None and not isinstance(part, dict):
                raise FormatError(
                    f"{self.where}a tensor's attributes are a {type(part).__name__}, a dict is expected"
                )
            for name, value in (part or {}).items():
                if not isinstance(name, str) or is_torchs_own(name, type(tensor)):
                    raise UnsafePickleError(
                        f"{self.where}the file wants to set the attribute {short(name)} of a tensor, which is torch's own",
                        qualname=f"torch.Tensor.{name if isinstance(name, str) else short(name)}",
                    )
                setattr(tensor, name, value)

    def keeps(self, opaque):
        """Whether an unknown object stays what it is; an error where it may not and the user allowed no such class."""
        if opaque.qualname in self.allowed():
            return False
        if self.unknown != "opaque":
            raise unsafe_name(self.where, opaque.qualname)
        return True

    def opaque(self, node):
        if self.keeps(node):
            return node
        cls = self.allowed()[node.qualname]
        if node.args is None:
            return cls
        return (
            cls.__new__(cls, *node.args, **node.kwargs)
            if node.new
            else cls(*node.args, **node.kwargs)
        )

    def set_allowed_state(self, obj, state):
        """Give an object of a class that the user allowed its state, as pickle does."""
        if hasattr(obj, "__setstate__"):
            obj.__setstate__(state)
            return
        attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
        if attributes:
            vars(obj).update(attributes)  # not setattr, which a frozen class forbids
        for name, value in (slots or {}).items():
            setattr(obj, name, value)
