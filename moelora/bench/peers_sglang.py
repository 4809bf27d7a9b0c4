"""The row `sglang`: SGLang's Triton MoE runner, and with adapters its MoE LoRA hooks with virtual experts.

Only calls SGLang (github.com/sgl-project/sglang), nothing of it is copied. Written for 0.5.23.

Both are `MoeRunner.run` with the Triton backend, as `FusedMoE` and `FusedMoEWithLoRA` call it: gate_up GEMM, adapters
of gate_up added, activation, down GEMM, adapters of down added, sum over the experts. With adapters it is the path of
`--lora-use-virtual-experts` (each pair of adapter and expert is an expert of its own); SGLang's newer runner of
`--lora-backend triton_v2` is not here. Inside the timed call is what SGLang does in every layer: sorting pairs by
expert, and again by virtual expert. Outside is what it does once per step, the adapter of each token, and at load: its
buffers hold A of gate and up apart, so an A that both share is there twice.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor

from moelora.bench.peers import imported, local_experts, refusing
from moelora.lora import MoELoRA


@cache
def interface() -> SimpleNamespace:
    """Everything of SGLang that is called here, by name, with its process-wide configuration set up for one rank.

    Raises:
        Refused: it is not installed, or this version has it elsewhere.
    """
    places = {
        "get_context": "sglang.srt.runtime_context",
        "get_parallel": "sglang.srt.runtime_context",
        "publish": "sglang.srt.runtime_context",
        "SpawnRanks": "sglang.srt.runtime_context",
        "ServerArgs": "sglang.srt.server_args",
        "MoeRunner": "sglang.srt.layers.moe.moe_runner.runner",
        "MoeRunnerConfig": "sglang.srt.layers.moe.moe_runner.base",
        "MoeRunnerBackend": "sglang.srt.layers.moe.utils",
        "TritonMoeQuantInfo": "sglang.srt.layers.moe.moe_runner.triton",
        "StandardDispatchOutput": "sglang.srt.layers.moe.token_dispatcher.standard",
        "StandardTopKOutput": "sglang.srt.layers.moe.topk",
        "LoRAInfo": "sglang.srt.lora.lora_moe_runners",
    }
    with refusing("sglang"):
        sglang = imported(places)
        if not sglang.get_context().is_config_namespace_published("exec"):
            sglang.publish(sglang.ServerArgs(model_path="dummy"), role="test", ranks=sglang.SpawnRanks(world_rank=0))
            sglang.get_parallel().override_permanently(tp_group=None)
        return sglang


class SglangLayer:
    """One step of a layer in SGLang: SwiGLU, adapters of scale 1.

    Args:
        num_experts: experts of the whole model; the first ones are local.
        adapter_ids: [T], -1 for none; None without adapters.
    """

    def __init__(self, num_experts: int, adapter_ids: Tensor | None = None, num_slots: int = 0) -> None:
        self.num_experts, self.num_slots = num_experts, num_slots
        self.token_slots = None if adapter_ids is None else adapter_ids.int()
        self.infos: dict[int, object] = {}
        self.places: Tensor | None = None

    def __call__(
        self, x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, lora: MoELoRA | None = None
    ) -> Tensor:
        """out [T, H] from x [T, H], w13 [E, 2I, H], w2 [E, H, I] and topk [T, K]; foreign ids are E or more.

        Raises:
            Refused: it cannot do this call here.
        """
        sglang, local = interface(), w13.shape[0]
        if self.num_experts > local:
            # SGLang's dispatcher maps ids to local ones in every layer, by a table that it makes at load.
            if self.places is None:
                self.places = local_experts(self.num_experts, local, x.device)
            topk_ids = self.places[topk_ids]
        with refusing("sglang"):
            config = sglang.MoeRunnerConfig(
                num_experts=self.num_experts, num_local_experts=local, hidden_size=x.shape[1],
                intermediate_size_per_partition=w2.shape[2], top_k=topk_ids.shape[1], params_dtype=x.dtype,
                activation="silu", inplace=False,
            )  # fmt: skip
            runner = sglang.MoeRunner(sglang.MoeRunnerBackend.TRITON, config, lora_enabled=lora is not None)
            topk = sglang.StandardTopKOutput(topk_weights, topk_ids, None)
            result = runner.run(
                sglang.StandardDispatchOutput(x, None, topk),
                sglang.TritonMoeQuantInfo(w13_weight=w13, w2_weight=w2),
                lora_info=None if lora is None else self._info(lora),
            )
            return result.hidden_states

    def _info(self, lora: MoELoRA) -> object:
        """What SGLang's layer knows of its adapters and of the batch."""
        key = id(lora)
        if key not in self.infos:
            rank = lora.down_a.shape[2]
            gate_up_a = lora.gate_up_a
            if gate_up_a.shape[2] == lora.gate_up_b.shape[3]:
                gate_up_a = gate_up_a.repeat(1, 1, 2, 1)
            slots = torch.full((self.num_slots,), rank, dtype=torch.int32, device=lora.device)
            tokens = torch.arange(self.token_slots.shape[0] + 1, dtype=torch.int32, device=lora.device)
            self.infos[key] = interface().LoRAInfo(
                gate_up_lora_a_weights=gate_up_a, gate_up_lora_b_weights=lora.gate_up_b,
                down_lora_a_weights=lora.down_a, down_lora_b_weights=lora.down_b,
                seg_indptr=tokens, req_to_lora=self.token_slots, lora_ranks=slots,
                adapter_enabled=torch.ones_like(slots), token_lora_mapping=self.token_slots, max_lora_rank=rank,
                num_experts=self.num_experts, has_active_lora=True, experts_shared_outer_loras=False,
                lora_use_virtual_experts=True,
            )  # fmt: skip
        return self.infos[key]
