"""Operators on chains and trees of drafts, for speculative decoding."""

from jitmx.ops.tree.acceptance import Accepted, Verified, accept_greedy, accept_requests, tree_verify
from jitmx.ops.tree.cache import move_kv
from jitmx.ops.tree.mask import pack_mask
from jitmx.ops.tree.plan import Tree, TreePlan, tree_build, tree_plan

__all__ = [
    "Accepted", "Tree", "TreePlan", "Verified", "accept_greedy", "accept_requests", "move_kv", "pack_mask",
    "tree_build", "tree_plan", "tree_verify",
]  # fmt: skip
