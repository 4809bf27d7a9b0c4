"""The stream that a pool writes on, and how its writes are ordered after the work that reads the slots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class CopyStream:
    """A stream for writes, and the streams that use what is written ("users").

    A write starts after all that users were given to do before it, and runs beside what they are given later.
    On CPU, where whoever calls an op has waited for it, nothing needs ordering.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            # Waiting for it lets the CPU sleep: a load may take long, and other threads have work to submit.
            self._done = torch.cuda.Event(blocking=True)
        self._users: dict[int, torch.cuda.Stream] = {}

    def note_user(self) -> None:
        """The current stream is a user from now on."""
        if self._stream is not None:
            stream = torch.cuda.current_stream(self._device)
            self._users[stream.cuda_stream] = stream

    def is_captured(self) -> bool:
        """Whether the current stream is being captured into a CUDA graph."""
        return self._stream is not None and _is_capturing(torch.cuda.current_stream(self._device))

    def require_no_capture(self) -> None:
        """Raises RuntimeError while the current stream or a user is being captured.

        Its earlier work could not be waited for: an event recorded now would become part of the graph.
        """
        if self.is_captured() or any(map(_is_capturing, list(self._users.values()))):
            raise RuntimeError("slots cannot change while a stream that uses the pool is being captured")

    @contextmanager
    def after_users(self) -> Iterator[None]:
        """Inside, the current stream is the copy stream, behind its users; leaving waits until it is done."""
        if self._stream is None:
            yield
            return
        self.note_user()
        for user in list(self._users.values()):
            self._stream.wait_stream(user)
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._done.record()
                self._done.synchronize()


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
