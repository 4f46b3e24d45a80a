"""vLLM on jitmx's kernels."""
