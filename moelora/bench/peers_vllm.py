"""The row `vllm`: vLLM's Triton MoE, and with adapters its `TritonExperts` with the ops of its MoE LoRA layer.

Only calls vLLM (github.com/vllm-project/vllm), nothing of it is copied. Written for 0.33.0.

Without adapters it is `fused_experts`. With adapters it is `TritonExperts.apply` with the context that its layers
(`FusedMoEWithLoRA`) give it: gate_up GEMM, adapters of gate_up added, activation, down GEMM, adapters of down added,
sum over the experts, on one stream unless VLLM_LORA_ENABLE_DUAL_STREAM=1 (vLLM's own default is 0). Inside the timed
call is what vLLM does in every layer: sorting pairs by expert, and again by (adapter, expert). Outside is what it does
once per step, the list of the adapters in the batch, and once per layer at load, the context.
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
    """Everything of vLLM that is called here, by name.

    Raises:
        Refused: it is not installed, or this version has it elsewhere.
    """
    fused_moe = "vllm.model_executor.layers.fused_moe"
    places = {
        "fused_experts": f"{fused_moe}.fused_moe",
        "FUSED_MOE_UNQUANTIZED_CONFIG": f"{fused_moe}.config",
        "FusedMoEConfig": f"{fused_moe}.config",
        "FusedMoEParallelConfig": f"{fused_moe}.config",
        "RoutingMethodType": f"{fused_moe}.config",
        "MoEActivation": f"{fused_moe}.activation",
        "MoELoRAContext": f"{fused_moe}.experts.lora_context",
        "TritonExperts": f"{fused_moe}.experts.triton_moe",
        "PunicaWrapperGPU": "vllm.lora.punica_wrapper.punica_gpu",
        "envs": "vllm",
    }
    with refusing("vllm"):
        return imported(places)


class VllmLayer:
    """One step of a layer in vLLM: SwiGLU, adapters of scale 1.

    Args:
        num_experts: experts of the whole model; the first ones are local.
        adapter_ids: [T], -1 for none; None without adapters.
    """

    def __init__(self, num_experts: int, adapter_ids: Tensor | None = None, num_slots: int = 0) -> None:
        self.num_experts, self.num_slots = num_experts, num_slots
        self.contexts: dict[int, object] = {}
        self.expert_map: Tensor | None = None
        if adapter_ids is None:
            return
        vllm, tokens = interface(), adapter_ids.shape[0]
        with refusing("vllm"):
            config = SimpleNamespace(max_loras=num_slots, specialize_active_lora=False)
            self.punica = vllm.PunicaWrapperGPU(tokens, tokens, adapter_ids.device, lora_config=config)
            self.punica.token_mapping_meta.prepare_tensors(adapter_ids)

    def __call__(
        self, x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, lora: MoELoRA | None = None
    ) -> Tensor:
        """out [T, H] from x [T, H], w13 [E, 2I, H], w2 [E, H, I] and topk [T, K]; foreign ids are E or more.

        Raises:
            Refused: it cannot do this call here.
        """
        vllm, local = interface(), w13.shape[0]
        if self.num_experts > local and self.expert_map is None:
            # vLLM makes it at load.
            self.expert_map = local_experts(self.num_experts, local, x.device)
        with refusing("vllm"):
            if lora is None:
                return vllm.fused_experts(
                    x, w13, w2, topk_weights, topk_ids, global_num_experts=self.num_experts, expert_map=self.expert_map
                )
            experts = self._experts(x, w13, topk_ids.shape[1], lora)
            activation = vllm.MoEActivation.SILU
            sizes = experts.workspace_shapes(
                x.shape[0], w13.shape[1], x.shape[1], topk_ids.shape[1], self.num_experts, local, None, activation
            )
            workspace13, workspace2, out = (x.new_empty(size) for size in sizes)
            experts.apply(
                output=out, hidden_states=x, w1=w13, w2=w2, topk_weights=topk_weights, topk_ids=topk_ids,
                activation=activation, global_num_experts=self.num_experts, expert_map=self.expert_map, a1q_scale=None,
                a2_scale=None, workspace13=workspace13, workspace2=workspace2, expert_tokens_meta=None,
                apply_router_weight_on_input=False,
            )  # fmt: skip
            return out

    def _experts(self, x: Tensor, w13: Tensor, top_k: int, lora: MoELoRA) -> object:
        """vLLM's kernel object of the layer that `lora` belongs to."""
        key = id(lora)
        if key not in self.contexts:
            vllm, local = interface(), w13.shape[0]
            experts = vllm.TritonExperts(
                vllm.FusedMoEConfig(
                    num_experts=self.num_experts, experts_per_token=top_k, hidden_dim=x.shape[1],
                    intermediate_size=w13.shape[1] // 2, num_local_experts=local, num_logical_experts=self.num_experts,
                    activation=vllm.MoEActivation.SILU, device=x.device,
                    routing_method=vllm.RoutingMethodType.Renormalize,
                    moe_parallel_config=vllm.FusedMoEParallelConfig.make_no_parallel(), in_dtype=x.dtype,
                    is_lora_enabled=True,
                ),
                vllm.FUSED_MOE_UNQUANTIZED_CONFIG,
            )  # fmt: skip
            experts.set_lora_context(self._context(lora, top_k, local))
            self.contexts[key] = experts
        return self.contexts[key]

    def _context(self, lora: MoELoRA, top_k: int, local: int) -> object:
        vllm = interface()
        # One A for gate and up is vLLM's layout of adapters on fused parameters: one slice, as in FusedMoE3DWithLoRA.
        rank = lora.gate_up_b.shape[3]
        slices = lora.gate_up_a.shape[2] // rank
        two_streams = vllm.envs.VLLM_LORA_ENABLE_DUAL_STREAM
        return vllm.MoELoRAContext(
            w13_lora_a_stacked=lora.gate_up_a.split(rank, dim=2),
            w13_lora_b_stacked=lora.gate_up_b.chunk(slices, dim=2),
            w2_lora_a_stacked=(lora.down_a,),
            w2_lora_b_stacked=(lora.down_b,),
            adapter_enabled=torch.ones(self.num_slots + 1, dtype=torch.int32, device=lora.device),
            max_loras=self.num_slots,
            top_k=top_k,
            w13_num_slices=slices,
            fully_sharded=False,
            tp_rank=0,
            tp_size=1,
            local_num_experts=local,
            punica_wrapper=self.punica,
            use_tuned_config=bool(vllm.envs.VLLM_TUNED_CONFIG_FOLDER),
            aux_stream=torch.cuda.Stream() if two_streams else None,
            events=tuple(torch.cuda.Event() for _ in range(4)) if two_streams else None,
        )
