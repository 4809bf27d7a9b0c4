"""MoELoRA: what the constructor accepts and refuses, moving, stacking and sharding."""

import pytest
import torch
from lora_makers import dense_updates, random_layer, random_lora

from moelora.lora import MoELoRA
from moelora.reference import moe_lora_reference

L, E, H, I, R1, R2 = 3, 4, 16, 8, 4, 2  # noqa: E741


def stacks(**changes):
    """Constructor arguments that fit together, with some of them replaced."""
    return {
        "gate_up_a": torch.zeros(L, E, 2 * R1, H),
        "gate_up_b": torch.zeros(L, E, 2 * I, R1),
        "down_a": torch.zeros(L, E, R2, I),
        "down_b": torch.zeros(L, E, H, R2),
        "scaling": torch.ones(L, 3),
        "ranks": torch.ones(L, 2, dtype=torch.int32),
    } | changes


def test_sizes_are_read_off_the_stacks():
    lora = MoELoRA(**stacks())
    assert (lora.num_slots, lora.num_experts, lora.hidden_size, lora.intermediate_size) == (L, E, H, I)
    assert (lora.gate_up_rank, lora.down_rank) == (R1, R2)
    assert lora.dtype == torch.float32
    assert lora.device == torch.device("cpu")
    assert not lora.gate_up_a_is_shared
    assert not lora.gate_up_a_is_shared_outer
    assert not lora.down_b_is_shared_outer


def test_gate_up_a_of_r1_rows_is_shared_by_gate_and_up():
    lora = MoELoRA(**stacks(gate_up_a=torch.zeros(L, E, R1, H)))
    assert lora.gate_up_a_is_shared
    assert lora.gate_up_rank == R1


def test_expert_dim_of_one_is_the_shared_outer_form():
    """J09"""
    lora = MoELoRA(**stacks(gate_up_a=torch.zeros(L, 1, 2 * R1, H), down_b=torch.zeros(L, 1, H, R2)))
    assert lora.gate_up_a_is_shared_outer
    assert lora.down_b_is_shared_outer
    assert lora.num_experts == E


@pytest.mark.parametrize("part", ["gate_up", "down"])
def test_a_part_may_be_none(part):
    """J08"""
    lora = MoELoRA(**stacks(**{f"{part}_a": None, f"{part}_b": None}))
    assert (lora.num_slots, lora.num_experts, lora.hidden_size, lora.intermediate_size) == (L, E, H, I)
    assert getattr(lora, f"{part}_rank") is None
    assert part not in repr(lora)


def test_the_constructor_never_copies():
    given = stacks()
    lora = MoELoRA(**given)
    for name, tensor in given.items():
        assert getattr(lora, name) is tensor


def test_scaling_of_one_per_slot_is_broadcast_and_follows_the_caller():
    scaling = torch.tensor([1.0, 2.0, 3.0])
    lora = MoELoRA(**stacks(scaling=scaling))
    assert lora.scaling.tolist() == [[1.0] * 3, [2.0] * 3, [3.0] * 3]
    scaling[1] = 5.0
    assert lora.scaling[1].tolist() == [5.0] * 3


def test_scaling_none_means_one_and_ranks_none_stays():
    lora = MoELoRA(**stacks(scaling=None, ranks=None))
    assert lora.scaling.dtype == torch.float32
    assert torch.equal(lora.scaling, torch.ones(L, 3))
    assert lora.ranks is None


@pytest.mark.parametrize("rank", [1, 5, 256])
def test_any_rank_up_to_256_is_taken(rank):
    """D08, D09"""
    lora = MoELoRA(
        **stacks(gate_up_a=torch.zeros(L, E, 2 * rank, H), gate_up_b=torch.zeros(L, E, 2 * I, rank))
    )
    assert lora.gate_up_rank == rank


