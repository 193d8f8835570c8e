"""Services of launchd and systemd: files, managers, actions, status."""
