"""Benchmark of the MoE-LoRA layer against its floor and its peers: `python -m moelora.bench --help`."""
