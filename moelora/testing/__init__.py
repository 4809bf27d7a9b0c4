"""What tests, benchmarks and `moelora.check` share: error measures and input makers."""

from moelora.testing.errors import bad_rows, check_close, relative_error, row_errors
from moelora.testing.inputs import LayerInputs, Shape, poisoned_memory, random_layer, random_lora

__all__ = [
    "LayerInputs",
    "Shape",
    "bad_rows",
    "check_close",
    "poisoned_memory",
    "random_layer",
    "random_lora",
    "relative_error",
    "row_errors",
]
