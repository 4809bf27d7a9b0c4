"""What adapter_config.json says: rank and scale of a path, adapted parameters, unsupported features."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

# Features that change what A and B mean for the modules they are on. Running those as plain LoRA is wrong.
_NOT_PLAIN_LORA = (
    "use_dora",
    "lora_bias",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)


class AdapterConfig:
    """The contents of adapter_config.json, checked.

    Raises:
        TypeError: `config` is no mapping.
        ValueError: not a LoRA adapter, or a rank, an alpha or a pattern that is missing or malformed.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        if not isinstance(config, Mapping):
            raise TypeError(f"config: expected a mapping, got {type(config).__name__}")
        peft_type = config.get("peft_type", "LORA")
        if peft_type != "LORA":
            raise ValueError(f'peft_type in adapter_config.json: expected "LORA", got {peft_type!r}')
        self.peft_version: str | None = config.get("peft_version")
        self._config = config
        self._rank = _checked_rank("r", config.get("r"))
        # PEFT's own default, 8, is not assumed: a file without lora_alpha was not written by PEFT.
        self._alpha = _checked_alpha("lora_alpha", config.get("lora_alpha"))
        self._rank_pattern = _compiled(config, "rank_pattern", _checked_rank)
        self._alpha_pattern = _compiled(config, "alpha_pattern", _checked_alpha)
        self._use_rslora = bool(config.get("use_rslora"))

    def rank(self, path: str) -> int:
        """The rank of the module or parameter at `path`."""
        return _first_match(self._rank_pattern, path, self._rank)

    def scaling(self, path: str) -> float:
        """What multiplies B A of the module or parameter at `path`."""
        rank = self.rank(path)
        alpha = _first_match(self._alpha_pattern, path, self._alpha)
        return alpha / math.sqrt(rank) if self._use_rslora else alpha / rank

    def adapts_parameter(self, path: str) -> bool:
        """Whether `target_parameters` names the parameter at `path`."""
        entries = self._config.get("target_parameters") or ()
        return any(path == entry or path.endswith(f".{entry}") for entry in entries)

    def refuse_unless_plain_lora(self) -> None:
        """Raises ValueError where A and B are not all there is to the adapted modules."""
        found = [name for name in _NOT_PLAIN_LORA if self._config.get(name)]
        if found:
            raise ValueError(f"adapter_config.json sets {', '.join(found)}: only plain LoRA is supported")


def _checked_rank(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} in adapter_config.json: expected a positive integer, got {value!r}")
    return value


def _checked_alpha(name: str, value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise ValueError(f"{name} in adapter_config.json: expected a finite number, got {value!r}")
    return value


def _compiled(config: Mapping[str, Any], name: str, check: Any) -> list[tuple[re.Pattern, Any]]:
    """The entries of rank_pattern or alpha_pattern, in the file's order."""
    entries = config.get(name) or {}
    if not isinstance(entries, Mapping):
        raise ValueError(f"{name} in adapter_config.json: expected a mapping, got {entries!r}")
    compiled = []
    for key, value in entries.items():
        try:
            pattern = re.compile(rf"(.*\.)?({key})$")
        except re.error as error:
            raise ValueError(
                f"{name} in adapter_config.json: expected regular expressions as keys, got {key!r} ({error})"
            ) from error
        compiled.append((pattern, check(f"{name}[{key!r}]", value)))
    return compiled


def _first_match(patterns: list[tuple[re.Pattern, Any]], path: str, default: Any) -> Any:
    return next((value for pattern, value in patterns if pattern.match(path)), default)
