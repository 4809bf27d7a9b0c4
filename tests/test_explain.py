"""`moelora.explain`, on meta tensors: for compute capability 9.0 where there is no GPU."""

import pytest
import torch

import moelora

E, K, H, I = 128, 8, 2048, 768  # noqa: E741


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the expectations are those of compute capability 9.0")


def explain(tokens, device="meta", **options):
    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, device=device, dtype=dtype)

    layer = empty(tokens, H), empty(E, 2 * I, H), empty(E, H, I), empty(tokens, K), empty(tokens, K, dtype=torch.int32)
    return moelora.explain(*layer, **options)


def lora(slots, rank):
    def empty(*shape):
        return torch.empty(shape, device="meta", dtype=torch.bfloat16)

    return moelora.MoELoRA(
        gate_up_a=empty(slots, E, 2 * rank, H),
        gate_up_b=empty(slots, E, 2 * I, rank),
        down_a=empty(slots, E, rank, I),
        down_b=empty(slots, E, H, rank),
    )


@pytest.mark.parametrize(
    ("config", "most_tokens"),
    [("rows32_direct", 1), ("rows64_tokens16", 128), ("rows128_tokens32", 256), ("rows128_tokens48", 512)],
)
def test_decode_tiles_by_token_count(config, most_tokens):
    assert explain(most_tokens).startswith(f"fused_decode ({config}")
    assert config not in explain(most_tokens + 1)


def test_few_weights_are_direct_up_to_four_tokens():
    """A quarter of the experts: 9.4 million elements of weights a token on average"""
    assert "direct" in explain(4, num_experts=4 * E)
    assert "direct" not in explain(5, num_experts=4 * E)


def test_paths_by_token_count():
    assert explain(256).startswith("fused_decode (")
    assert explain(512).startswith("fused_decode (")
    assert explain(513).startswith("fused_prefill (")
    assert explain(257, stream_mode="single").startswith("decomposed (")
    assert "do_finalize" in explain(257, do_finalize=False)


@pytest.mark.parametrize(("slots", "rank", "path"), [(1, 16, "decode"), (1, 24, "prefill"), (2, 16, "prefill")])
def test_more_adapters_leave_the_one_kernel_path_at_256_tokens(slots, rank, path):
    adapters = {"lora": lora(slots, rank), "adapter_ids": torch.empty(512, device="meta", dtype=torch.int32)}
    assert explain(512, **adapters).startswith(f"fused_{path}")
    adapters["adapter_ids"] = adapters["adapter_ids"][:256]
    assert explain(256, **adapters).startswith("fused_decode")


@pytest.mark.parametrize(("experts", "path"), [(128, "decode"), (240, "decode"), (256, "prefill")])
def test_rows_an_expert_decide_above_256_tokens(experts, path):
    """32, 18 and 16, over all experts, of which 128 are local."""
    assert explain(512, num_experts=experts).startswith(f"fused_{path}")


@pytest.mark.parametrize(
    ("tokens", "config"),
    [(513, "tokens144_stages6"), (2048, "tokens192_stages5"), (3072, "tokens256_stages4"), (6144, "tokens256_stages4")]
    + [(tokens, "rows256_tokens144_pairs") for tokens in (4096, 8192, 12288, 16384, 32768)],
)
def test_prefill_tiles_by_rows_an_expert(tokens, config):
    assert f"({config}" in explain(tokens)


def test_no_limit_cuts_only_what_needs_more_than_2_gib():
    assert "chunks" not in explain(16384)
    assert "chunks of 32768 tokens" in explain(65536)
    assert "chunks" not in explain(65536, stream_mode="single")


@pytest.mark.parametrize(("limit", "chunk"), [(1 << 30, 16384), (2**30 // 2, 8192), (0, 2048)])
def test_a_limit_cuts_into_chunks(limit, chunk):
    text = explain(16384, workspace_limit_bytes=limit)
    assert (f"chunks of {chunk} tokens" in text) == (chunk < 16384)
    # Chunks of 2048 tokens run with the kernels of 2048 tokens.
    assert explain(2048).split(" (")[1].split(")")[0] in explain(16384, workspace_limit_bytes=0)


def test_the_decomposed_path_is_cut_too():
    text = explain(16384, stream_mode="single", workspace_limit_bytes=1 << 30)
    assert text.startswith("decomposed (") and "chunks of 8192 tokens" in text


def test_the_cpu_has_one_path():
    assert explain(3, device="cpu").startswith("decomposed: the CPU")
