"""torch's classes and functions, as pickles name them: what a call of each gives, as a spec or a node."""

from . import numpy_nodes
from ._spec import Global, TensorSpec
from .dtypes import (
    CODE_BY_NAME,
    CODE_BY_STORAGE,
    DTYPES,
    FLOATING,
    QUANTIZED,
    SUB_BYTE_NAMES,
    UINT8,
)
from .errors import FormatError
from .known import REBUILD_TENSOR, REBUILD_TENSOR_V2, REBUILD_TENSOR_V3, Known, expect
from .nodes import (
    GeneratorNode,
    Node,
    Opaque,
    ParameterNode,
    QuantizedNode,
    TensorNode,
    TensorType,
    TorchName,
    is_tensor,
)


def size(machine, args):
    values = args[0] if args else ()
    values = values.args[0] if isinstance(values, TensorNode) and values.kind == "size" else values
    expect(len(args) < 2 and isinstance(values, (list, tuple)), "a list of sizes", args)
    expect(all(type(n) is int and -(2**63) <= n < 2**63 for n in values), "ints as sizes", args)
    machine.spend(len(values))
    return TensorNode("size", tuple(values))


def device(machine, args):
    expect(1 <= len(args) <= 2 and isinstance(args[0], str), "a device like ('cuda', 1)", args)
    expect(len(args) < 2 or type(args[1]) is int, "a device like ('cuda', 1)", args)
    return TensorNode("device", *args)


LAYOUTS = (
    "strided",
    "sparse_coo",
    "sparse_csr",
    "sparse_csc",
    "sparse_bsr",
    "sparse_bsc",
    "_mkldnn",
    "jagged",
)
QSCHEMES = (
    "per_tensor_affine", "per_channel_affine", "per_tensor_symmetric", "per_channel_symmetric", "per_channel_affine_float_qparams",
)  # fmt: skip


def layout(machine, args):
    name = args[0] if len(args) == 1 else None
    expect(
        isinstance(name, str) and name.removeprefix("torch.") in LAYOUTS,
        "a layout like 'torch.strided'",
        args,
    )
    return TorchName(name.removeprefix("torch."))


def name_of(value, what):
    """The torch name that an argument stands for, such as a dtype."""
    known = getattr(value, "known", None)
    value = known.value if known is not None else value
    expect(isinstance(value, TorchName), what, value)
    return value.path


def dtype_code(value):
    name = name_of(value, "a dtype")
    expect(name in CODE_BY_NAME, "a dtype", value)
    return CODE_BY_NAME[name]


def tensor_like(value):
    """A tensor among the arguments: plain, or of another layout."""
    expect(is_tensor(value), "a tensor", value)
    return value


def boolean(value, what):
    expect(type(value) is bool, f"a bool as {what}", value)
    return value


def parameter(machine, args):
    """_rebuild_parameter(data, requires_grad, hooks); the hooks are never taken."""
    expect(len(args) == 3, "(data, requires_grad, hooks)", args)
    return make_parameter(args[0], boolean(args[1], "requires_grad"))


def make_parameter(data, requires_grad):
    if data is not None:
        tensor_like(data)
    if requires_grad and isinstance(data, TensorSpec) and data.dtype not in FLOATING:
        raise FormatError(
            f"a Parameter of {DTYPES[data.dtype].name} wants a gradient, only floating types have one"
        )
    return ParameterNode(data, requires_grad)


def parameter_with_state(machine, args):
    expect(len(args) == 4, "(data, requires_grad, hooks, state)", args)
    node = make_parameter(args[0], boolean(args[1], "requires_grad"))
    Node.set_state(node, machine, args[3])
    return node


def parameter_class(machine, args):
    """nn.Parameter(data, requires_grad) of torch 0.1, its state follows."""
    expect(len(args) < 3, "(data, requires_grad)", args)
    return make_parameter(
        args[0] if args else None, boolean(args[1], "requires_grad") if len(args) > 1 else True
    )


