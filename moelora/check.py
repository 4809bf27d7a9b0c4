"""Checks this installation: every op and every forward on small, awkward shapes against the float32 oracle.

    python -m moelora.check

Prints the version, the build and the GPU, then one line a check with its error, on the CPU and on every dtype of the
present GPU. Exits non-zero if anything is wrong. It is what to run first on hardware that moelora has never seen.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import moelora
from moelora import _load, ops
from moelora.reference import (
    down_lora_delta_reference,
    gate_up_lora_delta_reference,
    moe_lora_reference,
    moe_sort_reference,
    pack_topk_reference,
    route_reference,
)
from moelora.testing.errors import BOUNDS, row_errors
from moelora.testing.inputs import LayerInputs, Shape, poisoned_memory, random_adapter_ids, random_layer, random_lora

# (shape, tokens): one token, an odd tail in every size, more rows than a tile, one expert with everything, rows for the
# widest tiles of few tokens and for pairs of tiles of many.
LAYERS = (
    (Shape(64, 40, 8, 3), 1),
    (Shape(136, 104, 8, 8), 4),
    (Shape(136, 24, 5, 2), 17),
    (Shape(512, 256, 16, 4), 64),
    (Shape(136, 104, 4, 1), 100),
    (Shape(256, 104, 1, 1), 300),
    (Shape(136, 104, 4, 2), 500),
    (Shape(512, 256, 16, 4), 700),
)
SLOTS, RANK = 3, 16


@dataclass
class Result:
    name: str
    error: float
    bound: float
    failure: str = ""

    @property
    def passed(self) -> bool:
        return not self.failure and self.error <= self.bound


def about() -> list[str]:
    """What is installed and on what, one line each."""
    info = moelora.build_info()
    archs = ", ".join(info["archs"]) or "none (CPU only)"
    lines = [
        f"moelora {info['version']}, built with CUDA {info['cuda']}, CUTLASS {info['cutlass']}, torch "
        f"{info['built_with_torch']}; GPU archs in the library: {archs}",
        f"torch {torch.__version__}, Python {sys.version.split()[0]}",
    ]
    reason = _load.cuda_unavailable_reason()
    if reason is not None:
        lines.append(f"GPU not checked: {reason}")
        return lines
    major, minor = torch.cuda.get_device_capability()
    lines.append(f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}, driver {driver_version()}")
    never = info["never_run_on_hardware"]
    if f"{major}.{minor}a" in never:
        lines.append(f"kernels for {major}.{minor}a have never run on hardware before: please report what follows")
    return lines


def driver_version() -> str:
    """The NVIDIA driver's version, as the kernel module tells it."""
    try:
        with open("/proc/driver/nvidia/version") as file:
            return file.readline().split("Module")[-1].split()[0]
    except OSError:
        return "unknown"


def worst_row(got: Tensor, expected: Tensor) -> float:
    return row_errors(got, expected).max().item() if got.numel() else 0.0


def mismatch(got: Tensor, expected: Tensor) -> float:
    """0 where two integer tensors are equal, else 1."""
    return 0.0 if torch.equal(got.long().cpu(), expected.long().cpu()) else 1.0


