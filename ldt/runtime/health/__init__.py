"""How a rank tells of a failure and learns of one: failure detector, watchdog, heartbeats, desync and hang detection."""
