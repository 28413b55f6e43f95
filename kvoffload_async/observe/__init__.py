"""What people see of a running engine: its metrics, by name, unit and label."""
