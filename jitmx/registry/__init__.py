"""From knobs to a key: what a kernel is, how it is rendered, and what identifies its machine code."""
