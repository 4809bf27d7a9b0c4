"""Reading PEFT adapter files: both forms, their names, ranks and scales, and what is refused."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from conformance_cases import adapter_cases, load_case, relative_error
from lora_makers import dense_updates
from safetensors.torch import save_file

from moelora.peft import load_peft_adapter, load_peft_tensors
from moelora.reference import moe_lora_reference

BLOCK = "model.layers.0.mlp"
PREFIX = f"base_model.model.{BLOCK}.experts"
E, H, I, R = 3, 8, 5, 2  # noqa: E741  (all different, and 2*I differs from H)
SIZES = {"num_experts": E, "hidden_size": H, "intermediate_size": I}
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def config(**changes):
    """An adapter_config.json; a value of ... leaves the key out."""
    base = {"peft_type": "LORA", "peft_version": "0.21.2", "r": R, "lora_alpha": 6, "target_parameters": BOTH}
    return {key: value for key, value in (base | changes).items() if value is not ...}


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def fused_tensors(*, gate_up_rank=R, down_rank=R, side="input", hidden=H, inter=I):
    """Both fused pairs of the block, lora_A on the given side."""
    tensors = {}
    for name, features, rank in (
        ("base_layer.", (hidden, 2 * inter), gate_up_rank),
        ("", (inter, hidden), down_rank),
    ):
        a_width, b_width = features if side == "input" else features[::-1]
        tensors[f"{PREFIX}.{name}lora_A.weight"] = random(E * rank, a_width, seed=1)
        tensors[f"{PREFIX}.{name}lora_B.weight"] = random(b_width, rank * E, seed=2)
    return tensors


def expert_tensors(
    projections=("gate_proj", "up_proj", "down_proj"), experts=range(E), rank=R, prefix=PREFIX
):
    """Per-expert pairs; every third name is a projection from I to H."""
    tensors = {}
    for expert in experts:
        for index, projection in enumerate(projections):
            in_features, out_features = (I, H) if index == 2 else (H, I)
            path = f"{prefix}.{expert}.{projection}"
            tensors[f"{path}.lora_A.weight"] = random(rank, in_features, seed=10 * expert + index)
            tensors[f"{path}.lora_B.weight"] = random(out_features, rank, seed=50 + 10 * expert + index)
    return tensors


def load(tensors, settings=None, **options):
    options = {"dtype": torch.float32} | SIZES | options
    return load_peft_tensors(tensors, settings or config(), BLOCK, **options)


def write_adapter(folder, tensors, settings=None):
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings or config()))
    return folder


def literal_fused_update(lora_a, lora_b, expert, rank, scale):
    """scale * B_e A_e by the positions of single rank entries: row e*r + i of A, column i*E + e of B."""
    update = torch.zeros(lora_b.shape[0], lora_a.shape[1], dtype=torch.float64)
    for i in range(rank):
        update += torch.outer(lora_b[:, i * E + expert].double(), lora_a[expert * rank + i].double())
    return scale * update


def close(got, expected):
    torch.testing.assert_close(got.double(), expected.double(), rtol=1e-5, atol=1e-6)


# --- fused parameters


def test_lora_b_is_read_with_expert_fastest():
    """J01"""
    tensors = fused_tensors()
    gate_up, down = dense_updates(load(tensors))
    for expert in range(E):
        pairs = ((gate_up, "base_layer."), (down, ""))
        for update, name in pairs:
            lora_a, lora_b = (tensors[f"{PREFIX}.{name}lora_{side}.weight"] for side in "AB")
            close(update[expert], literal_fused_update(lora_a, lora_b, expert, R, 6 / R))


@pytest.mark.parametrize("peft_version", ["0.18.1", "0.21.2", ...])
def test_widths_settle_the_side_of_lora_a_whatever_the_version(peft_version):
    """J02, J15"""
    settings = config(peft_version=peft_version)
    on_input = fused_tensors(side="input")
    on_output = fused_tensors(side="output")
    for expert, update in enumerate(dense_updates(load(on_input, settings))[0]):
        lora_a, lora_b = (on_input[f"{PREFIX}.base_layer.lora_{side}.weight"] for side in "AB")
        close(update, literal_fused_update(lora_a, lora_b, expert, R, 3.0))
    for expert, update in enumerate(dense_updates(load(on_output, settings))[0]):
        lora_a, lora_b = (on_output[f"{PREFIX}.base_layer.lora_{side}.weight"] for side in "AB")
        close(update, literal_fused_update(lora_a, lora_b, expert, R, 3.0).T)


def square_gate_up():
    return {
        f"{PREFIX}.lora_A.weight": random(E * R, 8, seed=3),
        f"{PREFIX}.lora_B.weight": random(8, R * E, seed=4),
    }


def test_a_square_file_needs_lora_a_side():
    """J02: 2*I = H and gate_up_proj alone."""
    tensors, settings = square_gate_up(), config(target_parameters=BOTH[:1])
    with pytest.raises(ValueError, match="lora_a_side"):
        load(tensors, settings, intermediate_size=4)
    for side in ("input", "output"):
        gate_up, _ = dense_updates(load(tensors, settings, intermediate_size=4, lora_a_side=side))
        for expert in range(E):
            update = literal_fused_update(*tensors.values(), expert, R, 3.0)
            close(gate_up[expert], update if side == "input" else update.T)


def test_a_square_down_proj_alone_needs_lora_a_side():
    """J02: I = H."""
    with pytest.raises(ValueError, match="lora_a_side"):
        load(square_gate_up(), config(target_parameters=BOTH[1:]), intermediate_size=8)


def test_one_pair_that_is_not_square_settles_the_side():
    """2*I = H, and down_proj tells."""
    tensors = fused_tensors(side="output", hidden=8, inter=4)
    lora = load(tensors, intermediate_size=4)
    update = literal_fused_update(*list(tensors.values())[:2], 1, R, 3.0)
    close(dense_updates(lora)[0][1], update.T)


def test_a_side_against_the_widths_is_refused():
    with pytest.raises(ValueError, match="lora_a_side"):
        load(fused_tensors(side="input"), lora_a_side="output")
    with pytest.raises(ValueError, match="lora_a_side"):
        load(fused_tensors(side="output"), lora_a_side="input")
    with pytest.raises(ValueError, match="lora_a_side"):
        load(expert_tensors(), config(target_parameters=None), lora_a_side="output")
    load(fused_tensors(side="output"), lora_a_side="output")
    load(expert_tensors(), config(target_parameters=None), lora_a_side="input")


def test_pairs_on_different_sides_are_refused():
    tensors = fused_tensors(side="input")
    down = {name: tensor for name, tensor in fused_tensors(side="output").items() if "base_layer" not in name}
    with pytest.raises(ValueError, match="same side"):
        load(tensors | down)


@pytest.mark.parametrize(("hidden", "inter"), [(2816, 704), (2048, 512), (1024, 3584)])
def test_narrow_and_wide_experts_keep_their_orientation(hidden, inter):
    """J15"""
    for side in ("input", "output"):
        tensors = fused_tensors(gate_up_rank=1, down_rank=1, side=side, hidden=hidden, inter=inter)
        lora = load(tensors, config(r=1), hidden_size=hidden, intermediate_size=inter)
        given = tensors[f"{PREFIX}.lora_{'A' if side == 'input' else 'B'}.weight"]
        expected = given[1] if side == "input" else given[:, 1]
        assert torch.equal(lora.down_a[0, 1, 0], expected)


def test_target_parameters_tell_what_a_single_pair_is_for():
    only_down = {name: tensor for name, tensor in fused_tensors().items() if "base_layer" not in name}
    lora = load(only_down, config(target_parameters=BOTH[1:]))
    assert lora.gate_up_a is None
    assert lora.ranks.tolist() == [[0, R]]
    only_gate_up = {
        name.replace("base_layer.", ""): tensor
        for name, tensor in fused_tensors().items()
        if "base_layer" in name
    }
    lora = load(only_gate_up, config(target_parameters=BOTH[:1]))
    assert lora.down_a is None
    for wrong in (None, [], BOTH, ["mlp.experts.gate_proj"], ["up_proj", "gate_up"]):
        with pytest.raises(ValueError, match="target_parameters"):
            load(only_down, config(target_parameters=wrong))
    with pytest.raises(ValueError, match="widths"):
        load(only_down, config(target_parameters=BOTH[:1]))


@pytest.mark.parametrize(
    "entry", ["down_proj", "experts.down_proj", "0.mlp.experts.down_proj", f"{BLOCK}.experts.down_proj"]
)
def test_target_parameters_match_whole_path_ends(entry):
    only_down = {name: tensor for name, tensor in fused_tensors().items() if "base_layer" not in name}
    assert load(only_down, config(target_parameters=[entry])).gate_up_a is None


@pytest.mark.parametrize(
    ("layout", "gate_rows", "up_rows"),
    [
        ("gate_up", [0, 1, 2, 3], [4, 5, 6, 7]),
        ("up_gate", [4, 5, 6, 7], [0, 1, 2, 3]),
        ("interleaved", [0, 2, 4, 6], [1, 3, 5, 7]),
    ],
)
def test_rows_of_b_follow_the_layout_of_the_fused_parameter(layout, gate_rows, up_rows):
    """J10"""
    rows = torch.arange(8.0)
    for side in ("input", "output"):
        numbered = rows[:, None].expand(8, E) if side == "input" else rows.expand(E, 8)
        tensors = {
            f"{PREFIX}.lora_A.weight": torch.ones(E, H + 2) if side == "input" else numbered.contiguous(),
            f"{PREFIX}.lora_B.weight": numbered.contiguous() if side == "input" else torch.ones(H + 2, E),
        }
        lora = load(
            tensors,
            config(r=1, target_parameters=BOTH[:1]),
            hidden_size=H + 2,
            intermediate_size=4,
            gate_up_layout=layout,
        )
        assert lora.gate_up_b[0, 1, :4, 0].tolist() == gate_rows
        assert lora.gate_up_b[0, 1, 4:, 0].tolist() == up_rows


def test_fused_files_share_a_between_gate_and_up():
    lora = load(fused_tensors())
    assert lora.gate_up_a_is_shared
    assert lora.gate_up_a.shape == (1, E, 8, H)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("base_layer.lora_A", (E * R + 1, H)),
        ("base_layer.lora_B", (2 * I, R * E + E)),
        ("lora_A", (E * 4, I)),
        ("lora_A", (E * R, I + 1)),
        ("lora_B", (H + 1, R * E)),
        ("lora_B", (H, R, E)),
    ],
)
def test_fused_shapes_that_do_not_fit_are_refused_by_name(name, shape):
    tensors = fused_tensors() | {f"{PREFIX}.{name}.weight": torch.zeros(shape)}
    with pytest.raises(ValueError, match=rf"experts\.{name}.*got"):
        load(tensors)


# --- per-expert modules


@pytest.mark.parametrize(
    ("names", "block"),
    [
        (("gate_proj", "up_proj", "down_proj"), BLOCK),
        (("w1", "w3", "w2"), "model.layers.0.block_sparse_moe"),
        (("gate_proj", "up_proj", "down_proj"), "model.language_model.layers.11.mlp"),
    ],
)
def test_per_expert_names_of_each_model_family(names, block):
    """J11"""
    prefix = f"base_model.model.{block}.experts"
    tensors = expert_tensors(names, prefix=prefix)
    lora = load_peft_tensors(tensors, config(), block, dtype=torch.float32, **SIZES)
    gate_up, down = dense_updates(lora)
    for expert in range(E):
        gate, up, down_update = (
            3.0
            * tensors[f"{prefix}.{expert}.{name}.lora_B.weight"].double()
            @ tensors[f"{prefix}.{expert}.{name}.lora_A.weight"].double()
            for name in names
        )
        close(gate_up[expert, :I], gate)
        close(gate_up[expert, I:], up)
        close(down[expert], down_update)


@pytest.mark.parametrize("projection", ["gate_proj", "up_proj", "down_proj"])
def test_a_missing_projection_has_no_update(projection):
    """J08"""
    tensors = {name: tensor for name, tensor in expert_tensors().items() if f".{projection}." in name}
    lora = load(tensors)
    gate_up, down = dense_updates(lora)
    assert gate_up[:, :I].any() == (projection == "gate_proj")
    assert gate_up[:, I:].any() == (projection == "up_proj")
    assert down.any() == (projection == "down_proj")


def test_a_missing_expert_has_no_update():
    """J04"""
    gate_up, down = dense_updates(load(expert_tensors(experts=[0, 2])))
    for update in (gate_up, down):
        assert update[0].any()
        assert not update[1].any()
        assert update[2].any()


def test_ranks_and_scales_by_expert_are_padded_and_folded():
    """J07"""
    tensors = expert_tensors()
    tensors |= expert_tensors(("gate_proj",), experts=[1], rank=3)
    settings = config(rank_pattern={"experts.1.gate_proj": 3}, alpha_pattern={"experts.2.up_proj": 1})
    lora = load(tensors, settings)
    gate_up, _ = dense_updates(lora)
    assert lora.ranks.tolist() == [[3, R]]
    assert lora.scaling.tolist() == [[1.0, 1.0, 3.0]]  # gate and up differ by expert, so they are folded
    scales = {(1, "gate_proj"): 6 / 3, (2, "up_proj"): 1 / R}
    for expert in range(E):
        for half, name in enumerate(("gate_proj", "up_proj")):
            update = (
                tensors[f"{PREFIX}.{expert}.{name}.lora_B.weight"].double()
                @ tensors[f"{PREFIX}.{expert}.{name}.lora_A.weight"].double()
            )
            close(gate_up[expert].chunk(2)[half], scales.get((expert, name), 3.0) * update)


def test_an_expert_beyond_num_experts_is_refused():
    with pytest.raises(ValueError, match="num_experts"):
        load(expert_tensors(experts=range(E + 1)))


def test_a_rank_that_is_not_the_configured_one_is_refused():
    with pytest.raises(ValueError, match=r"down_proj\.lora_A.*expected shape \[4, 5\], got \[2, 5\]"):
        load(expert_tensors(), config(r=4))


def test_two_names_for_one_projection_are_refused():
    with pytest.raises(ValueError, match="two gate projections"):
        load(expert_tensors() | expert_tensors(("w1",)))


def test_fused_and_per_expert_tensors_together_are_refused():
    with pytest.raises(ValueError, match="both fused and per-expert"):
        load(expert_tensors() | fused_tensors())


# --- rank and scale


@pytest.mark.parametrize(("use_rslora", "scale"), [(True, 4.0), (False, 1.0)])
def test_rslora_divides_alpha_by_the_root_of_the_rank(use_rslora, scale):
    """J05"""
    settings = config(r=16, lora_alpha=16, use_rslora=use_rslora)
    lora = load(fused_tensors(gate_up_rank=16, down_rank=16), settings)
    assert lora.scaling.tolist() == [[scale] * 3]


def test_patterns_apply_per_parameter():
    """J07"""
    settings = config(
        rank_pattern={"gate_up_proj": 1, "down_proj": 2}, lora_alpha=6, alpha_pattern={"down_proj": 8}
    )
    lora = load(fused_tensors(gate_up_rank=1, down_rank=2), settings)
    assert lora.scaling.tolist() == [[6.0, 6.0, 4.0]]
    assert lora.ranks.tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("pattern", "applies"),
    [
        ("down_proj", True),
        ("experts.down_proj", True),
        (f"{BLOCK}.experts.down_proj", True),
        (r".*\.experts\.down_proj", True),
        ("(up|down)_proj", True),
        ("own_proj", False),
        ("proj", False),
        ("experts", False),
        ("base_layer.down_proj", False),
        ("down", False),
    ],
)
def test_a_pattern_applies_where_it_fits_the_path(pattern, applies):
    lora = load(fused_tensors(), config(alpha_pattern={pattern: 10}))
    assert lora.scaling[0].tolist() == [3.0, 3.0, 5.0 if applies else 3.0]


def test_up_proj_does_not_apply_to_gate_up_proj():
    lora = load(fused_tensors(), config(alpha_pattern={"up_proj": 10, "gate": 20}))
    assert lora.scaling[0].tolist() == [3.0] * 3


def test_the_first_fitting_pattern_wins():
    first = load(fused_tensors(), config(alpha_pattern={"down_proj": 2, "mlp.experts.down_proj": 4}))
    second = load(fused_tensors(), config(alpha_pattern={"mlp.experts.down_proj": 4, "down_proj": 2}))
    assert (first.scaling[0, 2], second.scaling[0, 2]) == (1.0, 2.0)


@pytest.mark.parametrize("alpha", [..., None, "16", True, math.nan, [8]])
def test_a_missing_or_malformed_alpha_is_refused(alpha):
    """J06"""
    with pytest.raises(ValueError, match="lora_alpha"):
        load(fused_tensors(), config(lora_alpha=alpha))
    with pytest.raises(ValueError, match="alpha_pattern"):
        load(fused_tensors(), config(alpha_pattern={"down_proj": None if alpha is ... else alpha}))


@pytest.mark.parametrize(("alpha", "scale"), [(0, 0.0), (-4, -2.0), (0.5, 0.25)])
def test_an_explicit_zero_negative_or_fractional_alpha_is_kept(alpha, scale):
    """J06"""
    assert load(fused_tensors(), config(lora_alpha=alpha)).scaling.tolist() == [[scale] * 3]


@pytest.mark.parametrize("rank", [..., None, "2", 0, -1, 2.0, True])
def test_a_missing_or_malformed_rank_is_refused(rank):
    with pytest.raises(ValueError, match="r in adapter_config"):
        load(fused_tensors(), config(r=rank))


@pytest.mark.parametrize(
    "changes",
    [
        {"rank_pattern": {"down_proj": 0}},
        {"rank_pattern": ["down_proj"]},
        {"alpha_pattern": {"(down": 4}},
        {"peft_type": "LOHA"},
    ],
)
def test_a_malformed_configuration_is_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        load(fused_tensors(), config(**changes))


# --- allocation, dtype, memory


def test_stacks_are_allocated_for_the_rank_rounded_up_to_eight():
    lora = load(fused_tensors(gate_up_rank=9, down_rank=2), config(rank_pattern={"gate_up_proj": 9}))
    assert (lora.gate_up_rank, lora.down_rank) == (16, 8)
    assert lora.ranks.tolist() == [[9, 2]]


def test_max_rank_sets_the_allocation_and_limits_the_file():
    """D09"""
    lora = load(fused_tensors(), max_rank=20)
    assert (lora.gate_up_rank, lora.down_rank) == (24, 24)
    assert lora.ranks.tolist() == [[R, R]]
    load(fused_tensors(), max_rank=R)
    with pytest.raises(ValueError, match="max_rank"):
        load(fused_tensors(), max_rank=R - 1)
    assert load(fused_tensors(), max_rank=256).down_rank == 256
    with pytest.raises(ValueError, match="max_rank"):
        load(fused_tensors(), max_rank=257)


def test_a_rank_above_the_limit_is_refused():
    """D09"""
    with pytest.raises(ValueError, match="256"):
        load(fused_tensors(gate_up_rank=257), config(rank_pattern={"gate_up_proj": 257}))


def test_up_a_is_padded_inside_its_component():
    lora = load(expert_tensors())
    assert lora.gate_up_a.shape == (1, E, 16, H)
    up = torch.stack([tensor for name, tensor in expert_tensors().items() if "up_proj.lora_A" in name])
    assert torch.equal(lora.gate_up_a[0, :, 8 : 8 + R], up)
    assert not lora.gate_up_a[0, :, R:8].any()
    assert not lora.gate_up_a[0, :, 8 + R :].any()


@pytest.mark.parametrize("make", [fused_tensors, expert_tensors])
def test_the_callers_tensors_and_config_stay_unchanged(make):
    """J12"""
    tensors, settings = make(), config(alpha_pattern={"experts.0.up_proj": 1})
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    settings_before = json.dumps(settings)
    first, second = load(tensors, settings), load(tensors, settings)
    assert json.dumps(settings) == settings_before
    for name, tensor in tensors.items():
        assert torch.equal(tensor, before[name])
    for got, expected in zip(dense_updates(first), dense_updates(second), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("file_dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_file_tensors_are_cast_once(dtype, file_dtype):
    """J13"""
    tensors = {name: tensor.to(file_dtype) for name, tensor in fused_tensors().items()}
    lora = load(tensors, dtype=dtype)
    assert lora.dtype == dtype
    a = tensors[f"{PREFIX}.lora_A.weight"].float().view(E, R, I)
    assert torch.equal(lora.down_a[0, :, :R], a.to(dtype))


def test_a_folded_scale_is_applied_in_fp32_before_the_cast():
    """J13"""
    tensors = expert_tensors()
    lora = load(tensors, config(alpha_pattern={"experts.0.down_proj": 1}), dtype=torch.bfloat16)
    b = torch.stack([tensors[f"{PREFIX}.{expert}.down_proj.lora_B.weight"] for expert in range(E)])
    scales = torch.tensor([1 / R, 6 / R, 6 / R])[:, None, None]
    assert lora.scaling[0, 2] == 1.0
    assert torch.equal(lora.down_b[0, ..., :R], (b * scales).bfloat16())


def test_an_integer_tensor_is_refused():
    tensors = fused_tensors() | {f"{PREFIX}.lora_A.weight": torch.zeros(E * R, I, dtype=torch.int8)}
    with pytest.raises(ValueError, match="dtype"):
        load(tensors)


class Recording(dict):
    """Remembers which tensors were read."""

    def __init__(self, *args):
        super().__init__(*args)
        self.was_read = set()

    def __getitem__(self, name):
        self.was_read.add(name)
        return super().__getitem__(name)


def test_only_the_blocks_own_tensors_are_read():
    own = fused_tensors()
    foreign = {
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(1),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": torch.zeros(1),
        "base_model.model.model.layers.0.mlp.gate.lora_A.weight": torch.zeros(1),
        "base_model.model.model.layers.0.mlp.gate.weight": torch.zeros(1),
        "base_model.model.model.layers.0.mlp.shared_experts.up_proj.lora_B.bias": torch.zeros(1),
        "base_model.model.model.layers.0.mlp.shared_expert.up_proj.lora_A.weight": torch.zeros(1),
        "base_model.model.model.layers.10.mlp.experts.0.up_proj.lora_A.weight": torch.zeros(1),
        "base_model.model.model.layers.10.mlp.experts.unheard_of": torch.zeros(1),
        "base_model.model.lm_head.weight": torch.zeros(1),
    }
    tensors = Recording(own | foreign)
    load(tensors, config(modules_to_save=["lm_head", "gate"]))
    assert tensors.was_read == set(own)


# --- refusals


@pytest.mark.parametrize(
    "rest",
    [
        "0.gate_projection.lora_A.weight",
        "0.gate_proj.lora_C.weight",
        "0.gate_proj.lora_A.default.weight",
        "0.gate_proj.weight",
        "gate_proj.lora_A.weight",
        "base_layer.base_layer.lora_A.weight",
        "gate_up_projs.0.lora_A.weight",
        "modules_to_save.gate_up_proj",
        "gate_up_proj",
    ],
)
def test_unknown_tensors_of_the_experts_are_listed(rest):
    """J04, J14, J16"""
    with pytest.raises(ValueError, match=re.escape(f"{PREFIX}.{rest}")):
        load(fused_tensors() | {f"{PREFIX}.{rest}": torch.zeros(R, H)})


def test_a_list_of_fused_modules_is_refused_with_its_names():
    """J16"""
    tensors = {
        f"{PREFIX}.gate_up_projs.{expert}.lora_{side}.weight": torch.zeros(2, 2)
        for expert in range(16)
        for side in "AB"
    }
    with pytest.raises(ValueError, match=r"gate_up_projs\.0\.lora_A.* and 24 more"):
        load(tensors)


@pytest.mark.parametrize("suffix", ["lora_magnitude_vector", "lora_B.bias", "bias", "lora_A.bias"])
def test_tensors_beyond_a_and_b_are_refused(suffix):
    """J14"""
    with pytest.raises(ValueError, match=suffix):
        load(expert_tensors() | {f"{PREFIX}.1.up_proj.{suffix}": torch.zeros(I)})


@pytest.mark.parametrize(
    ("feature", "value"),
    [
        ("use_dora", True),
        ("lora_bias", True),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("alora_invocation_tokens", [1, 2]),
        ("arrow_config", {"top_k": 2}),
        ("kasa_config", {"beta": 1}),
        ("monteclora_config", {"samples": 2}),
    ],
)
def test_configured_features_beyond_plain_lora_are_refused(feature, value):
    """J14"""
    with pytest.raises(ValueError, match=feature):
        load(expert_tensors(), config(**{feature: value}))


@pytest.mark.parametrize(("name", "adapter"), adapter_cases(refused=True))
def test_adapters_of_the_cases_that_are_not_plain_lora_are_refused(name, adapter):
    """J14"""
    with pytest.raises(ValueError, match=r"lora_magnitude_vector|lora_B\.bias"):
        load_case(name).load_adapter(adapter)


@pytest.mark.parametrize("make", [fused_tensors, expert_tensors])
def test_a_matrix_without_its_partner_is_refused(make):
    """J04"""
    for name in make():
        tensors = make()
        del tensors[name]
        with pytest.raises(ValueError, match="partner"):
            load(tensors)


def test_an_inner_pair_without_an_outer_one_is_refused():
    tensors = {name: tensor for name, tensor in fused_tensors().items() if "base_layer" in name}
    with pytest.raises(ValueError, match="base_layer"):
        load(tensors)


def test_a_file_with_nothing_for_the_block_lists_the_blocks_it_has():
    """J04"""
    tensors = {
        name.replace("layers.0", f"layers.{layer}"): tensor
        for layer in (10, 2)
        for name, tensor in expert_tensors().items()
    }
    tensors["base_model.model.model.layers.0.mlp.gate.lora_A.weight"] = torch.zeros(R, H)
    with pytest.raises(ValueError, match=r"block_path.*: model\.layers\.2\.mlp, model\.layers\.10\.mlp$"):
        load(tensors)
    with pytest.raises(ValueError, match="none"):
        load({})


def test_allow_empty_gives_an_empty_slot():
    lora = load({}, allow_empty=True)
    assert lora.ranks.tolist() == [[0, 0]]
    assert (lora.num_experts, lora.hidden_size, lora.intermediate_size) == (E, H, I)
    assert not any(update.any() for update in dense_updates(lora))
    full = load(fused_tensors())
    stacked = full.stack([lora, full])
    assert stacked.ranks.tolist() == [[0, 0], [R, R]]


@pytest.mark.parametrize(
    ("error", "name", "options"),
    [
        (TypeError, "num_experts", {"num_experts": 3.0}),
        (ValueError, "num_experts", {"num_experts": 0}),
        (ValueError, "hidden_size", {"hidden_size": -8}),
        (TypeError, "intermediate_size", {"intermediate_size": True}),
        (ValueError, "gate_up_layout", {"gate_up_layout": "gateup"}),
        (TypeError, "gate_up_layout", {"gate_up_layout": None}),
        (ValueError, "lora_a_side", {"lora_a_side": "in"}),
        (TypeError, "lora_a_side", {"lora_a_side": 0}),
        (TypeError, "max_rank", {"max_rank": "8"}),
        (ValueError, "max_rank", {"max_rank": 0}),
        (TypeError, "dtype", {"dtype": torch.float64}),
        (TypeError, "dtype", {"dtype": torch.float8_e4m3fn}),
    ],
)
def test_bad_arguments_are_refused_by_name(error, name, options):
    with pytest.raises(error, match=name):
        load(fused_tensors(), **options)


# --- files


def test_a_folder_is_read_by_str_or_path(tmp_path):
    write_adapter(tmp_path, fused_tensors())
    for path in (tmp_path, str(tmp_path), Path(tmp_path)):
        lora = load_peft_adapter(path, BLOCK, **SIZES)
        assert lora.dtype == torch.bfloat16
    prefixed = load_peft_adapter(tmp_path, f"base_model.model.{BLOCK}", **SIZES)
    assert torch.equal(prefixed.down_a, lora.down_a)


def test_the_order_of_patterns_in_the_file_counts(tmp_path):
    write_adapter(
        tmp_path, fused_tensors(), config(alpha_pattern={"mlp.experts.down_proj": 4, "down_proj": 2})
    )
    assert load_peft_adapter(tmp_path, BLOCK, **SIZES).scaling[0, 2] == 2.0


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_file_is_named(tmp_path, missing):
    write_adapter(tmp_path, fused_tensors())
    (tmp_path / missing).unlink()
    with pytest.raises(FileNotFoundError, match=missing):
        load_peft_adapter(tmp_path, BLOCK, **SIZES)


def test_wrong_python_types_are_refused(tmp_path):
    write_adapter(tmp_path, fused_tensors())
    with pytest.raises(TypeError, match="path"):
        load_peft_adapter(3, BLOCK, **SIZES)
    with pytest.raises(TypeError, match="block_path"):
        load_peft_adapter(tmp_path, 0, **SIZES)
    with pytest.raises(TypeError, match="config"):
        load_peft_tensors(fused_tensors(), [], BLOCK, **SIZES)


# --- the cases see mistakes (the agreement itself is tested in test_reference.py)


def case_error(case, lora, adapter):
    got = moe_lora_reference(
        case.hidden_states,
        case.weights.w13,
        case.weights.w2,
        case.topk_weights,
        case.topk_ids,
        lora=lora,
        **case.forward_options,
    )
    return relative_error(got, case.expected(adapter))


def swap_halves(lora):
    lora.gate_up_b.copy_(lora.gate_up_b.roll(lora.intermediate_size, dims=2))


def shift_experts(lora):
    for stack in (lora.gate_up_a, lora.gate_up_b, lora.down_a, lora.down_b):
        stack.copy_(stack.roll(1, dims=1))


def drop_scale(lora):
    lora.scaling.fill_(1.0)


@pytest.mark.parametrize("mistake", [swap_halves, shift_experts, drop_scale])
@pytest.mark.parametrize(
    ("name", "adapter"),
    [("qwen3_moe_t17", "r8"), ("gpt_oss_t17", "r4"), ("per_expert_qwen3_moe_t17", "all_r8")],
)
def test_the_cases_see_a_mistake(name, adapter, mistake):
    case = load_case(name)
    lora = case.load_adapter(adapter)
    assert case_error(case, lora, adapter) < 1e-6
    mistake(lora)
    assert case_error(case, lora, adapter) > 1e-3


def test_the_cases_see_another_adapter():
    case = load_case("qwen3_moe_t17")
    assert case_error(case, case.load_adapter("r8"), "r4") > 1e-3


@pytest.mark.parametrize("name", ["llama4_square_t17", "peft018_llama4_square_t3"])
def test_the_cases_see_lora_a_on_the_wrong_side(name):
    case = load_case(name)
    side = case.load_options("gate_up_only_r4")["lora_a_side"]
    right = case.load_adapter("gate_up_only_r4")
    wrong = case.load_adapter("gate_up_only_r4", lora_a_side={"input": "output", "output": "input"}[side])
    assert case_error(case, right, "gate_up_only_r4") < 1e-6
    assert case_error(case, wrong, "gate_up_only_r4") > 1e-3


def test_the_cases_see_a_wrong_row_layout():
    case = load_case("gpt_oss_t17")
    wrong = case.load_adapter("r4", gate_up_layout="gate_up")
    assert case_error(case, wrong, "r4") > 1e-3
