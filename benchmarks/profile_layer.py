"""One layer of Qwen3-30B-A3B at a time, for a profiler to look at: each number of tokens without an adapter and with
one of rank 16, in this order.

    ncu --clock-control none -k regex:"fused_decode_kernel|weighted_sum" --metrics dram__bytes_read.sum,\
dram__throughput.avg.pct_of_peak_sustained_elapsed,gpu__time_duration.sum,dram__bytes_read.sum.per_second \
        python benchmarks/profile_layer.py
    ncu --clock-control none -k regex:prefill_gemm --metrics dram__bytes_read.sum,dram__bytes_write.sum,\
dram__throughput.avg.pct_of_peak_sustained_elapsed,lts__throughput.avg.pct_of_peak_sustained_elapsed,\
lts__t_sector_hit_rate.pct,l1tex__m_xbar2l1tex_read_bytes.sum,gpu__time_duration.sum,sm__cycles_elapsed.avg.per_second \
        python benchmarks/profile_layer.py --tokens 768 2048 8192

ncu empties the caches before every kernel, and its time for a kernel includes the launch, which a chain of dependent
launches hides: read bytes and bandwidth there, times in a graph (`python -m moelora.bench`).
"""

from __future__ import annotations

import argparse
import sys

import torch

import moelora
from moelora import _load
from moelora.testing.inputs import MODEL_SHAPES, random_layer, random_lora


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64], help="default: 1 16 64")
    args = parser.parse_args()
    reason = _load.cuda_unavailable_reason()
    if reason:
        print(f"profile_layer needs a GPU: {reason}")
        return 1
    shape = MODEL_SHAPES["qwen3_30b_a3b"]
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    lora = random_lora(1, shape, 16, **options)
    with torch.inference_mode():
        for tokens in args.tokens:
            layer = random_layer(tokens, shape, **options)
            experts = layer.arguments[-1].unique().numel()
            adapter_ids = torch.zeros(tokens, dtype=torch.int32, device="cuda")
            for adapters in ({}, {"lora": lora, "adapter_ids": adapter_ids}):
                moelora.fused_moe_lora(*layer.arguments, **adapters)
                torch.cuda.synchronize()
                print(f"T = {tokens}, {experts} experts hit, {'rank 16' if adapters else 'no adapter'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
