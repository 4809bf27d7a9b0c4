"""Times the MoE-LoRA layer: moelora's paths beside the grouped_mm composition, with the floor and the error; and where
they are installed, vLLM's and SGLang's Triton MoE-LoRA.

Every line is one shape, token count and set of adapters. All systems run the same data in CUDA graphs over several
layers with weights of their own (so that nothing stays in L2), taking turns; medians. A result that disagrees with
the float32 oracle prints no time. MiB: the most memory that one layer holds beside its inputs and weights; for moelora
that is its workspace, for the others their intermediates and the output.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import torch

import moelora
from moelora.bench.layers import SYSTEMS, Problem, Weights
from moelora.bench.peers import FOREIGN, missing, one_line
from moelora.bench.shapes import BENCH_SHAPES, Adapters
from moelora.bench.timing import PACES, capture, matmul_tflops, median_us, peak_bytes
from moelora.testing.errors import BOUNDS

PEERS = ("grouped_mm", *FOREIGN)
# A row of bf16 peers may round more often than ours.
_PEER_BOUND = 3 * BOUNDS[torch.bfloat16]


def adapters_argument(text: str) -> Adapters:
    """"0", "1x16", "4x32m": count x rank, m for a mix with rows that have no adapter."""
    if text == "0":
        return Adapters(0, 0)
    mixed = text.endswith("m")
    count, _, rank = text.removesuffix("m").partition("x")
    if not count.isdigit() or not rank.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: expected 0, 1x16 or 4x32m")
    return Adapters(int(count), int(rank), mixed)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m moelora.bench", description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=BENCH_SHAPES, default=["S1"], help="layers to time")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16, 64, 256, 2048], metavar="T")
    parser.add_argument(
        "--adapters", nargs="+", type=adapters_argument, default=[Adapters(0, 0), Adapters(1, 16)], metavar="NxR",
        help="0: none; 1x16: one of rank 16; 4x32m: four of rank 32 mixed with rows that have none",
    )  # fmt: skip
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["auto", "grouped_mm", *FOREIGN])
    parser.add_argument(
        "--workspace-limit", type=float, metavar="MiB", help="moelora's workspace_limit_bytes; default: none"
    )
    parser.add_argument(
        "--pace", choices=PACES, default="turns",
        help="turns: systems take turns, replay by replay; burst: each alone after a pause; sustained: each alone "
        "after 0.7 s of its own load; both of these beside an 8192^3 matmul timed the same way",
    )  # fmt: skip
    parser.add_argument("--replays", type=int, default=50, help="timed replays of each graph (median)")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--plot", type=Path, help="draw time and floor against T to this PNG (needs matplotlib)")
    return parser.parse_args(argv)


def time_problem(problem: Problem, systems: list[str], replays: int, pace: str) -> dict:
    errors, graphs, peaks, refused = {}, {}, {}, {}
    for system in systems:
        try:
            problem.run_layer(system)
            peaks[system] = peak_bytes(lambda system=system: problem.run_layer(system))
            for out in problem.outs:
                out.fill_(math.nan)
            graphs[system] = capture(lambda system=system: problem.run(system))
        except Exception as error:
            if system not in FOREIGN:
                raise
            refused[system] = one_line(error)
            continue
        graphs[system].replay()
        torch.cuda.synchronize()
        errors[system] = problem.error()
    bound = {name: _PEER_BOUND if name in PEERS else BOUNDS[torch.bfloat16] for name in graphs}
    right = {name: graph for name, graph in graphs.items() if errors[name] <= bound[name]}
    layers = len(problem.layers)
    times = {name: time / layers for name, time in median_us(right, replays, pace).items()}
    return {
        "us": times, "error": errors, "peak_bytes": peaks, "refused": refused,
        "floor_us": problem.floor_us(), "layers": layers,
    }  # fmt: skip


def line(result: dict, system: str, base: dict | None) -> str:
    time, floor = result["us"].get(system), result["floor_us"]
    head = f"{result['shape']:>12} {result['tokens']:>6} {result['adapters']:>14} {system:>11}"
    if system in result["refused"]:
        return f"{head}  {system}: {result['refused'][system]}"
    if time is None:
        return f"{head}  WRONG, worst row's error {result['error'][system]:.1e}: not timed"
    peer = result["us"].get("grouped_mm")
    against = f"{peer / time:8.2f}" if peer else f"{'-':>8}"
    no_adapter = (base or {}).get("us", {}).get(system)
    ratio = f"{time / no_adapter:9.3f}" if no_adapter else f"{'-':>9}"
    mib = result["peak_bytes"][system] / 2**20
    figures = f"{time:9.1f} {floor:9.1f} {floor / time:7.2f} {ratio} {against} {mib:8.1f}"
    return f"{head} {figures}   {result['error'][system]:.1e}"


HEADER = (
    f"{'shape':>12} {'T':>6} {'adapters':>14} {'system':>11} {'us':>9} {'floor us':>9} {'share':>7} "
    f"{'x no LoRA':>9} {'x gr.mm':>8} {'MiB':>8}   worst row"
)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    reason = moelora._load.cuda_unavailable_reason()
    if reason:
        print(f"moelora.bench needs a GPU: {reason}")
        return 1
    device = torch.device("cuda")
    limit = None if args.workspace_limit is None else int(args.workspace_limit * 2**20)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, moelora {moelora.build_info()}")
    absent = {system: reason for system in args.systems if (reason := missing(system))}
    for system, reason in absent.items():
        print(f"{system}: {reason}")
    args.systems = [system for system in args.systems if system not in absent]
    matmul = None
    if args.pace != "turns":
        matmul = matmul_tflops(args.pace, args.replays, device)
        print(f"bf16 matmul of 8192^3, {args.pace}: {matmul:.0f} TFLOP/s")
    print(HEADER, flush=True)
    results, wrong = [], 0
    with torch.inference_mode():
        for shape_name in args.shapes:
            without: dict[int, dict] = {}
            for adapters in args.adapters:
                weights = Weights(BENCH_SHAPES[shape_name], adapters, torch.bfloat16, device)
                for tokens in args.tokens:
                    problem = Problem(weights, tokens, limit)
                    result = time_problem(problem, args.systems, args.replays, args.pace)
                    result |= {"shape": shape_name, "tokens": tokens, "adapters": str(adapters)}
                    results.append(result)
                    if adapters.count == 0:
                        without[tokens] = result
                    for system in args.systems:
                        wrong += system not in result["us"] and system not in result["refused"]
                        print(line(result, system, without.get(tokens)), flush=True)
                    del problem
                del weights
                torch.cuda.empty_cache()
    _geometric_means(results, args.systems)
    if args.json:
        record = {
            "device": torch.cuda.get_device_name(), "build": moelora.build_info(), "pace": args.pace,
            "matmul_tflops": matmul, "results": results,
        }  # fmt: skip
        args.json.write_text(json.dumps(record, indent=1) + "\n")
        print(f"wrote {args.json}")
    if args.plot:
        from moelora.bench.plot import draw

        draw(results, args.plot)
        print(f"wrote {args.plot}")
    return 1 if wrong else 0


def _geometric_means(results: list[dict], systems: list[str]) -> None:
    for system in systems:
        shares = [result["floor_us"] / result["us"][system] for result in results if system in result["us"]]
        if shares:
            mean = math.exp(sum(map(math.log, shares)) / len(shares))
            print(f"geometric mean share of the floor, {system}: {mean:.3f}")


if __name__ == "__main__":
    sys.exit(main())
