"""Tests of schemas, fake kernels, torch.compile and torch.export, for any device.

A test file imports them and provides the fixture `device`.
"""

import pytest
import torch
from layer_cases import make
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import moelora
from moelora.reference import moe_sort_reference
from moelora.testing import Shape, poisoned_memory

DTYPE = torch.bfloat16


def op_names():
    """Every op of the library with a tensor in its schema, without namespace and overload."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted({name.removeprefix("moelora::") for name in names if name.startswith("moelora::")})


TENSOR_OPS = [
    "routing",
    "pack_topk",
    "unpack_topk",
    "moe_sort",
    "permute",
    "gate_up_gemm",
    "down_gemm",
    "lora_shrink",
    "lora_expand",
    "activation",
    "finalize",
    "fused_moe_lora",
]
# Arithmetic on sizes: no tensor goes in or out.
SIZE_OPS = ["fused_moe_lora_workspace_bytes"]


def op_arguments(name, device, tokens, shape):
    """Keyword arguments of the functional op that use every optional tensor; random, but of a fixed seed."""
    layer, lora, adapter_ids = make(tokens, device, DTYPE, shape, slots=2, ranks=[(8, 8), (4, 0)])
    for stack in (lora.gate_up_a, lora.gate_up_b, lora.down_a, lora.down_b):
        stack.nan_to_num_(0.0)
    experts, top_k, pairs = shape.experts, shape.top_k, tokens * shape.top_k
    sort = moe_sort_reference(layer.topk_ids, num_local_experts=experts, tile_rows=16)
    rows = len(sort.permuted_to_expanded)
    generator = torch.Generator().manual_seed(1)

    def normal(*size, dtype=DTYPE):
        return torch.randn(size, generator=generator).to(device, dtype)

    gemm = {
        "expert_offsets": sort.expert_offsets,
        "tile_expert": sort.tile_expert,
        "tile_row_limit": sort.tile_row_limit,
        "expected_rows": 1,
    }
    place = {"num_local_experts": experts, "expert_offset": 0}
    slots = {"topk_ids": layer.topk_ids, "adapter_ids": adapter_ids, "ranks": lora.ranks, "part": 0} | place
    arguments = {
        "routing": {
            "router_logits": normal(tokens, experts, dtype=torch.float32), "top_k": top_k, "method": 6,
            "correction_bias": normal(experts, dtype=torch.float32), "renormalize": True,
        },
        "pack_topk": {"topk_weights": layer.topk_weights, "topk_ids": layer.topk_ids},
        "unpack_topk": {"packed": layer.topk_ids << 16},
        "moe_sort": {
            "topk_ids": layer.topk_ids, "adapter_ids": adapter_ids, "ranks": lora.ranks, "num_slots": 2,
            "tile_rows": 16,
        } | place,
        "permute": {
            "hidden_states": layer.hidden_states, "permuted_to_expanded": sort.permuted_to_expanded, "top_k": top_k,
            "row_weights": layer.topk_weights,
        },
        "gate_up_gemm": {"permuted": normal(rows, shape.hidden), "w13": layer.w13, "w13_bias": layer.w13_bias} | gemm,
        "down_gemm": {"z": normal(rows, shape.inter), "w2": layer.w2, "w2_bias": layer.w2_bias} | gemm,
        "lora_shrink": {"x": layer.hidden_states, "lora_a": lora.gate_up_a, "rank": 8} | slots,
        "lora_expand": {
            "v": normal(pairs, 16, dtype=torch.float32), "lora_b": lora.gate_up_b, "scaling": lora.scaling,
            "row_weights": layer.topk_weights,
        } | slots,
        "activation": {
            "gate_up": normal(rows, 2 * shape.inter), "expanded_to_permuted": sort.expanded_to_permuted,
            "gate_up_lora_delta": normal(tokens, top_k, 2 * shape.inter), "top_k": top_k, "activation": 2,
            "alpha": 1.702, "limit": 7.0, "gate_up_layout": 2, "lora_input": True,
        },
        "finalize": {
            "down": normal(rows, shape.hidden), "topk_weights": layer.topk_weights,
            "expanded_to_permuted": sort.expanded_to_permuted,
            "down_lora_delta": normal(tokens, top_k, shape.hidden), "top_k": top_k, "delta_is_weighted": False,
            "routed_scaling_factor": 2.0,
        },
        "fused_moe_lora": {
            "hidden_states": layer.hidden_states, "w13": layer.w13, "w2": layer.w2,
            "topk_weights": layer.topk_weights, "topk_ids": layer.topk_ids, "num_experts": experts,
            "gate_up_a": lora.gate_up_a, "gate_up_b": lora.gate_up_b, "down_a": lora.down_a, "down_b": lora.down_b,
            "scaling": lora.scaling, "ranks": lora.ranks, "adapter_ids": adapter_ids,
        } | layer.biases,
    }  # fmt: skip
    op = getattr(torch.ops.moelora, name).default
    return positional(op, arguments[name])


def positional(op, arguments):
    """(args, kwargs) as the schema has them, with the defaults of what is not given."""
    args, kwargs = [], {}
    for argument in op._schema.arguments:
        value = arguments.get(argument.name, argument.default_value)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


def out_form(name, args, kwargs, device, tokens, shape):
    """The `.out` overload with its arguments: fresh buffers for what the functional form returns."""
    functional, op = getattr(torch.ops.moelora, name).default, getattr(torch.ops.moelora, name).out
    given = {a.name: v for a, v in zip(functional._schema.arguments, args, strict=False)} | kwargs
    returned = functional(*args, **kwargs)
    returned = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    for argument in op._schema.arguments:
        if argument.alias_info is None or argument.name == "replay_ids":
            continue
        if argument.name == "workspace":
            given["workspace"] = torch.zeros(2**20, dtype=torch.uint8, device=device)
        else:
            buffer = torch.zeros_like(returned.pop(0))
            # An output that was not asked for has size 0, and no buffer.
            given[argument.name] = buffer if buffer.numel() or not tokens else None
    return op, *positional(op, given)


# No row of padding, which an op may leave unwritten: one expert with exactly one tile of rows.
UNPADDED = Shape(hidden=64, inter=32, experts=1, top_k=1)


def test_every_op_is_tested():
    names = {name.split(".")[0] for name in op_names()}
    assert names == {*TENSOR_OPS, *SIZE_OPS}


@pytest.mark.parametrize("name", TENSOR_OPS)
def test_schemas_say_exactly_what_is_written(name):
    """H05, H06: `.out` forms return nothing, functional forms alias nothing"""
    overloads = [op for op in op_names() if op.split(".")[0] == name]
    assert sorted(overloads) == [name, f"{name}.out"]
    packet = getattr(torch.ops.moelora, name)
    assert not packet.default._schema.is_mutable
    assert all(r.alias_info is None for r in packet.default._schema.returns)
    written = [argument for argument in packet.out._schema.arguments if argument.alias_info is not None]
    assert written
    assert all(argument.kwarg_only and argument.alias_info.is_write for argument in written)
    assert len({frozenset(argument.alias_info.before_set) for argument in written}) == len(written)
    assert not packet.out._schema.returns


@pytest.mark.parametrize("name", TENSOR_OPS)
@pytest.mark.parametrize("form", ["functional", "out"])
def test_opcheck(device, name, form):
    """H01, H03: schema, fake kernel, autograd registration and AOT dispatch with dynamic shapes"""
    args, kwargs = op_arguments(name, device, 16, UNPADDED)
    op = getattr(torch.ops.moelora, name).default
    if form == "out":
        op, args, kwargs = out_form(name, args, kwargs, device, 16, UNPADDED)
    torch.library.opcheck(op, args, kwargs)


def metadata(result):
    tensors = result if isinstance(result, (tuple, list)) else (result,)
    return [(tuple(t.shape), t.stride(), t.dtype, t.device.type, t.storage_offset()) for t in tensors]


@pytest.mark.parametrize("name", TENSOR_OPS)
@pytest.mark.parametrize("tokens", [0, 1, 2, 5])
@pytest.mark.parametrize("top_k", [1, 8])
def test_fake_and_real_results_have_the_same_form(device, name, tokens, top_k):
    """H01: shape, strides, dtype, device, at H = 2880 and I = 360, also where a view or a slice goes in"""
    shape = Shape(2880, 360, 8, top_k)
    args, kwargs = op_arguments(name, device, tokens, shape)
    op = getattr(torch.ops.moelora, name).default
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        fake_kwargs = {k: mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for k, a in kwargs.items()}
        expected = metadata(op(*fake, **fake_kwargs))
    assert metadata(op(*args, **kwargs)) == expected
    assert all(offset == 0 for *_, offset in expected)


@pytest.mark.parametrize("tokens", [0, 1, 16])
@pytest.mark.parametrize("name", TENSOR_OPS)
def test_every_op_compiles_without_a_graph_break(device, name, tokens):
    """H03"""
    torch._dynamo.reset()
    args, kwargs = op_arguments(name, device, tokens, UNPADDED)
    op = getattr(torch.ops.moelora, name).default
    with poisoned_memory():
        # Rows of padding, which nobody writes, are NaN in both.
        got = torch.compile(lambda: op(*args, **kwargs), fullgraph=True, backend="aot_eager")()
        expected = op(*args, **kwargs)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


# ---- the forward ----

# The first T equals none of the other sizes: torch gives equal sizes one symbol, and compiles again once they differ.
FORWARD = Shape(hidden=64, inter=32, experts=8, top_k=4)
FORWARDS = ["fused_moe_lora", "fused_moe_lora_single_stream", "fused_moe_lora_two_stream"]


def forward_arguments(tokens, device, **changes):
    layer, lora, adapter_ids = make(tokens, device, DTYPE, FORWARD)
    names = ("hidden_states", "w13", "w2", "topk_weights", "topk_ids")
    given = {"lora": lora, "adapter_ids": adapter_ids}
    return dict(zip(names, layer.arguments, strict=True)) | layer.biases | given | changes


@pytest.mark.parametrize(
    ("name", "with_lora", "do_finalize"),
    [(FORWARDS[0], False, True), *((name, True, True) for name in FORWARDS), (FORWARDS[0], True, False)],
)
def test_a_forward_has_one_graph_for_all_token_counts(device, name, with_lora, do_finalize):
    """H03, H07: fullgraph, dynamic; one compile for T >= 2, one each for 0 and 1"""
    torch._dynamo.reset()
    counters.clear()
    forward = getattr(moelora, name)
    no_lora = {} if with_lora else {"lora": None, "adapter_ids": None}

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def compiled(**arguments):
        return forward(**arguments, do_finalize=do_finalize)

    weights = forward_arguments(2, device)
    fixed = {key: weights[key] for key in ("w13", "w2", "w13_bias", "w2_bias", "lora")} | no_lora
    compiles = []
    for tokens in (11, 2, 3, 5, 13, 64, 100, 1, 0, 7):
        arguments = forward_arguments(tokens, device) | fixed
        got, expected = compiled(**arguments), forward(**arguments, do_finalize=do_finalize)
        compiles.append(counters["stats"]["unique_graphs"])
        if do_finalize:
            assert torch.equal(got, expected)
            continue
        # Rows of padding may hold anything.
        rows = expected[2].long()
        assert torch.equal(got[2], expected[2])
        assert torch.equal(got[0][rows], expected[0][rows])
        assert (got[3] is None) == (expected[3] is None)
        assert got[3] is None or torch.equal(got[3], expected[3])
    assert compiles[6] == 1
    assert compiles[-1] <= 3


def test_a_compiled_forward_is_the_op_and_nothing_else(device):
    """H05: no argument is copied because it might be written"""
    torch._dynamo.reset()
    graphs = []

    def record(graph, _):
        graphs.append(graph)
        return graph.forward

    arguments = forward_arguments(5, device)
    compiled = torch.compile(
        lambda: moelora.fused_moe_lora(**arguments), fullgraph=True,
        backend=aot_autograd(fw_compiler=record),
    )  # fmt: skip
    before = {key: value.clone() for key, value in arguments.items() if isinstance(value, torch.Tensor)}
    with torch.no_grad():
        compiled()
    calls = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert [call for call in calls if "getitem" not in call] == ["moelora.fused_moe_lora.default"]
    assert all(torch.equal(arguments[key], value) for key, value in before.items())


# Of inductor itself, on its first import.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_the_default_backend_compiles_a_block_around_the_forward(device):
    """H03, K06: routing, forward and plain PyTorch before and after, with inductor; no class of ours to inherit from"""
    torch._dynamo.reset()
    layer, lora, _ = make(9, device, DTYPE, FORWARD, slots=1)
    router = torch.randn(FORWARD.experts, FORWARD.hidden, generator=torch.Generator().manual_seed(2))
    router = router.to(device, DTYPE)

    def block(x):
        weights, ids = moelora.route(x @ router.T, FORWARD.top_k)
        return x + moelora.fused_moe_lora(x, layer.w13, layer.w2, weights, ids, lora=lora)

    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(layer.hidden_states), block(layer.hidden_states))


def test_the_forward_exports(device):
    """H03"""
    arguments = forward_arguments(5, device)
    lora = arguments.pop("lora")
    names = ("hidden_states", "topk_weights", "topk_ids", "adapter_ids")
    fixed = {key: value for key, value in arguments.items() if key not in names}

    class Block(torch.nn.Module):
        def forward(self, hidden_states, topk_weights, topk_ids, adapter_ids):
            return moelora.fused_moe_lora(
                hidden_states, topk_weights=topk_weights, topk_ids=topk_ids, adapter_ids=adapter_ids, lora=lora,
                **fixed,
            )  # fmt: skip

    tokens = torch.export.Dim("tokens", min=2, max=4096)
    inputs = {name: arguments[name] for name in names}
    dynamic = {name: {0: tokens} for name in names}
    exported = torch.export.export(Block(), (), inputs, dynamic_shapes=dynamic, strict=False)
    other = forward_arguments(11, device)
    inputs = {name: other[name] for name in names}
    assert torch.equal(exported.module()(**inputs), Block()(**inputs))


@pytest.mark.parametrize("name", ["lora_ready_event", "down_gemm_done_event"])
@pytest.mark.parametrize("do_finalize", [True, False])
def test_an_event_is_refused_in_a_graph(device, name, do_finalize):
    """No graph leaves out an event silently: torch.compile says which argument it was, torch.export raises as it is"""
    torch._dynamo.reset()
    arguments = forward_arguments(3, device)
    event = torch.cuda.Event() if device == "cuda" else object()

    def forward(hidden_states):
        changed = arguments | {"hidden_states": hidden_states, name: event}
        return moelora.fused_moe_lora(**changed, do_finalize=do_finalize)

    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"ValueError.*{name}"):
        torch.compile(forward, fullgraph=True, backend="aot_eager")(arguments["hidden_states"])

    class Block(torch.nn.Module):
        def forward(self, hidden_states):
            return forward(hidden_states)

    with pytest.raises(ValueError, match=f"^{name}: "):
        torch.export.export(Block(), (arguments["hidden_states"],), strict=False)


def test_out_and_input_may_be_views_of_one_buffer(device):
    """H04: compiled and eager agree"""
    layer, _, _ = make(16, device, DTYPE, UNPADDED)

    def step(buffer):
        moelora.fused_moe_lora(buffer[0], *layer.arguments[1:], out=buffer[1])
        return buffer * 2

    def start():
        buffer = torch.zeros(2, 16, UNPADDED.hidden, dtype=DTYPE, device=device)
        buffer[0] = layer.hidden_states
        return buffer

    torch._dynamo.reset()
    eager, compiled = start(), start()
    expected = step(eager)
    got = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")(compiled)
    assert torch.equal(got, expected)
    assert torch.equal(compiled, eager)
    assert eager[1].abs().max() > 0


def test_an_op_with_out_compiles_with_views_of_one_buffer(device):
    """H04"""
    args, kwargs = op_arguments("finalize", device, 16, UNPADDED)

    def step(buffer):
        given = (buffer[0], *args[1:])
        torch.ops.moelora.finalize.out(*given, **kwargs, out=buffer[1])
        return buffer + 1

    def start():
        buffer = torch.zeros(2, 16, UNPADDED.hidden, dtype=DTYPE, device=device)
        buffer[0] = args[0]
        return buffer

    torch._dynamo.reset()
    eager, compiled = start(), start()
    expected = step(eager)
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(compiled), expected)
    assert torch.equal(compiled, eager)