FP8 = torch.float8_e4m3fn
BAD_ARGUMENTS = {
    "list": (TypeError, "gate_up_a", {"gate_up_a": [1.0]}),
    "float64": (TypeError, "gate_up_b", {"gate_up_b": torch.zeros(L, E, 2 * I, R1, dtype=torch.float64)}),
    "fp8 (J13)": (TypeError, "gate_up_a", {"gate_up_a": torch.zeros(L, E, 2 * R1, H, dtype=FP8)}),
    "two dtypes": (TypeError, "down_a", {"down_a": torch.zeros(L, E, R2, I, dtype=torch.bfloat16)}),
    "two devices": (ValueError, "down_b", {"down_b": torch.zeros(L, E, H, R2, device="meta")}),
    "only A": (ValueError, "gate_up_a, gate_up_b", {"gate_up_b": None}),
    "only B": (ValueError, "down_a, down_b", {"down_a": None}),
    "nothing": (
        ValueError,
        "gate_up_a, gate_up_b, down_a, down_b",
        dict.fromkeys(stacks().keys() - {"scaling", "ranks"}),
    ),
    "3 dims": (ValueError, "down_a", {"down_a": torch.zeros(E, R2, I)}),
    "A rank is not B rank (D01)": (ValueError, "gate_up_a", {"gate_up_a": torch.zeros(L, E, 2 * R1 + 1, H)}),
    "B twice as wide (F05)": (ValueError, "gate_up_a", {"gate_up_b": torch.zeros(L, E, 2 * I, 4 * R1)}),
    "odd rows": (ValueError, "gate_up_b", {"gate_up_b": torch.zeros(L, E, 2 * I + 1, R1)}),
    "slots": (ValueError, "gate_up_b", {"gate_up_b": torch.zeros(L + 1, E, 2 * I, R1)}),
    "experts": (ValueError, "down_a", {"down_a": torch.zeros(L, E + 1, R2, I)}),
    "two of four experts": (ValueError, "down_b", {"down_b": torch.zeros(L, 2, H, R2)}),
    "shared outer in the wrong place": (ValueError, "down_a", {"down_a": torch.zeros(L, 1, R2, I)}),
    "hidden": (ValueError, "down_b", {"down_b": torch.zeros(L, E, H + 8, R2)}),
    "intermediate": (ValueError, "down_a", {"down_a": torch.zeros(L, E, R2, I + 8)}),
    "down ranks": (ValueError, "down_b", {"down_b": torch.zeros(L, E, H, R2 + 1)}),
    "rank 257": (
        ValueError,
        "down_a",
        {"down_a": torch.zeros(L, E, 257, I), "down_b": torch.zeros(L, E, H, 257)},
    ),
    "rank 0": (
        ValueError,
        "down_a",
        {"down_a": torch.zeros(L, E, 0, I), "down_b": torch.zeros(L, E, H, 0)},
    ),
    "last dim strided": (ValueError, "down_a", {"down_a": torch.zeros(L, E, I, R2).transpose(2, 3)}),
    "scaling list": (TypeError, "scaling", {"scaling": [1.0, 1.0, 1.0]}),
    "scaling dtype": (TypeError, "scaling", {"scaling": torch.ones(L, 3, dtype=torch.bfloat16)}),
    "scaling shape": (ValueError, "scaling", {"scaling": torch.ones(L + 1, 3)}),
    "scaling device": (ValueError, "scaling", {"scaling": torch.ones(L, 3, device="meta")}),
    "ranks dtype (A11)": (TypeError, "ranks", {"ranks": torch.ones(L, 2, dtype=torch.int64)}),
    "ranks shape": (ValueError, "ranks", {"ranks": torch.ones(L, dtype=torch.int32)}),
    "ranks device": (ValueError, "ranks", {"ranks": torch.ones(L, 2, dtype=torch.int32, device="meta")}),
}


@pytest.mark.parametrize("what", BAD_ARGUMENTS)
def test_bad_arguments_are_refused_by_name(what):
    """K12"""
    error, name, changes = BAD_ARGUMENTS[what]
    with pytest.raises(error, match=f"^{name}: .*got"):
        MoELoRA(**stacks(**changes))


def test_to_changes_dtype_and_device_and_keeps_the_rest():
    lora = MoELoRA(**stacks())
    for moved in (lora.to(torch.bfloat16), lora.to(dtype=torch.bfloat16), lora.to("cpu", torch.bfloat16)):
        assert moved.dtype == torch.bfloat16
        assert moved.gate_up_a.dtype == moved.down_b.dtype == torch.bfloat16
        assert moved.scaling.dtype == torch.float32
        assert moved.ranks.dtype == torch.int32
    assert lora.to("cpu").gate_up_a is lora.gate_up_a
    on_meta = lora.to(torch.device("meta"))
    assert on_meta.device.type == on_meta.scaling.device.type == on_meta.ranks.device.type == "meta"
    with pytest.raises(TypeError, match="two dtypes"):
        lora.to(torch.bfloat16, torch.float16)


def test_repr_tells_forms_and_sizes():
    text = repr(random_lora(2, shared_a=True, shared_outer=True))
    for words in (
        "2 slots",
        "4 experts",
        "gate and up share A",
        "one A for all experts",
        "one B for all experts",
    ):
        assert words in text


# Adapters of unlike ranks and forms; 6 and 3 make the allocated ranks 8.
STACKABLE = {
    "plain": {"gate_up_rank": 6, "down_rank": 3},
    "shared_a": {"gate_up_rank": 2, "down_rank": 1, "shared_a": True},
    "shared_outer": {"gate_up_rank": 4, "down_rank": 4, "shared_outer": True},
    "both_shared": {"gate_up_rank": 1, "down_rank": 2, "shared_a": True, "shared_outer": True},
}


