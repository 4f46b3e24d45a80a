"""The kernel cache: what was compiled, why it is what it is, and how it is kept sound.

`store` reads and writes entries, `manifest` is the form of a record, `why` explains one, `verify` finds and mends what
is broken, `prune` takes out what is no longer wanted. Nothing here imports NumPy, CuPy, torch or Jinja.
"""
