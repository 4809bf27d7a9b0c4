"""Tests of what bad input gets (spec section 8), for any device: by name, with the right type, before any launch.

A test file imports them and provides the fixtures `device` and `dtype`.
"""

import pytest
import torch
from layer_cases import make, run

import moelora
from moelora import _checks, ops
from moelora.testing import Shape, random_lora

T, H, I, E, K, L = 10, 64, 32, 4, 2, 3  # noqa: E741
SHAPE = Shape(H, I, E, K)


def valid(device, dtype, **lora_options):
    """Every argument of a call that works, by name; `lora` as a dict of the constructor's arguments."""
    layer, lora, adapter_ids = make(T, device, dtype, SHAPE, slots=L, **lora_options)
    names = ("hidden_states", "w13", "w2", "topk_weights", "topk_ids")
    return {
        **dict(zip(names, layer.arguments, strict=True)),
        **layer.biases,
        "lora": lora,
        "adapter_ids": adapter_ids,
    }


def assert_refused(arguments, error, match):
    """The call raises, and wrote nothing before it did."""
    out = None
    if isinstance(arguments["hidden_states"], torch.Tensor) and arguments.get("do_finalize", True):
        out = arguments["hidden_states"].new_full((T, H), 7)
        arguments = {"out": out} | arguments
    with pytest.raises(error, match=match) as caught, torch.inference_mode():
        moelora.fused_moe_lora(**arguments)
    assert type(caught.value) is error
    if out is not None and arguments["out"] is out:
        assert (out == 7).all()


def wider(tensor, extra):
    """`tensor` with rows that lie `extra` elements further apart."""
    size = (*tensor.shape[:-1], tensor.shape[-1] + extra)
    view = torch.zeros(size, dtype=tensor.dtype, device=tensor.device)[..., : tensor.shape[-1]]
    view.copy_(tensor)
    return view


def shifted(tensor):
    """`tensor` one element beyond an aligned address."""
    flat = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)[1:]
    return flat.view(tensor.shape).copy_(tensor)


def last_dim_strided(tensor):
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


