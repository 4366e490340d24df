"""What the orchestration of whole flows costs, and what twenty of them in a row and four at once leave behind."""
