"""The whole layer on the GPU: the tests of the CPU, bad input included, and what only a GPU can show."""

import pytest
import torch
from adapter_cases import *  # noqa: F403
from error_cases import *  # noqa: F403
from layer_cases import *  # noqa: F403
from layer_cases import ACTIVATIONS, LAYOUTS, check, make, oracle, run
from parallel_cases import *  # noqa: F403

import moelora
from moelora.reference import gate_up_lora_delta_reference
from moelora.testing import Shape, check_close, random_layer, random_lora
from moelora.testing.inputs import MODEL_SHAPES, random_adapter_ids


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def dtype(request):
    return request.param


@pytest.fixture
def release_memory():
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 8, 9, 16, 33, 64, 130, 256, 512, 1100, 2048, 4096])
@pytest.mark.parametrize("with_lora", [False, True])
def test_token_counts_at_a_real_models_sizes(device, dtype, tokens, with_lora):
    """C12, E03: Qwen3-30B-A3B, on both sides of every bound that picks a kernel"""
    layer, lora, adapter_ids = make(tokens, device, dtype, MODEL_SHAPES["qwen3_30b_a3b"], rank=16)
    if with_lora:
        check(layer, lora, adapter_ids)
    else:
        check(layer)


@pytest.mark.parametrize("tokens", [1, 40, 600])
@pytest.mark.parametrize("rank", [8, 16, 32, 64, 128, 256])
def test_ranks_at_a_real_models_sizes(device, dtype, tokens, rank):
    """D08, D09"""
    shape = Shape(2048, 768, 16, 8)
    layer, lora, adapter_ids = make(tokens, device, dtype, shape, slots=2, rank=rank)
    check(layer, lora, adapter_ids)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("rank", [24, 48, 128])
def test_few_tokens_of_as_many_adapters(device, dtype, tokens, rank):
    """More chunks of ranks than a stage of a direct tile holds, rows cut short; a repeated id, an expert elsewhere"""
    layer, lora, _ = make(tokens, device, dtype, Shape(2056, 152, 32, 8), slots=4, rank=rank)
    adapter_ids = torch.arange(tokens, device=device, dtype=torch.int32)
    assert "direct" in moelora.explain(*layer.arguments, lora=lora, adapter_ids=adapter_ids)
    check(layer, lora, adapter_ids, **layer.biases)
    ids = layer.topk_ids.clone()
    ids[:, 1] = ids[:, 0]
    ids[0, 2] = -1
    check(layer.with_(topk_ids=ids), lora, adapter_ids)
    check(layer.with_(topk_ids=ids), lora, torch.where(adapter_ids % 2 == 0, -1, adapter_ids))


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_few_tokens_of_large_experts(device, dtype, tokens):
    """As few pairs as direct tiles take, but weights that are too many for them"""
    layer, lora, adapter_ids = make(tokens, device, dtype, MODEL_SHAPES["gpt_oss_20b"], slots=2, rank=16)
    assert "rows64_tokens16" in moelora.explain(*layer.arguments, lora=lora, adapter_ids=adapter_ids)
    check(layer, **layer.biases)
    check(layer, lora, 1 - torch.arange(tokens, device=device, dtype=torch.int32) % 3, **layer.biases)


@pytest.mark.parametrize("hidden", [120, 768, 1000, 1280, 1544])
@pytest.mark.parametrize("tokens", [1, 4, 9, 40, 90])
def test_few_tokens_of_every_number_of_stages(device, dtype, tokens, hidden):
    """The first tile's weights are asked for before there are lists: all, or most, or the next ticket with them"""
    layer, lora, adapter_ids = make(tokens, device, dtype, Shape(hidden, 200, 12, 4), slots=2, rank=16)
    check(layer)
    check(layer, lora, adapter_ids)
    check(layer, lora, torch.ones_like(adapter_ids))


@pytest.mark.parametrize("ranks", [None, [(128, 128), (128, 0)]])
def test_direct_tiles_in_pieces(device, dtype, ranks):
    """Four pieces of sixteen chunks of ranks each, or of eight for the rows of one adapter and none for the other's"""
    layer, lora, _ = make(2, device, dtype, Shape(512, 768, 16, 8), slots=2, rank=128, ranks=ranks)
    ids = torch.arange(16, device=device, dtype=torch.int32).view(2, 8)
    adapter_ids = torch.arange(2, device=device, dtype=torch.int32)
    check(layer.with_(topk_ids=ids), lora, adapter_ids)


@pytest.mark.parametrize("tokens", [256, 257, 300, 400, 512, 513])
def test_few_rows_an_expert_with_one_adapter(device, dtype, tokens):
    """On both sides of every bound between the one kernel and the prefill path, for all rows and for some"""
    layer, lora, adapter_ids = make(tokens, device, dtype, MODEL_SHAPES["qwen3_30b_a3b"], slots=1, rank=16)
    check(layer, lora, adapter_ids)
    check(layer, lora, torch.zeros_like(adapter_ids))


