"""routing on the CPU."""

from routing_cases import *  # noqa: F403
