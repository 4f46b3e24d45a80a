"""Plugins are named by VLLM_PLUGINS; the stand-in loads none."""


def load_general_plugins() -> None:
    pass
