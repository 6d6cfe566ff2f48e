"""The parts of the text example, one concern each; examples/train_text.py puts them together."""
