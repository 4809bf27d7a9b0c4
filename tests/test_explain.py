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


def test_paths_by_token_count():
    assert explain(256).startswith("fused_decode (")
    assert explain(257).startswith("fused_prefill (")
    assert explain(257, stream_mode="single").startswith("decomposed (")
    assert "do_finalize" in explain(257, do_finalize=False)


@pytest.mark.parametrize(
    ("tokens", "config"),
    [(512, "tokens144"), (2048, "tokens192"), (4096, "tokens256"), (8192, "rows256"), (16384, "tokens256")],
)
def test_prefill_tiles_by_rows_an_expert(tokens, config):
    assert config in explain(tokens)


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
