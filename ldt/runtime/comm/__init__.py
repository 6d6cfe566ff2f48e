"""What moves payloads: process groups, endpoints of channels, ways of transfer, transports and links between processes."""
