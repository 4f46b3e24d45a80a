"""Stands in for a torch without CUDA, where versions are all it is asked for: importing the real one takes a second."""

from __future__ import annotations

import types

version = types.SimpleNamespace(cuda=None)
backends = types.SimpleNamespace(cudnn=types.SimpleNamespace(version=lambda: None))
