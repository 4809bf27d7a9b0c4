"""Host time of an eager decode call: the whole layer as one op, beside the same layer composed of single ops.

The GPU's work is queued and never waited for inside the timed loop, so what is timed is Python, checks, allocation and
launches. Prints µs per call, medians over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch

import moelora
from moelora import _load, ops
from moelora.testing.inputs import MODEL_SHAPES, random_layer, random_lora

CALLS, ROUNDS = 100, 21


def composed(layer, lora, adapter_ids):
    """The layer by hand from the public ops (rank-16 adapters, SwiGLU)."""
    x, w13, w2, weights, ids = layer.arguments
    experts, top_k = w13.shape[0], ids.shape[1]
    common = {"adapter_ids": adapter_ids, "ranks": lora.ranks, "num_local_experts": experts}
    sort = ops.moe_sort(ids, num_slots=lora.num_slots, **common)
    rows = ops.permute(x, sort.permuted_to_expanded, top_k)
    gate_up = ops.gate_up_gemm(rows, w13, sort, expected_rows=1)
    v = ops.lora_shrink(x, lora.gate_up_a, ids, rank=16, part="gate_up", sort=sort, **common)
    delta = ops.lora_expand(v, lora.gate_up_b, ids, scaling=lora.scaling, part="gate_up", sort=sort, **common)
    z, by_pair = ops.activation(
        gate_up, sort.expanded_to_permuted, top_k, gate_up_lora_delta=delta, lora_input=True
    )
    down = ops.down_gemm(z, w2, sort, expected_rows=1)
    v = ops.lora_shrink(by_pair, lora.down_a, ids, rank=16, part="down", sort=sort, **common)
    delta = ops.lora_expand(v, lora.down_b, ids, scaling=lora.scaling, part="down", sort=sort, **common)
    return ops.finalize(down, weights, sort.expanded_to_permuted, top_k=top_k, down_lora_delta=delta)


def host_us(run) -> float:
    for _ in range(20):
        run()
    rounds = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            run()
        rounds.append((time.perf_counter() - start) / CALLS * 1e6)
        torch.cuda.synchronize()
    return statistics.median(rounds)


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    reason = _load.cuda_unavailable_reason()
    if reason:
        print(f"host_cost needs a GPU: {reason}")
        return 1
    shape = MODEL_SHAPES["qwen3_30b_a3b"]
    layer = random_layer(1, shape, dtype=torch.bfloat16, device="cuda")
    lora = random_lora(1, shape, 16, dtype=torch.bfloat16, device="cuda")
    adapter_ids = torch.zeros(1, dtype=torch.int32, device="cuda")
    out = torch.empty_like(layer.hidden_states)

    def one_op(mode, with_lora):
        adapters = {"lora": lora, "adapter_ids": adapter_ids} if with_lora else {}
        return lambda: moelora.fused_moe_lora(*layer.arguments, **adapters, stream_mode=mode, out=out)

    with torch.inference_mode():
        runs = {"ops one by one, adapter": lambda: composed(layer, lora, adapter_ids)}
        for mode in ("single", "two", "auto"):
            runs[f"{mode}, no adapter"] = one_op(mode, False)
            runs[f"{mode}, adapter"] = one_op(mode, True)
        for name, run in runs.items():
            print(f"{name:>26}: {host_us(run):7.1f} us of host time a call (T = 1)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
