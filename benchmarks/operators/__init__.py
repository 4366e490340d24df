"""The operator level, beside Auto-MAP's tables and today's peers."""
