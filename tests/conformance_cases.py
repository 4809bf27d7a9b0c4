"""The cases of tests/conformance: canonical weights, call arguments, adapters and expected outputs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from moelora.lora import MoELoRA
from moelora.peft import load_peft_adapter

FOLDER = Path(__file__).parent / "conformance"
CASE_NAMES = sorted(path.parent.name for path in FOLDER.glob("*/case.json"))

# Per-expert files of these adapters name the block otherwise than the fused model they are used on.
_OTHER_BLOCK_PATHS = {
    ("convert_mixtral_t17", "v4_r4"): "model.layers.0.block_sparse_moe",
    ("convert_mixtral_t17", "v4_down_only_r8"): "model.layers.0.block_sparse_moe",
}


@dataclass(frozen=True)
class Weights:
    """w13 [E, 2*I, H] in `gate_up_layout`, w2 [E, H, I], biases [E, 2*I] and [E, H] or None; float32."""

    w13: Tensor
    w2: Tensor
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    gate_up_layout: str


@dataclass(frozen=True)
class Case:
    """One folder of tests/conformance. Tensors are float32 as stored; ids int64."""

    name: str
    info: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters that are plain LoRA, in the order that `mixed.adapter_index` counts in."""
        return [adapter["name"] for adapter in self.info["adapters"] if adapter["plain_lora"]]

    @property
    def refused_adapters(self) -> list[str]:
        """Names of the adapters with more than A and B."""
        return [adapter["name"] for adapter in self.info["adapters"] if not adapter["plain_lora"]]

    @property
    def hidden_states(self) -> Tensor:
        return self.tensors["hidden_states"]

    @property
    def topk_ids(self) -> Tensor:
        return self.tensors["topk_ids"]

    @property
    def topk_weights(self) -> Tensor:
        return self.tensors["topk_weights"]

    @cached_property
    def weights(self) -> Weights:
        layout = self.info["experts_layout"]
        if layout["kind"] == "per_expert":
            w13 = torch.stack([torch.cat([self._expert(e, "gate"), self._expert(e, "up")]) for e in self._experts])
            w2 = torch.stack([self._expert(e, "down") for e in self._experts])
            return Weights(w13, w2, None, None, "gate_up")
        w13, w2 = self.tensors["experts.gate_up_proj"], self.tensors["experts.down_proj"]
        if layout["gate_up_proj"]["axes"] == "expert,in,out":
            w13, w2 = w13.transpose(1, 2).contiguous(), w2.transpose(1, 2).contiguous()
        return Weights(
            w13,
            w2,
            self.tensors.get("experts.gate_up_proj_bias"),
            self.tensors.get("experts.down_proj_bias"),
            self.gate_up_layout,
        )

    @property
    def gate_up_layout(self) -> str:
        out_axis = self.info["experts_layout"].get("gate_up_proj", {}).get("out_axis", "")
        return "interleaved" if out_axis.startswith("interleaved") else "gate_up"

    @property
    def forward_options(self) -> dict[str, Any]:
        """Keyword arguments of the forward that the case's model asks for, biases and layout included."""
        options: dict[str, Any] = {
            "w13_bias": self.weights.w13_bias,
            "w2_bias": self.weights.w2_bias,
            "gate_up_layout": self.weights.gate_up_layout,
            "apply_router_weight_on_input": self.info["routing"]["weights_applied_to"] == "expert input",
            "routed_scaling_factor": self.info["routing"]["routed_output_scale"],
        }
        activation = self.info["activation"]
        if activation["kind"] == "clamped_swiglu":
            options |= {
                "activation": "swigluoai",
                "activation_alpha": activation["alpha"],
                "activation_limit": activation["limit"],
            }
        return options

    @property
    def route_options(self) -> dict[str, Any]:
        """`method` and the keyword arguments of `route` for the case's model."""
        routing, architecture = self.info["routing"], self.info["architecture"]
        if routing["scoring"] == "sigmoid":
            options = {
                "method": "sigmoid",
                "correction_bias": self.tensors["e_score_correction_bias"],
                "renormalize": routing["norm_topk_prob"],
            }
            if architecture in ("deepseek_v3", "glm4_moe"):
                options["method"] = "deepseek_v3"
                options["n_group"] = routing["n_group"]
                options["topk_group"] = routing["topk_group"]
                options["routed_scaling_factor"] = routing["routed_scaling_factor"]
            return options
        methods = {
            "softmax over all experts, then top-k": "renormalize_naive" if routing["norm_topk_prob"] else "softmax",
            "top-k over logits, then softmax over the chosen": "renormalize",
            "top-k over logits, then sigmoid of the chosen": "llama4",
        }
        return {"method": methods[routing["scoring"]]}

    def adapter_folder(self, adapter: str) -> Path:
        return FOLDER / self.name / self._adapter_info(adapter)["folder"]

    def block_path(self, adapter: str) -> str:
        """The block's path as the adapter's file names it."""
        return _OTHER_BLOCK_PATHS.get((self.name, adapter), self.info["block_path"])

    @property
    def sizes(self) -> dict[str, int]:
        """The loader's size arguments."""
        shapes = self.info["shapes"]
        return {"num_experts": shapes["E"], "hidden_size": shapes["H"], "intermediate_size": shapes["I"]}

    def load_options(self, adapter: str) -> dict[str, Any]:
        """Keyword arguments of the loader; the side of lora_A only where the widths do not settle it."""
        info = self._adapter_info(adapter)
        options: dict[str, Any] = {**self.sizes, "gate_up_layout": self.gate_up_layout}
        if info.get("side_decided_by", "widths") != "widths":
            options["lora_a_side"] = info["lora_A_side"]
        return options

    def load_adapter(self, adapter: str, dtype: torch.dtype = torch.float32, **options: Any) -> MoELoRA:
        return load_peft_adapter(
            self.adapter_folder(adapter),
            self.block_path(adapter),
            dtype=dtype,
            **(self.load_options(adapter) | options),
        )

    def expected(self, adapter: str | None = None) -> Tensor:
        """The routed output [T, H] with that adapter on every token, or without any."""
        return self.tensors["expected.base" if adapter is None else self._adapter_info(adapter)["expected"]]

    @property
    def mixed_adapter_ids(self) -> Tensor:
        """int32 [T]: index into `adapters`, -1 for none."""
        return self.tensors["mixed.adapter_index"]

    @property
    def expected_mixed(self) -> Tensor:
        return self.tensors["expected.mixed"]

    @property
    def _experts(self) -> range:
        return range(self.info["shapes"]["E"])

    def _expert(self, expert: int, projection: str) -> Tensor:
        module = self.info["experts_layout"]["names"][projection]
        return self.tensors[f"experts.{expert}.{module}.weight"]

    def _adapter_info(self, adapter: str) -> dict[str, Any]:
        return next(info for info in self.info["adapters"] if info["name"] == adapter)


@cache
def load_case(name: str) -> Case:
    info = json.loads((FOLDER / name / "case.json").read_text(encoding="utf-8"))
    return Case(name, info, load_file(FOLDER / name / "tensors.safetensors"))


def adapter_cases(*, refused: bool = False) -> list[tuple[str, str]]:
    """(case, adapter) for every adapter that is plain LoRA, or for every one that is not."""
    return [
        (name, adapter)
        for name in CASE_NAMES
        for adapter in (load_case(name).refused_adapters if refused else load_case(name).adapters)
    ]


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected value."""
    return ((got.double() - expected.double()).abs().max() / expected.double().abs().max()).item()
