"""The parts of the fine-tuning recipe; examples/finetune_hf.py puts them together."""
