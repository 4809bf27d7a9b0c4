"""The layer composed by hand from the ops of `moelora.ops`, against `fused_moe_lora` and the reference.

    python examples/ops_directly.py [--device cuda]

For those who want to put a step of their own between two ops: each is usable by itself, and on a GPU
the composition gives the bits of `fused_moe_lora_single_stream`. docs/ops.md explains every op.
"""

import argparse
import sys

import torch
from torch import Tensor

import moelora
from moelora import MoELoRA, ops
from moelora.reference import moe_lora_reference

TOKENS, TOP_K, EXPERTS, HIDDEN, INTERMEDIATE = 33, 4, 16, 128, 96
SLOTS, RANK = 3, 8


def moe_lora_by_hand(
    hidden_states: Tensor, w13: Tensor, w2: Tensor, logits: Tensor, lora: MoELoRA, adapter_ids: Tensor
) -> Tensor:
    tokens, experts = logits.shape
    topk_weights, topk_ids = moelora.route(logits, TOP_K)

    # Group the pairs (token, chosen expert) by expert, inside an expert by adapter slot. A GEMM works
    # on tiles of rows, so each expert's rows are padded to a multiple of ops.TILE_ROWS.
    expected_rows = -(-tokens * TOP_K // experts)
    sort = ops.moe_sort(
        topk_ids,
        adapter_ids=adapter_ids,
        ranks=lora.ranks,
        num_slots=lora.num_slots,
        num_local_experts=experts,
    )
    of_adapter = {
        "adapter_ids": adapter_ids,
        "ranks": lora.ranks,
        "num_local_experts": experts,
        "sort": sort,
    }

    # gate and up: the base GEMM by sorted row, the adapter's delta by pair.
    rows = ops.permute(hidden_states, sort.permuted_to_expanded, TOP_K)
    gate_up = ops.gate_up_gemm(rows, w13, sort, expected_rows=expected_rows)
    v = ops.lora_shrink(
        hidden_states, lora.gate_up_a, topk_ids, rank=lora.gate_up_rank, part="gate_up", **of_adapter
    )
    gate_up_delta = ops.lora_expand(
        v, lora.gate_up_b, topk_ids, scaling=lora.scaling, part="gate_up", **of_adapter
    )

    # act(gate + delta, up + delta): by sorted row for the down GEMM, by pair for the down adapter.
    z, z_by_pair = ops.activation(
        gate_up, sort.expanded_to_permuted, TOP_K, gate_up_lora_delta=gate_up_delta, lora_input=True
    )

    # down, and the weighted sum over each token's experts.
    down = ops.down_gemm(z, w2, sort, expected_rows=expected_rows)
    v = ops.lora_shrink(z_by_pair, lora.down_a, topk_ids, rank=lora.down_rank, part="down", **of_adapter)
    down_delta = ops.lora_expand(v, lora.down_b, topk_ids, scaling=lora.scaling, part="down", **of_adapter)
    return ops.finalize(
        down, topk_weights, sort.expanded_to_permuted, top_k=TOP_K, down_lora_delta=down_delta
    )


def random_inputs(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, MoELoRA, Tensor]:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, device=device)
        return (values / shape[-1] ** 0.5).to(dtype)

    lora = MoELoRA(
        gate_up_a=normal(SLOTS, EXPERTS, 2 * RANK, HIDDEN),
        gate_up_b=normal(SLOTS, EXPERTS, 2 * INTERMEDIATE, RANK),
        down_a=normal(SLOTS, EXPERTS, RANK, INTERMEDIATE),
        down_b=normal(SLOTS, EXPERTS, HIDDEN, RANK),
        scaling=torch.rand(SLOTS, 3, generator=generator, device=device) + 0.5,
        ranks=torch.full((SLOTS, 2), RANK, dtype=torch.int32, device=device),
    )
    hidden_states = normal(TOKENS, HIDDEN) * HIDDEN**0.5
    w13, w2 = normal(EXPERTS, 2 * INTERMEDIATE, HIDDEN), normal(EXPERTS, HIDDEN, INTERMEDIATE)
    logits = normal(TOKENS, EXPERTS) * 2 * EXPERTS**0.5
    adapter_ids = torch.arange(TOKENS, device=device) % (SLOTS + 1) - 1  # -1: no adapter
    return hidden_states, w13, w2, logits, lora, adapter_ids


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


@torch.inference_mode()
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    device = parser.parse_args(argv).device
    dtype, tolerance = (torch.bfloat16, 1e-2) if device == "cuda" else (torch.float32, 1e-5)

    hidden_states, w13, w2, logits, lora, adapter_ids = random_inputs(device, dtype)
    by_hand = moe_lora_by_hand(hidden_states, w13, w2, logits, lora, adapter_ids)

    layer = (hidden_states, w13, w2, *moelora.route(logits, TOP_K))
    one_call = moelora.fused_moe_lora_single_stream(*layer, lora=lora, adapter_ids=adapter_ids)
    reference = moe_lora_reference(*layer, lora=lora, adapter_ids=adapter_ids)
    plain = moe_lora_reference(*layer)

    error = relative_error(by_hand, reference)
    same_bits = torch.equal(by_hand, one_call)
    print(f"{device}, {dtype}; relative Frobenius norms:")
    print(f"  composed ops against the float64 reference  {error:.1e}")
    print(f"  fused_moe_lora against the same             {relative_error(one_call, reference):.1e}")
    print(f"  what the adapters change                    {relative_error(plain, reference):.1e}")
    print(f"  composed ops and fused_moe_lora bit-equal   {same_bits}")
    return 0 if error < tolerance and (same_bits or device == "cpu") else 1


if __name__ == "__main__":
    sys.exit(main())
