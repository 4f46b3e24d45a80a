"""An adapter by name, number and folder; what is in the folder is vLLM's to read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str
