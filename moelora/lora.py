"""The adapter stacks that the forwards read: `MoELoRA`.

Shape letters are those of the specification: L adapter slots, E experts held by this process, H hidden size,
I intermediate size, R1 and R2 the ranks that the gate_up and the down stacks are allocated for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MAX_RANK = 256
ADAPTER_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ROUND_RANK_TO = 8


def allocated_rank(rank: int) -> int:
    """The rank that stacks are allocated for to hold adapters of `rank`: the next multiple of 8."""
    return (rank + _ROUND_RANK_TO - 1) // _ROUND_RANK_TO * _ROUND_RANK_TO


class MoELoRA:
    """LoRA adapters of one MoE layer, one per slot.

    The tensors are kept as given, never copied, so that an adapter is updated by writing into them.

    Args:
        gate_up_a: [L, E or 1, 2*R1, H] (gate's A in rows 0..R1-1, up's in rows R1..2*R1-1), or
            [L, E or 1, R1, H] where gate and up share one A. Size 1 in the expert dim: one matrix for all
            experts of a slot.
        gate_up_b: [L, E, 2*I, R1], I gate rows, then I up rows, whatever the layout of w13.
        down_a: [L, E, R2, I].
        down_b: [L, E or 1, H, R2]. Size 1 in the expert dim: one matrix for all experts of a slot.
        scaling: fp32 [L, 3] (gate, up, down), or [L] for all three; None means 1.
        ranks: int32 [L, 2] (gate_up, down): the rank of each slot's adapter, 0 for an empty slot. None
            means R1, R2.

    A and B of one part (gate_up or down) may both be None: that part has no adapter. The stacks share a dtype
    (bf16, fp16 or fp32) and a device; their last dims are contiguous; R1 and R2 are 1..256.

    Raises:
        TypeError: an argument that is no tensor, or has the wrong dtype.
        ValueError: shapes, devices or strides that do not fit.
    """

    def __init__(
        self,
        gate_up_a: Tensor | None,
        gate_up_b: Tensor | None,
        down_a: Tensor | None,
        down_b: Tensor | None,
        scaling: Tensor | None = None,
        ranks: Tensor | None = None,
    ) -> None:
        stacks = {
            name: stack
            for name, stack in (
                ("gate_up_a", gate_up_a),
                ("gate_up_b", gate_up_b),
                ("down_a", down_a),
                ("down_b", down_b),
            )
            if stack is not None
        }
        _check_stacks(stacks)
        self.gate_up_a = gate_up_a
        self.gate_up_b = gate_up_b
        self.down_a = down_a
        self.down_b = down_b
        first = next(iter(stacks.values()))
        self.num_slots: int = first.shape[0]
        self.dtype: torch.dtype = first.dtype
        self.device: torch.device = first.device
        if gate_up_b is not None:
            self.num_experts: int = gate_up_b.shape[1]
            self.hidden_size: int = gate_up_a.shape[3]
            self.intermediate_size: int = gate_up_b.shape[2] // 2
        else:
            self.num_experts = down_a.shape[1]
            self.hidden_size = down_b.shape[2]
            self.intermediate_size = down_a.shape[3]
        self._check_shapes()
        self.scaling: Tensor = self._checked_scaling(scaling)
        self.ranks: Tensor | None = self._checked_ranks(ranks)
        # What the op wants to know of sizes; asked for in every call, so worked out once.
        gate_up = (0, 1, False)
        if gate_up_b is not None:
            gate_up = (gate_up_b.shape[3], gate_up_a.shape[2] // gate_up_b.shape[3], gate_up_a.shape[1] == 1)
        self.op_sizes: tuple[int, int, int, bool, int] = (self.num_slots, *gate_up, self.down_rank or 0)

    def stacks(self) -> dict[str, Tensor]:
        """The adapter tensors there are, by name."""
        names = ("gate_up_a", "gate_up_b", "down_a", "down_b")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def op_arguments(self) -> tuple[Tensor | None, ...]:
        """Stacks, scaling [L, 3] contiguous and ranks, in the order of the fused_moe_lora op."""
        # [L] given as one scale for all three is a view of stride 0.
        scaling = self.scaling if self.scaling.is_contiguous() else self.scaling.contiguous()
        return self.gate_up_a, self.gate_up_b, self.down_a, self.down_b, scaling, self.ranks

    @property
    def gate_up_rank(self) -> int | None:
        """R1, the rank that the gate_up stacks are allocated for; None without a gate_up part."""
        return None if self.gate_up_b is None else self.gate_up_b.shape[3]

    @property
    def down_rank(self) -> int | None:
        """R2, the rank that the down stacks are allocated for; None without a down part."""
        return None if self.down_a is None else self.down_a.shape[2]

    @property
    def gate_up_a_is_shared(self) -> bool:
        """Whether gate and up share one A (R1 rows in all, as fused-parameter adapters have it)."""
        return self.gate_up_a is not None and self.gate_up_a.shape[2] == self.gate_up_rank

    @property
    def gate_up_a_is_shared_outer(self) -> bool:
        """Whether one gate_up A serves all experts of a slot."""
        return self.gate_up_a is not None and self.gate_up_a.shape[1] == 1 and self.num_experts != 1

    @property
    def down_b_is_shared_outer(self) -> bool:
        """Whether one down B serves all experts of a slot."""
        return self.down_b is not None and self.down_b.shape[1] == 1 and self.num_experts != 1

    def __repr__(self) -> str:
        parts = []
        if self.gate_up_b is not None:
            notes = [f"rank {self.gate_up_rank}"]
            if self.gate_up_a_is_shared:
                notes.append("gate and up share A")
            if self.gate_up_a_is_shared_outer:
                notes.append("one A for all experts")
            parts.append(f"gate_up: {', '.join(notes)}")
        if self.down_a is not None:
            notes = [f"rank {self.down_rank}"]
            if self.down_b_is_shared_outer:
                notes.append("one B for all experts")
            parts.append(f"down: {', '.join(notes)}")
        return (
            f"MoELoRA({self.num_slots} slots, {self.num_experts} experts, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}; {'; '.join(parts)}; {self.dtype}, {self.device})"
        )

    def to(
        self,
        device: torch.device | str | int | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
    ) -> MoELoRA:
        """The same adapters on another device, or with stacks of another dtype; `to(dtype)` works too.

        Tensors that need no change are shared with this object, not copied.
        """
        if isinstance(device, torch.dtype):
            if dtype is not None:
                raise TypeError(f"to() got two dtypes: {device} and {dtype}")
            device, dtype = None, device
        device = self.device if device is None else torch.device(device)

        def moved(stack: Tensor | None) -> Tensor | None:
            return None if stack is None else stack.to(device=device, dtype=dtype or stack.dtype)

        return MoELoRA(
            moved(self.gate_up_a),
            moved(self.gate_up_b),
            moved(self.down_a),
            moved(self.down_b),
            self.scaling.to(device),
            None if self.ranks is None else self.ranks.to(device),
        )

    def shard(self, *, experts: slice | None = None, intermediate: slice | None = None) -> MoELoRA:
        """The part of the adapters that one process of an expert or tensor parallel group needs, as a copy.

        Args:
            experts: which experts to keep. Shared outer matrices are kept whole.
            intermediate: which of the I rows of w13's gate and up (and columns of w2) to keep: it picks gate
                and up rows of gate_up_b and columns of down_a. The forward's output is then a partial sum:
                adding it over the group gives the whole, adapters included.

        Slices count as in Python, with a step of 1 only. None keeps everything.

        Raises:
            TypeError: an argument that is no slice.
            ValueError: a slice that keeps nothing, or has a step.
        """
        keep_experts = _checked_slice("experts", experts, self.num_experts)
        keep_columns = _checked_slice("intermediate", intermediate, self.intermediate_size)

        def copied(view: Tensor) -> Tensor:
            return view.clone(memory_format=torch.contiguous_format)

        gate_up_a = gate_up_b = down_a = down_b = None
        if self.gate_up_b is not None:
            a, b = self.gate_up_a, self.gate_up_b
            gate_up_a = copied(a if self.gate_up_a_is_shared_outer else a[:, keep_experts])
            halves = b.unflatten(2, (2, self.intermediate_size))
            gate_up_b = copied(halves[:, keep_experts, :, keep_columns]).flatten(2, 3)
        if self.down_a is not None:
            b = self.down_b
            down_a = copied(self.down_a[:, keep_experts, :, keep_columns])
            down_b = copied(b if self.down_b_is_shared_outer else b[:, keep_experts])
        ranks = None if self.ranks is None else copied(self.ranks)
        return MoELoRA(gate_up_a, gate_up_b, down_a, down_b, copied(self.scaling), ranks)

    @staticmethod
    def stack(loras: Sequence[MoELoRA | None]) -> MoELoRA:
        """Puts single adapters (L = 1) into the slots of one new object; None gives an empty slot.

        R1 and R2 are the largest among the adapters, rounded up to a multiple of 8. Where forms differ the
        result has the general one: a shared A is duplicated for gate and up, a shared outer matrix is
        expanded over the experts. A part that no adapter has stays None. `ranks` is always set.

        Raises:
            TypeError: an item that is neither MoELoRA nor None, or adapters of different dtypes.
            ValueError: only None, an item with more than one slot, or different devices or sizes.
        """
        loras = list(loras)
        present = _check_stackable(loras)
        first = next(iter(present.values()))
        ranks = torch.zeros(len(loras), 2, dtype=torch.int32, device=first.device)
        scaling = torch.ones(len(loras), 3, dtype=torch.float32, device=first.device)
        for slot, lora in present.items():
            scaling[slot] = lora.scaling[0]
            for part, rank in enumerate((lora.gate_up_rank, lora.down_rank)):
                if rank is not None:
                    ranks[slot, part] = rank if lora.ranks is None else lora.ranks[0, part]
        gate_up = _stack_gate_up(
            {slot: lora for slot, lora in present.items() if lora.gate_up_b is not None}, len(loras)
        )
        down = _stack_down(
            {slot: lora for slot, lora in present.items() if lora.down_a is not None}, len(loras)
        )
        return MoELoRA(*gate_up, *down, scaling, ranks)

    def _check_shapes(self) -> None:
        slots, experts = self.num_slots, self.num_experts
        hidden, inter = self.hidden_size, self.intermediate_size
        if self.gate_up_b is not None:
            rank = self.gate_up_rank
            _check_rank("gate_up_b", rank)
            _check_shape("gate_up_b", self.gate_up_b, (slots, experts, 2 * inter, rank))
            _check_shape("gate_up_a", self.gate_up_a, (slots, (experts, 1), (2 * rank, rank), hidden))
        if self.down_a is not None:
            rank = self.down_rank
            _check_rank("down_a", rank)
            _check_shape("down_a", self.down_a, (slots, experts, rank, inter))
            _check_shape("down_b", self.down_b, (slots, (experts, 1), hidden, rank))

    def _checked_scaling(self, scaling: Tensor | None) -> Tensor:
        if scaling is None:
            return torch.ones(self.num_slots, 3, dtype=torch.float32, device=self.device)
        self._check_slot_tensor("scaling", scaling, torch.float32)
        if tuple(scaling.shape) == (self.num_slots,):
            # A view, so that writing into the caller's tensor still changes the adapter.
            return scaling[:, None].expand(self.num_slots, 3)
        _check_shape("scaling", scaling, (self.num_slots, 3))
        return scaling

    def _checked_ranks(self, ranks: Tensor | None) -> Tensor | None:
        if ranks is not None:
            self._check_slot_tensor("ranks", ranks, torch.int32)
            _check_shape("ranks", ranks, (self.num_slots, 2))
        return ranks

    def _check_slot_tensor(self, name: str, value: Tensor, dtype: torch.dtype) -> None:
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor or None, got {type(value).__name__}")
        if value.dtype != dtype:
            raise TypeError(f"{name}: expected dtype {dtype}, got {value.dtype}")
        if value.device != self.device:
            raise ValueError(f"{name}: expected the device of the stacks, {self.device}, got {value.device}")


def _check_stacks(stacks: dict[str, Tensor]) -> None:
    """What holds of each stack whatever the sizes are, and that parts are complete."""
    for name, stack in stacks.items():
        if not isinstance(stack, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor or None, got {type(stack).__name__}")
    for part in ("gate_up", "down"):
        if (f"{part}_a" in stacks) != (f"{part}_b" in stacks):
            raise ValueError(f"{part}_a, {part}_b: expected both or neither, got one")
    if not stacks:
        raise ValueError("gate_up_a, gate_up_b, down_a, down_b: expected at least one part, got only None")
    first_name, first = next(iter(stacks.items()))
    for name, stack in stacks.items():
        if stack.dtype not in ADAPTER_DTYPES:
            raise TypeError(f"{name}: expected dtype bfloat16, float16 or float32, got {stack.dtype}")
        if stack.dtype != first.dtype:
            raise TypeError(f"{name}: expected the dtype of {first_name}, {first.dtype}, got {stack.dtype}")
        if stack.device != first.device:
            raise ValueError(
                f"{name}: expected the device of {first_name}, {first.device}, got {stack.device}"
            )
        if stack.dim() != 4:
            raise ValueError(f"{name}: expected 4 dims, got shape {tuple(stack.shape)}")
        if 0 in stack.shape:
            raise ValueError(f"{name}: expected no dim of size 0, got shape {tuple(stack.shape)}")
        if stack.stride(3) != 1 and stack.shape[3] != 1:
            raise ValueError(f"{name}: expected a contiguous last dim, got strides {stack.stride()}")
    if "gate_up_b" in stacks and stacks["gate_up_b"].shape[2] % 2:
        raise ValueError(
            "gate_up_b: expected an even number of rows (I of gate, then I of up), "
            f"got shape {tuple(stacks['gate_up_b'].shape)}"
        )


def _check_rank(name: str, rank: int) -> None:
    if not 1 <= rank <= MAX_RANK:
        raise ValueError(f"{name}: expected a rank of 1..{MAX_RANK}, got {rank}")


def _check_shape(name: str, value: Tensor, expected: tuple[int | tuple[int, ...], ...]) -> None:
    """Each expected size is an int, or a tuple of the allowed ones."""
    allowed = [size if isinstance(size, tuple) else (size,) for size in expected]
    if value.dim() != len(allowed) or any(
        size not in options for size, options in zip(value.shape, allowed, strict=True)
    ):
        words = ", ".join(" or ".join(map(str, dict.fromkeys(options))) for options in allowed)
        raise ValueError(f"{name}: expected shape [{words}], got {list(value.shape)}")


def _checked_slice(name: str, given: slice | None, size: int) -> slice:
    if given is None:
        return slice(0, size)
    if not isinstance(given, slice):
        raise TypeError(f"{name}: expected a slice or None, got {type(given).__name__}")
    start, stop, step = given.indices(size)
    if step != 1:
        raise ValueError(f"{name}: expected a slice of step 1, got {given}")
    if start >= stop:
        raise ValueError(f"{name}: expected a slice that keeps some of {size}, got {given}")
    return slice(start, stop)


def _check_stackable(loras: list[MoELoRA | None]) -> dict[int, MoELoRA]:
    """The adapters by slot, once it is sure that they fit together."""
    for slot, lora in enumerate(loras):
        if lora is not None and not isinstance(lora, MoELoRA):
            raise TypeError(f"loras[{slot}]: expected a MoELoRA or None, got {type(lora).__name__}")
    present = {slot: lora for slot, lora in enumerate(loras) if lora is not None}
    if not present:
        raise ValueError("loras: expected at least one adapter, got none")
    first_slot, first = next(iter(present.items()))
    for slot, lora in present.items():
        if lora.num_slots != 1:
            raise ValueError(f"loras[{slot}]: expected one slot, got {lora.num_slots}")
        if lora.dtype != first.dtype:
            raise TypeError(
                f"loras[{slot}]: expected the dtype of loras[{first_slot}], {first.dtype}, got {lora.dtype}"
            )
        for what in ("device", "num_experts", "hidden_size", "intermediate_size"):
            expected, got = getattr(first, what), getattr(lora, what)
            if got != expected:
                raise ValueError(
                    f"loras[{slot}]: expected the {what} of loras[{first_slot}], {expected}, got {got}"
                )
    return present


def _stack_gate_up(loras: dict[int, MoELoRA], num_slots: int) -> tuple[Tensor | None, Tensor | None]:
    """gate_up_a and gate_up_b of a stack, from the adapters (by slot) that have a gate_up part."""
    if not loras:
        return None, None
    first = next(iter(loras.values()))
    rank = allocated_rank(max(lora.gate_up_rank for lora in loras.values()))
    experts = 1 if all(x.gate_up_a.shape[1] == 1 for x in loras.values()) else first.num_experts
    components = 1 if all(lora.gate_up_a_is_shared for lora in loras.values()) else 2
    a = first.gate_up_a.new_zeros(num_slots, experts, components, rank, first.hidden_size)
    b = first.gate_up_b.new_zeros(num_slots, first.num_experts, 2 * first.intermediate_size, rank)
    for slot, lora in loras.items():
        own = lora.gate_up_rank
        # copy_ broadcasts an expert dim or a component dim of size 1.
        a[slot, :, :, :own].copy_(lora.gate_up_a[0].unflatten(1, (-1, own)))
        b[slot, :, :, :own].copy_(lora.gate_up_b[0])
    return a.flatten(2, 3), b


def _stack_down(loras: dict[int, MoELoRA], num_slots: int) -> tuple[Tensor | None, Tensor | None]:
    """down_a and down_b of a stack, from the adapters (by slot) that have a down part."""
    if not loras:
        return None, None
    first = next(iter(loras.values()))
    rank = allocated_rank(max(lora.down_rank for lora in loras.values()))
    experts = 1 if all(x.down_b.shape[1] == 1 for x in loras.values()) else first.num_experts
    a = first.down_a.new_zeros(num_slots, first.num_experts, rank, first.intermediate_size)
    b = first.down_b.new_zeros(num_slots, experts, first.hidden_size, rank)
    for slot, lora in loras.items():
        own = lora.down_rank
        a[slot, :, :own].copy_(lora.down_a[0])
        b[slot, :, :, :own].copy_(lora.down_b[0])
    return a, b
