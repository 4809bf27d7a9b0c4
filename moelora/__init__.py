"""moelora: MoE layers with LoRA adapters on the experts, as fused PyTorch ops for CPU and CUDA."""

from moelora import _load

_load.load_library()

from moelora import _fake, ops  # noqa: E402  (needs the library)
from moelora._load import build_info, cuda_unavailable_reason  # noqa: E402
from moelora._streams import set_two_stream_max_tokens  # noqa: E402
from moelora._version import __version__  # noqa: E402
from moelora.explain import explain  # noqa: E402
from moelora.fused_moe_lora import (  # noqa: E402
    fused_moe_lora,
    fused_moe_lora_single_stream,
    fused_moe_lora_two_stream,
)
from moelora.lora import MoELoRA  # noqa: E402
from moelora.peft import load_peft_adapter  # noqa: E402
from moelora.pool import AdapterPool, UnknownAdapterError  # noqa: E402
from moelora.routing import route  # noqa: E402
from moelora.weights import swap_gate_up  # noqa: E402

_fake.register()

__all__ = [
    "AdapterPool",
    "MoELoRA",
    "UnknownAdapterError",
    "__version__",
    "build_info",
    "cuda_unavailable_reason",
    "explain",
    "fused_moe_lora",
    "fused_moe_lora_single_stream",
    "fused_moe_lora_two_stream",
    "load_peft_adapter",
    "ops",
    "route",
    "set_two_stream_max_tokens",
    "swap_gate_up",
]
