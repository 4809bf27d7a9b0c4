"""Tests of activation for any device: a test file imports them and provides the fixtures `device` and `dtype`."""

import pytest
import torch
import torch.nn.functional as F
from op_helpers import (
    UNIT_ROUNDOFF,
    WILD_IDS,
    assert_guards,
    one_rounding,
    poisoned,
    random_ids,
    random_tensor,
    same_bits,
    sort_pairs,
)

from moelora import ops, swap_gate_up

KINDS = list(ops.ACTIVATIONS)
LAYOUTS = list(ops.GATE_UP_LAYOUTS)
ALPHA, LIMIT = 1.702, 7.0


def activate(gate, up, kind, alpha=ALPHA, limit=LIMIT):
    """The float64 oracle."""
    gate, up = gate.double(), up.double()
    if kind == "silu":
        return F.silu(gate) * up
    if kind == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def arranged(gate, up, layout):
    """[rows, 2I] in the row order of `layout`."""
    if layout == "gate_up":
        return torch.cat([gate, up], dim=1)
    if layout == "up_gate":
        return torch.cat([up, gate], dim=1)
    return torch.stack([gate, up], dim=2).flatten(1)


def activation_into_poison(
    gate_up, sort, top_k, *, kind="silu", layout="gate_up", delta=None, alpha=ALPHA, limit=LIMIT, lora_input=True
):
    """(z, activation_lora_input or None), both written into NaN buffers with guards."""
    inner = gate_up.shape[1] // 2
    num_tokens = sort.expanded_to_permuted.shape[0] // top_k
    options = {"dtype": gate_up.dtype, "device": gate_up.device}
    z, whole_z = poisoned(gate_up.shape[0], inner, **options)
    by_pair, whole_by_pair = poisoned(num_tokens, top_k, inner, **options)
    torch.ops.moelora.activation.out(
        gate_up, sort.expanded_to_permuted, delta, top_k, ops.ACTIVATIONS[kind], alpha, limit,
        ops.GATE_UP_LAYOUTS[layout], z=z, activation_lora_input=by_pair if lora_input else None,
    )  # fmt: skip
    assert_guards(whole_z)
    assert_guards(whole_by_pair)
    return z, by_pair if lora_input else None


def inputs(num_tokens, top_k, num_experts, inner, device, dtype, num_local=None, seed=0):
    """gate and up by pair, the sort, and gate and up by permuted row with NaN in the padding."""
    ids = random_ids(num_tokens, top_k, num_experts, device, seed)
    sort = sort_pairs(ids, num_local or num_experts)
    gate = random_tensor(num_tokens * top_k, inner, dtype=dtype, device=device, seed=seed + 1, scale=3.0)
    up = random_tensor(num_tokens * top_k, inner, dtype=dtype, device=device, seed=seed + 2)
    return gate, up, sort, by_row(gate, sort), by_row(up, sort)


def by_row(values, sort):
    pairs = sort.permuted_to_expanded.long()
    rows = torch.full((pairs.shape[0], values.shape[1]), torch.nan, dtype=values.dtype, device=values.device)
    rows[pairs >= 0] = values[pairs[pairs >= 0]]
    return rows


def check(z, by_pair, sort, expected):
    """expected: float64 by pair."""
    rows = sort.expanded_to_permuted.long()
    local = rows >= 0
    one_rounding(z[rows[local]], expected[local])
    padding = torch.ones(z.shape[0], dtype=torch.bool, device=z.device)
    padding[rows[local]] = False
    assert z[padding].isnan().all()
    if by_pair is not None:
        by_pair = by_pair.flatten(0, 1)
        assert same_bits(by_pair[local], z[rows[local]])
        assert same_bits(by_pair[~local], torch.zeros_like(by_pair[~local]))


