"""Two LoRA adapters and none, in one batch of a Qwen3-MoE, against transformers + PEFT one adapter at a time.

    python examples/quickstart.py [--device cuda] [--dtype bfloat16]

The model is random and small, so nothing is downloaded. PEFT attaches and saves two adapters on its
experts; moelora loads them and takes the place of the experts of every MoE block. Router, attention
and generation stay those of transformers. Needs `transformers` and `peft`.
"""

import argparse
import copy
import sys
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moelora

RANKS = {"A": 4, "B": 16}
ROWS = ["A", None, "B", "B", None, "A"]  # the adapter of each row of the batch; None: the plain model
PROMPT_TOKENS, NEW_TOKENS = 12, 8
# The logit difference that still counts as rounding, relative to the largest logit. A mixed-up adapter
# gives 0.1 and more.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}


def small_qwen3_moe() -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=128, num_hidden_layers=3, max_position_embeddings=256,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, initializer_range=0.1,
        num_experts=16, num_experts_per_tok=4, moe_intermediate_size=96, norm_topk_prob=True,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).eval().requires_grad_(False)
    for layer in model.model.layers:
        # A router with clear preferences, as a trained one has: where rounding swaps a token's 4th
        # and 5th expert, as it does between any two bf16 implementations, their weight is small.
        layer.mlp.gate.weight.mul_(4)
    return model


def save_adapter(model: Qwen3MoeForCausalLM, rank: int, folder: Path) -> None:
    """Attaches a random adapter to the experts' two 3-D parameters, and saves it as after training."""
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,  # B is random too; PEFT's default, B = 0, would change nothing
    )
    get_peft_model(copy.deepcopy(model), config).save_pretrained(folder)


class LoRAExperts(nn.Module):
    """Takes the place of `Qwen3MoeExperts`: same weights, same arguments, one call of moelora."""

    def __init__(self, experts: nn.Module, lora: moelora.MoELoRA, row_adapters: Tensor) -> None:
        super().__init__()
        self.gate_up_proj = experts.gate_up_proj  # [E, 2I, H], used in place
        self.down_proj = experts.down_proj  # [E, H, I]
        self.lora = lora
        self.row_adapters = row_adapters  # [batch] slot of each row, -1: none

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        # Tokens come flattened, row after row: each row's slot holds for all of its tokens.
        tokens_per_row = hidden_states.shape[0] // self.row_adapters.shape[0]
        adapter_ids = self.row_adapters.repeat_interleave(tokens_per_row)
        return moelora.fused_moe_lora(
            hidden_states, self.gate_up_proj, self.down_proj, top_k_weights, top_k_index,
            lora=self.lora, adapter_ids=adapter_ids,
        )  # fmt: skip


def use_moelora(model: Qwen3MoeForCausalLM, folders: list[Path], row_adapters: Tensor) -> None:
    """Loads the adapters in `folders` into slots 0, 1, ... and swaps the experts of every MoE block."""
    config = model.config
    for index, layer in enumerate(model.model.layers):
        loras = [
            moelora.load_peft_adapter(
                folder,
                f"model.layers.{index}.mlp",
                num_experts=config.num_experts,
                hidden_size=config.hidden_size,
                intermediate_size=config.moe_intermediate_size,
                dtype=model.dtype,
                device=model.device,
            )
            for folder in folders
        ]
        layer.mlp.experts = LoRAExperts(layer.mlp.experts, moelora.MoELoRA.stack(loras), row_adapters)


class Outputs(NamedTuple):
    logits: Tensor  # of the prompts, [batch, tokens, vocabulary] fp32
    tokens: Tensor  # what the model writes next, greedily, [batch, NEW_TOKENS]


def run(model: nn.Module, prompts: Tensor) -> Outputs:
    logits = model(prompts).logits.float()
    generated = model.generate(prompts, max_new_tokens=NEW_TOKENS, do_sample=False)
    return Outputs(logits, generated[:, prompts.shape[1] :])


def default_device() -> str:
    """The GPU where there is one that this build of moelora has kernels for."""
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        if f"{major}.{minor}a" in moelora.build_info()["archs"]:
            return "cuda"
    return "cpu"


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], help="default: cuda where moelora can use it, else cpu"
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="default: bfloat16 on cuda, float32 on cpu",
    )
    args = parser.parse_args(argv)
    args.device = args.device or default_device()
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no usable GPU here")
    if args.device == "cuda" and args.dtype == "float32":
        parser.error("float32 runs on the CPU only")
    return args


def report(expected: dict[str | None, Outputs], actual: Outputs, dtype: torch.dtype) -> bool:
    """Prints what each row gave both ways, and tells whether the differences are rounding."""
    plain_logits = expected[None].logits
    largest_logit = plain_logits.abs().max().item()
    limit = TOLERANCES[dtype] * largest_logit
    print(f"largest logit {largest_logit:.2f}; differences up to {limit:.1e} count as rounding\n")
    print("row  adapter      largest logit change by  largest logit difference of moelora")
    print("                  the adapter              from transformers + PEFT")
    largest_difference = 0.0
    for row, name in enumerate(ROWS):
        logits = expected[name].logits[row]
        change = (logits - plain_logits[row]).abs().max().item()
        difference = (actual.logits[row] - logits).abs().max().item()
        largest_difference = max(largest_difference, difference)
        label = "none" if name is None else f"{name}, rank {RANKS[name]}"
        print(f"{row:3}  {label:12} {change:<24.3f} {difference:.1e}")
    print("\nrow  generated by transformers + PEFT         by moelora")
    for row, name in enumerate(ROWS):
        columns = [
            " ".join(f"{token:3}" for token in outputs.tokens[row].tolist())
            for outputs in (expected[name], actual)
        ]
        print(f"{row:3}  {columns[0]:36} {columns[1]}")
    if dtype != torch.float32:
        print("\nGreedy tokens may part where two logits are within rounding of each other.")
    ok = largest_difference <= limit
    print("\nok: every row matches" if ok else "\nFAILED: a row differs by more than rounding")
    return ok


@torch.inference_mode()
def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    dtype = getattr(torch, args.dtype)
    # PEFT calls a function of transformers by its old name.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    torch.manual_seed(0)
    base = small_qwen3_moe().to(args.device, dtype)
    config = base.config
    prompts = torch.randint(config.vocab_size, (len(ROWS), PROMPT_TOKENS), device=args.device)
    print(f"moelora {moelora.__version__} on {args.device}, {args.dtype}: a Qwen3-MoE of", end=" ")
    print(f"{config.num_hidden_layers} layers and {config.num_experts} experts, {len(ROWS)} rows in a batch")

    with tempfile.TemporaryDirectory() as temporary:
        folders = {name: Path(temporary, name) for name in RANKS}
        for name, rank in RANKS.items():
            save_adapter(base, rank, folders[name])

        # What is expected: the batch through the plain model, through PEFT with A, through PEFT with B.
        expected = {None: run(base, prompts)}
        for name, folder in folders.items():
            expected[name] = run(PeftModel.from_pretrained(copy.deepcopy(base), folder), prompts)

        # What moelora does: the batch once, each row with its own adapter.
        slots = {None: -1} | {name: slot for slot, name in enumerate(RANKS)}
        row_adapters = torch.tensor([slots[name] for name in ROWS], device=args.device)
        model = copy.deepcopy(base)
        use_moelora(model, list(folders.values()), row_adapters)
        actual = run(model, prompts)

    return 0 if report(expected, actual, dtype) else 1


if __name__ == "__main__":
    sys.exit(main())
