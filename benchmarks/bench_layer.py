"""The layer beside the composition of torch.nn.functional.grouped_mm, with the floor: Qwen3-30B-A3B shapes.

`python benchmarks/bench_layer.py --help` lists what can be chosen; `python -m moelora.bench` is the whole suite.
"""

import sys

from moelora.bench.__main__ import main

if __name__ == "__main__":
    defaults = ["--systems", "single", "auto", "grouped_mm", "--tokens", "1", "16", "64", "256", "2048"]
    sys.exit(main([*defaults, *sys.argv[1:]]))
