"""One thin Prefect task for each step of the pipeline: a name, retries and progress around one call of the engine."""