def assert_same_updates(stacked, slot, lora):
    for got, expected in zip(dense_updates(stacked, slot), dense_updates(lora), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "forms",
    [
        ["plain", None, "shared_a", "shared_outer", "both_shared"],
        ["shared_a", "both_shared"],
        ["shared_outer", None, "both_shared"],
        ["both_shared", "both_shared"],
    ],
)
def test_stack_keeps_what_each_adapter_does(forms):
    loras = [None if form is None else random_lora(**STACKABLE[form], seed=i) for i, form in enumerate(forms)]
    stacked = MoELoRA.stack(loras)
    assert stacked.num_slots == len(forms)
    assert stacked.gate_up_rank == stacked.down_rank == 8
    assert stacked.gate_up_a_is_shared == all(form in ("shared_a", "both_shared", None) for form in forms)
    assert stacked.gate_up_a_is_shared_outer == all(
        form in ("shared_outer", "both_shared", None) for form in forms
    )
    assert stacked.down_b_is_shared_outer == stacked.gate_up_a_is_shared_outer
    for slot, lora in enumerate(loras):
        if lora is None:
            assert stacked.ranks[slot].tolist() == [0, 0]
        else:
            assert stacked.ranks[slot].tolist() == [lora.gate_up_rank, lora.down_rank]
            assert_same_updates(stacked, slot, lora)


def test_up_a_starts_at_the_allocated_rank():
    """E04"""
    lora = random_lora(gate_up_rank=3, down_rank=3)
    stacked = MoELoRA.stack([lora, random_lora(gate_up_rank=16, down_rank=16)])
    assert torch.equal(stacked.gate_up_a[0, :, :3], lora.gate_up_a[0, :, :3])
    assert torch.equal(stacked.gate_up_a[0, :, 16:19], lora.gate_up_a[0, :, 3:])
    assert not stacked.gate_up_a[0, :, 3:16].any()
    assert not stacked.gate_up_a[0, :, 19:].any()
    assert not stacked.gate_up_b[0, :, :, 3:].any()
    assert not stacked.down_a[0, :, 3:].any()
    assert not stacked.down_b[0, :, :, 3:].any()


def test_stack_takes_adapters_with_one_part_only():
    """J08"""
    full = random_lora()
    gate_up_only = MoELoRA(full.gate_up_a, full.gate_up_b, None, None)
    down_only = MoELoRA(None, None, full.down_a, full.down_b)
    stacked = MoELoRA.stack([gate_up_only, down_only])
    assert stacked.ranks.tolist() == [[4, 0], [0, 4]]
    assert_same_updates(MoELoRA.stack([gate_up_only, full]), 0, gate_up_only)
    only_down = MoELoRA.stack([None, down_only])
    assert only_down.gate_up_a is None
    assert_same_updates(only_down, 1, down_only)


def test_stack_keeps_the_true_ranks_of_its_items():
    lora = random_lora(gate_up_rank=8, down_rank=8, ranks=[[3, 5]])
    assert MoELoRA.stack([lora, None]).ranks.tolist() == [[3, 5], [0, 0]]


def test_stack_copies():
    lora = random_lora(gate_up_rank=8, down_rank=8)
    stacked = MoELoRA.stack([lora])
    before = stacked.gate_up_b.clone()
    lora.gate_up_b.fill_(7.0)
    assert torch.equal(stacked.gate_up_b, before)


@pytest.mark.parametrize(
    ("error", "words", "loras"),
    [
        (ValueError, "loras: .*got none", [None, None]),
        (ValueError, "loras: .*got none", []),
        (TypeError, r"loras\[1\]", [random_lora(), "adapter"]),
        (ValueError, r"loras\[1\]: expected one slot", [random_lora(), random_lora(2)]),
        (TypeError, r"loras\[2\]: .*dtype", [random_lora(), None, random_lora(dtype=torch.bfloat16)]),
        (ValueError, "device", [random_lora(), random_lora().to("meta")]),
        (ValueError, "num_experts", [random_lora(), random_lora(num_experts=5)]),
        (ValueError, "hidden_size", [random_lora(), random_lora(hidden=24)]),
        (ValueError, "intermediate_size", [random_lora(), random_lora(inter=16)]),
    ],
)
def test_stack_refuses_adapters_that_do_not_fit(error, words, loras):
    with pytest.raises(error, match=words):
        MoELoRA.stack(loras)


