"""A pool of two slots serves a batch with three adapters coming and going, checked against the reference.

    python examples/adapter_pool.py [--device cuda]

Two MoE layers with random weights; the adapters are PEFT folders, written here. On CUDA each layer is captured in a
graph once, before anything is loaded, and replayed for every batch. docs/adapter_pool.md has the rules.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

import moelora
from moelora.pool import AdapterPool
from moelora.reference import moe_lora_reference
from moelora.testing import LayerInputs, Shape, check_close, random_layer

SHAPE = Shape(hidden=128, inter=96, experts=8, top_k=2)
BLOCKS = ["model.layers.0.mlp", "model.layers.1.mlp"]
RANKS = {"poet": 4, "lawyer": 16, "translator": 8}
TOKENS = 12
SIZES = {"num_experts": SHAPE.experts, "hidden_size": SHAPE.hidden, "intermediate_size": SHAPE.inter}


def write_adapter(folder: Path, rank: int) -> Path:
    """A random adapter as PEFT saves one with a module for each expert."""
    tensors = {}
    for block in BLOCKS:
        for expert in range(SHAPE.experts):
            for module in ("gate_proj", "up_proj", "down_proj"):
                widths = (SHAPE.inter, SHAPE.hidden) if module == "down_proj" else (SHAPE.hidden, SHAPE.inter)
                path = f"base_model.model.{block}.experts.{expert}.{module}"
                tensors[f"{path}.lora_A.weight"] = torch.randn(rank, widths[0]) / widths[0] ** 0.5
                tensors[f"{path}.lora_B.weight"] = torch.randn(widths[1], rank) / rank**0.5
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder


def make_step(layers: list[LayerInputs], pool: AdapterPool, ids: Tensor) -> Callable[[], list[Tensor]]:
    """A function that computes both layers for the slots in `ids`; on CUDA a replay of what is captured here."""

    def step() -> list[Tensor]:
        return [
            moelora.fused_moe_lora(*layer.arguments, lora=lora, adapter_ids=ids)
            for layer, lora in zip(layers, pool.layers, strict=True)
        ]

    if not ids.is_cuda:
        return step
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()

    def replay() -> list[Tensor]:
        graph.replay()
        return [output.clone() for output in outputs]

    return replay


def matches(
    layers: list[LayerInputs], folders: dict[str, Path], names: list[str | None], results: list[Tensor]
) -> bool:
    """Whether every row is what the reference gives with the adapters read anew."""
    distinct = [name for name in dict.fromkeys(names) if name is not None]
    device, dtype = results[0].device, results[0].dtype
    ids = torch.tensor([-1 if name is None else distinct.index(name) for name in names], device=device)
    for block, layer, result in zip(BLOCKS, layers, results, strict=True):
        loras = [moelora.load_peft_adapter(folders[name], block, **SIZES, dtype=dtype) for name in distinct]
        lora = moelora.MoELoRA.stack(loras).to(device) if loras else None
        expected, plain = (
            moe_lora_reference(*layer.arguments, lora=lora, adapter_ids=ids, dtype=precision)
            for precision in (torch.float64, None)
        )
        try:
            check_close(result, expected, plain=plain)
        except AssertionError as error:
            print(f"  {block}: {error}")
            return False
    return True


@torch.inference_mode()
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    device = parser.parse_args(argv).device
    torch.manual_seed(0)
    layers = [random_layer(TOKENS, SHAPE, dtype=torch.bfloat16, device=device, seed=seed) for seed in range(2)]

    pool = AdapterPool(2, 16, BLOCKS, **SIZES, dtype=torch.bfloat16, device=device)
    print(f"{pool}\n")
    ids = torch.full((TOKENS,), -1, dtype=torch.int32, device=device)
    step = make_step(layers, pool, ids)
    ok = True

    with tempfile.TemporaryDirectory() as temporary:
        folders = {name: write_adapter(Path(temporary, name), rank) for name, rank in RANKS.items()}

        def serve(names: list[str | None]) -> None:
            nonlocal ok
            # The adapters are pinned inside, so that other threads may load and evict meanwhile.
            with pool.use(names) as slots:
                ids.copy_(slots)
                results = step()
            fine = matches(layers, folders, names, results)
            ok = ok and fine
            kinds = ", ".join(name or "no adapter" for name in dict.fromkeys(names))
            print(f"  a batch of {kinds}: {'right' if fine else 'WRONG'}")

        serve([None] * TOKENS)
        for name in ("poet", "lawyer"):
            print(f"load {name!r} into slot {pool.load(name, folders[name])}")
        serve(["poet", None, "lawyer", "poet"] * 3)
        pool.evict("poet")
        print("evict 'poet'")
        serve([None, "lawyer", "lawyer"] * 4)
        print(f"load 'translator' into slot {pool.load('translator', folders['translator'])}")
        serve(["translator", "lawyer", None] * 4)
        print(f"load 'poet' into slot {pool.load('poet', folders['poet'])}, least recently used of the two")
        serve(["poet", None, None] * 4)
    print(f"\n{pool}\n{'ok: every row matches' if ok else 'FAILED'}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
