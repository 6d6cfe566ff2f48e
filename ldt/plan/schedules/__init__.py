"""Fixed orders, and passes that add communication and gradient reduction."""