@pytest.mark.parametrize("shared_a", [False, True])
@pytest.mark.parametrize("shared_outer", [False, True])
def test_shards_of_experts_and_columns_hold_their_part_of_the_update(shared_a, shared_outer):
    lora = random_lora(2, shared_a=shared_a, shared_outer=shared_outer, ranks=[[4, 3], [0, 0]])
    shard = lora.shard(experts=slice(1, 3), intermediate=slice(2, 6))
    assert (shard.num_experts, shard.intermediate_size, shard.hidden_size) == (2, 4, 16)
    assert shard.gate_up_a_is_shared_outer == shard.down_b_is_shared_outer == shared_outer
    assert shard.ranks.tolist() == lora.ranks.tolist()
    gate_up, down = dense_updates(lora)
    shard_gate_up, shard_down = dense_updates(shard)
    assert torch.equal(shard_gate_up, gate_up.unflatten(1, (2, 8))[1:3, :, 2:6].flatten(1, 2))
    assert torch.equal(shard_down, down[1:3, :, 2:6])


def test_shards_are_contiguous_copies():
    lora = random_lora()
    shard = lora.shard(experts=slice(0, 2), intermediate=slice(0, 4))
    for name in ("gate_up_a", "gate_up_b", "down_a", "down_b", "scaling"):
        tensor, whole = getattr(shard, name), getattr(lora, name)
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
    everything = lora.shard()
    for name in ("gate_up_a", "gate_up_b", "down_a", "down_b", "scaling"):
        assert torch.equal(getattr(everything, name), getattr(lora, name))


def test_a_shard_of_one_part_only():
    full = random_lora()
    down_only = MoELoRA(None, None, full.down_a, full.down_b).shard(intermediate=slice(4, 8))
    assert down_only.gate_up_a is None
    assert torch.equal(down_only.down_a, full.down_a[..., 4:8])


@pytest.mark.parametrize("name", ["experts", "intermediate"])
def test_a_shard_of_nothing_or_with_a_step_is_refused(name):
    """F03"""
    lora = random_lora()
    for empty in (slice(2, 2), slice(3, 1), slice(100, 200)):
        with pytest.raises(ValueError, match=name):
            lora.shard(**{name: empty})
    with pytest.raises(ValueError, match="step"):
        lora.shard(**{name: slice(0, 4, 2)})
    with pytest.raises(TypeError, match=name):
        lora.shard(**{name: 2})


def forward(layer, lora, adapter_ids, **options):
    return moe_lora_reference(*layer.arguments, lora=lora, adapter_ids=adapter_ids, **options)


@pytest.mark.parametrize("shared_outer", [False, True])
def test_tensor_parallel_shards_add_up_to_the_whole(shared_outer):
    """F06, F04"""
    layer = random_layer()
    lora = random_lora(2, shared_outer=shared_outer, ranks=[[4, 4], [2, 3]])
    ids = torch.tensor([0, 1, -1, 0, 1, 1, 0])
    total = torch.zeros(7, 16, dtype=torch.float64)
    for part in (slice(0, 4), slice(4, 8)):
        w13 = layer.w13.unflatten(1, (2, 8))[:, :, part].flatten(1, 2)
        total += moe_lora_reference(
            layer.hidden_states,
            w13,
            layer.w2[:, :, part],
            layer.topk_weights,
            layer.topk_ids,
            lora=lora.shard(intermediate=part),
            adapter_ids=ids,
        )
    torch.testing.assert_close(total, forward(layer, lora, ids))


@pytest.mark.parametrize("shared_outer", [False, True])
def test_expert_parallel_shards_add_up_to_the_whole(shared_outer):
    """F02"""
    layer = random_layer(num_experts=8, top_k=3)
    lora = random_lora(2, num_experts=8, shared_outer=shared_outer)
    ids = torch.tensor([0, 1, -1, 0, 1, 1, 0])
    total = torch.zeros(7, 16, dtype=torch.float64)
    for part in (slice(0, 4), slice(4, 8)):
        total += moe_lora_reference(
            layer.hidden_states,
            layer.w13[part],
            layer.w2[part],
            layer.topk_weights,
            layer.topk_ids,
            lora=lora.shard(experts=part),
            adapter_ids=ids,
            num_experts=8,
            expert_offset=part.start,
        )
    torch.testing.assert_close(total, forward(layer, lora, ids))


@pytest.mark.parametrize("inter", [768, 24])
def test_shards_of_every_rank_tile_the_columns_without_gap_or_repeat(inter):
    """F03"""
    lora = random_lora(inter=inter, gate_up_rank=1, down_rank=1)
    step = inter // 8
    shards = [lora.shard(intermediate=slice(i * step, (i + 1) * step)) for i in range(8)]
    assert torch.equal(torch.cat([shard.down_a for shard in shards], dim=3), lora.down_a)


def test_shard_takes_the_rest_of_an_uneven_split():
    lora = random_lora(num_experts=5)
    assert [lora.shard(experts=slice(i, i + 2)).num_experts for i in (0, 2, 4)] == [2, 2, 1]
