"""Reports failures and detects them: watchdog, heartbeats, desync and hang detection."""
