"""The parts of the vision-language example; examples/train_vlm.py puts them together."""
