"""What every part of the runtime may use: specs of tensors, ranks, devices, texts of errors."""