@pytest.mark.parametrize(
    ("tile", "rows"),
    [
        (16, [15, 16, 17, 0, 1, 33, 3, 2, 1, 0, 1, 2]),
        (32, [31, 32, 33, 0, 1, 3, 2]),
        (32, [5, 66, 1, 4, 0, 3, 1]),
        (48, [47, 48, 49, 97, 0, 15]),
        (48, [1, 33, 200, 3, 1, 18]),
    ],
)
@pytest.mark.parametrize("slots", [1, 40])
def test_lists_of_about_a_tiles_rows(device, dtype, tile, rows, slots):
    """Lists that are cut or just not: of one adapter's rows and others, of its rows alone, and of many's"""
    tokens = sum(rows)
    layer, lora, adapter_ids = make(tokens, device, dtype, Shape(136, 200, len(rows), 1), slots=slots, rank=24)
    assert f"tokens{tile}" in moelora.explain(*layer.arguments, lora=lora, adapter_ids=adapter_ids)
    ids = torch.arange(len(rows), dtype=torch.int32).repeat_interleave(torch.tensor(rows))
    ids = ids[torch.randperm(tokens, generator=torch.Generator().manual_seed(0))].to(device)
    layer = layer.with_(topk_ids=ids[:, None].contiguous())
    check(layer)
    check(layer, lora, adapter_ids)
    check(layer, lora, torch.zeros_like(adapter_ids))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("tokens", "tile"), [(30, 16), (50, 32), (100, 48)])
@pytest.mark.parametrize("sizes", [(136, 200), (192, 192)])
def test_every_tile_in_every_layout(device, dtype, tokens, tile, sizes, layout):
    """Widths that are whole blocks of 64 columns, an odd number of them, and such that are not"""
    layer, lora, adapter_ids = make(tokens, device, dtype, Shape(*sizes, 4, 1), rank=24)
    assert f"tokens{tile}" in moelora.explain(*layer.arguments, lora=lora, adapter_ids=adapter_ids)
    options = {"gate_up_layout": layout, "activation": ACTIVATIONS[LAYOUTS.index(layout)], **layer.biases}
    check(layer, lora, adapter_ids, **options)
    check(layer, lora, adapter_ids, apply_router_weight_on_input=True, **options)


@pytest.mark.parametrize(
    ("tokens", "slots", "experts", "tile"),
    [(256, 1, 128, 48), (256, 64, 128, 48), (512, 1, 128, 48), (256, 1, 256, 32), (256, 8, 256, 32), (256, 8, 512, 16)],
)
def test_the_most_pairs_of_the_one_kernel_path(device, dtype, tokens, slots, experts, tile):
    """4,096 pairs, 8 to 32 rows an expert; of 64 adapters more than 2,048 (expert, adapter) runs"""
    shape = Shape(136, 200, experts, 4096 // tokens)
    layer, lora, adapter_ids = make(tokens, device, dtype, shape, slots=slots, rank=8)
    assert f"tokens{tile}" in moelora.explain(*layer.arguments, lora=lora, adapter_ids=adapter_ids)
    check(layer)
    check(layer, lora, adapter_ids)
    check(layer, lora, torch.zeros_like(adapter_ids))


@pytest.mark.parametrize("tokens", [257, 600, 1000, 1500, 2100])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tile_shape_of_prefill(device, dtype, tokens, layout):
    """C07: 65, 150 and 375 rows an expert pick one each, 250 and 525 one or two pairs; sizes that are no multiple"""
    layer, lora, adapter_ids = make(tokens, device, dtype, Shape(136, 200, 8, 2), rank=24)
    activation = ACTIVATIONS[LAYOUTS.index(layout)]
    check(layer, lora, adapter_ids, gate_up_layout=layout, activation=activation, **layer.biases)


@pytest.mark.parametrize("form", ["own", "shared_a", "shared_outer"])
def test_pairs_of_tiles_that_differ(device, dtype, form):
    """Rows for no tile, one step, and just one or two pairs; nine adapters in one tile of a pair, none in the other"""
    rows = [1, 16, 17, 0, 288, 289, 576, 577, 236]
    # More items than clusters, so that items follow each other; the last weight blocks lie half outside.
    shape = Shape(3080, 2056, len(rows), 1)
    options = {} if form == "own" else {form: True}
    layer, lora, adapter_ids = make(sum(rows), device, dtype, shape, slots=9, rank=40, **options)
    ids = torch.arange(len(rows), device=device, dtype=torch.int32).repeat_interleave(torch.tensor(rows, device=device))
    if torch.cuda.get_device_capability() == (9, 0):
        assert "pairs" in moelora.explain(*layer.arguments, lora=lora, adapter_ids=adapter_ids)
    # Sorted by slot, the base rows of expert 4 fill one tile; expert 5 has no adapter at all.
    adapter_ids[ids == 4] = torch.cat([torch.full((200,), -1), torch.arange(88) % 9]).to(adapter_ids)
    adapter_ids[ids == 5] = -1
    shuffled = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0)).to(device)
    layer = layer.with_(topk_ids=ids[shuffled, None].contiguous())
    adapter_ids = adapter_ids[shuffled]
    check(layer, lora, adapter_ids)
    check(layer, lora, adapter_ids, apply_router_weight_on_input=True, **layer.biases)
    assert torch.equal(run(layer, lora, adapter_ids), run(layer, lora, adapter_ids))
    nowhere = layer.with_(topk_ids=torch.full_like(layer.topk_ids, -1))
    assert not run(nowhere, lora, adapter_ids).any()


