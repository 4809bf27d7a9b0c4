"""Tests of AdapterPool for any device: what is in the slots, who gets which, errors, threads.

A test file imports them and provides the fixtures `device` and `dtype`.
"""

import random
import threading

import pytest
import torch
from pool_makers import (
    BLOCKS,
    MAX_RANK,
    SHAPE,
    STACKS,
    Library,
    bits,
    load_folder,
    make_adapter,
    make_adapters,
    make_layer,
    make_pool,
    peft_config,
    peft_tensors,
    poison,
    random_names,
    run,
    same_bits,
    write_folder,
)

from moelora import MoELoRA
from moelora.pool import AdapterPool, UnknownAdapterError
from moelora.pool import storage as pool_storage
from moelora.reference import moe_lora_reference
from moelora.testing import Shape, check_close, random_lora

NARROW = Shape(SHAPE.hidden // 2, SHAPE.inter, SHAPE.experts, SHAPE.top_k)


def check_batch(pool, layer, names, adapters):
    """A batch through every layer of the pool, against the oracle with the adapters as they were given."""
    distinct = sorted({name for name in names if name is not None})
    ids = torch.tensor([-1 if name is None else distinct.index(name) for name in names])
    with pool.use(names) as adapter_ids:
        results = [run(layer, lora, adapter_ids) for lora in pool.layers]
    for index, got in enumerate(results):
        lora = MoELoRA.stack([adapters[name][index] for name in distinct]).to(layer.hidden_states.device)
        expected = moe_lora_reference(*layer.arguments, lora=lora, adapter_ids=ids.to(got.device))
        plain = moe_lora_reference(*layer.arguments, lora=lora, adapter_ids=ids.to(got.device), dtype=None)
        check_close(got, expected, plain=plain)


# ---- what is in the slots ----


def test_a_mixed_batch_matches_the_oracle_in_every_layer(device, dtype):
    """E01, E10: base rows, full and small ranks, one part only, a layer that an adapter leaves alone"""
    pool, layer = make_pool(device, dtype, num_slots=4), make_layer(device, dtype)
    half = make_adapter(3, dtype, rank=(16, 8))
    half[0] = MoELoRA(half[0].gate_up_a, half[0].gate_up_b, None, None, half[0].scaling)
    half[1] = MoELoRA(None, None, half[1].down_a, half[1].down_b, half[1].scaling)
    adapters = {
        "full": make_adapter(1, dtype, rank=MAX_RANK),
        "small": make_adapter(2, dtype, rank=3, shared_a=True),
        "half": half,
        "outer": make_adapter(4, dtype, rank=8, shared_outer=True),
    }
    for name, adapter in adapters.items():
        pool.load(name, adapter)
    check_batch(
        pool, layer, ["small", None, "full", "half", "outer", "full", None, *["small", "outer"] * 2, None], adapters
    )
    check_batch(pool, layer, ["half"] * 12, adapters)
    one_layer_only = [None, make_adapter(5, dtype)[1]]
    pool.evict("half")
    slot = pool.load("one layer", one_layer_only)
    assert pool.layers[0].ranks[slot].tolist() == [0, 0]
    assert pool.layers[1].ranks[slot].tolist() == [8, 8]
    ids = pool.adapter_ids(["one layer"] * 12)
    assert torch.equal(run(layer, pool.layers[0], ids, stream_mode="single"), run(layer, stream_mode="single"))


def test_folder_tensors_and_stacks_give_the_same_bits(device, dtype, tmp_path):
    pool = make_pool(device, dtype)
    tensors, config = peft_tensors(), peft_config()
    folder = write_folder(tmp_path / "adapter", tensors, config)
    stacks = load_folder(folder, dtype, device)
    slots = [pool.load("folder", folder), pool.load("tensors", (tensors, config)), pool.load("stacks", stacks)]
    assert slots == [0, 1, 2]
    assert all(same_bits(bits(pool, 0), bits(pool, slot)) for slot in slots)
    assert pool.layers[0].scaling[0].tolist() == [1.5, 1.5, 1.5]
    adapters = dict.fromkeys(("folder", "tensors"), stacks)
    check_batch(pool, make_layer(device, dtype), ["folder", None, "tensors"] * 4, adapters)


def test_files_are_cast_once_and_left_as_they_are(device, dtype):
    """J12, J13: the caller's tensors do not change, also where they require grad; the second load is as the first"""
    tensors = {name: tensor.double().requires_grad_() for name, tensor in peft_tensors().items()}
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    pool = make_pool(device, dtype)
    pool.load("first", (tensors, peft_config()))
    pool.load("second", (tensors, peft_config()))
    assert same_bits(bits(pool, 0), bits(pool, 1))
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)
    assert not any(getattr(lora, name).requires_grad for lora in pool.layers for name in STACKS)


