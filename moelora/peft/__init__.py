"""Reading LoRA adapters as PEFT saves them, for the experts of one MoE block."""

from moelora.peft.load import load_peft_adapter, load_peft_tensors

__all__ = ["load_peft_adapter", "load_peft_tensors"]
