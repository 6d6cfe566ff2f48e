"""Fixed schedules, and passes that add communication and gradient reduction."""