@pytest.mark.parametrize(("old", "new"), [(MAX_RANK, 3), (3, MAX_RANK), (8, (2, 5))])
@pytest.mark.parametrize("how", ["replace", "evict", "least recently used"])
def test_nothing_of_an_earlier_adapter_is_left(device, dtype, old, new, how):
    """E05: a slot that is filled again has the bits of a fresh one, and so have the results"""
    layer = make_layer(device, dtype)
    used, fresh = make_pool(device, dtype, num_slots=1), make_pool(device, dtype, num_slots=1)
    used.load("old", make_adapter(1, dtype, rank=old))
    run(layer, used.layers[0], used.adapter_ids(["old"] * 12))
    if how == "evict":
        used.evict("old")
    name = "old" if how == "replace" else "new"
    adapter = make_adapter(2, dtype, rank=new)
    for pool in (used, fresh):
        assert pool.load(name, adapter) == 0
    assert used.loaded() == {name: 0}
    assert same_bits(bits(used), bits(fresh))
    for index in range(len(BLOCKS)):
        results = [run(layer, pool.layers[index], pool.adapter_ids([name] * 12)) for pool in (used, fresh)]
        assert torch.equal(*results)
    check_batch(used, layer, [name, None, name] * 4, {name: adapter})


def test_unused_ranks_never_matter(device, dtype):
    """E04: NaN in the slots before, NaN beyond the rank of the adapter's own stacks"""
    layer = make_layer(device, dtype)
    dirty, clean = make_pool(device, dtype, max_rank=64), make_pool(device, dtype, max_rank=64)
    poison(dirty)
    for pool in (dirty, clean):
        pool.load("a", make_adapter(1, dtype, rank=16, ranks=[(8, 5)]))
        assert all(lora.ranks[0].tolist() == [8, 5] for lora in pool.layers)
    assert same_bits(bits(dirty, 0), bits(clean, 0))
    names = ["a", None, "a"] * 4
    assert torch.equal(*(run(layer, pool.layers[0], pool.adapter_ids(names)) for pool in (dirty, clean)))
    check_batch(dirty, layer, names, {"a": make_adapter(1, dtype, rank=16, ranks=[(8, 5)])})


def test_free_slots_compute_as_no_adapter(device, dtype):
    """never filled, evicted, and whatever bytes are in them"""
    pool, layer = make_pool(device, dtype), make_layer(device, dtype)
    base = run(layer, stream_mode="single")
    slots = torch.tensor([0, 1, 2, -1] * 3, dtype=torch.int32, device=device)

    def all_equal_the_base():
        return all(torch.equal(run(layer, lora, slots, stream_mode="single"), base) for lora in pool.layers)

    assert all_equal_the_base()
    for name in "abc":
        pool.load(name, make_adapter(ord(name), dtype))
    assert not all_equal_the_base()
    for name in "bac":
        pool.evict(name)
    assert all_equal_the_base()
    poison(pool)
    assert all_equal_the_base()


def test_rows_without_adapter_are_not_changed_by_loaded_ones(device, dtype):
    """E07: after a call with adapters, and in a mixed batch"""
    pool, layer = make_pool(device, dtype), make_layer(device, dtype)
    base = run(layer, stream_mode="single")
    pool.load("a", make_adapter(1, dtype))
    run(layer, pool.layers[0], pool.adapter_ids(["a"] * 12), stream_mode="single")
    assert torch.equal(run(layer, pool.layers[0], pool.adapter_ids([None] * 12), stream_mode="single"), base)
    mixed = run(layer, pool.layers[0], pool.adapter_ids([None, "a", None] * 4), stream_mode="single")
    unadapted = torch.tensor([True, False, True] * 4)
    assert torch.equal(mixed[unadapted], base[unadapted])
    assert (mixed != base).any(dim=1).tolist() == (~unadapted).tolist()


