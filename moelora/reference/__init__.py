"""The layer, its routing and its sort in plain PyTorch: the oracle of tests, examples and benchmarks.

Written to be read next to the specification, from which it takes its shape letters: T tokens, K experts
per token, E experts (E_loc of them local), H hidden size, I intermediate size, L adapter slots, P = T*K
pairs. Everything runs on any device, and nothing here uses the compiled library.
"""

from moelora.reference.layer import (
    down_lora_delta_reference,
    gate_up_lora_delta_reference,
    moe_lora_reference,
)
from moelora.reference.routing import pack_topk_reference, route_reference, unpack_topk_reference
from moelora.reference.sort import MoeSortMaps, max_padded_rows, moe_sort_reference

__all__ = [
    "MoeSortMaps",
    "down_lora_delta_reference",
    "gate_up_lora_delta_reference",
    "max_padded_rows",
    "moe_lora_reference",
    "moe_sort_reference",
    "pack_topk_reference",
    "route_reference",
    "unpack_topk_reference",
]
