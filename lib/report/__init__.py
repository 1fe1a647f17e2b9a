"""What people see of a run: console, dashboard, report, model card, trackers."""
