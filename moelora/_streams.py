"""The side stream of the two-stream forward, and when it is used."""

import os
from typing import NamedTuple

import torch

_ENVIRONMENT = "MOELORA_TWO_STREAM_MAX_TOKENS"
_DEFAULT_MAX_TOKENS = 256
_TORCH_STREAMS = 32  # which torch hands out in turn, again and again


class SideStream(NamedTuple):
    """Raw handles for the op, and what keeps them alive."""

    stream: int
    fork_event: int
    join_event: int
    owners: tuple


_side_streams: dict[tuple[int, int], SideStream] = {}


def _initial_max_tokens() -> int:
    text = os.environ.get(_ENVIRONMENT, "")
    if text == "":
        return _DEFAULT_MAX_TOKENS
    try:
        return _checked_max_tokens(int(text))
    except ValueError:
        raise ValueError(f"{_ENVIRONMENT}: expected a whole number of 0 or more, got {text!r}") from None


def _checked_max_tokens(max_tokens: int) -> int:
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool):
        raise TypeError(f"max_tokens: expected an int, got {type(max_tokens).__name__}")
    if max_tokens < 0:
        raise ValueError(f"max_tokens: expected 0 or more, got {max_tokens}")
    return max_tokens


_two_stream_max_tokens = _initial_max_tokens()


def set_two_stream_max_tokens(max_tokens: int) -> None:
    """Sets the most tokens for which `stream_mode="auto"` uses two streams, where no fused path serves the call.

    The first value is that of the environment variable MOELORA_TWO_STREAM_MAX_TOKENS, else 256; 0 turns them off.

    Raises:
        TypeError, ValueError: not a whole number of 0 or more.
    """
    global _two_stream_max_tokens
    _two_stream_max_tokens = _checked_max_tokens(max_tokens)


def two_stream_max_tokens() -> int:
    """The bound that `set_two_stream_max_tokens` set."""
    return _two_stream_max_tokens


def _unused_stream(caller: torch.cuda.Stream) -> torch.cuda.Stream:
    """A stream that is not `caller`, nor any caller's side stream as long as torch has such a one."""
    taken = {side.stream for (device, _), side in list(_side_streams.items()) if device == caller.device_index}
    unused = None
    for _ in range(_TORCH_STREAMS):
        stream = torch.cuda.Stream(caller.device)
        if stream.cuda_stream == caller.cuda_stream:
            continue
        unused = stream
        if stream.cuda_stream not in taken:
            break
    return unused


def side_stream(device: torch.device) -> SideStream:
    """The side stream that belongs to `device` and the caller's current stream there; made once, also inside a capture.

    One per caller stream, so that calls on different streams never wait for each other.
    """
    caller = torch.cuda.current_stream(device)
    key = (caller.device_index, caller.cuda_stream)
    found = _side_streams.get(key)
    if found is None:
        with torch.cuda.device(device):
            stream = _unused_stream(caller)
            events = (torch.cuda.Event(), torch.cuda.Event())
            for event in events:
                # A torch event has no handle before its first record; on the side stream it orders nothing.
                event.record(stream)
        found = SideStream(stream.cuda_stream, events[0].cuda_event, events[1].cuda_event, (stream, *events))
        # Two threads may both get here; the first entry stays.
        found = _side_streams.setdefault(key, found)
    return found