def test_updates_in_place_by_the_caller(device, dtype):
    """K14: writing into the stacks of slot 1 changes its results and no others"""
    pool, layer = make_pool(device, dtype), make_layer(device, dtype)
    adapters = {name: make_adapter(seed, dtype, rank=MAX_RANK) for seed, name in enumerate("abc")}
    pool.load("a", adapters["a"])
    pool.load("b", adapters["b"])
    ids = pool.adapter_ids(["a", "b", None] * 4)
    before = run(layer, pool.layers[0], ids)
    for lora, new in zip(pool.layers, adapters["c"], strict=True):
        for name in STACKS[:5]:
            getattr(lora, name)[1].copy_(getattr(new, name)[0])
    after = run(layer, pool.layers[0], ids)
    assert (after != before).any(dim=1).tolist() == [False, True, False] * 4
    check_batch(pool, layer, ["a", "b", None] * 4, {"a": adapters["a"], "b": adapters["c"]})


def test_tensors_stay_where_they_are(device, dtype):
    """Graphs hold their addresses."""
    pool = make_pool(device, dtype, num_slots=2)
    layers = pool.layers
    addresses = [getattr(lora, name).data_ptr() for lora in layers for name in STACKS]
    assert all(address % 16 == 0 for address in addresses)
    for name in "abca":
        pool.load(name, make_adapter(ord(name), dtype))
    pool.evict("a")
    assert pool.layers is layers
    assert [getattr(lora, name).data_ptr() for lora in pool.layers for name in STACKS] == addresses


# ---- parts of a model, forms ----


def test_parts_of_expert_and_tensor_parallel_groups_add_up(device, dtype):
    """F: a pool for each process; the same file"""
    layer, source = make_layer(device, dtype), (peft_tensors(), peft_config())
    whole = make_pool(device, dtype)
    slot = whole.load("a", source)
    names = ["a", None, "a"] * 4
    expected = moe_lora_reference(*layer.arguments, lora=whole.layers[1], adapter_ids=whole.adapter_ids(names))
    total = torch.zeros_like(expected)
    for experts in (slice(0, 1), slice(1, 4)):
        for inter in (slice(0, 8), slice(8, 32)):
            pool = make_pool(device, dtype, experts=experts, intermediate=inter)
            pool.load("a", source)
            sharded = whole.layers[1].shard(experts=experts, intermediate=inter)
            assert same_bits(bits(pool, 0)[6:], [getattr(sharded, name)[slot].cpu() for name in STACKS])
            gate, up = layer.w13[experts].chunk(2, dim=1)
            local = layer.with_(
                w13=torch.cat([gate[:, inter], up[:, inter]], dim=1), w2=layer.w2[experts, :, inter].contiguous()
            )
            options = {"num_experts": SHAPE.experts, "expert_offset": experts.start}
            total += run(local, pool.layers[1], pool.adapter_ids(names), **options).double()
    check_close(total.to(dtype), expected)


def test_forms_that_save_memory(device, dtype):
    layer = make_layer(device, dtype)
    general, shared = make_pool(device, dtype), make_pool(device, dtype, shared_a=True, shared_outer=True)
    assert shared.memory_per_slot < general.memory_per_slot
    adapter = make_adapter(1, dtype, shared_a=True, shared_outer=True)
    for pool in (general, shared):
        pool.load("a", adapter)
        check_batch(pool, layer, ["a", None, "a"] * 4, {"a": adapter})
    with pytest.raises(ValueError, match=r"source for model\.layers\.3\.mlp: expected one A for gate and up"):
        shared.load("b", make_adapter(2, dtype, shared_outer=True))
    with pytest.raises(ValueError, match=r"model\.layers\.3\.mlp: expected one gate_up_a for all experts.*got 4"):
        shared.load("b", make_adapter(2, dtype, shared_a=True))
    assert shared.loaded() == {"a": 0}