def variable_class(machine, args):
    """autograd.Variable of torch 0.1 to 0.3: today's tensor."""
    expect(len(args) < 3, "(data, requires_grad)", args)
    node = make_parameter(
        args[0] if args else None, boolean(args[1], "requires_grad") if len(args) > 1 else False
    )
    node.kind = "variable"
    return node


def sparse(machine, args):
    """_rebuild_sparse_tensor(layout, (indices, values, size[, is_coalesced])), or (compressed, plain, values, size)."""
    expect(len(args) == 2 and isinstance(args[1], tuple), "(layout, data)", args)
    kind, data = name_of(args[0], "a layout"), args[1]
    if kind == "sparse_coo":
        expect(len(data) in (3, 4), "(indices, values, size, is_coalesced)", data)
        flag = data[3] if len(data) == 4 else None
        expect(flag is None or type(flag) is bool, "a bool as is_coalesced", flag)
        return TensorNode(
            "sparse_coo",
            spelled_out(data[0], "indices"),
            tensor_like(data[1]),
            geometry(machine, data[2]),
            flag,
        )
    expect(
        kind in ("sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc") and len(data) == 4,
        "a sparse tensor",
        args,
    )
    indices = [spelled_out(each, "indices") for each in data[:2]]
    return TensorNode(
        "sparse_compressed", kind, *indices, tensor_like(data[2]), geometry(machine, data[3])
    )


def spelled_out(value, what):
    """A tensor whose elements are all in the file: an expanded one could have any number, and they will be looked at."""
    expect(isinstance(value, TensorSpec), f"a tensor of {what}", value)
    if value.numel > value.extent:
        raise FormatError(
            f"a tensor of {what} has {value.numel} elements over {value.extent} in the file; it is damaged, or made to deceive"
        )
    return value


def geometry(machine, value):
    """Sizes or strides: a tuple of ints that are not negative."""
    value = value.args[0] if isinstance(value, TensorNode) and value.kind == "size" else value
    expect(
        isinstance(value, (tuple, list)) and all(type(n) is int and 0 <= n < 2**63 for n in value),
        "sizes",
        value,
    )
    machine.spend(len(value))
    return tuple(value)


def quantized(machine, args):
    """_rebuild_qtensor(storage, offset, size, stride, quantizer, requires_grad, hooks)."""
    expect(
        len(args) == 7 and isinstance(args[4], tuple) and args[4],
        "seven arguments for a quantized tensor",
        args,
    )
    spec = machine.tensor(*args[:4])
    expect(spec.dtype in QUANTIZED, "a quantized dtype", spec)
    requires_grad = boolean(args[5], "requires_grad")
    scheme, params = name_of(args[4][0], "a quantization scheme"), args[4][1:]
    if scheme == "per_tensor_affine":
        expect(
            len(params) == 2 and type(params[0]) in (float, int) and type(params[1]) is int,
            "(scale, zero_point)",
            params,
        )
        return QuantizedNode(
            "quantized_per_tensor", spec, float(params[0]), params[1], requires_grad
        )
    expect(
        scheme in ("per_channel_affine", "per_channel_affine_float_qparams"),
        "per_tensor_affine or per_channel_affine",
        scheme,
    )
    expect(len(params) == 3 and type(params[2]) is int, "(scales, zero_points, axis)", params)
    scales, zero_points, axis = params
    expect(0 <= axis < len(spec.shape), f"an axis below {len(spec.shape)}", axis)
    for values in (scales, zero_points):
        numeric = isinstance(values, (list, tuple)) and all(type(v) in (int, float) for v in values)
        expect(numeric or isinstance(values, TensorSpec), "a list of numbers or a tensor", values)
        shape = values.shape if isinstance(values, TensorSpec) else (len(values),)
        expect(
            shape == (spec.shape[axis],), f"{spec.shape[axis]} values, one for each channel", values
        )
    scales, zero_points = (
        v if isinstance(v, TensorSpec) else channel_values(machine, v)
        for v in (scales, zero_points)
    )
    return QuantizedNode(
        "quantized_per_channel", spec, scheme, scales, zero_points, axis, requires_grad
    )


