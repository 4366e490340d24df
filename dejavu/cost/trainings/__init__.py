"""What trainings teach: their times as rows of the database, and how they correct later prices."""