@pytest.mark.parametrize("with_delta", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_activation_of_every_kind_and_layout(kind, layout, with_delta, device, dtype):
    """K11, B05: also, padding rows stay unwritten, and pairs that are not local give exact zeros."""
    gate, up, sort, gate_rows, up_rows = inputs(13, 3, 8, 88, device, dtype, num_local=5)
    delta = random_tensor(13, 3, 176, dtype=dtype, device=device, seed=5) if with_delta else None
    z, by_pair = activation_into_poison(
        arranged(gate_rows, up_rows, layout), sort, 3, kind=kind, layout=layout, delta=delta
    )
    gate, up = gate.double(), up.double()
    if with_delta:
        gate = gate + delta.flatten(0, 1)[:, :88].double()
        up = up + delta.flatten(0, 1)[:, 88:].double()
    check_sums(z, by_pair, sort, gate, up, kind)
    assert (sort.expanded_to_permuted < 0).any()


def check_sums(z, by_pair, sort, gate, up, kind):
    # g + delta is an fp32 sum: its rounding, seen through the activation, is within the fp32 allowance
    # of one_rounding for terms of this size.
    expected = activate(gate, up, kind)
    rows = sort.expanded_to_permuted.long()
    local = rows >= 0
    magnitude = (gate.abs() + 1) * (up.abs() + 1)
    one_rounding(z[rows[local]], expected[local], magnitude[local])
    by_pair = by_pair.flatten(0, 1)
    assert same_bits(by_pair[local], z[rows[local]])
    assert same_bits(by_pair[~local], torch.zeros_like(by_pair[~local]))


@pytest.mark.parametrize("inner", [8, 96, 224, 256, 352, 360, 1856, 2880])
def test_activation_widths_of_real_models(inner, device, dtype):
    """C07: no width is rounded up to a tile."""
    gate, up, sort, gate_rows, up_rows = inputs(3, 2, 8, inner, device, dtype)
    z, by_pair = activation_into_poison(arranged(gate_rows, up_rows, "gate_up"), sort, 2)
    check(z, by_pair, sort, activate(gate, up, "silu"))


def test_activation_functional_form_equals_out_form(device, dtype):
    _, _, sort, gate_rows, up_rows = inputs(5, 2, 4, 16, device, dtype)
    rows = arranged(gate_rows, up_rows, "gate_up")
    expected_z, expected_by_pair = activation_into_poison(rows, sort, 2)
    real = sort.permuted_to_expanded >= 0
    for lora_input in (False, True):
        z, by_pair = torch.ops.moelora.activation(
            rows, sort.expanded_to_permuted, None, 2, 0, ALPHA, LIMIT, 0, lora_input
        )
        assert same_bits(z[real], expected_z[real])
        assert same_bits(by_pair, expected_by_pair) if lora_input else by_pair.numel() == 0
        z, by_pair = ops.activation(rows, sort.expanded_to_permuted, 2, lora_input=lora_input)
        assert same_bits(z[real], expected_z[real])
        assert same_bits(by_pair, expected_by_pair) if lora_input else by_pair is None


def test_activation_clamps_as_gpt_oss_does(device, dtype):
    """D07: the gate from above only, up on both sides, +1 on up; the delta is added before the clamp."""
    pairs = [(20, 20), (-20, -20), (20, -20), (0, 0), (6, 1), (-6, 1)]
    gate = torch.tensor([[p[0]] * 8 for p in pairs], dtype=dtype, device=device)
    up = torch.tensor([[p[1]] * 8 for p in pairs], dtype=dtype, device=device)
    sort = sort_pairs(torch.zeros(6, 1, dtype=torch.int32, device=device), 1)
    rows = arranged(by_row(gate, sort), by_row(up, sort), "gate_up")
    z, by_pair = activation_into_poison(rows, sort, 1, kind="swigluoai")
    check(z, by_pair, sort, activate(gate, up, "swigluoai"))
    assert by_pair[3].abs().max() == 0  # gate 0
    # A one-sided clamp: -20 stays -20 for the gate (-20 * sigmoid(-34) is 0 for all purposes), up is -7.
    assert by_pair[1].float().abs().max() < 1e-10

    delta = torch.zeros(6, 1, 16, dtype=dtype, device=device)
    delta[4, 0, :8] = 5
    z, by_pair = activation_into_poison(rows, sort, 1, kind="swigluoai", delta=delta)
    expected = activate(torch.tensor(11.0), torch.tensor(1.0), "swigluoai")
    assert abs(by_pair[4, 0, 0].item() - expected.item()) <= UNIT_ROUNDOFF[dtype] * 16
    assert abs(by_pair[4, 0, 0].item() - activate(torch.tensor(6.0), torch.tensor(1.0), "swigluoai").item()) > 0.5


def test_activation_parameters_are_used(device, dtype):
    """D07: alpha and limit are the caller's."""
    gate, up, sort, gate_rows, up_rows = inputs(5, 2, 4, 16, device, dtype)
    rows = arranged(gate_rows, up_rows, "gate_up")
    z, by_pair = activation_into_poison(rows, sort, 2, kind="swigluoai", alpha=0.5, limit=1.25)
    check(z, by_pair, sort, activate(gate, up, "swigluoai", alpha=0.5, limit=1.25))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_activation_delta_is_gate_then_up_whatever_the_layout(layout, device, dtype):
    """J10, D10: a swapped delta is another result, so a wrong order cannot hide."""
    gate, up, sort, gate_rows, up_rows = inputs(9, 2, 4, 24, device, dtype)
    delta = random_tensor(9, 2, 48, dtype=dtype, device=device, seed=8)
    delta[..., :24] += 3
    rows = arranged(gate_rows, up_rows, layout)
    z, by_pair = activation_into_poison(rows, sort, 2, layout=layout, delta=delta)
    halves = delta.flatten(0, 1).double()
    gate, up = gate.double() + halves[:, :24], up.double() + halves[:, 24:]
    check_sums(z, by_pair, sort, gate, up, "silu")
    swapped, _ = activation_into_poison(rows, sort, 2, layout=layout, delta=swap_gate_up(delta))
    real = sort.permuted_to_expanded >= 0
    assert (swapped[real].double() - z[real].double()).norm() > 0.5 * z[real].double().norm()


def test_activation_delta_of_zeros_changes_no_bit(device, dtype):
    """E08: a row without adapter has the bits it has without the delta."""
    _, _, sort, gate_rows, up_rows = inputs(9, 2, 4, 24, device, dtype)
    rows = arranged(gate_rows, up_rows, "gate_up")
    plain, _ = activation_into_poison(rows, sort, 2)
    zeros = torch.zeros(9, 2, 48, dtype=dtype, device=device)
    with_zeros, _ = activation_into_poison(rows, sort, 2, delta=zeros)
    real = sort.permuted_to_expanded >= 0
    assert same_bits(with_zeros[real], plain[real])


def test_activation_does_not_read_the_delta_of_pairs_elsewhere(device, dtype):
    """F01, D10: NaN in the delta of a pair that is not local does not reach its zeros."""
    gate, up, sort, gate_rows, up_rows = inputs(9, 2, 8, 16, device, dtype, num_local=3)
    delta = torch.zeros(9, 2, 32, dtype=dtype, device=device)
    delta.flatten(0, 1)[sort.expanded_to_permuted < 0] = torch.nan
    z, by_pair = activation_into_poison(arranged(gate_rows, up_rows, "gate_up"), sort, 2, delta=delta)
    check(z, by_pair, sort, activate(gate, up, "silu"))


def test_activation_with_map_entries_out_of_range(device, dtype):
    """B12: such a pair counts as not local."""
    rows = random_tensor(16, 32, dtype=dtype, device=device)
    maps = torch.tensor([3, *WILD_IDS, 16, 15, 0], dtype=torch.int32, device=device)
    sort = sort_pairs(torch.zeros(4, 2, dtype=torch.int32, device=device), 1)
    sort = sort._replace(expanded_to_permuted=maps)
    z, by_pair = activation_into_poison(rows, sort, 2)
    expected = activate(rows[:, :16], rows[:, 16:], "silu")
    by_pair = by_pair.flatten(0, 1)
    for pair, row in ((0, 3), (6, 15), (7, 0)):
        one_rounding(by_pair[pair], expected[row])
        assert same_bits(by_pair[pair], z[row])
    assert same_bits(by_pair[1:6], torch.zeros_like(by_pair[1:6]))
    assert z[[1, 2, *range(4, 15)]].isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_activation_is_exact_over_the_whole_range(kind, device, dtype):
    """The exponential may cost nothing that the one rounding does not cost anyway, large inputs included."""
    gate = torch.cat([torch.linspace(-100, 100, 4001), torch.linspace(-3, 3, 4001), torch.zeros(6)])
    gate = torch.cat([gate, torch.tensor([1e4, -1e4])]).view(-1, 10)
    gate = F.pad(gate, (0, 6)).to(dtype).to(device)
    up = torch.full_like(gate, 1.5)
    sort = sort_pairs(torch.zeros(gate.shape[0], 1, dtype=torch.int32, device=device), 1)
    rows = arranged(by_row(gate, sort), by_row(up, sort), "gate_up")
    z, _ = activation_into_poison(rows, sort, 1, kind=kind)
    expected = activate(gate, up, kind)
    real = sort.expanded_to_permuted.long()
    # Relative, down to results that vanish beside the largest ones.
    allowed = (1.03 * UNIT_ROUNDOFF[dtype] + 2e-6) * expected.abs() + 1e-7
    if dtype == torch.float32:
        # The oracle's own 1 + tanh loses what lies 16 digits below 1.
        allowed = 1e-5 * expected.abs() + 1e-13
    assert ((z[real].double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("kind", KINDS)
def test_activation_hands_nan_on(kind, device, dtype):
    gate = torch.ones(2, 8, dtype=dtype, device=device)
    up = torch.ones(2, 8, dtype=dtype, device=device)
    gate[0, 3], up[1, 5] = torch.nan, torch.nan
    sort = sort_pairs(torch.zeros(2, 1, dtype=torch.int32, device=device), 1)
    rows = arranged(by_row(gate, sort), by_row(up, sort), "gate_up")
    _, by_pair = activation_into_poison(rows, sort, 1, kind=kind)
    assert by_pair[:, 0].isnan().nonzero().tolist() == [[0, 3], [1, 5]]


def test_activation_of_nothing(device, dtype):
    """C01, F09: no tokens, and no local pair."""
    empty = torch.empty(0, dtype=torch.int32, device=device)
    z, by_pair = ops.activation(torch.empty(0, 32, dtype=dtype, device=device), empty, 2, lora_input=True)
    assert z.shape == (0, 16) and by_pair.shape == (0, 2, 16)
    sort = sort_pairs(torch.full((4, 2), -1, dtype=torch.int32, device=device), 3)
    rows = torch.full((sort.permuted_to_expanded.shape[0], 32), torch.nan, dtype=dtype, device=device)
    z, by_pair = activation_into_poison(rows, sort, 2)
    assert z.isnan().all()
    assert same_bits(by_pair, torch.zeros_like(by_pair))


@pytest.mark.parametrize("num_tokens", [8191, 8192, 8193])
def test_activation_of_more_than_65535_pairs(num_tokens, device):
    """B10: nothing is laid out along a grid dimension that ends at 65535."""
    dtype = torch.bfloat16
    pairs = num_tokens * 8
    rows = random_tensor(pairs, 16, dtype=dtype, device=device)
    order = torch.randperm(pairs, generator=torch.Generator().manual_seed(1)).int().to(device)
    _, by_pair = ops.activation(rows, order, 8, lora_input=True)
    expected = activate(rows[:, :8], rows[:, 8:], "silu")[order.long()]
    one_rounding(by_pair.flatten(0, 1), expected)


def test_activation_refuses_bad_arguments(device, dtype):
    """D14, C12, D07, K12: views that the kernel cannot read and unknown options are refused by name."""
    rows = torch.zeros(16, 32, dtype=dtype, device=device)
    maps = torch.zeros(4, dtype=torch.int32, device=device)
    wide = torch.zeros(16, 48, dtype=dtype, device=device)
    for bad in (wide[:, :32], rows[:, :24], wide[:, :40].contiguous(), rows[None]):
        with pytest.raises(ValueError, match="gate_up"):
            ops.activation(bad, maps, 2)
    with pytest.raises(TypeError, match="gate_up"):
        ops.activation(rows.double(), maps, 2)
    with pytest.raises(TypeError, match="expanded_to_permuted"):
        ops.activation(rows, maps.long(), 2)
    with pytest.raises(ValueError, match="expanded_to_permuted"):
        ops.activation(rows, maps, 3)
    delta = torch.zeros(2, 2, 32, dtype=dtype, device=device)
    for bad in (delta[:1], delta.flatten(0, 1), torch.zeros(2, 2, 40, dtype=dtype, device=device)[..., :32]):
        with pytest.raises(ValueError, match="gate_up_lora_delta"):
            ops.activation(rows, maps, 2, gate_up_lora_delta=bad)
    with pytest.raises(TypeError, match="gate_up_lora_delta"):
        ops.activation(rows, maps, 2, gate_up_lora_delta=delta.double())
    with pytest.raises(ValueError, match="activation"):
        ops.activation(rows, maps, 2, activation="relu2")
    with pytest.raises(ValueError, match="gate_up_layout"):
        ops.activation(rows, maps, 2, gate_up_layout="gate-up")
    out = torch.zeros(16, 16, dtype=dtype, device=device)
    for codes in ((3, 0), (-1, 0), (0, 3), (0, -1)):
        with pytest.raises(RuntimeError, match="unknown code"):
            torch.ops.moelora.activation.out(rows, maps, None, 2, codes[0], 1.0, 1.0, codes[1], z=out)
    with pytest.raises(RuntimeError, match="overlap"):
        torch.ops.moelora.activation.out(rows, maps, None, 2, 0, 1.0, 1.0, 0, z=rows.flatten()[:256].view(16, 16))
    with pytest.raises(RuntimeError, match="activation_lora_input"):
        torch.ops.moelora.activation.out(rows, maps, None, 2, 0, 1.0, 1.0, 0, z=out, activation_lora_input=out[:4])


def test_activation_passes_opcheck(device, dtype):
    rows = random_tensor(8, 32, dtype=dtype, device=device)
    maps = torch.arange(8, dtype=torch.int32, device=device).flip(0)
    delta = random_tensor(4, 2, 32, dtype=dtype, device=device)
    for options in ((None, 2, 0, ALPHA, LIMIT, 0, False), (delta, 2, 2, ALPHA, LIMIT, 1, True)):
        torch.library.opcheck(torch.ops.moelora.activation.default, (rows, maps, *options))
