"""Detects and reports failures: watchdog, heartbeats, desync and hang detection."""
