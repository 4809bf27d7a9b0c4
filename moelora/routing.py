"""`moelora.route`: which experts each token goes to, and with what weight."""

from torch import Tensor

from moelora import ops

# Options that a method has a use for; any other that is given is an error, never ignored.
_OPTIONS = {
    "softmax": set(),
    "renormalize": set(),
    "renormalize_naive": set(),
    "deepseek_v3": {"correction_bias", "n_group", "topk_group", "renormalize"},
    "llama4": set(),
    "topk": set(),
    "sigmoid": {"correction_bias", "renormalize"},
}
_RENORMALIZE_DEFAULT = {"deepseek_v3": True, "sigmoid": False}


def route(
    router_logits: Tensor,
    top_k: int,
    method: str = "renormalize",
    *,
    correction_bias: Tensor | None = None,
    n_group: int | None = None,
    topk_group: int | None = None,
    renormalize: bool | None = None,
    routed_scaling_factor: float = 1.0,
    num_valid_tokens: Tensor | None = None,
    packed: bool = False,
) -> tuple[Tensor | None, Tensor]:
    """Chooses `top_k` experts for every token.

    | method | what is compared | weight |
    |---|---|---|
    | "softmax" | softmax over all experts | that probability |
    | "renormalize" | logit | softmax over the chosen |
    | "renormalize_naive" | softmax over all experts | probability / sum of the chosen |
    | "deepseek_v3" | sigmoid(x) + bias inside the `topk_group` best of `n_group` groups | s, or s / sum of the chosen |
    | "llama4" | logit, top_k = 1 | sigmoid(logit) |
    | "topk" | logit | the logit |
    | "sigmoid" | sigmoid(x) (+ bias) | s, or s / sum of the chosen |

    Logits are compared in the dtype given, with fp32 maths; ties go to the smaller expert id. NaN counts as -inf, and
    every row gets distinct ids in 0..E-1 and finite weights whatever its logits.

    Args:
        router_logits: [T, E] bf16, fp16 or fp32; E up to 1024.
        top_k: K, 1..32.
        correction_bias: [E], added to the key but not to the weight ("deepseek_v3", "sigmoid").
        n_group, topk_group: groups of experts and how many of them a token may use ("deepseek_v3"; default 1).
        renormalize: divide by the sum of the chosen ("deepseek_v3": default True, "sigmoid": default False).
        routed_scaling_factor: multiplies the weights; give it here or to the forward, not to both.
        num_valid_tokens: int32 device scalar; rows from it on get id -1 and weight 0.
        packed: return the packed form from the same launch.

    Returns:
        (topk_weights [T, K] fp32, topk_ids [T, K] int32) in descending order of the key, or (None, packed [T, K]
        int32) to hand on as `topk_ids` with `topk_weights=None`.

    Raises:
        ValueError: an unknown method, an option the method has no use for, sizes out of range.
        TypeError: a wrong dtype.
    """
    given = {
        "correction_bias": correction_bias,
        "n_group": n_group,
        "topk_group": topk_group,
        "renormalize": renormalize,
    }
    for name, value in given.items():
        if value is not None and name not in _OPTIONS.get(method, given):
            raise ValueError(f"{name}: method {method!r} has no use for it")
    weights, ids = ops.routing(
        router_logits,
        top_k,
        method,
        correction_bias=correction_bias,
        n_group=1 if n_group is None else n_group,
        topk_group=1 if topk_group is None else topk_group,
        renormalize=_RENORMALIZE_DEFAULT.get(method, False) if renormalize is None else renormalize,
        routed_scaling_factor=routed_scaling_factor,
        num_valid_tokens=num_valid_tokens,
        packed=packed,
    )
    return (None, ids) if packed else (weights, ids)