def test_memory_per_slot_is_the_formula(device, dtype):
    """K07: per layer and expert R * (3 H + 3 I) numbers, here R = 10 rounded up to 16; and 5 numbers of 4 bytes"""
    pool = make_pool(device, dtype, max_rank=10)
    numbers = SHAPE.experts * 16 * (2 * SHAPE.hidden + 2 * SHAPE.inter + SHAPE.inter + SHAPE.hidden)
    assert pool.memory_per_slot == len(BLOCKS) * (numbers * dtype.itemsize + 20)
    stacks = sum(getattr(lora, name).nbytes for lora in pool.layers for name in STACKS)
    assert stacks == pool.num_slots * pool.memory_per_slot


# ---- who gets which slot ----


def test_the_least_recently_used_adapter_goes_first(device, dtype):
    pool = make_pool(device, dtype)
    adapter = make_adapter(1, dtype)
    for name in "abc":
        pool.load(name, adapter)
    pool.slot("a")
    pool.adapter_ids([None, "c", "b"])
    assert list(pool.loaded()) == ["a", "c", "b"]
    assert pool.load("d", adapter) == 0
    assert pool.loaded() == {"c": 2, "b": 1, "d": 0}
    with pool.use(["c", "b", "c"]):
        assert list(pool.loaded()) == ["d", "b", "c"]
        assert pool.load("e", adapter) == 0
    pool.evict("b")
    assert pool.load("f", adapter) == 1
    assert pool.load("c", adapter) == 2
    assert pool.loaded() == {"e": 0, "f": 1, "c": 2}


def test_adapter_ids_are_slots_on_the_device(device, dtype):
    pool = make_pool(device, dtype)
    for name in "ab":
        pool.load(name, make_adapter(1, dtype))
    ids = pool.adapter_ids(name for name in ["b", None, "a", "b"])
    assert (ids.dtype, ids.device.type, ids.tolist()) == (torch.int32, device, [1, -1, 0, 1])
    assert pool.adapter_ids([]).shape == (0,)
    assert pool.adapter_ids([None]).tolist() == [-1]


def test_pinned_adapters_stay(device, dtype):
    pool = make_pool(device, dtype, num_slots=2)
    adapter, other = make_adapter(1, dtype), make_adapter(2, dtype)
    pool.load("a", adapter)
    pool.load("b", adapter)
    pool.pin("a")
    pool.pin("a")
    before = bits(pool, 0)
    assert pool.load("c", other) == 1
    assert pool.load("d", other) == 1
    for action in (lambda: pool.evict("a"), lambda: pool.load("a", other)):
        with pytest.raises(RuntimeError, match="adapter 'a' is pinned"):
            action()
    pool.pin("d")
    with pytest.raises(RuntimeError, match=r"no slot for 'e': all adapters are pinned \(a, d\)"):
        pool.load("e", other)
    assert pool.loaded() == {"a": 0, "d": 1}
    assert same_bits(bits(pool, 0), before)
    pool.unpin("a")
    with pytest.raises(RuntimeError, match="adapter 'a' is pinned"):
        pool.evict("a")
    pool.unpin("a")
    with pytest.raises(ValueError, match="name: expected a pinned adapter, got 'a'"):
        pool.unpin("a")
    pool.evict("a")
    assert pool.loaded() == {"d": 1}


def test_use_pins_until_its_end_whatever_happens(device, dtype):
    pool = make_pool(device, dtype, num_slots=1)
    pool.load("a", make_adapter(1, dtype))
    with pytest.raises(ZeroDivisionError), pool.use(["a", None, "a"]) as ids:
        assert ids.tolist() == [0, -1, 0]
        with pytest.raises(RuntimeError, match="pinned"):
            pool.load("b", make_adapter(2, dtype))
        raise ZeroDivisionError
    with pytest.raises(UnknownAdapterError), pool.use(["a", "b"]):
        pass
    pool.load("b", make_adapter(2, dtype))
    assert pool.loaded() == {"b": 0}


