"""What choosing among initial weights gains, and what it costs."""
