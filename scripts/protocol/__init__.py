"""The test protocol around vLLM with jitmx: six levels, checkpoints to run them on, and what a run is recorded with.

docs/protocol.md says what each level proves. Nothing here imports torch, transformers or vLLM before it is needed.
"""
