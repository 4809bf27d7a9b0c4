"""Routing in plain PyTorch: logits to expert ids and weights, and the packed form of the two."""

from __future__ import annotations

import torch
from torch import Tensor

_FP32_MAX = torch.finfo(torch.float32).max
_METHODS = (
    "softmax",
    "renormalize",
    "renormalize_naive",
    "deepseek_v3",
    "llama4",
    "topk",
    "sigmoid",
)
_SOFTMAX_METHODS = ("softmax", "renormalize_naive")
_SIGMOID_METHODS = ("deepseek_v3", "sigmoid")


def route_reference(
    router_logits: Tensor,
    top_k: int,
    method: str = "renormalize",
    *,
    correction_bias: Tensor | None = None,
    n_group: int | None = None,
    topk_group: int | None = None,
    renormalize: bool | None = None,
    routed_scaling_factor: float = 1.0,
    num_valid_tokens: Tensor | int | None = None,
    packed: bool = False,
) -> tuple[Tensor | None, Tensor]:
    """Chosen experts of router_logits [T, E]: weights fp32 [T, K] and ids int32 [T, K].

    Rows are in descending order of the selection key, the smaller id first among equals. Keys are fp32, so
    that probabilities that underflow are equal. Weights are computed in float64 and rounded once. With
    packed=True: None and the packed form, int32 [T, K].

    Raises:
        ValueError: an unknown method, an option that the method has no use for, K > E, n_group that
            does not divide E, or K beyond the experts of the chosen groups.
    """
    num_tokens, num_experts = router_logits.shape
    _check_options(method, num_experts, top_k, correction_bias, n_group, topk_group, renormalize)
    # NaN counts as -inf, +inf as the largest fp32.
    logits = router_logits.float().nan_to_num(nan=-torch.inf, posinf=_FP32_MAX, neginf=-torch.inf)
    key = logits
    if method in _SOFTMAX_METHODS:
        key = torch.softmax(logits, dim=1).nan_to_num(nan=0.0)  # a row of -inf is 0/0 throughout
    if method in _SIGMOID_METHODS:
        key = torch.sigmoid(logits)
        if correction_bias is not None:
            key = (key + correction_bias.float()).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        key = _only_best_groups(key, n_group or 1, topk_group or 1)
    ids = _descending(key)[:, :top_k]
    weights = _weights(method, logits.double(), ids, renormalize)
    # Without a usable key the weight is 0, and so is 0/0, the softmax of nothing but -inf.
    weights = weights.masked_fill(key.gather(1, ids) == -torch.inf, 0.0).nan_to_num(nan=0.0)
    weights = (weights * routed_scaling_factor).clamp(-_FP32_MAX, _FP32_MAX).float()
    ids = ids.int()
    if num_valid_tokens is not None:
        padding = torch.arange(num_tokens, device=ids.device) >= num_valid_tokens
        weights = weights.masked_fill(padding[:, None], 0.0)
        ids = ids.masked_fill(padding[:, None], -1)
    if packed:
        return None, pack_topk_reference(weights, ids)
    return weights, ids


def pack_topk_reference(topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """int32 [T, K]: the id in the high half, the weight's bf16 bits in the low half.

    Ids outside -1..32767 name no expert and become -1.
    """
    bits = topk_weights.to(torch.bfloat16).view(torch.int16).int() & 0xFFFF
    ids = topk_ids.masked_fill((topk_ids < -1) | (topk_ids > 32767), -1).int()
    return (ids << 16) | bits


def unpack_topk_reference(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Weights fp32 [T, K] and ids int32 [T, K] of the packed form."""
    weights = (packed << 16).view(torch.float32)
    return weights, packed >> 16


def _check_options(
    method: str,
    num_experts: int,
    top_k: int,
    correction_bias: Tensor | None,
    n_group: int | None,
    topk_group: int | None,
    renormalize: bool | None,
) -> None:
    if method not in _METHODS:
        raise ValueError(f"method: expected one of {', '.join(_METHODS)}, got {method!r}")
    for name, option, users in (
        ("correction_bias", correction_bias, _SIGMOID_METHODS),
        ("renormalize", renormalize, _SIGMOID_METHODS),
        ("n_group", n_group, ("deepseek_v3",)),
        ("topk_group", topk_group, ("deepseek_v3",)),
    ):
        if option is not None and method not in users:
            raise ValueError(f"{name}: method {method!r} has no use for it")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k: expected 1..{num_experts}, got {top_k}")
    if method == "llama4" and top_k != 1:
        raise ValueError(f"top_k: expected 1 for method 'llama4', got {top_k}")
    n_group, topk_group = (1 if option is None else option for option in (n_group, topk_group))
    if n_group < 1 or num_experts % n_group:
        raise ValueError(f"n_group: expected a divisor of {num_experts} experts, got {n_group}")
    if not 1 <= topk_group <= n_group:
        raise ValueError(f"topk_group: expected 1..{n_group}, got {topk_group}")
    if top_k > topk_group * (num_experts // n_group):
        raise ValueError(
            f"top_k: expected at most the {topk_group * (num_experts // n_group)} experts of "
            f"{topk_group} groups, got {top_k}"
        )


def _descending(key: Tensor) -> Tensor:
    """Indices of the last dim by descending key; equals keep their order."""
    return key.sort(dim=-1, descending=True, stable=True).indices


def _only_best_groups(key: Tensor, n_group: int, topk_group: int) -> Tensor:
    """key [T, E] with -inf outside each token's topk_group best groups."""
    groups = key.unflatten(1, (n_group, -1))
    best_two = groups.topk(min(2, groups.shape[2]), dim=2).values
    chosen = _descending(best_two.sum(dim=2))[:, :topk_group]
    is_chosen = torch.zeros(key.shape[0], n_group, dtype=torch.bool, device=key.device)
    is_chosen.scatter_(1, chosen, True)
    return groups.masked_fill(~is_chosen[:, :, None], -torch.inf).flatten(1)


def _weights(method: str, logits: Tensor, ids: Tensor, renormalize: bool | None) -> Tensor:
    """Weights [T, K] of the chosen ids before scaling; logits [T, E] are float64 without NaN or +inf."""
    chosen = logits.gather(1, ids)
    if method == "topk":
        return chosen
    if method == "llama4":
        return torch.sigmoid(chosen)
    if method in _SIGMOID_METHODS:
        scores = torch.sigmoid(chosen)
        if renormalize is None:
            renormalize = method == "deepseek_v3"
        return scores / (scores.sum(dim=1, keepdim=True) + 1e-20) if renormalize else scores
    if method == "softmax":
        return torch.softmax(logits, dim=1).gather(1, ids)
    # Dividing the chosen probabilities by their sum is the softmax over the chosen.
    return torch.softmax(chosen, dim=1)
