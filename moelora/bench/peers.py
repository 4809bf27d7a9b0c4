"""Rows of other projects' layers, where those are installed. None of them has ever run where this was written.

Imported on first use. What stops a peer (it is not installed, its interface is another one, it does not do what is
asked) becomes one line of the output; its results are checked against the oracle as everyone's are.

vLLM: `fused_experts`, its Triton MoE, whose first five arguments have stayed the same over many releases; lines
without adapters only. What its LoRA layers add (`fused_moe_lora` with its alignment and its metadata), and all of
SGLang's MoE-LoRA, are internals whose modules and arguments differ between releases: a row of them could not be
checked here, so there is none.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache

from torch import Tensor


class Refused(Exception):
    """Why a peer gives no row, in one line."""


FOREIGN = ("vllm",)


def missing(system: str) -> str | None:
    """Why `system` cannot run at all here, None where it can be tried."""
    try:
        if system == "vllm":
            _vllm()
    except Refused as reason:
        return str(reason)
    return None


def one_line(error: Exception) -> str:
    """What to print of an exception that a peer ended with."""
    text = str(error).strip().split("\n")[0]
    if isinstance(error, Refused):
        return text
    return f"{type(error).__name__}: {text}"


@cache
def _vllm() -> Callable:
    try:
        return importlib.import_module("vllm.model_executor.layers.fused_moe.fused_moe").fused_experts
    except ModuleNotFoundError as error:
        if error.name == "vllm":
            raise Refused("not installed") from None
        raise Refused(one_line(error)) from error
    except Exception as error:
        raise Refused(one_line(error)) from error


def vllm_layer(
    x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, *, num_experts: int, adapters: int
) -> Tensor:
    """out [T, H] from vLLM's Triton MoE: SwiGLU, all experts local, no adapters.

    Raises:
        Refused: it cannot do this call here.
    """
    fused_experts = _vllm()
    if adapters:
        raise Refused("only lines without adapters")
    if num_experts != w13.shape[0]:
        raise Refused("only layers with all experts local")
    return fused_experts(x, w13, w2, topk_weights, topk_ids)
