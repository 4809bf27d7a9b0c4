"""`AdapterPool`: which adapter is in which slot, for how long, and who may replace it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from moelora.lora import MAX_RANK, MoELoRA, _checked_slice
from moelora.peft.block import Block
from moelora.pool.layout import SlotLayout
from moelora.pool.source import Model, Source, read_adapter
from moelora.pool.storage import SlotStorage


class UnknownAdapterError(KeyError):
    """A name that no loaded adapter has."""

    def __str__(self) -> str:
        return self.args[0]  # KeyError would show the message in quotes


@dataclass
class _Entry:
    slot: int
    pins: int = 0


class AdapterPool:
    """Slots for LoRA adapters on a device, for all MoE layers of one model, filled and freed while it serves.

    All memory is allocated here. `layers[i]` holds the stacks of the i-th layer for `moelora.fused_moe_lora`; its
    tensors stay the same for the life of the pool, so that CUDA graphs captured with them keep working whatever is
    loaded. An adapter has the same slot in all layers; a free slot computes as "no adapter".

    Rules for use beside loads and evictions (docs/adapter_pool.md says why they suffice):

    - Nothing but `load` and `evict` writes into slots, and neither ever into the slot of a pinned adapter. So threads
      that compute while others load take their slots with `use`, which pins until the work is submitted.
    - Writes wait for all work submitted earlier to the streams that were current in calls of this pool's methods,
      and run beside what is submitted later. `load` and `evict` return when the device is done, so that work
      submitted afterwards, on any stream, sees the result.

    All methods may be called from several threads. One load or eviction runs at a time; the others never wait for it.

    Args:
        num_slots: adapters that fit at once, 1 or more.
        max_rank: the largest rank of an adapter, up to 256. Slots are allocated for it, rounded up to a multiple of 8.
        layers: the block path of each MoE layer as adapter files name it, such as "model.layers.0.mlp".
        num_experts, hidden_size, intermediate_size: sizes of the whole model.
        dtype: of the stacks: bfloat16, float16 or float32; that of the model.
        device: where the slots are.
        gate_up_layout: row order of the model's fused gate_up parameter, as in `moelora.load_peft_adapter`.
        experts: the experts that this process holds (expert parallelism); None: all.
        intermediate: its part of the intermediate size (tensor parallelism); None: all.
        shared_a: gate and up share one A, which saves memory. Adapters on a fused gate_up parameter are so; others
            are refused.
        shared_outer: one gate_up A and one down B for all experts of a slot; other adapters are refused.
        allow_other_blocks: files may have experts of other blocks too, as where this process has only some of the
            model's layers. Else that is an error, since they would have no effect.

    Raises:
        TypeError, ValueError: an argument of the wrong type or out of range.
        torch.OutOfMemoryError: the slots do not fit.
    """

    def __init__(
        self,
        num_slots: int,
        max_rank: int,
        layers: Sequence[str],
        *,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        gate_up_layout: str = "gate_up",
        experts: slice | None = None,
        intermediate: slice | None = None,
        shared_a: bool = False,
        shared_outer: bool = False,
        allow_other_blocks: bool = False,
    ) -> None:
        _check_count("num_slots", num_slots)
        _check_count("max_rank", max_rank, MAX_RANK)
        if isinstance(layers, str) or not isinstance(layers, Sequence):
            raise TypeError(f"layers: expected a sequence of block paths, got {type(layers).__name__}")
        if not layers:
            raise ValueError("layers: expected at least one block path, got none")
        blocks = tuple(
            Block(path, num_experts, hidden_size, intermediate_size, gate_up_layout, None, None, dtype).path
            for path in layers
        )
        if len(set(blocks)) != len(blocks):
            raise ValueError(f"layers: expected different block paths, got {', '.join(blocks)}")
        experts = _checked_slice("experts", experts, num_experts)
        intermediate = _checked_slice("intermediate", intermediate, intermediate_size)
        self._model = Model(
            blocks, num_experts, hidden_size, intermediate_size, gate_up_layout, experts, intermediate,
            allow_other_blocks,
        )  # fmt: skip
        self._layout = SlotLayout(
            experts.stop - experts.start,
            hidden_size,
            intermediate.stop - intermediate.start,
            max_rank,
            shared_a,
            shared_outer,
            dtype,
        )
        self._num_slots = num_slots
        with torch.inference_mode(False):  # tensors made in inference mode could not be written outside of it
            self._device = torch.empty(0, device=device).device
            self._storage = SlotStorage(len(blocks), num_slots, self._layout, self._device)
        # Least recently used first. A slot that no entry has is free, or being written by who holds _writing.
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._lock = threading.Lock()  # of _entries; held for moments
        self._writing = threading.Lock()  # for a whole write of a slot; taken before _lock

    @property
    def layers(self) -> tuple[MoELoRA, ...]:
        """The stacks of each layer, L = num_slots."""
        return self._storage.layers

    @property
    def num_slots(self) -> int:
        """How many adapters fit."""
        return self._num_slots

    @property
    def memory_per_slot(self) -> int:
        """Bytes that each slot takes on the device, in all layers together."""
        return self._storage.bytes_per_slot

    def loaded(self) -> dict[str, int]:
        """The slot of each loaded adapter, least recently used first."""
        with self._lock:
            return {name: entry.slot for name, entry in self._entries.items()}

    def __contains__(self, name: object) -> bool:
        with self._lock:
            return name in self._entries

    def __repr__(self) -> str:
        layout = self._layout
        with self._lock:
            adapters = [
                f"{name!r} in {entry.slot}{' (pinned)' if entry.pins else ''}" for name, entry in self._entries.items()
            ]
        return (
            f"AdapterPool({len(self.layers)} layers, {layout.num_experts} experts, "
            f"hidden_size={layout.hidden_size}, intermediate_size={layout.intermediate_size}, "
            f"max_rank={layout.max_rank}; {layout.dtype}, {self._device}; {len(adapters)} of {self._num_slots} slots "
            f"of {self.memory_per_slot / 2**20:.1f} MiB taken: {', '.join(adapters) or 'none'})"
        )

    @torch.no_grad()
    def load(self, name: str, source: Source, *, lora_a_side: str | None = None) -> int:
        """Puts an adapter into a slot: the one it has if `name` is loaded, else a free one, else that of the least
        recently used adapter that is not pinned, which is evicted.

        Everything is read and checked on the host first, so that an error leaves the pool as it was. While the slot
        is written, neither the old adapter nor the new one is there, and the slot computes as "no adapter".

        Args:
            name: under which it is asked for.
            source: a folder as PEFT saves it; a pair (tensors, configuration) as for `moelora.peft.load_peft_tensors`;
                or for each layer a `MoELoRA` of one slot or None, of this process's part of the model, on any device.
            lora_a_side: as in `moelora.load_peft_adapter`, for files.

        Returns:
            The slot.

        Raises:
            FileNotFoundError, OSError, safetensors.SafetensorError: files that are missing or cannot be read.
            TypeError: an argument of the wrong type, stacks of another dtype than the pool's.
            ValueError: what is no plain LoRA for these layers, does not fit the sizes, has a rank over max_rank or a
                form that the pool has no room for; or experts of blocks that are not in `layers`.
            RuntimeError: `name` is loaded and pinned, or all slots are taken by pinned adapters; or a stream that
                uses the pool is being captured into a CUDA graph.
        """
        _check_name(name)
        adapters = read_adapter(source, self._model, self._layout, lora_a_side)
        with self._writing:
            self._storage.copy_stream.require_no_capture()
            slot = self._vacate_for(name)
            try:
                self._storage.write(slot, adapters)
            except BaseException:
                # An interrupt or a failing device: the slot is free, so it must be empty.
                self._storage.clear(slot)
                raise
            with self._lock:
                self._entries[name] = _Entry(slot)
        return slot

    def evict(self, name: str) -> None:
        """Frees the slot of an adapter; it computes as "no adapter" from then on.

        Raises:
            UnknownAdapterError (a KeyError): no such adapter.
            RuntimeError: it is pinned, or a stream that uses the pool is being captured into a CUDA graph.
        """
        with self._writing:
            self._storage.copy_stream.require_no_capture()
            with self._lock:
                entry = self._entry(name)
                _require_unpinned(name, entry)
                del self._entries[name]
            self._storage.clear(entry.slot)

    def slot(self, name: str) -> int:
        """The slot of an adapter, in all layers. Counts as use.

        Raises:
            UnknownAdapterError (a KeyError): no such adapter.
        """
        self._storage.copy_stream.note_user()
        with self._lock:
            entry = self._entry(name)
            self._entries.move_to_end(name)
            return entry.slot

    def adapter_ids(self, names: Iterable[str | None]) -> Tensor:
        """The slots of adapters, None giving -1 (no adapter), as int32 [len(names)] on the device. Counts as use.

        It is copied on the current stream without waiting for it, so it cannot be called in a CUDA graph capture:
        captured work reads a tensor that the caller copies the ids into.

        Raises:
            TypeError: names is a str, or has an item that is neither a str nor None.
            UnknownAdapterError (a KeyError): a name that no loaded adapter has.
            RuntimeError: in a capture.
        """
        names = _checked_names(names)
        if self._storage.copy_stream.is_captured():
            raise RuntimeError("adapter_ids cannot be captured into a CUDA graph: a replay would read old slots")
        self._storage.copy_stream.note_user()
        with self._lock:
            slots: dict[str | None, int] = {name: self._entry(name).slot for name in _distinct(names)}
            for name in slots:
                self._entries.move_to_end(name)
        slots[None] = -1
        on_cuda = self._device.type == "cuda"
        ids = torch.tensor([slots[name] for name in names], dtype=torch.int32, pin_memory=on_cuda)
        return ids.to(self._device, non_blocking=True)

    def pin(self, name: str) -> None:
        """Keeps an adapter in its slot, unchanged, until `unpin` was called as often as `pin`.

        Raises:
            UnknownAdapterError (a KeyError): no such adapter.
        """
        with self._lock:
            self._entry(name).pins += 1

    def unpin(self, name: str) -> None:
        """Takes back one `pin`. Work that was submitted to the current stream before may still use the slot.

        Raises:
            UnknownAdapterError (a KeyError): no such adapter.
            ValueError: it is not pinned.
        """
        self._storage.copy_stream.note_user()
        with self._lock:
            entry = self._entry(name)
            if not entry.pins:
                raise ValueError(f"name: expected a pinned adapter, got {name!r}")
            entry.pins -= 1

    @contextmanager
    def use(self, names: Iterable[str | None]) -> Iterator[Tensor]:
        """`adapter_ids` for work that is submitted inside a `with` block; its adapters are pinned meanwhile.

        The block need not wait for the work: what was submitted to the stream that is current at its end, or was
        at its start, is waited for before the slots change.

        Raises:
            as `adapter_ids`.
        """
        names = _checked_names(names)
        pinned = _distinct(names)
        with self._lock:
            for entry in [self._entry(name) for name in pinned]:
                entry.pins += 1
        try:
            yield self.adapter_ids(names)
        finally:
            for name in pinned:
                self.unpin(name)

    def _vacate_for(self, name: str) -> int:
        """A slot that no entry has."""
        with self._lock:
            if name in self._entries:
                _require_unpinned(name, self._entries[name])
                return self._entries.pop(name).slot
            free = set(range(self._num_slots)) - {entry.slot for entry in self._entries.values()}
            if free:
                return min(free)
            victim = next((name for name, entry in self._entries.items() if not entry.pins), None)
            if victim is None:
                raise RuntimeError(f"no slot for {name!r}: all adapters are pinned ({', '.join(self._entries)})")
            return self._entries.pop(victim).slot

    def _entry(self, name: str) -> _Entry:
        _check_name(name)
        entry = self._entries.get(name)
        if entry is None:
            raise UnknownAdapterError(f"no adapter {name!r} is loaded; loaded: {', '.join(self._entries) or 'none'}")
        return entry


def _require_unpinned(name: str, entry: _Entry) -> None:
    if entry.pins:
        raise RuntimeError(f"adapter {name!r} is pinned")


def _distinct(names: Sequence[str | None]) -> list[str]:
    """Each name once, in the order of its last appearance, which is that of use."""
    return [name for name in dict.fromkeys(reversed(names)) if name is not None][::-1]


def _checked_names(names: Iterable[str | None]) -> list[str | None]:
    if isinstance(names, str):
        raise TypeError("names: expected a sequence of names, got a str")
    names = list(names)
    for name in names:
        if name is not None:
            _check_name(name)
    return names


def _check_name(name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"name: expected a str, got {type(name).__name__}")


def _check_count(argument: str, count: int, most: int | None = None) -> None:
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"{argument}: expected an int, got {type(count).__name__}")
    if count < 1 or (most is not None and count > most):
        raise ValueError(f"{argument}: expected {'1 or more' if most is None else f'1..{most}'}, got {count}")