class Case:
    """One layer with adapters, and the checks of every op on it."""

    def __init__(self, shape: Shape, tokens: int, dtype: torch.dtype, device: str) -> None:
        self.shape, self.tokens, self.dtype, self.device = shape, tokens, dtype, device
        self.layer: LayerInputs = random_layer(tokens, shape, dtype=dtype, device=device, seed=tokens)
        self.lora = random_lora(SLOTS, shape, RANK, dtype=dtype, device=device, ranks=[(16, 8), (0, 0), (8, 16)])
        self.adapter_ids = random_adapter_ids(tokens, SLOTS, device=device, seed=tokens)
        self.common = {
            "adapter_ids": self.adapter_ids,
            "ranks": self.lora.ranks,
            "num_local_experts": shape.experts,
        }
        self.sort = ops.moe_sort(self.layer.topk_ids, num_slots=SLOTS, **self.common)

    def checks(self) -> Iterator[tuple[str, Callable[[], float]]]:
        yield "routing", self.routing
        yield "pack_topk", self.pack_topk
        yield "moe_sort", self.moe_sort
        yield "permute .. finalize", self.base_ops
        yield "lora_shrink, lora_expand: gate_up", lambda: self.lora_ops("gate_up")
        yield "lora_shrink, lora_expand: down", lambda: self.lora_ops("down")
        for mode in ("single", "two", "auto"):
            yield f"fused_moe_lora, {mode}, no adapter", lambda mode=mode: self.forward(mode, False)
            yield f"fused_moe_lora, {mode}, adapters", lambda mode=mode: self.forward(mode, True)

    def routing(self) -> float:
        logits = torch.randn(self.tokens, self.shape.experts, device=self.device)
        worst = 0.0
        for method in ("softmax", "renormalize", "sigmoid", "deepseek_v3"):
            weights, ids = moelora.route(logits, self.shape.top_k, method)
            expected_weights, expected_ids = route_reference(logits, self.shape.top_k, method)
            worst = max(worst, mismatch(ids, expected_ids), worst_row(weights, expected_weights.to(weights.device)))
        return worst

    def pack_topk(self) -> float:
        packed = ops.pack_topk(self.layer.topk_weights, self.layer.topk_ids)
        return mismatch(packed, pack_topk_reference(self.layer.topk_weights, self.layer.topk_ids))

    def moe_sort(self) -> float:
        expected = moe_sort_reference(
            self.layer.topk_ids, num_slots=SLOTS, tile_rows=ops.TILE_ROWS, **self.common
        )
        return max(mismatch(got, want) for got, want in zip(self.sort, expected, strict=True))

    def base_ops(self) -> float:
        x, w13, w2, weights, ids = self.layer.arguments
        rows = ops.permute(x, self.sort.permuted_to_expanded, self.shape.top_k)
        expected_rows = ids.numel() // self.shape.experts + 1
        gate_up = ops.gate_up_gemm(rows, w13, self.sort, w13_bias=self.layer.w13_bias, expected_rows=expected_rows)
        z, _ = ops.activation(gate_up, self.sort.expanded_to_permuted, self.shape.top_k)
        down = ops.down_gemm(z, w2, self.sort, w2_bias=self.layer.w2_bias, expected_rows=expected_rows)
        out = ops.finalize(down, weights, self.sort.expanded_to_permuted, top_k=self.shape.top_k)
        return worst_row(out, moe_lora_reference(*self.layer.arguments, **self.layer.biases, dtype=torch.float32))

    def lora_ops(self, part: str) -> float:
        ids = self.layer.topk_ids
        if part == "gate_up":
            x, a, b = self.layer.hidden_states, self.lora.gate_up_a, self.lora.gate_up_b
            expected = gate_up_lora_delta_reference(x, ids, self.lora, self.adapter_ids, dtype=torch.float32)
        else:
            x = torch.randn(*ids.shape, self.shape.inter, device=self.device).to(self.dtype)
            a, b = self.lora.down_a, self.lora.down_b
            expected = down_lora_delta_reference(x, ids, self.lora, self.adapter_ids, dtype=torch.float32)
        v = ops.lora_shrink(x, a, ids, rank=RANK, part=part, sort=self.sort, **self.common)
        delta = ops.lora_expand(v, b, ids, scaling=self.lora.scaling, part=part, sort=self.sort, **self.common)
        return worst_row(delta, expected)

    def forward(self, mode: str, adapters: bool) -> float:
        lora = {"lora": self.lora, "adapter_ids": self.adapter_ids} if adapters else {}
        out = moelora.fused_moe_lora(*self.layer.arguments, **lora, stream_mode=mode)
        return worst_row(out, moe_lora_reference(*self.layer.arguments, **lora, dtype=torch.float32))


def run(device: str, dtype: torch.dtype) -> Iterator[Result]:
    """Every check on every layer; a check that raises is a failure with the exception's text."""
    for shape, tokens in LAYERS:
        where = f"{device} {str(dtype).removeprefix('torch.'):>8}  T={tokens:<4} H={shape.hidden:<4} "
        where += f"I={shape.inter:<4} "
        where += f"E={shape.experts:<3} K={shape.top_k}"
        try:
            with torch.inference_mode():
                case = Case(shape, tokens, dtype, device)
        except Exception as error:
            yield Result(f"{where}  set-up", float("nan"), 0.0, f"{type(error).__name__}: {error}")
            continue
        for name, check in case.checks():
            try:
                with torch.inference_mode(), poisoned_memory():
                    yield Result(f"{where}  {name}", check(), BOUNDS[dtype])
            except Exception as error:
                traceback.print_exc()
                yield Result(f"{where}  {name}", float("nan"), BOUNDS[dtype], f"{type(error).__name__}: {error}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m moelora.check", description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda", "all"], default="all", help="what to check (default all)")
    args = parser.parse_args(argv)
    print("\n".join(about()), flush=True)
    runs = []
    if args.device != "cuda":
        runs += [("cpu", torch.float32), ("cpu", torch.bfloat16), ("cpu", torch.float16)]
    if args.device == "cuda" or (args.device == "all" and _load.cuda_unavailable_reason() is None):
        runs += [("cuda", torch.bfloat16), ("cuda", torch.float16)]
    failed = total = 0
    for device, dtype in runs:
        for result in run(device, dtype):
            total += 1
            failed += not result.passed
            verdict = "pass" if result.passed else "FAIL"
            print(f"{verdict}  {result.name:<100} {result.error:.1e} {result.failure}".rstrip(), flush=True)
    print(f"{total - failed} of {total} checks passed" + (f", {failed} FAILED" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