def test_random_sequences_against_a_model(device, dtype):
    """A dict of name -> [slot, pins, content], least recently used first, is all there is to it."""
    pool = make_pool(device, dtype, num_slots=3, blocks=BLOCKS[:1], max_rank=4)
    contents = [make_adapter(seed, dtype, rank=1 + seed, layers=1) for seed in range(4)]
    model = {}
    choose = random.Random(7)
    for _ in range(200):
        name = choose.choice("abcde")
        action = choose.choice(["load", "load", "evict", "pin", "unpin", "ids"])
        slot, pins, _ = model.get(name, (None, 0, 0))
        if action == "load":
            content = choose.randrange(4)
            free = [s for s in range(3) if s not in [entry[0] for entry in model.values()]]
            unpinned = [n for n, entry in model.items() if not entry[1]]
            if pins or (name not in model and not free and not unpinned):
                with pytest.raises(RuntimeError):
                    pool.load(name, contents[content])
                continue
            if name in model:
                model.pop(name)
            else:
                slot = free[0] if free else model.pop(unpinned[0])[0]
            assert pool.load(name, contents[content]) == slot
            model[name] = [slot, 0, content]
        elif name not in model:
            call = {"evict": pool.evict, "pin": pool.pin, "unpin": pool.unpin, "ids": pool.slot}[action]
            with pytest.raises(UnknownAdapterError):
                call(name)
        elif action == "evict" and pins:
            with pytest.raises(RuntimeError):
                pool.evict(name)
        elif action == "evict":
            pool.evict(name)
            model.pop(name)
        elif action == "unpin" and not pins:
            with pytest.raises(ValueError):
                pool.unpin(name)
        elif action in ("pin", "unpin"):
            getattr(pool, action)(name)
            model[name][1] += 1 if action == "pin" else -1
        else:
            assert pool.adapter_ids([name, None]).tolist() == [slot, -1]
            model[name] = model.pop(name)
        assert list(pool.loaded().items()) == [(n, entry[0]) for n, entry in model.items()]
        ranks = [0, 0, 0]
        for slot, _, content in model.values():
            ranks[slot] = 1 + content
        assert pool.layers[0].ranks[:, 0].tolist() == ranks


def test_repr_and_contains(device, dtype):
    pool = make_pool(device, dtype)
    assert "0 of 3 slots of 0." in repr(pool) and repr(pool).endswith("taken: none)")
    pool.load("a", make_adapter(1, dtype))
    pool.load("b", make_adapter(1, dtype))
    pool.pin("b")
    assert "2 layers, 4 experts" in repr(pool)
    assert repr(pool).endswith("taken: 'a' in 0, 'b' in 1 (pinned))")
    assert "a" in pool and "c" not in pool


# ---- errors ----


def test_unknown_names_say_what_is_loaded(device, dtype):
    pool = make_pool(device, dtype)
    with pytest.raises(KeyError, match="no adapter 'x' is loaded; loaded: none"):
        pool.slot("x")
    pool.load("a", make_adapter(1, dtype))
    pool.load("b", make_adapter(1, dtype))
    calls = (pool.slot, pool.pin, pool.unpin, pool.evict, lambda name: pool.adapter_ids(["b", name]))
    for call in calls:
        with pytest.raises(UnknownAdapterError) as info:
            call("x")
        assert str(info.value) == "no adapter 'x' is loaded; loaded: a, b"
    for call in (*calls, lambda name: pool.load(name, make_adapter(1, dtype))):
        with pytest.raises(TypeError, match="name: expected a str, got int"):
            call(1)
    with pytest.raises(TypeError, match="names: expected a sequence of names, got a str"):
        pool.adapter_ids("a")
    assert list(pool.loaded()) == ["a", "b"]


BAD_CONSTRUCTORS = [
    ({"num_slots": 0}, ValueError, "num_slots: expected 1 or more, got 0"),
    ({"num_slots": 2.0}, TypeError, "num_slots: expected an int, got float"),
    ({"max_rank": 257}, ValueError, r"max_rank: expected 1\.\.256, got 257"),
    ({"layers": "model.layers.0.mlp"}, TypeError, "layers: expected a sequence of block paths, got str"),
    ({"layers": []}, ValueError, "layers: expected at least one block path"),
    ({"layers": ["a", "base_model.model.a"]}, ValueError, "layers: expected different block paths"),
    ({"layers": [3]}, TypeError, "block_path: expected a str"),
    ({"num_experts": 0}, ValueError, "num_experts"),
    ({"hidden_size": 2.0}, TypeError, "hidden_size"),
    ({"experts": slice(4, 8)}, ValueError, "experts: expected a slice that keeps some of 4"),
    ({"experts": 3}, TypeError, "experts: expected a slice or None, got int"),
    ({"intermediate": slice(0, 8, 2)}, ValueError, "intermediate: expected a slice of step 1"),
    ({"gate_up_layout": "down"}, ValueError, "gate_up_layout"),
    ({"dtype": torch.float64}, TypeError, "dtype: expected bfloat16, float16 or float32"),
]


