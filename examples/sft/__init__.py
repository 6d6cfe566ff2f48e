"""The parts of the fine-tuning example, one concern each; examples/finetune_hf.py puts them together."""
