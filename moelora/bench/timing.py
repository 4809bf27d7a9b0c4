"""Timing as people should do it: CUDA graphs over layers with different weights, interleaved, medians."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

WARM_UPS = 3


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


def median_us(graphs: dict[str, torch.cuda.CUDAGraph], replays: int) -> dict[str, float]:
    """Median µs of one replay of each graph, the graphs taking turns so that all see the same card state."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for graph in graphs.values():
        for _ in range(WARM_UPS):
            graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(replays):
        for name, graph in graphs.items():
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}
