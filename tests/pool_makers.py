"""Pools, adapters and adapter files for the tests of AdapterPool, and what batches must give."""

import json

import torch
from safetensors.torch import save_file

import moelora
from moelora import MoELoRA
from moelora.peft import load_peft_adapter
from moelora.pool import AdapterPool
from moelora.testing import Shape, random_layer, random_lora

SHAPE = Shape(hidden=64, inter=32, experts=4, top_k=2)
BLOCKS = ["model.layers.3.mlp", "model.layers.10.mlp"]
MAX_RANK = 16
STACKS = ("gate_up_a", "gate_up_b", "down_a", "down_b", "scaling", "ranks")


def make_pool(device, dtype, num_slots=3, max_rank=MAX_RANK, blocks=BLOCKS, shape=SHAPE, **options):
    sizes = {"num_experts": shape.experts, "hidden_size": shape.hidden, "intermediate_size": shape.inter}
    return AdapterPool(num_slots, max_rank, blocks, **sizes, dtype=dtype, device=device, **options)


def make_adapter(seed, dtype, rank=8, layers=2, shape=SHAPE, **options):
    """One MoELoRA per layer, on the host."""
    return [random_lora(1, shape, rank, dtype=dtype, seed=100 * seed + layer, **options) for layer in range(layers)]


def make_adapters(count, dtype, shape=SHAPE):
    """By name, of ranks 1 to MAX_RANK; the first has the largest."""
    ranks = [MAX_RANK, *(1 + (5 * index) % MAX_RANK for index in range(1, count))]
    return {f"adapter {seed}": make_adapter(seed, dtype, rank, shape=shape) for seed, rank in enumerate(ranks)}


def peft_tensors(rank=8, blocks=BLOCKS, seed=0, shape=SHAPE):
    """A file with modules for each expert."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for block in blocks:
        for expert in range(shape.experts):
            for projection in ("gate_proj", "up_proj", "down_proj"):
                widths = shape.hidden, shape.inter
                inputs, outputs = reversed(widths) if projection == "down_proj" else widths
                path = f"base_model.model.{block}.experts.{expert}.{projection}"
                tensors[f"{path}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / inputs**0.5
                tensors[f"{path}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) / rank**0.5
    return tensors


def peft_config(rank=8, **changes):
    return {"peft_type": "LORA", "r": rank, "lora_alpha": 3 * rank // 2} | changes


def write_folder(folder, tensors, config):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def load_folder(folder, dtype, device="cpu", shape=SHAPE):
    """The adapter in a folder, one MoELoRA per layer."""
    sizes = {"num_experts": shape.experts, "hidden_size": shape.hidden, "intermediate_size": shape.inter}
    return [load_peft_adapter(folder, block, **sizes, dtype=dtype, device=device) for block in BLOCKS]


def bits(pool, slot=None):
    """A copy of all that the pool holds, or of one slot."""
    tensors = [getattr(layer, name) for layer in pool.layers for name in STACKS]
    return [(tensor if slot is None else tensor[slot]).cpu().clone() for tensor in tensors]


def same_bits(some, others):
    # NaN is not equal to itself, its bytes are.
    return all(
        torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        for one, other in zip(some, others, strict=True)
    )


def poison(pool):
    """NaN in every stack, as if other adapters had left the worst; ranks and scaling stay."""
    for layer in pool.layers:
        for name in STACKS[:4]:
            getattr(layer, name).fill_(torch.nan)


def run(layer, lora=None, adapter_ids=None, **options):
    with torch.inference_mode():
        return moelora.fused_moe_lora(*layer.arguments, lora=lora, adapter_ids=adapter_ids, **options)


def make_layer(device, dtype, tokens=12, seed=0):
    return random_layer(tokens, SHAPE, dtype=dtype, device=device, seed=seed)


class Library:
    """Adapters (by name) in stacks that no pool made, and from them what any batch of a pool must give."""

    def __init__(self, device, adapters):
        self.adapters = adapters
        self.names = list(adapters)
        # One slot more than adapters: an empty one.
        by_layer = [[*layer, None] for layer in zip(*adapters.values(), strict=True)]
        self._stacks = [MoELoRA.stack(layer).to(device) for layer in by_layer]

    def lora(self, index, num_slots, slots):
        """Layer `index` with each adapter (by name) in its slot, as a pool of `num_slots` should have it."""
        order = torch.full((num_slots,), len(self.names))
        for name, slot in slots.items():
            order[slot] = self.names.index(name)
        stacks = self._stacks[index]
        order = order.to(stacks.device)
        return MoELoRA(*(getattr(stacks, name)[order] for name in STACKS))


def random_names(library, pool, choose, tokens):
    """Names of a batch: base rows and up to as many adapters as the pool has slots less one, loaded or not."""
    likely = [name for name in pool.loaded()] or library.names
    few = [choose.choice(likely) for _ in range(choose.randint(0, pool.num_slots - 1))]
    if choose.random() < 0.1:
        few.append(choose.choice(library.names))
    return [choose.choice([None, *few]) for _ in range(tokens)]
