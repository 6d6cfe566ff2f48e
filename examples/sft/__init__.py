"""The parts of the fine-tuning example; examples/finetune_hf.py puts them together."""
