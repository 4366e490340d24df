"""What the papers behind this project claim, each claim held against one command of ours."""
