"""Feedback from trainings: their times as rows of the database, and how these correct later prices."""