def channel_values(machine, values):
    """A copy, since the pickle may go on to change the list."""
    machine.spend(len(values))
    expect(all(-(2**63) <= v < 2**63 or v != v for v in values), "64-bit numbers", values)
    return tuple(values)


def nested(machine, args):
    """_rebuild_nested_tensor(buffer, sizes, strides, storage_offsets)."""
    expect(len(args) == 4 and all(isinstance(a, TensorSpec) for a in args), "four tensors", args)
    return TensorNode("nested", args[0], *(spelled_out(a, "sizes") for a in args[1:]))


def meta(machine, args):
    """_rebuild_meta_tensor_no_storage(dtype, size, stride, requires_grad)."""
    expect(len(args) == 4, "(dtype, size, stride, requires_grad)", args)
    return TensorNode(
        "meta",
        dtype_code(args[0]),
        geometry(machine, args[1]),
        geometry(machine, args[2]),
        boolean(args[3], "requires_grad"),
    )


def wrapper_subclass(machine, args):
    """_rebuild_wrapper_subclass(cls, dtype, size, stride, storage_offset, layout, device, requires_grad)."""
    expect(len(args) == 8, "eight arguments for a wrapper subclass", args)
    cls, dtype, shape, stride, offset, layout_, device_, requires_grad = args
    expect(isinstance(cls, (Global, Opaque)), "a class", cls)
    return TensorNode("wrapper_subclass", cls, dtype_code(dtype), geometry(machine, shape), geometry(machine, stride), offset,
                      TorchName(name_of(layout_, "a layout")), device_, boolean(requires_grad, "requires_grad"))  # fmt: skip


def from_type(machine, args):
    """_rebuild_from_type[_v2](func, type, args, state): a tensor with attributes, or of a subclass."""
    expect(len(args) == 4 and isinstance(args[2], tuple), "(func, type, args, state)", args)
    func, cls, inner, state = args
    expect(isinstance(cls, (Global, Opaque)), "a class", cls)
    made = machine.call(func, inner)  # by a function of the user's, where it is Opaque
    node = TensorNode("from_type", made if isinstance(made, Opaque) else tensor_like(made), cls)
    if state is not None:
        Node.set_state(node, machine, state)
    return node


def device_tensor(machine, args):
    """_rebuild_device_tensor_from_cpu_tensor / _from_numpy(data, dtype, device, requires_grad)."""
    expect(
        len(args) == 4 and isinstance(args[2], str), "(data, dtype, device, requires_grad)", args
    )
    expect(
        isinstance(args[0], (TensorSpec, TensorNode, numpy_nodes.ArrayNode))
        or hasattr(args[0], "__array_interface__"),
        "a tensor or an array",
        args[0],
    )
    if isinstance(args[0], TensorSpec):
        spelled_out(args[0], "values for a device")  # they are copied
    return TensorNode(
        "device_tensor", args[0], dtype_code(args[1]), args[2], boolean(args[3], "requires_grad")
    )


def generator(machine, args):
    expect(len(args) < 2 and all(isinstance(a, (str, TensorNode)) for a in args), "a device", args)
    return GeneratorNode("generator", *args)


def tensor_type(code):
    """torch.FloatTensor(): an empty tensor, which BUILD fills; with sizes it would be uninitialised memory."""

    def make(machine, args):
        expect(
            not args, "no arguments (a tensor of given size would be uninitialised memory)", args
        )
        return TensorType(code)

    return make


def jit_list(machine, args):
    """torch.jit._pickle.build_*list(items): TorchScript's typed lists."""
    expect(len(args) == 1 and isinstance(args[0], list), "a list", args)
    return args[0]


def jit_tag(machine, args):
    """torch.jit._pickle.restore_type_tag(value, type): the value."""
    expect(len(args) == 2, "(value, type)", args)
    return args[0]