# What is wrong: (error, the argument that is named, the argument that is changed, the change).
BAD_TENSORS = {
    "x is a list": (TypeError, "hidden_states", lambda x: x.tolist()),
    "x has 1 dim (K12)": (ValueError, "hidden_states", lambda x: x[0]),
    "x has 3 dims (K12)": (ValueError, "hidden_states", lambda x: x[None]),
    "x is float64": (TypeError, "hidden_states", lambda x: x.double()),
    "x is int": (TypeError, "hidden_states", lambda x: x.int()),
    "x is fp8 without a scale (D05)": (TypeError, "hidden_states", lambda x: x.to(torch.float8_e4m3fn)),
    "x with a strided last dim (C10)": (ValueError, "hidden_states", last_dim_strided),
    "x misaligned (B11)": (ValueError, "hidden_states", shifted),
    "x with odd row strides (B11)": (ValueError, "hidden_states", lambda x: wider(x, 4)),
    "w13 has 2 dims": (ValueError, "w13", lambda w: w[0]),
    "w13 with odd rows (K12)": (ValueError, "w13", lambda w: w[:, :-1]),
    "w13 of another H": (ValueError, "w13", lambda w: w[:, :, :-8].contiguous()),
    "w13 of another dtype": (TypeError, "w13", lambda w: w.double()),
    "w13 in fp8 without scales (D05)": (TypeError, "w13", lambda w: w.to(torch.float8_e4m3fn)),
    "w13 transposed (C06)": (ValueError, "w13", last_dim_strided),
    "w13 misaligned": (ValueError, "w13", shifted),
    "w13 with odd row strides": (ValueError, "w13", lambda w: wider(w, 4)),
    "w2 has 4 dims": (ValueError, "w2", lambda w: w[None]),
    "w2 of another I (K12)": (ValueError, "w2", lambda w: w[:, :, :-8].contiguous()),
    "w2 of another H": (ValueError, "w2", lambda w: w[:, :-8]),
    "w2 of other experts (K12)": (ValueError, "w2", lambda w: w[:-1]),
    "w2 of another dtype": (TypeError, "w2", lambda w: w.double()),
    "w2 transposed (C06)": (ValueError, "w2", last_dim_strided),
    "ids have 1 dim": (ValueError, "topk_ids", lambda i: i[:, 0]),
    "ids are float": (TypeError, "topk_ids", lambda i: i.float()),
    "ids are int16 (A11)": (TypeError, "topk_ids", lambda i: i.short()),
    "ids are uint32 (A11)": (TypeError, "topk_ids", lambda i: i.to(torch.uint32)),
    "weights of other tokens": (ValueError, "topk_weights", lambda w: w[:-1]),
    "weights of another K (K12)": (ValueError, "topk_weights", lambda w: w[:, :-1]),
    "weights are a list": (TypeError, "topk_weights", lambda w: w.tolist()),
    "weights are fp16": (TypeError, "topk_weights", lambda w: w.half()),
    "weights are float64": (TypeError, "topk_weights", lambda w: w.double()),
    "too few adapter ids (E12)": (ValueError, "adapter_ids", lambda a: a[:6]),
    "too many adapter ids (E12)": (ValueError, "adapter_ids", lambda a: torch.cat([a, a[:2]])),
    "adapter ids have 2 dims": (ValueError, "adapter_ids", lambda a: a[:, None]),
    "adapter ids are float": (TypeError, "adapter_ids", lambda a: a.float()),
    "adapter ids are int16 (A11)": (TypeError, "adapter_ids", lambda a: a.short()),
    "no adapter ids with three slots": (ValueError, "adapter_ids", lambda a: None),
    "w13_bias has 1 dim": (ValueError, "w13_bias", lambda b: b[0]),
    "w13_bias of I": (ValueError, "w13_bias", lambda b: b[:, :I].contiguous()),
    "w13_bias in float64": (TypeError, "w13_bias", lambda b: b.double()),
    "w13_bias strided": (ValueError, "w13_bias", lambda b: wider(b, 8)),
    "w2_bias of other experts": (ValueError, "w2_bias", lambda b: b[:-1]),
    "w2_bias of another dtype": (TypeError, "w2_bias", lambda b: b.double()),
    "lora is a tensor": (TypeError, "lora", lambda lora: lora.down_a),
    "lora is a tuple": (TypeError, "lora", lambda lora: (lora.gate_up_a, lora.gate_up_b)),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_a_wrong_tensor_is_named(device, dtype, name):
    """A11, B11, C06, C10, D05, E12, K04, K12: formats that are not built yet, such as fp8 weights, among them"""
    error, argument, change = BAD_TENSORS[name]
    arguments = valid(device, dtype)
    arguments[argument] = change(arguments[argument])
    assert_refused(arguments, error, argument)


BAD_OPTIONS = {
    "num_experts below E_loc": (ValueError, "num_experts|expert_offset", {"num_experts": E - 1}),
    "num_experts of 0": (ValueError, "num_experts", {"num_experts": 0}),
    "num_experts over the limit": (ValueError, "num_experts", {"num_experts": 1025}),
    "num_experts is a str": (TypeError, "num_experts", {"num_experts": "4"}),
    "negative offset": (ValueError, "expert_offset", {"expert_offset": -1, "num_experts": 8}),
    "offset beyond the model": (ValueError, "expert_offset", {"expert_offset": 5, "num_experts": 8}),
    "offset without num_experts": (ValueError, "expert_offset", {"expert_offset": 1}),
    "offset is a float": (TypeError, "expert_offset", {"expert_offset": 0.5}),
    "unknown activation (K13)": (ValueError, "activation.*'silu'.*'relu2'", {"activation": "relu2"}),
    "activation is a number": (TypeError, "activation", {"activation": 0}),
    "alpha is a str": (TypeError, "activation_alpha", {"activation_alpha": "1"}),
    "limit is None": (TypeError, "activation_limit", {"activation_limit": None}),
    "unknown layout": (ValueError, "gate_up_layout", {"gate_up_layout": "gate"}),
    "layout is None": (TypeError, "gate_up_layout", {"gate_up_layout": None}),
    "unknown mode": (ValueError, "stream_mode", {"stream_mode": "three"}),
    "mode is a number": (TypeError, "stream_mode", {"stream_mode": 2}),
    "weight on input with K = 2 (D06)": (
        ValueError,
        "apply_router_weight_on_input",
        {"apply_router_weight_on_input": True},
    ),
    "scaling factor is None": (TypeError, "routed_scaling_factor", {"routed_scaling_factor": None}),
    "ready event is a number": (TypeError, "lora_ready_event", {"lora_ready_event": 1}),
    "done event is a stream": (TypeError, "down_gemm_done_event", {"down_gemm_done_event": object()}),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_a_wrong_option_is_named(device, dtype, name):
    """D06, K11, K13"""
    error, match, changes = BAD_OPTIONS[name]
    assert_refused(valid(device, dtype) | changes, error, match)


def delta_shape(part):
    return (T, K, 2 * I if part == "gate_up" else H)


@pytest.mark.parametrize("part", ["gate_up", "down"])
def test_a_wrong_delta_is_named(device, dtype, part):
    argument = f"{part}_lora_delta"
    plain = valid(device, dtype) | {"lora": None, "adapter_ids": None}
    delta = torch.zeros(delta_shape(part), dtype=dtype, device=device)
    bad = {
        "2 dims": (ValueError, delta.flatten(0, 1)),
        "other tokens": (ValueError, delta[:-1]),
        "another width": (ValueError, delta[..., :-8].contiguous()),
        "another dtype": (TypeError, delta.double()),
        "strided": (ValueError, wider(delta, 8)),
        "a list": (TypeError, [delta]),
    }
    for error, value in bad.values():
        assert_refused(plain | {argument: value}, error, argument)
    # Two sources of one part.
    assert_refused(valid(device, dtype) | {argument: delta}, ValueError, argument)


BAD_OUT = {
    "other tokens": (ValueError, lambda x: x.new_empty(T + 1, H)),
    "another width": (ValueError, lambda x: x.new_empty(T, H + 8)),
    "3 dims": (ValueError, lambda x: x.new_empty(1, T, H)),
    "another dtype": (TypeError, lambda x: x.new_empty(T, H, dtype=torch.float64)),
    "a strided last dim": (ValueError, lambda x: last_dim_strided(x.new_zeros(T, H))),
    "odd row strides": (ValueError, lambda x: wider(x.new_empty(T, H), 4)),
    "misaligned": (ValueError, lambda x: shifted(x.new_empty(T, H))),
    "a list": (TypeError, lambda x: [x]),
}


@pytest.mark.parametrize("name", BAD_OUT)
def test_a_wrong_out_is_named(device, dtype, name):
    error, change = BAD_OUT[name]
    arguments = valid(device, dtype)
    assert_refused(arguments | {"out": change(arguments["hidden_states"])}, error, "out")


def test_out_may_not_overlap_an_input(device, dtype):
    """G02"""
    arguments = valid(device, dtype)
    x = arguments["hidden_states"]
    for argument, out in {
        "hidden_states": x,
        "w13": arguments["w13"].view(-1)[: T * H].view(T, H),
        "w2": arguments["w2"].view(-1)[8 : T * H + 8].view(T, H),
    }.items():
        before = out.clone()
        assert_refused(arguments | {"out": out}, ValueError, f"out.*{argument}")
        assert torch.equal(out, before)
    buffer = torch.zeros(T + 1, H, dtype=dtype, device=device)
    assert_refused(arguments | {"hidden_states": buffer[:-1], "out": buffer[1:]}, ValueError, "out.*hidden_states")


def test_out_and_do_finalize_exclude_each_other(device, dtype):
    arguments = valid(device, dtype) | {"do_finalize": False}
    assert_refused(arguments | {"out": torch.empty(T, H, dtype=dtype, device=device)}, ValueError, "out")


def test_more_experts_per_token_than_there_are(device, dtype):
    """A16: refused by name, also over the limit of 32"""
    for top_k, experts in ((E + 1, E), (33, 64)):
        arguments = valid(device, dtype) | {
            "topk_ids": torch.zeros(T, top_k, dtype=torch.int32, device=device),
            "topk_weights": torch.ones(T, top_k, device=device),
            "num_experts": experts,
        }
        assert_refused(arguments, ValueError, "topk_ids")


def test_packed_topk_must_be_int32(device, dtype):
    arguments = valid(device, dtype) | {"topk_weights": None}
    assert_refused(arguments | {"topk_ids": arguments["topk_ids"].long()}, TypeError, "topk_ids")


@pytest.mark.parametrize(
    ("hidden", "inter", "experts", "match"),
    [(H, 12, E, "w13"), (H, 20, E, "w13"), (12, I, E, "hidden_states"), (H, 8, 1025, r"w13.*1024")],
)
def test_sizes_outside_the_limits(device, dtype, hidden, inter, experts, match):
    """C07: H and I are multiples of 8; at most 1024 experts"""
    arguments = valid(device, dtype)
    bad = {
        "hidden_states": torch.zeros(T, hidden, dtype=dtype, device=device),
        "w13": torch.zeros(experts, 2 * inter, hidden, dtype=dtype, device=device),
        "w2": torch.zeros(experts, hidden, inter, dtype=dtype, device=device),
        "topk_weights": arguments["topk_weights"],
        "topk_ids": arguments["topk_ids"],
    }
    with pytest.raises(ValueError, match=match), torch.inference_mode():
        moelora.fused_moe_lora(**bad)


@pytest.mark.parametrize("changes", [{"experts": E + 1}, {"experts": E - 1}, {"hidden": H + 8}, {"inter": I + 8}])
def test_a_lora_of_other_sizes_is_named(device, dtype, changes):
    """E09, F02: nine experts in the weights and eight in the adapters, and other mismatches"""
    sizes = {"hidden": H, "inter": I, "experts": E} | changes
    lora = random_lora(L, Shape(**sizes, top_k=K), 8, dtype=dtype, device=device)
    assert_refused(valid(device, dtype) | {"lora": lora}, ValueError, "gate_up_a|gate_up_b|down_a|down_b|lora")


def test_a_lora_of_another_dtype_is_named(device, dtype):
    """J13"""
    other = torch.float16 if dtype != torch.float16 else torch.bfloat16
    lora = random_lora(L, SHAPE, 8, dtype=other, device=device)
    assert_refused(valid(device, dtype) | {"lora": lora}, TypeError, "gate_up_a|gate_up_b")


def test_non_gated_experts_are_refused(device, dtype):
    """K13: w13 of I rows instead of 2I"""
    arguments = valid(device, dtype)
    assert_refused(arguments | {"w13": arguments["w13"][:, :I]}, ValueError, "w2|w13")


TENSORS = ["hidden_states", "w13", "w2", "topk_weights", "topk_ids", "adapter_ids", "w13_bias", "w2_bias"]


@pytest.mark.parametrize("argument", TENSORS)
def test_a_tensor_on_another_device_is_named(device, dtype, argument):
    """G10"""
    arguments = valid(device, dtype)
    for elsewhere in {"meta", "cpu"} - {torch.device(device).type}:
        moved = arguments | {argument: arguments[argument].to(elsewhere)}
        if argument == "hidden_states":
            moved["out"] = None
        with pytest.raises(ValueError, match=r"device"), torch.inference_mode():
            moelora.fused_moe_lora(**moved)


def test_a_lora_or_out_on_another_device_is_named(device, dtype):
    """G10"""
    arguments = valid(device, dtype)
    assert_refused(arguments | {"out": torch.empty(T, H, dtype=dtype, device="meta")}, ValueError, "out.*device")
    assert_refused(arguments | {"lora": arguments["lora"].to("meta")}, ValueError, "gate_up_a.*device")


# ---- no gradients ----


GRAD_ARGUMENTS = ["hidden_states", "w13", "w2", "topk_weights", "w13_bias", "w2_bias"]


@pytest.mark.parametrize("argument", [*GRAD_ARGUMENTS, "gate_up_a", "gate_up_b", "down_a", "down_b"])
def test_an_input_that_requires_grad_is_refused(device, dtype, argument):
    """H08: while grad mode is on; the message says what to do"""
    arguments = valid(device, dtype)
    where = arguments if argument in arguments else vars(arguments["lora"])
    where[argument] = where[argument].clone().requires_grad_()
    with pytest.raises(ValueError, match=rf"^{argument}.*torch\.inference_mode\(\)"):
        moelora.fused_moe_lora(**arguments)
    with torch.no_grad():
        expected = moelora.fused_moe_lora(**arguments)
    assert not expected.requires_grad
    with torch.inference_mode():
        assert torch.equal(moelora.fused_moe_lora(**arguments), expected)


def test_the_functional_op_refuses_to_lose_a_gradient(device, dtype):
    """H08: no silent zero or partial gradient on either device"""
    arguments = valid(device, dtype)
    x = arguments["hidden_states"].clone().requires_grad_()
    weights = [arguments[name] for name in ("w13", "w2", "topk_weights", "topk_ids")]
    with pytest.raises(RuntimeError, match=r"hidden_states.*torch\.inference_mode\(\)"):
        torch.ops.moelora.fused_moe_lora(x, *weights, num_experts=E)
    with torch.no_grad():
        torch.ops.moelora.fused_moe_lora(x, *weights, num_experts=E)


# ---- the raw op, and checks of device data ----


def test_the_raw_op_says_the_same_words(device, dtype):
    """RuntimeError from torch.ops, TypeError or ValueError from Python."""
    arguments = valid(device, dtype)
    for change, error in (({"topk_weights": arguments["topk_weights"][:, :1]}, ValueError),
                          ({"w2": arguments["w2"].double()}, TypeError)):  # fmt: skip
        changed = arguments | change
        plain = {name: changed[name] for name in ("hidden_states", "w13", "w2", "topk_weights", "topk_ids")}
        with pytest.raises(error) as from_python, torch.inference_mode():
            moelora.fused_moe_lora(**plain)
        with pytest.raises(RuntimeError) as from_op, torch.inference_mode():
            torch.ops.moelora.fused_moe_lora(*plain.values(), num_experts=E)
        assert str(from_python.value) in str(from_op.value)


def test_a_workspace_that_is_too_small_is_refused(device, dtype):
    arguments = valid(device, dtype)
    plain = [arguments[name] for name in ("hidden_states", "w13", "w2", "topk_weights", "topk_ids")]
    out = torch.empty(T, H, dtype=dtype, device=device)
    workspace = torch.empty(64, dtype=torch.uint8, device=device)
    with pytest.raises(RuntimeError, match="workspace"):
        torch.ops.moelora.fused_moe_lora.out(*plain, num_experts=E, out=out, workspace=workspace)


def test_device_data_is_checked_on_request(device, dtype, monkeypatch):
    """MOELORA_CHECK=1"""
    arguments = valid(device, dtype)
    bad_id, bad_slot, bad_weight = (arguments[name].clone() for name in ("topk_ids", "adapter_ids", "topk_weights"))
    bad_id[1, 1], bad_slot[2], bad_weight[3, 0] = E, L, torch.inf
    changes = {"topk_ids": bad_id, "adapter_ids": bad_slot, "topk_weights": bad_weight}
    with torch.inference_mode():
        for argument, value in changes.items():
            moelora.fused_moe_lora(**arguments | {argument: value})
        monkeypatch.setattr(_checks, "CHECK_DATA", True)
        moelora.fused_moe_lora(**arguments)
        for argument, value in changes.items():
            with pytest.raises(ValueError, match=argument):
                moelora.fused_moe_lora(**arguments | {argument: value})


def test_ids_of_every_integer_type_in_every_op(device, dtype):
    """A11: int32 and int64 give the same, the others are refused by name and dtype"""
    layer, lora, adapter_ids = make(T, device, dtype, SHAPE)
    v = torch.zeros(T * K, 16, device=device)
    calls = {
        "pack_topk": lambda ids: ops.pack_topk(layer.topk_weights, ids),
        "moe_sort": lambda ids: ops.moe_sort(ids, num_local_experts=E),
        "lora_shrink": lambda ids: ops.lora_shrink(
            layer.hidden_states, lora.gate_up_a, ids, adapter_ids=adapter_ids, rank=8, part="gate_up",
            num_local_experts=E,
        ),
        "lora_expand": lambda ids: ops.lora_expand(
            v, lora.gate_up_b, ids, adapter_ids=adapter_ids, part="gate_up", num_local_experts=E
        ),
        "fused_moe_lora": lambda ids: run(layer.with_(topk_ids=ids), lora, adapter_ids),
    }  # fmt: skip
    for call in calls.values():
        first = call(layer.topk_ids)
        second = call(layer.topk_ids.long())
        for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (first, second)), strict=True):
            assert torch.equal(a, b)
        for wrong in (torch.int16, torch.uint32, torch.float32):
            with pytest.raises(TypeError, match="topk_ids"):
                call(layer.topk_ids.to(wrong))