@pytest.mark.parametrize("tokens", [1, 3, 64, 1024])
def test_modes_give_the_same_bits(device, dtype, tokens):
    """single and two streams"""
    layer, lora, adapter_ids = make(tokens, device, dtype, Shape(512, 256, 16, 4), rank=16)
    single = run(layer, lora, adapter_ids, stream_mode="single")
    two = run(layer, lora, adapter_ids, stream_mode="two")
    assert torch.equal(single, two)
    assert torch.equal(
        single, moelora.fused_moe_lora_single_stream(*layer.arguments, lora=lora, adapter_ids=adapter_ids)
    )
    assert torch.equal(two, moelora.fused_moe_lora_two_stream(*layer.arguments, lora=lora, adapter_ids=adapter_ids))


def test_the_same_call_on_the_cpu_agrees(device, dtype):
    """K09"""
    shape = Shape(256, 128, 16, 4)
    layer, lora, adapter_ids = make(37, "cpu", dtype, shape, rank=16)
    expected = oracle(layer, lora, adapter_ids)
    on_cpu = run(layer, lora, adapter_ids)
    moved = layer.with_(**{name: getattr(layer, name).to(device) for name in vars(layer)})
    on_gpu = run(moved, lora.to(device), adapter_ids.to(device))
    check_close(on_cpu, expected)
    check_close(on_gpu.cpu(), expected)


def test_float32_on_the_gpu_is_refused_by_name(device):
    layer = random_layer(3, Shape(64, 32, 4, 2), dtype=torch.float32, device=device)
    with pytest.raises(TypeError, match=r"hidden_states: expected bfloat16 or float16 on CUDA, got float32"):
        moelora.fused_moe_lora(*layer.arguments)


@pytest.mark.parametrize("delay", ["producer", "consumer"])
def test_the_events_of_the_caller_order_its_own_streams(device, dtype, delay):
    """lora_ready_event is waited for before the delta is read; down_gemm_done_event comes after the down GEMM"""
    layer, lora, adapter_ids = make(64, device, dtype, Shape(512, 256, 16, 4))
    delta = gate_up_lora_delta_reference(layer.hidden_states, layer.topk_ids, lora, adapter_ids).to(dtype)
    expected = run(layer, gate_up_lora_delta=delta)
    buffer = torch.full_like(delta, torch.nan)
    side, ready, done = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        if delay == "producer":
            torch.cuda._sleep(20_000_000)
        buffer.copy_(delta)
        ready.record()
    if delay == "consumer":
        torch.cuda._sleep(20_000_000)
    out = moelora.fused_moe_lora(
        *layer.arguments, gate_up_lora_delta=buffer, lora_ready_event=ready, down_gemm_done_event=done
    )
    done.synchronize()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_an_allocation_that_fails_can_be_caught(device, dtype):
    """torch.OutOfMemoryError, nothing half-written, and the next call works"""
    layer, lora, adapter_ids = make(4096, device, dtype, Shape(2048, 768, 16, 8))
    out = torch.full_like(layer.hidden_states, 7)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**24) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            moelora.fused_moe_lora(*layer.arguments, lora=lora, adapter_ids=adapter_ids, out=out)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert (out == 7).all()
    check(layer, lora, adapter_ids)


def check_last_tokens(tokens, shape, device, dtype, count=100):
    """The last tokens of a huge call against the oracle of just those tokens."""
    layer = random_layer(tokens, shape, dtype=dtype, device=device)
    lora = random_lora(2, shape, 16, dtype=dtype, device=device)
    adapter_ids = random_adapter_ids(tokens, 2, device=device)
    last = slice(tokens - count, tokens)
    with torch.inference_mode():
        for options in ({}, {"lora": lora, "adapter_ids": adapter_ids}):
            got = moelora.fused_moe_lora(*layer.arguments, **options)[last]
            some = {"lora": lora, "adapter_ids": adapter_ids[last]} if options else {}
            check_close(got, oracle(layer.tokens(last), **some))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "shape"),
    [(65_600, Shape(2048, 2048, 16, 8)), (56_000, Shape(7168, 256, 16, 8))],
    ids=["gate_up rows", "down rows"],
)
def test_calls_beyond_2_to_31_elements(device, release_memory, tokens, shape):
    """C04, B10: T*K*2I and T*K*H pass 2^31"""
    check_last_tokens(tokens, shape, device, torch.bfloat16)


@pytest.mark.slow
def test_weights_beyond_2_to_31_elements(device, release_memory):
    """C04: E*2I*H passes 2^31; the last expert's rows"""
    shape = Shape(4096, 2048, 160, 1)
    layer = random_layer(64, shape, dtype=torch.bfloat16, device=device)
    layer = layer.with_(topk_ids=159 - layer.topk_ids % 3)
    check(layer)
