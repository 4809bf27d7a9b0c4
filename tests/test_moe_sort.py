"""moe_sort on the CPU."""

from moe_sort_cases import *  # noqa: F403
