"""The parts of the vision-language example, one concern each; examples/train_vlm.py puts them together."""
