"""Draws one decode step of the single-stream and of the two-stream forward, kernel by kernel, on a shared time axis.

    python examples/two_stream_trace.py --png two_streams.png

Records both forms with the PyTorch profiler and prints, for each, how long the step took and for how long both streams
were busy at once. Needs an NVIDIA GPU and matplotlib.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import moelora
from moelora import _load
from moelora.testing.inputs import MODEL_SHAPES, random_adapter_ids, random_layer, random_lora

STEPS = 15
# Holds the GPU back while the host queues a step, so that the picture shows the GPU and not the host.
HEAD_START_CYCLES = 1_000_000


@dataclass(frozen=True)
class Kernel:
    """One bar: times in µs from the start of the step."""

    name: str
    stream: int
    start: float
    end: float


@dataclass(frozen=True)
class Step:
    """The kernels of one forward."""

    kernels: list[Kernel]

    @property
    def span(self) -> float:
        return max(kernel.end for kernel in self.kernels) - min(kernel.start for kernel in self.kernels)

    @property
    def overlap(self) -> float:
        """µs in which both streams were busy; kernels of one stream that overlap do not count."""
        total = 0.0
        for index, one in enumerate(self.kernels):
            for other in self.kernels[index + 1 :]:
                if one.stream != other.stream:
                    total += max(0.0, min(one.end, other.end) - max(one.start, other.start))
        return total


def record(run, steps: int) -> list[Step]:
    """Profiles `steps` calls of `run`, one at a time."""
    found = []
    for _ in range(steps):
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            torch.cuda._sleep(HEAD_START_CYCLES)
            run()
            torch.cuda.synchronize()
        events = [
            event
            for event in profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA and "spin_kernel" not in event.name
        ]
        begin = min(event.time_range.start for event in events)
        found.append(
            Step(
                [
                    Kernel(
                        short_name(event.name), event.device_resource_id,
                        event.time_range.start - begin, event.time_range.end - begin,
                    )
                    for event in events
                ]
            )
        )  # fmt: skip
    return found


def short_name(name: str) -> str:
    """The op behind a kernel's mangled or templated name."""
    for op in ("moe_sort", "permute", "lora_shrink", "lora_expand", "activation", "finalize"):
        if op in name:
            return op
    return "gemm" if "gemm" in name.lower() or "cutlass" in name.lower() else name.split("(")[0][:24]


def draw(steps: dict[str, Step], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = sorted({kernel.name for step in steps.values() for kernel in step.kernels})
    colors = {name: plt.get_cmap("tab10")(i % 10) for i, name in enumerate(names)}
    figure, axes = plt.subplots(len(steps), 1, sharex=True, figsize=(11, 2.2 * len(steps)))
    for axis, (form, step) in zip(axes, steps.items(), strict=True):
        streams = list(dict.fromkeys(k.stream for k in sorted(step.kernels, key=lambda k: k.name != "gemm")))
        for kernel in step.kernels:
            row = streams.index(kernel.stream)
            axis.barh(row, kernel.end - kernel.start, left=kernel.start, height=0.7, color=colors[kernel.name],
                      edgecolor="white")  # fmt: skip
        axis.set_yticks(range(len(streams)), ["main", "side"][: len(streams)])
        axis.invert_yaxis()
        axis.set_title(f"{form}: {step.span:.1f} µs, both streams busy for {step.overlap:.1f} µs", loc="left")
    axes[-1].set_xlabel("µs")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colors[name]) for name in names]
    figure.legend(handles, names, loc="lower center", ncol=len(names), frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, dpi=130)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--png", type=Path, default=Path("two_stream_trace.png"), help="the picture")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of the decode step (default 16)")
    parser.add_argument("--adapters", type=int, default=4, help="adapters mixed in the batch (default 4)")
    parser.add_argument("--rank", type=int, default=16, help="their rank (default 16)")
    args = parser.parse_args()
    reason = _load.cuda_unavailable_reason()
    if reason:
        print(f"this example needs a GPU: {reason}")
        return 1

    shape = MODEL_SHAPES["qwen3_30b_a3b"]
    layer = random_layer(args.tokens, shape, dtype=torch.bfloat16, device="cuda")
    lora = random_lora(args.adapters, shape, args.rank, dtype=torch.bfloat16, device="cuda")
    adapter_ids = random_adapter_ids(args.tokens, args.adapters, device="cuda")
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    steps = {}
    with torch.inference_mode():
        for form, mode in (("single stream", "single"), ("two streams", "two")):

            def run(mode=mode):
                moelora.fused_moe_lora(*layer.arguments, lora=lora, adapter_ids=adapter_ids, stream_mode=mode)

            for _ in range(5):
                run()
            flush.zero_()
            recorded = record(run, STEPS)
            middle = statistics.median_low([step.span for step in recorded])
            steps[form] = next(step for step in recorded if step.span == middle)
            print(f"{form}: {middle:.1f} µs a step, {steps[form].overlap:.1f} µs of it on both streams at once")
    single, two = steps["single stream"], steps["two streams"]
    print(f"two streams save {single.span - two.span:.1f} µs ({1 - two.span / single.span:.1%})")
    draw(steps, args.png)
    print(f"wrote {args.png}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
