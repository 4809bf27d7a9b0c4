"""pack_topk and unpack_topk on the CPU."""

from pack_topk_cases import *  # noqa: F403