@pytest.mark.parametrize(("changes", "error", "text"), BAD_CONSTRUCTORS)
def test_constructor_errors(device, changes, error, text):
    arguments = {"num_slots": 2, "max_rank": 8, "layers": BLOCKS, "num_experts": 4, "hidden_size": 64}
    with pytest.raises(error, match=text):
        AdapterPool(**arguments | {"intermediate_size": 32, "device": device} | changes)


def bad_sources(dtype, folder):
    """What `load` refuses, by name: source, error, text."""
    tensors, config = peft_tensors(), peft_config()
    good = make_adapter(1, dtype)
    other_dtype = torch.float16 if dtype != torch.float16 else torch.bfloat16
    lone = dict(list(tensors.items())[1:])
    truncated = write_folder(folder / "truncated", tensors, config)
    content = (truncated / "adapter_model.safetensors").read_bytes()
    (truncated / "adapter_model.safetensors").write_bytes(content[: len(content) // 2])
    no_json = write_folder(folder / "no_json", tensors, config)
    (no_json / "adapter_config.json").write_text("{")
    no_tensors = write_folder(folder / "no_tensors", tensors, config)
    (no_tensors / "adapter_model.safetensors").unlink()
    wrong_size = [good[0], random_lora(1, NARROW, 8, dtype=dtype)]
    beyond = MoELoRA(*[getattr(good[1], name) for name in STACKS[:5]], torch.tensor([[8, 9]], dtype=torch.int32))
    mistyped = make_adapter(1, other_dtype)
    renamed = {name.replace(BLOCKS[0], "model.layers.3.moe"): tensor for name, tensor in tensors.items()}
    return {
        "no such folder": (folder / "nothing", FileNotFoundError, "source: expected an adapter folder"),
        "no tensor file": (no_tensors, FileNotFoundError, "got no file .*adapter_model.safetensors"),
        "broken json": (no_json, ValueError, "line 1"),
        "truncated file": (truncated, Exception, "(?i)header|incomplete|invalid"),
        "no source": (7, TypeError, "source: expected a folder, .*, got int"),
        "wrong width in the last layer": ((tensors | peft_tensors(blocks=BLOCKS[1:], shape=NARROW), config), ValueError,
                                          r"model\.layers\.10.*expected shape \[64, 8\], got \[32, 8\]"),
        "rank of the file": ((peft_tensors(rank=17), peft_config(17)), ValueError,
                             r"source for model\.layers\.3\.mlp: .* at most max_rank 16, got 17"),
        "rank of the configuration": ((tensors, peft_config(4)), ValueError, "expected shape"),
        "a matrix without its partner": ((lone, config), ValueError, "without its lora_A or lora_B partner"),
        "DoRA": ((tensors, peft_config(use_dora=True)), ValueError, "use_dora"),
        "no lora_alpha": ((tensors, {"peft_type": "LORA", "r": 8}), ValueError, "lora_alpha"),
        "another block too": ((renamed, config), ValueError, r"got some for model\.layers\.3\.moe$"),
        "other blocks only": ((peft_tensors(blocks=["x.mlp"]), config), ValueError, r"got some for x\.mlp$"),
        "no experts at all": (({"model.layers.3.self_attn.q_proj.lora_A.weight": torch.zeros(8, 64)}, config),
                              ValueError, "got some for none$"),
        "too few layers": (good[:1], ValueError, "for each of 2 layers, got 1"),
        "no layer": ([None, None], ValueError, "expected an adapter for at least one layer"),
        "no adapter object": ([good[0], "x"], TypeError, r"source for model\.layers\.10\.mlp: expected a MoELoRA"),
        "rank in the second layer": ([good[0], make_adapter(1, dtype, rank=(8, 24))[1]], ValueError,
                                     r"source for model\.layers\.10\.mlp: expected a down rank of at most max_rank 16"),
        "a rank over that of its stacks": ([good[0], beyond], ValueError, r"expected a down rank of 0\.\.8"),
        "wrong sizes": (wrong_size, ValueError, r"source for model\.layers\.10\.mlp: expected hidden_size 64, got 32"),
        "two slots": ([good[0], random_lora(2, SHAPE, 8, dtype=dtype)], ValueError, "expected one slot, got 2"),
        "wrong dtype": (mistyped, TypeError, "expected the pool's dtype"),
    }  # fmt: skip


def test_a_failed_load_leaves_the_pool_as_it_was(device, dtype, tmp_path):
    """J04, J06, J14: nothing is evicted, moved up or written, whether `name` is new or loaded"""
    pool = make_pool(device, dtype, num_slots=2)
    pool.load("a", make_adapter(1, dtype))
    pool.load("b", make_adapter(2, dtype, rank=MAX_RANK))
    loaded, before = list(pool.loaded().items()), bits(pool)
    for case, (source, error, text) in bad_sources(dtype, tmp_path).items():
        for name in ("new", "a"):
            with pytest.raises(error, match=text):
                pool.load(name, source)
            assert list(pool.loaded().items()) == loaded, case
        assert same_bits(bits(pool), before), case
    assert pool.load("new", (peft_tensors(), peft_config())) == 0


def test_other_blocks_where_they_are_allowed(device, dtype):
    """A process that has some of the layers; a file that has none of them is still refused."""
    pool = make_pool(device, dtype, blocks=BLOCKS[1:], allow_other_blocks=True)
    pool.load("a", (peft_tensors(), peft_config()))
    whole = make_pool(device, dtype)
    whole.load("a", (peft_tensors(), peft_config()))
    assert same_bits(bits(pool, 0), bits(whole, 0)[6:])
    with pytest.raises(
        ValueError, match=r"for the pool's layers \(model\.layers\.10\.mlp\), got some for model\.layers\.3"
    ):
        pool.load("b", (peft_tensors(blocks=BLOCKS[:1]), peft_config()))
    whole.load("half", (peft_tensors(blocks=BLOCKS[1:]), peft_config()))
    assert whole.layers[0].ranks[1].tolist() == [0, 0]


@pytest.mark.parametrize("step", ["place", "ranks"])
def test_a_write_that_fails_midway_leaves_an_empty_slot(device, dtype, monkeypatch, step):
    """Such as an interrupt. The old adapter of the slot is gone, but nothing of the new one is there."""
    pool, layer = make_pool(device, dtype, num_slots=1), make_layer(device, dtype)
    pool.load("a", make_adapter(1, dtype))
    owner, method = {"place": (pool_storage, "place"), "ranks": (pool_storage._SlotTable, "set")}[step]
    original, calls = getattr(owner, method), []

    def interrupted(*args):
        original(*args)
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.load("b", make_adapter(2, dtype))
    assert pool.loaded() == {}
    slot0 = torch.zeros(12, dtype=torch.int32, device=device)
    base = run(layer, stream_mode="single")
    assert all(torch.equal(run(layer, lora, slot0, stream_mode="single"), base) for lora in pool.layers)
    adapter = make_adapter(3, dtype)
    assert pool.load("c", adapter) == 0
    check_batch(pool, layer, ["c", None, "c"] * 4, {"c": adapter})


def test_inference_mode_inside_and_outside(device, dtype):
    with torch.inference_mode():
        pool = make_pool(device, dtype)
        pool.load("a", make_adapter(1, dtype))
    pool.load("b", make_adapter(1, dtype))
    assert same_bits(bits(pool, 0), bits(pool, 1))
    with torch.inference_mode():
        pool.load("a", make_adapter(2, dtype))
        pool.evict("b")
    pool.layers[0].gate_up_b[0].mul_(2)


# ---- threads ----


def hammer(pool, library, forwards, seconds, loaders=2):
    """Threads that load and evict at random while others run `forwards`, each a function (random generator) that
    checks one batch and says whether it could; returns how many of each went well."""
    stop, errors, counts = threading.Event(), [], {"loads": 0, "evictions": 0, "batches": 0}
    counting = threading.Lock()

    def repeat(action, seed):
        choose = random.Random(seed)
        try:
            while not stop.is_set():
                done = action(choose)
                if done:
                    with counting:
                        counts[done] += 1
        except BaseException as error:
            errors.append(error)
            stop.set()

    def change(choose):
        name = choose.choice(library.names)
        try:
            if choose.random() < 0.7:
                pool.load(name, library.adapters[name])
                return "loads"
            pool.evict(name)
            return "evictions"
        except (UnknownAdapterError, RuntimeError) as error:
            if not isinstance(error, UnknownAdapterError) and "pinned" not in str(error):
                raise
            return None

    def batch(forward):
        return lambda choose: "batches" if forward(choose) else None

    actions = [change] * loaders + [batch(forward) for forward in forwards]
    threads = [threading.Thread(target=repeat, args=(action, seed)) for seed, action in enumerate(actions)]
    for thread in threads:
        thread.start()
    stop.wait(seconds)
    stop.set()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return counts


def eager_forward(pool, library, device, dtype, seed):
    """A function for `hammer`: one eager batch, bit for bit what it is without a pool."""
    layer = make_layer(device, dtype, seed=seed)

    def forward(choose):
        names = random_names(library, pool, choose, 12)
        index = choose.randrange(len(pool.layers))
        try:
            with pool.use(names) as ids:
                slots = {name: pool.slot(name) for name in names if name is not None}
                got = run(layer, pool.layers[index], ids)
        except UnknownAdapterError:
            return False
        ids = torch.tensor([-1 if name is None else slots[name] for name in names], device=device)
        expected = run(layer, library.lora(index, pool.num_slots, slots), ids)
        assert torch.equal(got, expected), f"layer {index}, {names}, {slots}"
        return True

    return forward


def check_hammer(device, dtype, seconds):
    pool, library = make_pool(device, dtype, num_slots=4), Library(device, make_adapters(7, dtype))
    forwards = [eager_forward(pool, library, device, dtype, seed) for seed in range(3)]
    counts = hammer(pool, library, forwards, seconds)
    assert all(counts.values()), counts
    for name, slot in pool.loaded().items():
        fresh = make_pool(device, dtype, num_slots=1)
        fresh.load(name, library.adapters[name])
        assert same_bits(bits(pool, slot), bits(fresh, 0))
    return counts


def test_threads_that_load_evict_and_compute(device, dtype):
    counts = check_hammer(device, dtype, seconds=4)
    assert counts["loads"] > 20 and counts["batches"] > 20, counts


def test_a_slot_being_written_is_empty_and_the_others_are_in_use(device, dtype, monkeypatch):
    """Asking for a slot does not wait for a load."""
    pool = make_pool(device, dtype, num_slots=2)
    pool.load("a", make_adapter(1, dtype))
    pool.load("b", make_adapter(1, dtype))
    pool.pin("a")
    place, go_on = pool_storage.place, threading.Event()
    reached = threading.Semaphore(0)

    def slow(adapter, slot):
        place(adapter, slot)
        reached.release()
        assert go_on.wait(60)

    monkeypatch.setattr(pool_storage, "place", slow)
    loader = threading.Thread(target=pool.load, args=("c", make_adapter(2, dtype)))
    loader.start()
    try:
        assert reached.acquire(timeout=60)
        assert pool.loaded() == {"a": 0}
        assert pool.adapter_ids(["a", None]).tolist() == [0, -1]
        for name in "bc":
            with pytest.raises(UnknownAdapterError):
                pool.slot(name)
        if device == "cuda":
            torch.cuda.synchronize()
        assert all(lora.ranks.tolist() == [[8, 8], [0, 0]] for lora in pool.layers)
    finally:
        go_on.set()
        loader.join()
    assert pool.loaded() == {"a": 0, "c": 1}
    assert all(lora.ranks.tolist() == [[8, 8], [8, 8]] for lora in pool.layers)