def torch_rows():
    for dtype in DTYPES:
        yield f"torch {dtype.name}", Known(None, TorchName(dtype.name))
        if dtype.storage:
            code = CODE_BY_STORAGE[dtype.storage]
            for module in ("torch", "torch.cuda", "torch.storage"):
                yield (
                    f"{module} {dtype.storage}",
                    Known(None, TorchName(dtype.storage), storage_dtype=code),
                )
            kind = dtype.storage.removesuffix("Storage") + "Tensor"
            if code not in QUANTIZED and not kind.startswith("Complex"):
                for module in ("torch", "torch.cuda", "torch.sparse", "torch.cuda.sparse"):
                    way = f"{module}.{kind}".removeprefix("torch.")
                    call = None if "sparse" in module else tensor_type(code)
                    yield f"{module} {kind}", Known(call, TorchName(way))
    for name in (
        SUB_BYTE_NAMES
        + QSCHEMES
        + ("contiguous_format", "channels_last", "channels_last_3d", "preserve_format")
    ):
        yield f"torch {name}", Known(None, TorchName(name))
    yield (
        "torch.storage UntypedStorage",
        Known(None, TorchName("storage.UntypedStorage"), storage_dtype=UINT8),
    )
    yield "torch.storage TypedStorage", Known(None, TorchName("storage.TypedStorage"))
    yield "torch Tensor", Known(tensor_type(CODE_BY_NAME["float32"]), TorchName("Tensor"))
    yield "torch Size", Known(size, TorchName("Size"))
    yield "torch device", Known(device, TorchName("device"))
    yield "torch.serialization _get_layout", Known(layout)
    yield "torch._utils _rebuild_tensor", Known(rebuild=REBUILD_TENSOR)
    yield "torch._utils _rebuild_tensor_v2", Known(rebuild=REBUILD_TENSOR_V2)
    yield "torch._utils _rebuild_tensor_v3", Known(rebuild=REBUILD_TENSOR_V3)
    yield "torch._utils _rebuild_parameter", Known(parameter)
    yield "torch._utils _rebuild_parameter_with_state", Known(parameter_with_state)
    yield "torch._utils _rebuild_sparse_tensor", Known(sparse)
    yield "torch._utils _rebuild_sparse_csr_tensor", Known(sparse)
    yield "torch._utils _rebuild_qtensor", Known(quantized)
    yield "torch._utils _rebuild_nested_tensor", Known(nested)
    yield "torch._utils _rebuild_meta_tensor_no_storage", Known(meta)
    yield "torch._utils _rebuild_wrapper_subclass", Known(wrapper_subclass)
    yield "torch._utils _rebuild_device_tensor_from_cpu_tensor", Known(device_tensor)
    yield "torch._utils _rebuild_device_tensor_from_numpy", Known(device_tensor)
    yield "torch._utils _rebuild_xla_tensor", Known(device_tensor)
    yield "torch._utils _rebuild_mlc_tensor", Known(device_tensor)
    for module in ("torch._tensor", "torch.tensor"):
        yield f"{module} _rebuild_from_type", Known(from_type)
        yield f"{module} _rebuild_from_type_v2", Known(from_type)
    yield "torch.nn.parameter Parameter", Known(parameter_class, TorchName("nn.Parameter"))
    yield "torch.nn.parameter Buffer", Known(None, TorchName("nn.Buffer"))
    yield "torch.autograd.variable Variable", Known(variable_class, TorchName("autograd.Variable"))
    yield "torch._C Generator", Known(generator, TorchName("Generator"))
    yield "torch Generator", Known(generator, TorchName("Generator"))
    for kind in ("int", "tensor", "double", "bool"):
        yield f"torch.jit._pickle build_{kind}list", Known(jit_list, gives_back=0)
    yield "torch.jit._pickle restore_type_tag", Known(jit_tag, gives_back=0)
