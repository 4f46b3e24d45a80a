"""The argument struct of every kernel of `attention`."""

from __future__ import annotations

from jitmx.registry.arguments import Arguments, number, reads, writes

ARGUMENTS = Arguments(
    "AttentionArguments",
    reads("q", "[tokens, heads, head_dim], rows q_stride apart"),
    reads("k", "[tokens, kv_heads, head_dim]: new keys, rows k_stride apart"),
    reads("v", "[tokens, kv_heads, head_dim]: new values, rows v_stride apart"),
    writes("k_cache", "[pages, page_size, kv_heads, head_dim] by the strides below"),
    writes("v_cache", "the same of values"),
    reads("block_table", "[requests, table_stride]: pages of each request", "int"),
    reads("seq_lens", "[requests]: tokens with the new ones", "int"),
    reads("query_start", "[requests + 1]: first new token of each request", "int"),
    reads("slots", "[tokens]: where new tokens go in the cache, -1: nowhere; null: by the block table", "long long"),
    reads("positions", "[tokens]: positions of new tokens; null: in their order", "long long"),
    reads("sinks", "[heads]: a logit each"),
    reads("rope", "[positions, rotary]: cosines, then sines"),
    reads("mask", "[tokens, mask / 32]: which new tokens of its request a token attends to", "unsigned int"),
    reads("k_scale", "[1] or [kv_heads]: what E4M3 keys are multiplied by", "float"),
    reads("v_scale", "[1] or [kv_heads]: the same of values", "float"),
    writes("out", "[tokens, heads, head_dim], rows out_stride apart"),
    writes("workspace", "a counter a block, zero before the first launch, then partial results"),
    number("block_stride", "long long", "elements from a page of the cache to the next"),
    number("token_stride", "long long", "elements from a token of the cache to the next"),
    number("head_stride", "long long", "elements from a head of the cache to the next"),
    number("table_stride", "long long", "pages a row of the block table"),
    number("q_stride", "long long", "elements"),
    number("k_stride", "long long", "elements"),
    number("v_stride", "long long", "elements"),
    number("out_stride", "long long", "elements"),
    number("scale", "float", "of q k"),
    number("soft_cap", "float", "s becomes soft_cap * tanh(s / soft_cap)"),
    number("window", "int", "tokens that a token attends to, itself included"),
    number("requests", "int"),
    number("kv_heads", "int"),
    number("scale_stride", "int", "1 where each head has a scale of its own, else 0"),
    number("least_queries", "int", "new tokens of a request that prefill takes, at least; others are left to decode"),
)
