"""The device memory of a pool: the stacks of all layers and slots, and the only code that writes into them."""

from __future__ import annotations

import torch
from torch import Tensor

from moelora.lora import MoELoRA
from moelora.pool.copy_stream import CopyStream
from moelora.pool.layout import LayerAdapter, SlotLayout, Stacks, place


class SlotStorage:
    """`num_slots` slots for each of `num_layers` layers, in tensors that stay where they are.

    `write` and `clear` are for one thread at a time; all memory that they need is allocated beforehand. Both return
    when the device has done it.
    """

    def __init__(self, num_layers: int, num_slots: int, layout: SlotLayout, device: torch.device) -> None:
        self.copy_stream = CopyStream(device)
        # Zeros, so that no byte of a free slot is NaN.
        self._stacks = [
            Stacks(*(torch.zeros(num_slots, *shape, dtype=layout.dtype, device=device) for shape in layout.shapes))
            for _ in range(num_layers)
        ]
        self._scaling = _SlotTable(num_layers, num_slots, torch.ones(3), device)
        self._ranks = _SlotTable(num_layers, num_slots, torch.zeros(2, dtype=torch.int32), device)
        self.layers = tuple(
            MoELoRA(stacks.gate_up_a.flatten(2, 3), *stacks[1:], scaling, ranks)
            for stacks, scaling, ranks in zip(self._stacks, self._scaling.layers, self._ranks.layers, strict=True)
        )
        # Two, so that one is filled while the other is copied.
        self._staging = [_Staging(layout) for _ in range(2)] if device.type == "cuda" else []
        with self.copy_stream.after_users():
            pass  # waits for the zeros, which other streams do not know of

    @property
    def bytes_per_slot(self) -> int:
        """What a slot takes on the device, all layers together."""
        of_a_slot = [stack[0] for stacks in self._stacks for stack in stacks]
        of_a_slot += [table.tensor[:, 0] for table in (self._scaling, self._ranks)]
        return sum(tensor.numel() * tensor.element_size() for tensor in of_a_slot)

    def write(self, slot: int, adapters: list[LayerAdapter]) -> None:
        """Fills a slot with one adapter; it counts as empty until the last step."""
        scaling = torch.stack([adapter.scaling for adapter in adapters])
        ranks = torch.tensor([(adapter.gate_up_rank, adapter.down_rank) for adapter in adapters], dtype=torch.int32)
        with self.copy_stream.after_users():
            self._ranks.tensor[:, slot].zero_()
            for layer, adapter in enumerate(adapters):
                self._fill(layer, slot, adapter)
            self._scaling.set(slot, scaling)
            self._ranks.set(slot, ranks)

    def clear(self, slot: int) -> None:
        """Makes a slot count as empty."""
        with self.copy_stream.after_users():
            self._ranks.tensor[:, slot].zero_()

    def _fill(self, layer: int, slot: int, adapter: LayerAdapter) -> None:
        target = Stacks(*(stack[slot] for stack in self._stacks[layer]))
        if not self._staging:
            place(adapter, target)
            return
        staging = self._staging[layer % len(self._staging)]
        staging.copied.synchronize()
        place(adapter, staging.stacks)
        for stack, staged in zip(target, staging.stacks, strict=True):
            stack.copy_(staged, non_blocking=True)
        staging.copied.record()


class _Staging:
    """Pinned host memory for one layer of one slot, and the event after which it may be filled anew."""

    def __init__(self, layout: SlotLayout) -> None:
        self.stacks = Stacks(*(torch.empty(shape, dtype=layout.dtype, pin_memory=True) for shape in layout.shapes))
        self.copied = torch.cuda.Event(blocking=True)


class _SlotTable:
    """n numbers for each layer and slot, [num_layers, L, n]; those of one slot change in one step."""

    def __init__(self, num_layers: int, num_slots: int, empty: Tensor, device: torch.device) -> None:
        # With a multiple of four slots every layer's part starts at a multiple of 16 bytes, as all tensors do.
        self.tensor = empty.to(device).repeat(num_layers, -(-num_slots // 4) * 4, 1)
        self.layers = [layer[:num_slots] for layer in self.tensor]
        self._staging: tuple[Tensor, Tensor] | None = None
        if device.type == "cuda":
            host = torch.empty(num_layers, len(empty), dtype=empty.dtype, pin_memory=True)
            self._staging = host, torch.empty_like(host, device=device)

    def set(self, slot: int, rows: Tensor) -> None:
        """Gives a slot its numbers, rows [num_layers, n]; once per write, as it does not wait for its host memory."""
        if self._staging is not None:
            host, staged = self._staging
            host.copy_(rows)
            rows = staged.copy_(host, non_blocking=True)
        self.tensor[:, slot].copy_(rows)
