"""Timing as people should do it: CUDA graphs over layers with different weights, medians.

Under load the card lowers its clocks, by 6 to 17 % in long matrix work, and so a figure says of
which of the `PACES` it is.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch

WARM_UPS = 3
PAUSE_SECONDS, LOAD_SECONDS = 0.1, 0.7
# The GPU's clock cycles that it waits before each timed replay, so that the host has sent all of it by then.
HOST_CYCLES = 200_000


# How the card is loaded while a graph is timed. turns: graphs take turns, replay by replay, and so see the same card
# state; burst: each alone, after a pause; sustained: each alone, after a while of its own replays.
PACES = ("turns", "burst", "sustained")


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of `run`, which is called once eagerly first."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def peak_bytes(run: Callable[[], object]) -> int:
    """The most memory that `run` holds at a time beside what was there before; it has run once already."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def median_us(graphs: dict[str, torch.cuda.CUDAGraph], replays: int, pace: str = "turns") -> dict[str, float]:
    """Median µs of one replay of each graph."""
    if pace != "turns":
        return {name: _alone_us(graph, replays, pace) for name, graph in graphs.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for graph in graphs.values():
        for _ in range(WARM_UPS):
            graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(replays):
        for name, graph in graphs.items():
            torch.cuda._sleep(HOST_CYCLES)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def _alone_us(graph: torch.cuda.CUDAGraph, replays: int, pace: str) -> float:
    for _ in range(WARM_UPS):
        graph.replay()
    torch.cuda.synchronize()
    if pace == "burst":
        time.sleep(PAUSE_SECONDS)
    else:
        until = time.monotonic() + LOAD_SECONDS
        while time.monotonic() < until:
            for _ in range(5):
                graph.replay()
            torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) * 1e3 for start, end in itertools.pairwise(events))


def matmul_tflops(pace: str, replays: int, device: torch.device, size: int = 8192) -> float:
    """TFLOP/s of a bf16 matrix product of `size`^3 by torch (cuBLAS), timed as the layers are."""
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    graph = capture(lambda: torch.matmul(a, b, out=out))
    return 2 * size**3 / median_us({"matmul": graph}, replays, pace)["matmul"] * 1e-6
