"""The parts of the text example; examples/train_text.py puts them together."""
