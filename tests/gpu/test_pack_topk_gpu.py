"""pack_topk and unpack_topk on the GPU."""

from pack_topk_cases import *  # noqa: F403
